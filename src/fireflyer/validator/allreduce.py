"""Allreduce over shared memory between processes of this node, with a known answer.

This module imports torch, so only the process of this check imports the module; see `gpu.py`.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta

from fireflyer.validator.model import Measured, NotRun, Settings
from fireflyer.validator.sampling import best_of

RANKS = 2
ELEMENTS = 4 << 20
ROUNDS = 8
FULL_ROUNDS = 100
BEST_OF = 4
"""Rounds per sample. A sample is the fastest of them: other processes only slow a rank down."""

TIMEOUT_S = 30


def run(settings: Settings) -> Iterator[Measured]:
    """Reduces a tensor between two processes."""
    try:
        import torch  # noqa: F401  # imported once, before the ranks are forked
    except ImportError:
        raise NotRun("torch is not installed") from None
    rounds = ROUNDS if settings.quick else FULL_ROUNDS
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [os.pipe() for _ in range(RANKS)]
    children = [_fork(rank, port, rounds, pipes[rank][1]) for rank in range(RANKS)]
    rates: list[tuple[float, ...]] = []
    wrong = 0
    for (reading, writing), pid in zip(pipes, children, strict=True):
        os.close(writing)
        data = b""
        while piece := os.read(reading, 65536):
            data += piece
        os.close(reading)
        os.waitpid(pid, 0)
        if len(data) != 8 * (rounds + 1):
            raise RuntimeError("a rank of the allreduce ended without a result")
        found = struct.unpack(f"{rounds + 1}d", data)
        wrong += int(found[0])
        rates.append(found[1:])
    slowest = tuple(map(min, zip(*rates, strict=True)))
    failed = f"{wrong} elements of the sum are wrong" if wrong else ""
    samples = best_of(slowest, BEST_OF, "more")
    yield Measured("allreduce", max(samples), failed, samples=samples)


def _fork(rank: int, port: int, rounds: int, writing: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        found = _rank(rank, port, rounds)
        os.write(writing, struct.pack(f"{len(found)}d", *found))
        code = 0
    finally:
        os._exit(code)


def _rank(rank: int, port: int, rounds: int) -> list[float]:
    """Reduces repeatedly; returns the number of wrong elements, then the GB/s of each round."""
    import torch
    import torch.distributed as dist

    import fireflyer.hfreduce  # noqa: F401  # registers the backend

    dist.init_process_group(
        "hfreduce", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    start = torch.arange(ELEMENTS, dtype=torch.float32) % 1000 + rank
    answer = RANKS * (torch.arange(ELEMENTS, dtype=torch.float32) % 1000) + sum(range(RANKS))
    wrong, rates = 0, []
    for _ in range(rounds):
        tensor = start.clone()
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        rates.append(4 * ELEMENTS / (time.perf_counter() - begin) / 1e9)
        wrong += int((tensor != answer).sum())
    dist.destroy_process_group()
    return [float(wrong), *rates]
