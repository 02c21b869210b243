"""Tensors on devices: the order of the stream, the life of the memory, and what failures leave behind."""

import datetime
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.collectives.cases import COLLECTIVES, REDUCING, Case
from tests.hfreduce.conftest import Play
from tests.hfreduce.devices.device_memory import DeviceCall, FakeMemory

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, DeadlineExceeded, RankFailed
from fireflyer.hfreduce.backend import devices

LONG = datetime.timedelta(seconds=20)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", ["A", "AA", "AB", "AABB"])
def test_every_collective_waits_for_the_stream_and_the_stream_for_it(
    play: Play, shape: str
) -> None:
    """The stream stands still while a call is made and waited for: only its order connects the two."""

    def body(rank: int, world: int) -> list[tuple[Case, list[str]]]:
        memory = FakeMemory(delay_us=20)
        devices.PART_BYTES = 8192  # many parts, small tensors
        names = sorted(COLLECTIVES.keys() - {"ring"})  # point to point waits on the host
        found = []
        for seed, name in enumerate(names * 2):
            dtype = (torch.float32, torch.bfloat16, torch.int64)[seed % 3]
            count = (7, 8193, 0, 1000)[seed % 4]
            op = "MAX" if name in REDUCING and seed % 5 == 0 else "SUM"
            root = seed % world
            case = Case(name, dtype, op, count, asynchronous=seed >= len(names), root=root)
            call = DeviceCall(memory, case, shape)
            COLLECTIVES[name](call)
            call.close()
            found.append((case, [*call.problems, call.alike.hexdigest()]))
        return found

    results = play(body, shape)
    for outcomes in zip(*results, strict=True):
        assert [problems[:-1] for _, problems in outcomes] == [[]] * len(shape), outcomes[0][0]
        assert len({problems[-1] for _, problems in outcomes}) == 1, ("ranks differ", outcomes[0])


