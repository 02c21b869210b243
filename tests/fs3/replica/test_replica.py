"""Replicas in Python: a write through the chain as a transcript, a sync, what the bindings promise."""

from collections.abc import Iterable

import pytest

from fireflyer._native.fs3 import ChunkId, Kind, Status, Tag, replica

CHUNK = ChunkId(1)


class Pair:
    """Targets 1 (head) and 2 of one chain, stores in maps; messages arrive at once, transcript in `lines`."""

    def __init__(self, *states: replica.State) -> None:
        self.lines: list[str] = []
        self.stores = [replica.MapStore() for _ in states]
        self.replicas = [replica.Replica(i + 1, 1, store) for i, store in enumerate(self.stores)]
        members = [replica.Member(i + 1, state, 1) for i, state in enumerate(states)]
        for target in (1, 2):
            self.step(target, replica.Lease(True))
            self.step(target, replica.Routing(1, members))

    def step(self, target: int, event: object) -> None:
        self.lines.append(f"{target} < {event}")
        actions = self.replicas[target - 1].step(event)  # type: ignore[call-overload]
        self.lines += [f"{target} > {action}" for action in actions]
        for action in actions:
            self.carry_out(target, action)

    def carry_out(self, target: int, action: object) -> None:
        store = self.stores[target - 1]
        done: Iterable[replica.Applied] = ()
        match action:
            case replica.Apply():
                done = store.apply(action, action.payload) or store.sync()
            case replica.Commit():
                store.commit(action)
            case replica.Mark():
                store.mark()
            case replica.Conclude():
                store.conclude(action, [])
                done = store.sync()
            case replica.Send():
                self.step(action.to, action.message)
        for applied in done:
            self.step(target, applied)


def test_a_write_through_the_chain() -> None:
    pair = Pair(replica.State.serving, replica.State.serving)
    pair.lines.clear()
    pair.step(1, replica.ClientWrite(1, 1, CHUNK, Kind.write, 0, 9, Tag(5, 0, 1), 7))
    assert pair.lines == [
        "1 < ClientWrite 1 at 1 write 1.0 at 0+9 tag 5/0#1 payload 7",
        "1 > Apply 1 write 1.0 v2 on v0 at 0+9 pending tag 5/0#1 payload 7",
        "1 < Applied 1 ok",
        "1 > Send to 2: Update 2 from 1 at 1 write 1.0 v2 on v0 at 0+9 tag 5/0#1 payload 7",
        "2 < Update 2 from 1 at 1 write 1.0 v2 on v0 at 0+9 tag 5/0#1 payload 7",
        "2 > Apply 1 write 1.0 v2 on v0 at 0+9 committed tag 5/0#1 payload 7",
        "2 < Applied 1 ok",
        "2 > Send to 1: Answer 2 from 2 at 1 ok",
        "2 > Release payload 7",
        "1 < Answer 2 from 2 at 1 ok",
        "1 > Commit 1.0 v2",
        "1 > Reply 1 ok v2 length 1",
        "1 > Release payload 7",
    ]
    assert [store.entry(CHUNK).committed for store in pair.stores] == [2, 2]
    assert all(one.busy_chunks == 0 and one.outstanding == 0 for one in pair.replicas)


def test_a_target_that_syncs_becomes_uptodate() -> None:
    pair = Pair(replica.State.serving, replica.State.syncing)
    pair.step(1, replica.ClientWrite(1, 1, CHUNK, Kind.write, 0, 9, Tag(5, 0, 1), 7))
    # Target 2 had no routing yet when the head asked for its first page: the head paused, and asks again now.
    pair.step(1, replica.Retry(1))
    assert pair.replicas[1].local.state is replica.Local.uptodate
    assert pair.replicas[1].local.version == 1
    assert pair.replicas[1].role is replica.State.syncing


def test_messages_are_values() -> None:
    pair = Pair(replica.State.serving, replica.State.serving)
    head = pair.replicas[0]
    (apply,) = head.step(replica.ClientWrite(1, 1, CHUNK, Kind.write, 0, 9, Tag(5, 0, 1), 7))
    assert isinstance(apply, replica.Apply)
    assert (apply.chunk, apply.kind, apply.committed, apply.tag) == (
        CHUNK,
        Kind.write,
        False,
        Tag(5, 0, 1),
    )
    (send,) = head.step(replica.Applied(apply.op, Status.ok, 9))
    assert isinstance(send, replica.Send)
    message = send.message
    assert isinstance(message, replica.Update)
    message.payload = 99
    assert isinstance(send.message, replica.Update)
    assert send.message.payload == 7
    assert (message.from_target, message.chain_version, message.version) == (1, 1, 2)


def test_names() -> None:
    assert ChunkId(3, 4) == ChunkId(3, 4)
    assert ChunkId(3, 4) < ChunkId(3, 5)
    assert len({ChunkId(3, 4), ChunkId(3, 4), ChunkId(4)}) == 2
    assert repr(Tag(1, 2, 3)) == "1/2#3"


class Failing:
    """A store that has nothing, and of which tags cannot be asked."""

    def entry(self, chunk: ChunkId) -> replica.Entry:
        return replica.Entry(chunk)

    def floor(self) -> int:
        return 41

    def complete(self) -> bool:
        return True

    def pendings(self) -> list[replica.Pending]:
        return [replica.Pending(ChunkId(9), 3, 100, False, Tag(5, 0, 1))]


def test_a_store_written_in_python() -> None:
    one = replica.Replica(1, 1, replica.ObjectLookup(Failing()))
    one.step(replica.Lease(True))
    resolved = one.step(replica.Routing(1, [replica.Member(1, replica.State.serving, 1)]))
    assert [str(action) for action in resolved] == ["Commit 9.0 v3"]
    untagged = replica.ClientWrite(1, 1, CHUNK, Kind.write, 0, 9, payload=7)
    assert "v42 on v0" in str(one.step(untagged)[0])
    with pytest.raises(AttributeError):
        one.step(replica.ClientWrite(2, 1, CHUNK, Kind.write, 0, 9, Tag(6, 0, 1), 8))
