"""The loader in one process: shares, ends of an epoch, states, threads, errors, pickling."""

import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests import draws
from tests.waiting import LIMIT_S

from fireflyer.datasets import DistributedLoader
from fireflyer.datasets.loader import Plan
from fireflyer.datasets.order import Order, Positions
from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord import FileWriter
from fireflyer.storage import FsspecStorage

Records = Callable[..., list[Path]]
NumberOf = Callable[[Any], int]


def indices_only(indices: Any, samples: Any) -> list[int]:
    """A `process` that can be pickled."""
    assert len(indices) == len(samples)
    return list(indices.tolist())


def flat(batches: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


class Numbers:
    """A reader of one's own: sample i is i. Notes what is being read, and waits where it is told to."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.begun: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.two_read = threading.Event()

    def read(self, indices: Any) -> list[int]:
        self.begun.append(list(indices))
        if not self.gate.is_set() and len(self.begun) >= 2:
            self.two_read.set()
        self.gate.wait(LIMIT_S)
        return [int(index) for index in indices]


def loader(data: Any, rank: int = 0, world: int = 1, **options: Any) -> DistributedLoader:
    options = {"seed": 3, "batch_size": 8, **options}
    return DistributedLoader(data, rank, world, **options)


@pytest.mark.parametrize("shuffle", [True, False, "block"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_side_by_side_are_the_order(
    records: Records, number_of: NumberOf, shuffle: Any, world: int
) -> None:
    paths = records(101)
    block = 10 if shuffle == "block" else None
    ranks = [
        loader(paths, rank, world, shuffle=shuffle, block=block, epoch=4) for rank in range(world)
    ]
    assert {len(one) for one in ranks} == {13}
    batches = [[[number_of(s) for s in batch] for batch in one] for one in ranks]
    seen = [number for step in zip(*batches, strict=True) for share in step for number in share]
    assert seen == Order(101, 3, 4, bool(shuffle), block).span(0, 101).tolist()
    assert all(one.state_dict() == ranks[0].state_dict() for one in ranks)
    assert ranks[0].state_dict()["epoch"] == 5


def test_epochs_follow_one_another() -> None:
    one = loader(Numbers(20))
    first, second = [flat(one), flat(one)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    one.set_epoch(0)
    assert flat(one) == first


@pytest.mark.parametrize(
    ("last", "lengths"), [("keep", [8, 8, 4]), ("drop", [8, 8]), ("pad", [8, 8, 8])]
)
def test_the_short_last_batch(last: Any, lengths: list[int]) -> None:
    ranks = [loader(Numbers(20), rank, 4, last=last) for rank in range(4)]
    steps = [flat(step) for step in zip(*ranks, strict=True)]
    assert [len(step) for step in steps] == lengths
    order = Order(20, 3, 0).span(0, 20).tolist()
    assert flat(steps) == (order + order)[: sum(lengths)]
    assert ranks[0].state_dict()["epoch"] == 1, "the epoch is over whatever was left out"


def test_fewer_samples_than_ranks_leave_some_with_an_empty_batch() -> None:
    ranks = [loader(Numbers(9), rank, 4) for rank in range(4)]
    steps = list(zip(*ranks, strict=True))
    assert sorted(len(share) for share in steps[-1]) == [0, 0, 0, 1]
    pads = [loader(Numbers(3), rank, 4, batch_size=8, last="pad") for rank in range(4)]
    assert [len(share) for share in next(iter(zip(*pads, strict=True)))] == [2, 2, 2, 2]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_state_at_any_batch_resumes_with_any_world_and_batch_size(prefetch: int) -> None:
    whole = Order(53, 3, 2).span(0, 53).tolist()
    for done in range(8):
        before = loader(Numbers(53), 0, 1, epoch=2, prefetch=prefetch)
        seen: list[int] = []
        running = iter(before)
        for _ in range(done):
            seen += next(running)
        state = pickle.loads(pickle.dumps(before.state_dict()))
        assert state["samples"] == len(seen)
        for world, batch in ((1, 8), (2, 8), (3, 5), (4, 16)):
            ranks = [
                loader(Numbers(53), rank, world, seed=99, batch_size=batch) for rank in range(world)
            ]
            for one in ranks:
                one.load_state_dict(state)
            rest = [flat(step) for step in zip(*ranks, strict=True)]
            assert seen + flat(rest) == whole, (done, world)
            assert all(len(step) == batch for step in rest[:-1])
            again = flat(flat(step) for step in zip(*ranks, strict=True))
            assert again == Order(53, 3, 3).span(0, 53).tolist(), "the next epoch is whole"


def test_nothing_before_the_resumed_sample_is_read() -> None:
    data = Numbers(1000)
    state = {**loader(data).state_dict(), "samples": 997}
    one = loader(data)
    one.load_state_dict(state)
    list(one)
    assert sum(map(len, data.begun)) == 3


def test_leaving_an_iteration_goes_on_behind_the_last_batch_handed_out() -> None:
    one = loader(Numbers(40))
    whole = flat(loader(Numbers(40)))
    seen: list[int] = []
    for batch in one:
        seen += batch
        if len(seen) == 16:
            break
    assert one.samples == 16
    for batch in one:
        seen += batch
    assert seen == whole


def test_taking_over_ends_an_older_iteration() -> None:
    one = loader(Numbers(40))
    older = iter(one)
    next(older)
    one.set_epoch(5)
    assert list(older) == []
    assert one.state_dict()["epoch"] == 5


def test_a_state_moves_the_iteration_under_way() -> None:
    data = Numbers(40)
    one = loader(data, prefetch=3)
    whole = flat(loader(Numbers(40)))
    running = iter(one)
    seen = next(running)
    before = one.state_dict()
    again = [*next(running), *next(running)]
    one.load_state_dict(before)
    assert seen + flat(running) == whole
    assert again == whole[8:24], "they were handed out, and then again"
    assert (one.epoch, one.samples) == (1, 0)
    first = next(running := iter(one))
    one.load_state_dict({**one.state_dict(), "epoch": 0, "samples": 40})
    assert list(running) == [], "the end of an epoch is the end of an iteration"
    assert next(iter(one)) == first


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("last", ["keep", "drop"])
@pytest.mark.parametrize("seed", draws.seeds("loaders", 8))
def test_each_sample_comes_once_however_often_ranks_are_divided_anew(
    seed: int, last: Any, prefetch: int
) -> None:
    """Ranks leave and come behind any batch; some of the epoch's batches are taken back first."""
    dice = random.Random(seed)
    n = dice.choice([53, 96])
    world = dice.randint(1, 6)
    ranks = [loader(Numbers(n), r, world, prefetch=prefetch, last=last) for r in range(world)]
    running = [iter(one) for one in ranks]
    seen: list[int] = []
    while True:
        before = ranks[0].state_dict()
        step = flat(share for share in (next(each, None) for each in running) if share is not None)
        if not step:
            break
        change = dice.random()
        if change < 0.3:  # it did not happen
            for one in ranks:
                one.load_state_dict(before)
        else:
            seen += step
        if change < 0.6:
            kept = dice.sample(range(len(ranks)), dice.randint(1, len(ranks)))
            ranks, running = [ranks[r] for r in kept], [running[r] for r in kept]
            for _ in range(dice.randint(0, 6 - len(ranks))):
                ranks.append(loader(Numbers(n), prefetch=prefetch, last=last))
                ranks[-1].load_state_dict(ranks[0].state_dict())
                running.append(iter(ranks[-1]))
            for rank, one in enumerate(ranks):
                one.redivide(rank, len(ranks))
    assert seen == Order(n, 3, 0).span(0, n if last == "keep" else n // 8 * 8).tolist()
    assert all((one.epoch, one.samples) == (1, 0) for one in ranks)


def test_redividing_reads_nothing_more_for_the_old_rank() -> None:
    data = Numbers(80)
    one = loader(data, 0, 2, prefetch=0, shuffle=False)
    running = iter(one)
    assert next(running) == [0, 1, 2, 3]
    one.redivide(3, 4)
    assert next(running) == [14, 15]
    assert data.begun == [[0, 1, 2, 3], [14, 15]]
    for rank, world in ((4, 4), (0, 9), (-1, 2)):
        with pytest.raises(ConfigError):
            one.redivide(rank, world)
    with pytest.raises(TypeError):
        one.redivide(0, 2.5)  # type: ignore[arg-type]
    assert next(running) == [22, 23], "what was refused changed nothing"


@pytest.mark.parametrize("begun", [0, 1])
def test_a_newer_iteration_ends_an_older_one_and_no_sample_comes_twice(begun: int) -> None:
    one = loader(Numbers(40))
    older = iter(one)
    seen = [batch for _, batch in zip(range(begun), older, strict=False)]
    newer = iter(one)
    assert list(older) == []
    seen += newer
    assert sorted(itertools.chain(*seen)) == list(range(40))
    assert (one.epoch, one.samples) == (1, 0)
    assert list(zip(one, one, strict=False)) == []
    assert one.samples == 0


def test_no_more_is_read_ahead_than_prefetch() -> None:
    data = Numbers(800)
    running = iter(loader(data, prefetch=3, threads=2))
    for taken in range(1, 20):
        next(running)
        assert taken <= len(data.begun) <= taken + 3
    del running
    data.begun.clear()
    data.gate.clear()
    stuck = iter(loader(data, prefetch=5, threads=2))
    consumer = threading.Thread(target=lambda: next(stuck))
    consumer.start()
    assert data.two_read.wait(LIMIT_S)
    assert len(data.begun) == 2, "no more threads read than asked for"
    data.gate.set()
    consumer.join(LIMIT_S)


def test_batches_keep_their_order_however_many_threads_read() -> None:
    plain = list(loader(Numbers(500), prefetch=0))
    for threads in (1, 4):
        assert list(loader(Numbers(500), prefetch=6, threads=threads)) == plain


def test_process_gets_indices_and_samples(records: Records, number_of: NumberOf) -> None:
    def process(indices: Any, samples: Sequence[Any]) -> Any:
        assert indices.tolist() == [number_of(sample) for sample in samples]
        return indices

    batches = list(loader(records(30), process=process))
    assert sorted(np.concatenate(batches).tolist()) == list(range(30))


def test_rows_are_taken_where_there_are_columns() -> None:
    class Columns(Numbers):
        columns = ("x",)

        def rows(self, indices: Any) -> list[dict[str, int]]:
            return [{"x": int(index)} for index in indices]

    rows = flat(loader(Columns(20)))
    assert sorted(row["x"] for row in rows) == list(range(20))


def test_an_error_is_raised_at_its_batch_and_the_state_stays_before_it(
    records: Records, number_of: NumberOf
) -> None:
    paths = records(64, files=1)
    whole = [[number_of(s) for s in batch] for batch in loader(paths)]
    bad = whole[3][5]
    content = bytearray(paths[0].read_bytes())
    at = content.index(bad.to_bytes(8, "little"), 12 + 12 * 64)
    good, content[at] = content[at], content[at] ^ 1
    paths[0].write_bytes(content)
    one = loader(paths)
    with pytest.raises(Corrupted, match=f"sample {bad}"):
        list(one)
    with pytest.raises(Corrupted, match=f"sample {bad}"):
        next(iter(one))
    assert one.samples == 24
    content[at] = good
    with paths[0].open("r+b") as file:
        file.write(content)
    assert [[number_of(s) for s in batch] for batch in one] == whole[3:]


def test_a_pickled_loader_goes_on_where_the_first_stood(records: Records) -> None:
    one = loader(records(50), process=indices_only)
    running = iter(one)
    next(running)
    copy = pickle.loads(pickle.dumps(one))
    assert flat(copy) == flat(running)


def test_as_a_map_style_dataset() -> None:
    one = loader(Numbers(30), 1, 2)
    assert len(one) == 4
    batches = [one[k] for k in range(len(one))]
    assert one.samples == 0
    assert batches == list(loader(Numbers(30), 1, 2))
    with pytest.raises(IndexError, match=r"outside \[0, 4\)"):
        one[4]
    one.advance()
    assert one.samples == 8
    assert one[1] == batches[1], "counted from where the epoch was entered"
    resumed = loader(Numbers(30), 1, 2)
    resumed.load_state_dict(one.state_dict())
    assert [resumed[k] for k in range(len(resumed))] == batches[1:]
    with pytest.raises(ValueError, match="3 are left"):
        one.advance(4)
    one.advance(3)
    assert one.state_dict()["epoch"] == 1
    assert one.samples == 0


def test_an_empty_dataset_has_empty_epochs() -> None:
    one = loader(Numbers(0), last="pad")
    assert list(one) == []
    assert one.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 2, "world": 2}, "rank 2"),
        ({"rank": -1}, "rank -1"),
        ({"world": 9}, "expected at least 9"),
        ({"shuffle": "blocks"}, "expected shuffle True"),
        ({"shuffle": 1}, "expected shuffle True"),
        ({"shuffle": "block", "block": 2**62}, "at least one sample"),
        ({"last": "drop_last"}, "'keep', 'drop' or 'pad'"),
        ({"block": 3}, "needs shuffle='block'"),
        ({"shuffle": "block", "block": 0}, "at least one sample"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"threads": 0}, "threads 0"),
        ({"seed": -1}, "seed -1"),
        ({"epoch": 2**64}, "epoch 18446744073709551616"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        loader(Numbers(10), **options)


@pytest.mark.parametrize("name", ["rank", "world", "batch_size", "block", "prefetch", "threads"])
@pytest.mark.parametrize("value", [1.5, "1", True])
def test_what_is_no_whole_number_is_a_type_error(name: str, value: Any) -> None:
    options: dict[str, Any] = {"shuffle": "block"} if name == "block" else {}
    with pytest.raises(TypeError, match=f"{name} must be a whole number"):
        loader(Numbers(10), **options, **{name: value})


def test_batches_are_counted_and_named_by_whole_numbers() -> None:
    one = loader(Numbers(10))
    for bad in (0.5, True, None):
        with pytest.raises(TypeError, match="batches must be"):
            one.advance(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a batch must be"):
            one[bad]  # type: ignore[index]
    assert one.samples == 0


@pytest.mark.parametrize(
    "change",
    [
        *({"dataset": "other"}, {"n": 11}, {"order": 2}, {"shuffle": False}, {"block": 4}),
        *({"samples": -1}, {"samples": 11}, {"samples": True}, {"samples": None}),
        *({"seed": 2**64}, {"epoch": 1.5}, {"more": 1}),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    one = loader(Numbers(10))
    before = one.state_dict()
    with pytest.raises(ConfigError):
        one.load_state_dict({**before, **change})
    assert one.state_dict() == before


def test_other_files_are_other_data(records: Records, tmp_path: Path) -> None:
    paths = records(30)
    state = loader(paths).state_dict()
    loader(str(paths[0].parent)).load_state_dict(state)
    moved = tmp_path / "moved"
    paths[0].parent.rename(moved)
    loader(moved).load_state_dict(state)
    with pytest.raises(ConfigError, match="saved loader has dataset"):
        loader(sorted(moved.iterdir())[::-1]).load_state_dict(state)


def test_a_state_moves_between_local_and_remote_copies(records: Records) -> None:
    paths = records(30)
    remote = loader([f"memory://loader-test/{path.name}" for path in upload(paths)])
    state = loader(paths).state_dict()
    assert remote.state_dict() == state
    changed = bytearray(paths[0].read_bytes())
    changed[-1] ^= 1
    with FileWriter(paths[0]) as writer:
        writer.write_one(bytes(changed))
    with pytest.raises(ConfigError, match="saved loader has"):
        loader(paths).load_state_dict(state)


def upload(paths: list[Path]) -> list[Path]:
    storage = FsspecStorage("memory://loader-test")
    for path in paths:
        storage.write(path.name, [path.read_bytes()])
    return paths


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
@pytest.mark.parametrize("block", [None, 100])
def test_shares_that_are_drawn_together_are_those_drawn_alone(
    last: Literal["keep", "drop", "pad"], block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(Order(30_011, 5, 2, True, block), 7, 300, last)
    alone = [plan.share(k, 1, 3).tolist() for k in range(len(plan))]
    drawn: list[int] = []
    at = Order.at

    def counted(self: Order, positions: Positions) -> Positions:
        drawn.append(len(positions))
        return at(self, positions)

    monkeypatch.setattr(Order, "at", counted)
    assert [indices.tolist() for indices in plan.shares(2, 1, 3)] == alone[2:]
    assert len(drawn) == 3
    assert max(drawn) <= 4096
    assert list(plan.shares(len(plan), 1, 3)) == []
