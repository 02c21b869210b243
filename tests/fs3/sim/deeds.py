"""How the shell of a simulated storage process carries out each action of its replica."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.fs3.sim.messages import Between, Contents, ReadAnswer, WriteAnswer

from fireflyer._native.fs3 import Kind, Status, replica, store
from fireflyer.fs3.manager.chains import LocalState

if TYPE_CHECKING:
    from tests.fs3.sim.storage import StorageProcess

SEND_TIMEOUT = 0.15
OK, NOT_FOUND = Status.ok.value, Status.not_found.value
Tagged = tuple[int, int, int, int, int, int, int]  # as Store.tags() has them
LOCAL = {
    replica.Local.online: LocalState.ONLINE,
    replica.Local.uptodate: LocalState.UPTODATE,
    replica.Local.faulty: LocalState.FAULTY,
}


def apply(process: "StorageProcess", action: Any) -> None:
    cargo = process.payloads.get(action.payload)
    data, crcs = cargo or b"", b""
    if isinstance(cargo, Contents):
        data, crcs = cargo.data, cargo.crcs
    assert process.store is not None
    tag = action.tag
    status = Status(
        process.store.apply(
            action.op,
            action.chunk.inode,
            action.chunk.index,
            store.ANY_BASE if action.any_base else action.base,
            action.version,
            action.chain_version,
            action.kind.value,
            action.offset,
            action.length,
            data,
            crcs,
            action.committed,
            tag.client,
            tag.channel,
            tag.seq,
        )
    )
    process.powered()
    if status is Status.ok:
        process.given += 1
        process.sync_soon()
    else:
        process.note(f"   refused: {status.name}")
        process.later(0.0, process.applied, action.op, status)


def commit(process: "StorageProcess", action: Any) -> None:
    """Needs no sync of its own: it rides along with the next."""
    chunk = action.chunk
    assert process.store is not None
    status = process.store.commit(chunk.inode, chunk.index, action.version)
    process.powered()
    accepted(process, status)


def drop(process: "StorageProcess", action: Any) -> None:
    chunk = action.chunk
    assert process.store is not None
    status = process.store.drop(chunk.inode, chunk.index, action.version)
    process.powered()
    if accepted(process, status):
        wait_for_sync(process, action.op)


def accepted(process: "StorageProcess", status: int) -> bool:
    """Whether the store took it. It refuses only when it has failed, and is opened anew then."""
    assert process.store is not None
    assert status == OK or process.store.failed(), f"refused: {Status(status)}"
    if status != OK:
        process.deaf = True
        process.restart_soon()
    return status == OK


def mark(process: "StorageProcess", action: Any) -> None:
    assert process.store is not None
    process.store.keep_state(1, *process.store.state()[1:])
    for client in sorted({client for client, *_ in process.store.tags()}):
        process.store.forget_client(client)
    process.powered()


def conclude(process: "StorageProcess", action: Any) -> None:
    assert process.store is not None
    process.store.raise_floor(action.floor)
    for tagged in process.payloads.get(action.payload, ()):
        process.store.keep_tag(*tagged)
    process.store.clear_damage()
    process.store.keep_state(0, *process.store.state()[1:])
    process.powered()
    wait_for_sync(process, action.op)


def wait_for_sync(process: "StorageProcess", op: int) -> None:
    """`op` is done when the next sync is."""
    process.riding.append(op)
    process.sync_soon()


def send(process: "StorageProcess", action: Any) -> None:
    message, to = action.message, action.to
    cargo: Any = None
    if isinstance(message, replica.Answer) and message.status is Status.diverged:
        process.machine.cluster.diverged(process.name)
    if isinstance(message, (replica.Update, replica.Fetched)):
        cargo, status = cargo_of(process, message, as_is=action.as_is)
        if status is not Status.ok:
            if isinstance(message, replica.Update):
                process.later(0.0, process.step, replica.SendFailed(message.op, status))
                return
            message.status = status
    elif isinstance(message, (replica.SyncDone, replica.Tags)):
        assert process.store is not None
        cargo = tuple(process.store.tags())
        if isinstance(message, replica.SyncDone):
            cargo = tuple(without_pending(process, tagged) for tagged in cargo)
    between = Between(message, cargo)
    if isinstance(message, (replica.Answer, replica.Page, replica.Fetched, replica.Tags)):
        answer = process.neighbours.pop((to, message.op), None)
        if answer is not None:
            answer(between)
        return
    op = message.op

    def told(answer: Between | None) -> None:
        if answer is None:
            process.step(replica.SendFailed(op, Status.io_error))
        else:
            process.take(answer)

    process.ask(process.machine.cluster.nodes[to], between, SEND_TIMEOUT, told)


def without_pending(process: "StorageProcess", tagged: Tagged) -> Tagged:
    """A tag as the target that syncs may know it: of a write that is pending yet, that it did not
    happen."""
    assert process.store is not None
    client, channel, seq, inode, index, version, _ = tagged
    pending = process.store.entry(inode, index)[6]
    return (client, channel, seq, inode, index, 0, 0) if version and pending == version else tagged


def cargo_of(process: "StorageProcess", message: Any, *, as_is: bool) -> tuple[Any, Status]:
    """The bytes that go along with an Update or Fetched, and whether they are good."""
    if isinstance(message, replica.Update) and message.kind is Kind.write:
        return process.payloads[message.payload], Status.ok
    if isinstance(message, replica.Update) and message.kind is not Kind.replace:
        return None, Status.ok
    if isinstance(message, replica.Fetched) and message.status is not Status.ok:
        return None, message.status
    return process.contents_of(message.chunk, message.version, as_is=as_is)


def reply(process: "StorageProcess", action: Any) -> None:
    answer = process.clients.pop(action.op)
    asked = process.reads.pop(action.op, None)
    if asked is None:
        answer(WriteAnswer(action.status, action.version))
    else:
        answer(ReadAnswer(action.status, action.version))


def serve_read(process: "StorageProcess", action: Any) -> None:
    """Takes the bytes now and sends them a little later."""
    asked, answer = process.reads.pop(action.op), process.clients.pop(action.op)
    assert process.store is not None
    inode, index = action.chunk.inode, action.chunk.index
    found = process.store.read(inode, index, action.version, asked.offset, asked.length)
    process.powered()
    if found[0] == NOT_FOUND:
        # A newer version, committed in its own record, is durable but not reported yet: it may be read.
        # An older one, or none, may not.
        found = process.store.read(inode, index, 0, asked.offset, asked.length)
        process.powered()
    status, version, whole, offset, data, crcs = found
    if status == NOT_FOUND or (status == OK and version < action.version):
        answer(ReadAnswer(Status.io_error))
        return
    said = ReadAnswer(Status(status), version, whole, offset, data, crcs)
    process.later(process.disk_time(), answer, said)


def pause(process: "StorageProcess", action: Any) -> None:
    process.later(process.world.rng.uniform(0.01, 0.08), process.step, replica.Retry(action.op))


def local_state(process: "StorageProcess", action: Any) -> None:
    process.local = (LOCAL[action.state], action.version)
    process.later(0.0, process.beat)


def release(process: "StorageProcess", action: Any) -> None:
    del process.payloads[action.payload]


def unrepairable(process: "StorageProcess", action: Any) -> None:
    process.machine.cluster.unrepairable.append((process.name, action.chunk.index, action.version))


HANDLERS: dict[type, Callable[["StorageProcess", Any], None]] = {
    replica.Apply: apply,
    replica.Commit: commit,
    replica.Drop: drop,
    replica.Mark: mark,
    replica.Conclude: conclude,
    replica.Send: send,
    replica.Reply: reply,
    replica.ServeRead: serve_read,
    replica.Pause: pause,
    replica.LocalState: local_state,
    replica.Release: release,
    replica.Unrepairable: unrepairable,
}
