"""Allreduce on one host: zero-copy and staged against gloo, in the same processes.

The limit of a zero-copy allreduce is 2nS bytes (n ranks read and write S each) at the rate at which the ranks
together run `a += b`, measured in the same round; a staged one moves at least the same.
"""

import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.report import Row
from fireflyer.errors import FireflyerError

SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
GOALS = {"zero-copy": 8.0, "staged": 3.0}
GOAL_BYTES = 16 << 20
TIMED_BYTES = 64 << 20  # each candidate runs about this much a round, and at least twice

Timing = tuple[float, float]  # wall and CPU microseconds a call


def parse_size(text: str) -> int:
    """Bytes of "64K", "16M" or "1000".

    Raises:
        ValueError: not a size.
    """
    unit = SIZE_UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"not a size: {text!r} (use 64K, 16M, 1G or bytes)")
    return int(digits) * unit


def run(ranks: int, sizes: list[int], dtype: str, rounds: int) -> list[Row]:
    """Measures and returns two rows (wall, CPU) for each size and memory kind.

    Raises:
        FireflyerError: a rank failed.
    """
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(
                target=_rank, args=(store, rank, ranks, sizes, dtype, rounds, send), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        send.close()
        try:
            timings = receive.recv()
        except EOFError:
            raise FireflyerError("bench allreduce: a rank failed, see above") from None
        for process in processes:
            process.join()
    return [row for size in sizes for row in _rows(ranks, dtype, size, timings[size])]


def _rows(ranks: int, dtype: str, size: int, timings: dict[str, list[Timing]]) -> list[Row]:
    rows = []
    for kind in ("zero-copy", "staged"):
        for index, clock in enumerate(("wall", "CPU")):
            bounds = [limit[0] for limit in timings["limit"]] if clock == "wall" else []
            rows.append(
                Row.of_times(
                    f"{ranks} ranks, {dtype}, {_size_text(size)}, {kind}, {clock}",
                    "us",
                    [t[index] for t in timings[kind]],
                    "gloo",
                    [t[index] for t in timings["gloo"]],
                    bounds,
                    GOALS[kind] if size == GOAL_BYTES else None,
                )
            )
    return rows


def _size_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _rank(
    store: str, rank: int, ranks: int, sizes: list[int], dtype: str, rounds: int, send: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "hfreduce", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    gloo = dist.new_group(backend="gloo")
    result = {size: _measure(size, getattr(torch, dtype), rounds, ranks, gloo) for size in sizes}
    if rank == 0:
        send.send(result)
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    size: int, dtype: torch.dtype, rounds: int, ranks: int, gloo: dist.ProcessGroup
) -> dict[str, list[Timing]]:
    count = max(size // dtype.itemsize, 1)
    zero_copy = hfreduce.empty(count, dtype=dtype).zero_()
    staged = torch.zeros(count, dtype=dtype)
    for_gloo = torch.zeros(count, dtype=dtype)
    share = torch.zeros(max(count // ranks, 1), dtype=dtype)
    addend = torch.zeros_like(share)
    bytes_of_add, bytes_of_zero_copy = 3 * share.nbytes * ranks, 2 * ranks * zero_copy.nbytes
    candidates: dict[str, Callable[[], object]] = {
        "limit": lambda: share.add_(addend),
        "zero-copy": lambda: dist.all_reduce(zero_copy),
        "staged": lambda: dist.all_reduce(staged),
        "gloo": lambda: dist.all_reduce(for_gloo, group=gloo),
    }
    calls = max(2, min(200, TIMED_BYTES // size))
    timings: dict[str, list[Timing]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, call in candidates.items():
            wall, cpu = _time(call, calls if name != "gloo" else max(2, calls // 5), gloo)
            if name == "limit":
                wall *= bytes_of_zero_copy / bytes_of_add
            if round_number > 0:  # the first one maps memory and opens connections
                timings[name].append((wall, cpu))
    return timings


def _time(call: Callable[[], object], calls: int, group: dist.ProcessGroup) -> Timing:
    """Wall time of the slowest rank and CPU time of all ranks together, microseconds a call."""
    dist.barrier(group=group)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    mine = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    slowest = mine.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(mine, group=group)
    return float(slowest[0]) / calls * 1e6, float(mine[1]) / calls * 1e6