def test_large_calls_are_cut_and_small_ones_not(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        memory = FakeMemory()
        tensor = memory.hold(torch.full((2_500_000,), rank + 1.0))
        with memory.stopped():
            dist.all_reduce(tensor)
        assert bool((tensor == 3.0).all())
        copied = [line.split(" ", 1)[1] for line in memory.device.history()]
        parts = ["4194304", "4194304", "1611392"]
        assert [c for c in copied if c.startswith("to_host")] == [f"to_host {n}" for n in parts]
        assert [c for c in copied if c.startswith("to_device")] == [f"to_device {n}" for n in parts]
        assert [c for c in copied if c.startswith("hold")] == ["hold 1", "hold 2", "hold 3"]
        assert devices.parts_of(native.Kind.ALLREDUCE, 1_048_576, 4 << 20) == [1_048_576]
        assert devices.parts_of(native.Kind.ALL_GATHER, 9_000_000, 36_000_000) == [9_000_000]

    play(body, "AA")


def test_strided_tensors_and_messages_pass_through_host_memory(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        memory = FakeMemory()
        columns = memory.hold(torch.full((30, 20), rank + 1.0)).t()
        dist.all_reduce(columns)
        assert bool((columns == 3.0).all())
        message = memory.hold(torch.full((100,), 5.0 * (1 - rank)))
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        assert bool((message == 5.0).all())

    play(body, "AA")


def test_memory_lives_until_the_device_is_through_with_it(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        memory = FakeMemory()
        with memory.stopped():
            tensor = memory.hold(torch.ones(1000))
            alive = weakref.ref(tensor)
            dist.all_reduce(tensor, async_op=True)
            del tensor
            gc.collect()
            assert alive() is not None
        last = memory.hold(torch.ones(10))
        work: Any = dist.all_reduce(last, async_op=True)
        work.wait()
        memory.synchronize()
        work.get_future().wait()
        assert work.is_completed()
        dist.all_reduce(last)  # a later call lets go of what is over
        gc.collect()
        assert alive() is None
        memory.synchronize()

    play(body, "AA")


def test_nothing_grows(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        memory = FakeMemory()
        tensor = memory.hold(torch.ones(50_000))
        reserved = []
        for _ in range(60):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            memory.synchronize()
            reserved.append(native.arena_reserved_bytes())
        assert reserved[-1] == reserved[4]
        assert memory.device.pinned_bytes <= reserved[-1]
        assert memory.device.live_events < 20

    play(body, "AA")


def test_a_future_completes_when_the_data_is_there(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        memory = FakeMemory()
        tensor = memory.hold(torch.zeros(1000))
        source = torch.full((1000,), rank + 1.0)
        memory.stop()
        memory.compute(tensor, source)
        work: Any = dist.all_reduce(tensor, async_op=True)
        future = work.get_future().then(lambda done: float(done.value()[0].sum()))
        assert not future.done()
        assert not work.is_completed()
        memory.go_on()
        assert future.wait() == 3000.0
        assert work.is_completed()
        assert work.is_success()

    play(body, "AA")


def test_a_wait_with_a_timeout_waits_for_the_other_ranks(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        memory = FakeMemory()
        tensor = memory.hold(torch.ones(1000))
        signals = dist.distributed_c10d._get_default_store()
        if rank == 0:
            work: Any = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(DeadlineExceeded):
                work.wait(datetime.timedelta(milliseconds=50))
            signals.set("late", "1")
            assert work.wait(LONG)
        else:
            signals.get("late")
            dist.all_reduce(tensor)
        memory.synchronize()
        assert bool((tensor == 2.0).all())

    play(body, "AA")


def _is_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_an_input_that_never_comes_names_its_rank_everywhere(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> int:
        group: Any = dist.group.WORLD
        memory = FakeMemory()
        tensor = memory.hold(torch.ones(1000))
        dist.all_reduce(tensor)
        memory.synchronize()
        group.set_timeout(datetime.timedelta(seconds=1 if rank == 1 else 15))
        if rank == 1:
            memory.stop()
        work: Any = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RankFailed) as caught:
            work.wait(LONG)
        assert isinstance(work.exception(), RankFailed)
        with pytest.raises(CollectiveError):
            dist.all_reduce(tensor)  # the caller hears of it, although he never waits
        memory.go_on()
        work.settle_silently()
        assert _is_nan(tensor), "no plausible numbers after a failure"
        return caught.value.rank

    assert play(body, shape, leave=False) == [1, 1]


def test_an_abort_frees_the_streams(play: Play, store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        group: Any = dist.group.WORLD
        signals = dist.FileStore(store_path, world)
        memory = FakeMemory()
        tensor, seen = memory.hold(torch.ones(1000)), torch.zeros(1000)
        if rank == 0:
            memory.stop()
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.wait()
        memory.compute(seen, tensor)
        if rank == 1:
            signals.set("on the stream", "")
        else:
            signals.get("on the stream")  # an abort before rank 1 waited would be raised there
            group.abort()
            with pytest.raises(CollectiveError):
                work.wait(LONG)
            assert not work.is_completed(), "the stream may still read the tensor"
            memory.go_on()
        memory.synchronize()
        assert _is_nan(seen)
        with pytest.raises(CollectiveError):
            work.wait(LONG)

    play(body, "AA", leave=False)


def test_what_cannot_be_staged_is_refused(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        import fireflyer.hfreduce as hfreduce

        memory = FakeMemory()
        tensor = memory.hold(torch.ones(10))
        with pytest.raises(ValueError, match="host memory"):
            hfreduce.allreduce(tensor, shared=True)
        with pytest.raises(CollectiveError, match="meta"):
            dist.all_reduce(torch.ones(10, device="meta"))
        with pytest.raises(CollectiveError, match="meta"):
            dist.all_gather([torch.ones(10, device="meta")] * world, torch.ones(10))
        dist.all_reduce(tensor)  # the group is as good as before
        memory.synchronize()
        assert bool((tensor == 2.0).all())

    play(body, "AA")


def test_a_group_ends_while_the_device_is_at_work(play: Play) -> None:
    def body(rank: int, world: int) -> bool:
        memory = FakeMemory(delay_us=2000)
        tensor = memory.hold(torch.ones(100_000))
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.destroy_process_group()
        return bool((tensor == 8.0).all())

    assert play(body, "AA", leave=False) == [True, True]
