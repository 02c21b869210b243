"""Asynchronous operations keep their order, their tensors alive and their promises: wait, timeout, future."""

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import Play, place

from fireflyer.errors import DeadlineExceeded

MEMORY = ("zero-copy", "staged")


def full(count: int, value: float, memory: str) -> torch.Tensor:
    return place(torch.full((count,), float(value)), memory)


class Calls:
    """One asynchronous call of every collective: its Work, and the tensors that it writes to."""

    def __init__(self, rank: int, world: int, count: int, memory: str) -> None:
        self.rank, self.world, self.count, self.memory = rank, world, count, memory

    def tensor(self, value: float, parts: int = 1) -> torch.Tensor:
        return full(self.count * parts, value, self.memory)

    def tensors(self, value: float) -> list[torch.Tensor]:
        return [self.tensor(value) for _ in range(self.world)]

    def barrier(self) -> tuple[Any, list[torch.Tensor]]:
        return dist.barrier(async_op=True), []

    def all_reduce(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.tensor(1)
        return dist.all_reduce(tensor, async_op=True), [tensor]

    def broadcast(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.tensor(self.world if self.rank == 1 else 0)
        return dist.broadcast(tensor, 1, async_op=True), [tensor]

    def reduce(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.tensor(1)
        work = dist.reduce(tensor, 0, async_op=True)
        return work, [tensor] if self.rank == 0 else []

    def all_gather(self) -> tuple[Any, list[torch.Tensor]]:
        outputs = self.tensors(0)
        return dist.all_gather(outputs, self.tensor(self.world), async_op=True), outputs

    def all_gather_into_tensor(self) -> tuple[Any, list[torch.Tensor]]:
        output = self.tensor(0, self.world)
        source = self.tensor(self.world)
        return dist.all_gather_into_tensor(output, source, async_op=True), [output]

    def reduce_scatter(self) -> tuple[Any, list[torch.Tensor]]:
        output = self.tensor(0)
        return dist.reduce_scatter(output, self.tensors(1), async_op=True), [output]

    def reduce_scatter_tensor(self) -> tuple[Any, list[torch.Tensor]]:
        output, source = self.tensor(0), self.tensor(1, self.world)
        return dist.reduce_scatter_tensor(output, source, async_op=True), [output]

    def gather(self) -> tuple[Any, list[torch.Tensor]]:
        outputs = self.tensors(0) if self.rank == 0 else None
        return dist.gather(self.tensor(self.world), outputs, 0, async_op=True), outputs or []

    def scatter(self) -> tuple[Any, list[torch.Tensor]]:
        output = self.tensor(0)
        parts = self.tensors(self.world) if self.rank == 1 else None
        return dist.scatter(output, parts, 1, async_op=True), [output]

    def all_to_all(self) -> tuple[Any, list[torch.Tensor]]:
        outputs = self.tensors(0)
        return dist.all_to_all(outputs, self.tensors(self.world), async_op=True), outputs

    def all_to_all_single(self) -> tuple[Any, list[torch.Tensor]]:
        output, source = self.tensor(0, self.world), self.tensor(self.world, self.world)
        return dist.all_to_all_single(output, source, async_op=True), [output]

    def every(self) -> list[Callable[[], tuple[Any, list[torch.Tensor]]]]:
        """Calls whose outputs are all `world` in the end. Rank 0 needs rank 1 for each of them."""
        return [
            self.all_reduce,
            self.broadcast,
            self.reduce,
            self.all_gather,
            self.all_gather_into_tensor,
            self.reduce_scatter,
            self.reduce_scatter_tensor,
            self.gather,
            self.scatter,
            self.all_to_all,
            self.all_to_all_single,
        ]

    def right(self, outputs: list[torch.Tensor]) -> bool:
        return all(bool((output == self.world).all()) for output in outputs)


@pytest.mark.parametrize("shape", ["AA", "AAB"])
def test_operations_of_all_kinds_in_flight(play: Play, shape: str) -> None:
    """Hundreds are started before the first is waited for, small and large ones, waited for backwards."""

    def body(rank: int, world: int) -> None:
        started = []
        for round_ in range(12):
            count = (3, 20_000, 70, 1)[round_ % 4]
            calls = Calls(rank, world, count, MEMORY[round_ % 2])
            every = [*calls.every(), calls.barrier]
            started += [(calls, call.__name__, *call()) for call in every]
        for calls, what, work, outputs in reversed(started):
            work.wait()
            assert calls.right(outputs), (what, calls.count, calls.memory)

    play(body, shape)


@pytest.mark.parametrize("shape", ["AA", "AAB"])
@pytest.mark.parametrize("memory", MEMORY)
def test_operations_run_in_the_order_of_their_calls(play: Play, shape: str, memory: str) -> None:
    """One tensor goes through a row of operations; only the last is waited for."""

    def body(rank: int, world: int) -> None:
        for count in (10, 60_000):
            tensor = full(count, 1, memory)
            before, after = torch.zeros(world * count), torch.zeros(count)
            factor = 1
            for _ in range(6):
                dist.all_reduce(tensor, async_op=True)
                factor *= world
            dist.all_gather_into_tensor(before, tensor, async_op=True)
            dist.reduce_scatter_tensor(after, before, async_op=True)
            dist.all_reduce(tensor, async_op=True)
            dist.broadcast(after, 1, async_op=True)
            last = dist.all_reduce(after, op=dist.ReduceOp.MAX, async_op=True)
            assert last is not None
            last.wait()
            assert bool((before == factor).all())
            assert bool((tensor == factor * world).all())
            assert bool((after == factor * world).all())

    play(body, shape)


def test_synchronous_calls_wait_for_their_turn(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        tensor = full(200_000, 1, "staged")
        for _ in range(5):
            dist.all_reduce(tensor, async_op=True)
            dist.broadcast(tensor, 1, async_op=True)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert bool((tensor == world**5).all())

    play(body, "AAB")


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_a_dropped_work_keeps_its_tensors_until_it_is_done(
    play: Play, shape: str, memory: str
) -> None:
    """The memory of inputs and outputs that nobody refers to any more must not be reused under way."""

    def body(rank: int, world: int) -> None:
        calls = Calls(rank, world, 100_000, memory)
        for call in calls.every():
            victims = []
            for _ in range(4):
                call()
                victims += [calls.tensor(7), calls.tensor(7, world)]
            last = dist.all_reduce(torch.ones(1), async_op=True)
            assert last is not None
            last.wait()
            assert all(bool((v == 7).all()) for v in victims), call.__name__

    play(body, shape)


@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_a_wait_lets_go_of_the_memory(play: Play, shape: str) -> None:
    """Also where an earlier operation was under way when the later one began, and no other follows."""

    def body(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        calls = Calls(rank, world, 50_000, "zero-copy")
        for call in calls.every():
            if rank == 1:
                store.get(f"both-{call.__name__}")
            works, memory = [], []
            for _ in range(2):
                work, outputs = call()
                works.append(work)
                memory += [weakref.ref(tensor) for tensor in outputs]
            del work, outputs
            if rank == 0:
                assert not any(work.is_completed() for work in works)
                store.set(f"both-{call.__name__}", "")
            for work in works:
                work.wait()
            del work, works
            gc.collect()
            assert [ref() for ref in memory] == [None] * len(memory), call.__name__
            dist.barrier()

    play(body, shape)


@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_wait_ends_at_its_timeout_and_the_operation_goes_on(play: Play, shape: str) -> None:
    """Rank 0 waits in vain until it tells rank 1 to join in; then the same Work succeeds."""

    def body(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        for count in (5, 50_000):
            calls = Calls(rank, world, count, "staged")
            for call in (*calls.every(), calls.barrier):
                key = f"late-{count}-{call.__name__}"
                if rank == 1:
                    store.get(key)
                work, outputs = call()
                if rank == 0:
                    assert not work.is_completed()
                    with pytest.raises(DeadlineExceeded):
                        work.wait(timedelta(milliseconds=20))
                    store.set(key, "")
                assert work.wait(timedelta(seconds=15))
                assert work.is_completed()
                assert calls.right(outputs), call

    play(body, shape)


@pytest.mark.parametrize("shape", ["A", "AA", "ABB"])
def test_a_future_holds_the_output_tensors(play: Play, shape: str) -> None:
    def same(got: Any, outputs: list[torch.Tensor]) -> bool:
        flat = [t for item in got for t in (item if isinstance(item, list) else [item])]
        return [t.data_ptr() for t in flat] == [t.data_ptr() for t in outputs]

    def body(rank: int, world: int) -> None:
        for count in (5, 50_000):
            calls = Calls(rank, world, count, "zero-copy")
            every = calls.every() if world > 1 else [calls.all_reduce, calls.all_gather]
            for call in every:
                work, outputs = call()
                seen: list[bool] = []

                def look(
                    future: Any, calls: Calls = calls, outputs: Any = outputs, seen: Any = seen
                ) -> str:
                    seen.append(calls.right(outputs))
                    future.value()
                    return "seen"

                future = work.get_future()
                assert future.then(look).wait() == "seen", call.__name__
                assert seen == [True], call.__name__
                is_root = rank == 0 or call.__name__ not in ("reduce", "gather")
                assert not is_root or same(future.wait(), outputs), call.__name__
                assert work.is_completed()
            barrier = dist.barrier(async_op=True)
            assert barrier is not None
            barrier.get_future().wait()

    play(body, shape)


@pytest.mark.parametrize("shape", ["AA", "ABB"])
def test_coalesced_calls_give_a_future_of_all_tensors(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        tensors = [full(n, 1, "mixed") for n in (3, 20_000, 0, 70_000)]
        future: Any = dist.all_reduce_coalesced(tensors, async_op=True)
        got = future.wait()
        assert [t.data_ptr() for t in got] == [t.data_ptr() for t in tensors]
        assert all(bool((t == world).all()) for t in tensors)
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(bool((t == world * world).all()) for t in tensors)

    play(body, shape)


def test_many_threads_may_wait_for_one_work(play: Play) -> None:
    import threading

    def body(rank: int, world: int) -> None:
        strided = torch.ones(100_000, 2)[:, 0]
        work: Any = dist.all_reduce(strided, async_op=True)
        answers: list[bool] = []

        def wait() -> None:
            work.wait()
            answers.append(bool((strided == world).all()))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 4

    play(body, "AB")


@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_a_callback_may_wait_for_later_futures(play: Play, shape: str) -> None:
    """As the hooks of DDP do that compress gradients in two rounds."""

    def body(rank: int, world: int) -> list[float]:
        group: Any = dist.group.WORLD
        depths = 5

        def reduce(depth: int) -> torch.futures.Future[Any]:
            tensor = torch.full((200_000,), float(depth))
            future = group.allreduce([tensor]).get_future()

            def then(done: torch.futures.Future[Any]) -> list[float]:
                (mine,) = done.value()
                below = reduce(depth + 1).wait() if depth < depths else []
                return [float(mine[0]), *below]

            chained: torch.futures.Future[Any] = future.then(then)
            return chained

        return [*reduce(1).wait()]

    assert play(body, shape) == [[2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def test_the_future_of_a_receive_does_not_hold_up_those_of_collectives(play: Play) -> None:
    def body(rank: int, world: int) -> float:
        got, tensor = torch.zeros(10), torch.ones(100_000)
        group: Any = dist.group.WORLD
        if rank == 0:
            late = group.recv([got], 1, 0).get_future()
            group.allreduce([tensor]).get_future().wait()  # rank 1 sends when this is over
            return float(late.wait()[0][0])
        group.allreduce([tensor]).wait()
        dist.send(torch.full((10,), 7.0), 0)
        return 7.0

    assert play(body, "AA") == [7.0, 7.0]
