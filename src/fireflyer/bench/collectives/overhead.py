"""Cost of one call: an allreduce of one element, synchronous and asynchronous.

The calls go through torch.distributed. A single rank exchanges nothing, so its time is that of the
call alone.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.ranks import Session, Timing, interleave, on_ranks
from fireflyer.bench.harness.report import Row

KINDS = {"synchronous": goals.SYNC_CALL_US, "asynchronous and wait": goals.ASYNC_CALL_US}


def run(ranks: int, rounds: int) -> list[Row]:
    """Returns rows against gloo and, with a single rank, also against the allowed time.

    Raises:
        FireflyerError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")

        def body(rank: int) -> dict[str, list[Timing]]:
            with Session(store, rank, ranks) as session:
                return _measure(session, rounds)

        timings: dict[str, list[Timing]] = on_ranks(ranks, body)
    rows = []
    for kind, allowed in KINDS.items():
        case = f"{ranks} rank{'s' * (ranks > 1)}, 1 element, {kind}"
        ours, theirs = timings[f"hfreduce {kind}"], timings[f"gloo {kind}"]
        walls = [timing.wall for timing in ours]
        if ranks == 1:
            rows.append(Row.of_times(f"{case}, wall", "us", walls, "allowed", [allowed], (), 1.0))
        peers = [timing.wall for timing in theirs]
        rows.append(Row.of_times(f"{case}, wall", "us", walls, "gloo", peers))
        cpus, peers = [timing.cpu for timing in ours], [timing.cpu for timing in theirs]
        rows.append(Row.of_times(f"{case}, CPU", "us", cpus, "gloo", peers))
    return rows


def _measure(session: Session, rounds: int) -> dict[str, list[Timing]]:
    runs = {}
    for kind in KINDS:
        make = _synchronous if kind == "synchronous" else _asynchronous
        ours, theirs = hfreduce.empty(1, dtype=torch.float32).zero_(), torch.zeros(1)
        runs[f"hfreduce {kind}"] = partial(session.time, make(ours, None))
        runs[f"gloo {kind}"] = partial(session.time, make(theirs, session.gloo))
    return interleave(runs, rounds)


def _synchronous(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    return partial(dist.all_reduce, tensor, dist.ReduceOp.SUM, group)


def _asynchronous(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    def call() -> None:
        work: Any = dist.all_reduce(tensor, dist.ReduceOp.SUM, group, async_op=True)
        work.wait()

    return call
