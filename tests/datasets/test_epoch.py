"""Two epochs with 1, 2, 4 ranks and 0, 1, 3 worker processes, killed in the middle and resumed by
another world: every sample once, in the one global order."""

import itertools
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as td
from tests.waiting import LIMIT_S

from fireflyer.datasets import Catalog, DistributedLoader
from fireflyer.datasets.order import Order

Records = Callable[..., list[Path]]

N, BATCH, EVERY = 207, 8, 3
SEED = 11


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def same(batch: Any) -> Any:
    """A collation that leaves the batch alone."""
    return batch


def numbers(indices: Any, samples: list[Any]) -> list[int]:
    found = [int.from_bytes(sample[:8].tobytes(), "little") for sample in samples]
    assert found == indices.tolist()
    return found


def batches_of(loader: DistributedLoader, workers: int | None) -> Iterator[list[int]]:
    """The batches of the rest of an epoch, by threads (None) or torch's DataLoader."""
    if workers is None:
        yield from loader
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total.*")
        batches = iter(
            td.DataLoader(loader, batch_size=None, num_workers=workers, collate_fn=same)  # type: ignore[arg-type]
        )
    for batch in batches:
        loader.advance()
        yield batch


class Run:
    """One attempt of a job: ranks that log what they consumed and save their state together."""

    def __init__(self, root: Path, log: Path, workers: int | None, die_at: int | None) -> None:
        self.root, self.log, self.workers, self.die_at = root, log, workers, die_at

    def body(self, barrier: Any) -> Callable[[int, int], int]:
        def rank_body(rank: int, world: int) -> int:
            dataset = Catalog(self.root).get("set")
            loader = DistributedLoader(
                dataset, rank, world, seed=SEED, batch_size=BATCH, process=numbers
            )
            state_file = self.log / "state.json"
            if state_file.exists():
                loader.load_state_dict(json.loads(state_file.read_text()))
            steps = 0
            with (self.log / f"{rank}.log").open("a", buffering=1) as log:
                while loader.state_dict()["epoch"] < 2:
                    epoch, samples = loader.epoch, loader.samples
                    for batch in batches_of(loader, self.workers):
                        log.write(json.dumps([epoch, samples, rank, batch]) + "\n")
                        samples += BATCH
                        steps += 1
                        if steps == self.die_at and rank == world - 1:
                            os.kill(os.getpid(), signal.SIGKILL)
                        if steps % EVERY == 0:
                            self.save(barrier, rank, loader, state_file)
            return steps

        return rank_body

    def save(self, barrier: Any, rank: int, loader: DistributedLoader, state_file: Path) -> None:
        """As a checkpoint does: all ranks have come so far, then one state is put in place."""
        barrier.wait(LIMIT_S)
        if rank == 0:
            temporary = state_file.with_suffix(".tmp")
            temporary.write_text(json.dumps(loader.state_dict()))
            temporary.replace(state_file)
        barrier.wait(LIMIT_S)


def history(log: Path, before: tuple[int, int] | None) -> dict[tuple[int, int], list[int]]:
    """(epoch, first sample) -> global batch, from the logs; only what a saved state covers."""
    parts: dict[tuple[int, int], dict[int, list[int]]] = {}
    for path in sorted(log.glob("*.log")):
        for line in path.read_text().splitlines():
            epoch, samples, rank, batch = json.loads(line)
            if before is None or (epoch, samples) < before:
                parts.setdefault((epoch, samples), {})[rank] = batch
    return {
        key: list(itertools.chain.from_iterable(ranks[rank] for rank in sorted(ranks)))
        for key, ranks in parts.items()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [None, 0, 1, 3])
def test_killed_and_resumed_every_sample_comes_once_in_one_order(
    tmp_path: Path,
    records: Records,
    start_gang: Callable[..., Any],
    world: int,
    workers: int | None,
) -> None:
    root = tmp_path / "catalog"
    Catalog(root).publish("set", records(N), licence="none")
    (first := tmp_path / "first").mkdir()
    die_at = 16 if world == 2 else 34  # in the first epoch, in the second
    barrier = multiprocessing.get_context("fork").Barrier(world)
    gang = start_gang(Run(root, first, workers, die_at).body(barrier), world)
    assert gang.result(world - 1) is None, "the last rank was killed"
    gang.close()
    state = json.loads((first / "state.json").read_text())
    consumed = history(first, (state["epoch"], state["samples"]))

    after = {1: 4, 2: 1, 4: 2}[world]
    (second := tmp_path / "second").mkdir()
    (first / "state.json").rename(second / "state.json")
    barrier = multiprocessing.get_context("fork").Barrier(after)
    start_gang(Run(root, second, workers, None).body(barrier), after).results()
    resumed = history(second, None)

    assert consumed
    assert not set(consumed) & set(resumed)
    together = {**consumed, **resumed}
    for epoch in (0, 1):
        seen = [n for key in sorted(together) if key[0] == epoch for n in together[key]]
        assert seen == Order(N, SEED, epoch).span(0, N).tolist()


def test_a_killed_worker_process_is_an_error_and_the_state_holds(
    tmp_path: Path, records: Records
) -> None:
    marker = tmp_path / "killed"

    def dying(indices: Any, samples: list[Any]) -> list[int]:
        found = numbers(indices, samples)
        if whole[24] in found and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    whole = Order(N, SEED, 0).span(0, N).tolist()
    paths = records(N)
    loader = DistributedLoader(paths, 0, 1, seed=SEED, batch_size=BATCH, process=dying)
    seen: list[int] = []

    def consume(one: DistributedLoader) -> None:
        for batch in batches_of(one, 1):
            seen.extend(batch)

    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        consume(loader)
    assert marker.exists()
    assert loader.samples == len(seen) <= 24
    resumed = DistributedLoader(paths, 0, 1, seed=0, batch_size=BATCH, process=dying)
    resumed.load_state_dict(loader.state_dict())
    consume(resumed)
    assert seen == whole
