"""Messages between two ranks arrive whole, at whom they were sent to, by tag, in order of their sending."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import (
    DTYPES,
    MEMORY,
    Play,
    difference,
    init,
    name,
    place,
    values,
)

from fireflyer.errors import RankFailed

SHAPES = ("AA", "AB", "ABB")
CONTIGUOUS = [memory for memory in MEMORY if memory != "strided"]


def message(sender: int, receiver: int, number: int, count: int = 1000) -> torch.Tensor:
    return values(torch.float32, count, (sender * 8 + receiver) * 101 + number)


def wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


@pytest.mark.parametrize("shape", [*SHAPES, "AAABB"])
def test_every_pair_of_ranks(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        for sender in range(world):
            for receiver in range(world):
                for i, count in enumerate((0, 1, 7, 8193, 70_001)):
                    sent = message(sender, receiver, i, count)
                    if rank == sender != receiver:
                        dist.send(place(sent, CONTIGUOUS[i % 4]), receiver)
                    elif rank == receiver != sender:
                        got = place(torch.zeros(count), CONTIGUOUS[(i + 1) % 4])
                        assert dist.recv(got, sender) == sender
                        assert difference(got, sent) is None

    play(body, shape)


@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_strided_tensors(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        for count in (7, 20_000):
            for memories in (("strided", "staged"), ("zero-copy", "strided"), ("strided",) * 2):
                tensor = place(
                    message(0, 1, 0, count) if rank == 0 else torch.zeros(count), memories[rank]
                )
                if rank == 0:
                    work = dist.isend(tensor, 1)
                    assert work is not None
                    work.wait()
                else:
                    dist.recv(tensor, 0)
                assert difference(tensor, message(0, 1, 0, count)) is None

    play(body, shape)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_type(play: Play, dtype: torch.dtype) -> None:
    def body(rank: int, world: int) -> None:
        for receiver in (1, 2):  # on this host, on another
            for memory in ("zero-copy", "staged"):
                sent = values(dtype, 1001, receiver)
                if rank == 0:
                    dist.send(place(sent, memory), receiver)
                elif rank == receiver:
                    got = place(torch.zeros(1001).to(dtype), memory)
                    dist.recv(got, 0)
                    assert difference(got, sent) is None

    play(body, "AAB")


@pytest.mark.parametrize("shape", SHAPES)
def test_tags_are_matched_out_of_order(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        tags = list(range(8))
        last = world - 1
        for count in (4, 30_000):
            if rank == 0:
                wait_for([dist.isend(message(0, last, t, count), last, tag=t) for t in tags])
            elif rank == last:
                for tag in reversed(tags):
                    got = torch.zeros(count)
                    dist.recv(got, 0, tag=tag)
                    assert difference(got, message(0, last, tag, count)) is None

    play(body, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_receives_posted_early_take_their_own_message(play: Play, shape: str) -> None:
    """All receives are posted before the sender starts; it sends in another order."""

    def body(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        tags, last = list(range(10)), world - 1
        if rank == 0:
            store.get("posted")
            for tag in (5, 9, 0, 3, 1, 8, 2, 7, 6, 4):
                dist.send(message(0, last, tag, 5000 * (tag % 3)), last, tag=tag)
        elif rank == last:
            got = [torch.zeros(5000 * (tag % 3)) for tag in tags]
            works = [dist.irecv(g, 0, tag=tag) for tag, g in zip(tags, got, strict=True)]
            store.set("posted", "")
            wait_for(works)
            for tag in tags:
                assert difference(got[tag], message(0, last, tag, 5000 * (tag % 3))) is None

    play(body, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_of_one_tag_keep_their_order(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        counts = [(1, 40_000, 300, 0)[i % 4] for i in range(60)]
        peer = world - 1 - rank
        if rank not in (0, world - 1):
            return
        sending = [dist.isend(message(rank, peer, i, n), peer) for i, n in enumerate(counts)]
        for i, n in enumerate(counts):
            got = torch.zeros(n)
            dist.recv(got, peer)
            assert difference(got, message(peer, rank, i, n)) is None, i
        wait_for(sending)

    play(body, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_large_messages_cross(play: Play, shape: str) -> None:
    """Both directions at once, larger than any buffer on the way."""

    def body(rank: int, world: int) -> None:
        count = 2_000_003
        peers = [r for r in range(world) if r != rank]
        sending = [dist.isend(torch.full((count,), rank + 1.0), peer) for peer in peers]
        got = [torch.zeros(count) for _ in peers]
        receiving = [dist.irecv(g, peer) for g, peer in zip(got, peers, strict=True)]
        wait_for(receiving + sending)
        assert [bool((g == p + 1.0).all()) for g, p in zip(got, peers, strict=True)] == [
            True
        ] * len(peers)

    play(body, shape)


@pytest.mark.parametrize("shape", ["AA", "AAB", "ABAB"])
def test_a_batch_of_sends_and_receives(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        after, before = (rank + 1) % world, (rank - 1) % world
        for count in (10, 20_000):
            from_before, from_after = torch.zeros(count), torch.zeros(count)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, from_before, before, tag=1),
                    dist.P2POp(dist.isend, message(rank, after, 1, count), after, tag=1),
                    dist.P2POp(dist.isend, message(rank, before, 2, count), before, tag=2),
                    dist.P2POp(dist.irecv, from_after, after, tag=2),
                ]
            )
            wait_for(works)
            assert difference(from_before, message(before, rank, 1, count)) is None
            assert difference(from_after, message(after, rank, 2, count)) is None

    play(body, shape)


@pytest.mark.parametrize("shape", ["AAA", "ABB"])
def test_a_receive_from_anybody_names_the_sender(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        if rank != 1:
            dist.send(torch.full((9000,), float(rank)), 1, tag=3)
            return
        seen = []
        for _ in range(world - 1):
            got = torch.zeros(9000)
            seen.append(dist.recv(got, tag=3))
            assert bool((got == seen[-1]).all())
        assert sorted(seen) == [0, 2]

    play(body, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pending_receive_does_not_hold_up_collectives(play: Play, shape: str) -> None:
    def body(rank: int, world: int) -> None:
        last = world - 1
        got, tensor = torch.zeros(20_000), torch.ones(20_000)
        receiving = dist.irecv(got, 0, tag=9) if rank == last else None
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()
        if rank == 0:
            dist.send(tensor, last, tag=9)
        if receiving is not None:
            receiving.wait()
            assert bool((got == world * world).all())

    play(body, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_received_tensor_is_there_when_wait_returns(play: Play, shape: str) -> None:
    """A token goes round many times; each rank adds to what it got."""

    def body(rank: int, world: int) -> None:
        token = torch.zeros(50)
        for turn in range(40):
            if rank == 0:
                dist.send(token + 1, 1 % world, tag=turn)
                dist.recv(token, world - 1, tag=turn)
            else:
                work = dist.irecv(token, rank - 1, tag=turn)
                assert work is not None
                work.wait()
                assert work.is_completed()
                dist.send(token + 1, (rank + 1) % world, tag=turn)
        if rank == 0:
            assert bool((token == 40 * world).all())

    play(body, shape)


def test_dropped_sends_keep_their_tensors(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        if rank == 0:
            for i in range(30):
                dist.isend(torch.full((100_000,), float(i)), 1 + i % 2)
                assert bool((torch.full((100_000,), -1.0) == -1).all())  # takes freed memory
            dist.barrier()
            return
        dist.barrier()
        for i in range(rank - 1, 30, 2):
            got = torch.zeros(100_000)
            dist.recv(got, 0)
            assert bool((got == i).all())

    play(body, "AAB")


def test_objects_are_sent(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        if rank == 0:
            for peer in (1, 2):
                dist.send_object_list(["text", {"to": peer}, torch.arange(3)], peer)
            return
        got: list[Any] = [None] * 3
        assert dist.recv_object_list(got, 0) == 0
        assert got[:2] == ["text", {"to": rank}]
        assert got[2].tolist() == [0, 1, 2]

    play(body, "AAB")


@pytest.mark.parametrize("shape", ["AAA", "ABC"])
def test_a_pipeline_of_micro_batches(play: Play, shape: str) -> None:
    """Activations go forward, gradients come back, as a pipeline schedule calls for them."""

    def body(rank: int, world: int) -> None:
        batches, first, last = 6, rank == 0, rank == world - 1
        sends: list[Any] = []
        for batch in range(batches):
            activation = torch.full((64, 32), float(batch))
            if not first:
                dist.recv(activation, rank - 1, tag=batch)
            activation += 1
            if not last:
                sends.append(dist.isend(activation.clone(), rank + 1, tag=batch))
        for batch in range(batches):
            gradient = torch.full((64, 32), 0.5)
            if not last:
                dist.recv(gradient, rank + 1, tag=batch)
            assert bool((gradient == 0.5 * 2 ** (world - 1 - rank)).all())
            if last:
                assert bool((activation == batches - 1 + world).all())
            if not first:
                sends.append(dist.isend(gradient * 2, rank - 1, tag=batch))
        wait_for(sends)

    play(body, shape)


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_was_sent_arrives_though_the_sender_has_left(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        signals = dist.FileStore(store_path + "-left", world)
        if rank == 0:
            dist.send(torch.full((100,), 3.0), 1)
            dist.destroy_process_group()
            signals.set("left", "1")
            return 3.0
        signals.get("left")
        got = torch.zeros(100)
        dist.recv(got, 0)
        with pytest.raises(RankFailed, match="rank 0"):
            dist.recv(got, 0)  # nothing more was sent
        return float(got[-1])

    assert start_gang(body, 2, nodes).results() == [3.0, 3.0]
