"""How the shell of a simulated storage process carries out each action of its replica."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fireflyer._native.fs3 import Kind, Status, replica, store
from fireflyer.fs3.manager.chains import LocalState
from tests.fs3.sim.messages import Between, Contents, ReadAnswer, WriteAnswer

if TYPE_CHECKING:
    from tests.fs3.sim.storage import StorageProcess

SEND_TIMEOUT = 0.15
COMPLETE = 0  # which of the store's state words says that it is a whole replica: 0, or 1 where it is not
LOCAL = {
    replica.Local.online: LocalState.ONLINE,
    replica.Local.uptodate: LocalState.UPTODATE,
    replica.Local.faulty: LocalState.FAULTY,
}


def apply(process: "StorageProcess", action: Any) -> None:
    cargo = process.payloads.get(action.payload)
    data, crcs = b"", ()
    if isinstance(cargo, Contents):
        data, crcs = cargo.data, cargo.crcs
    elif cargo is not None:
        data = cargo
    assert process.store is not None
    status = process.store.apply(
        action.op,
        store.Apply(
            chunk=action.chunk,
            base=store.ANY_BASE if action.any_base else action.base,
            version=action.version,
            chain_version=action.chain_version,
            kind=action.kind,
            committed=action.committed,
            offset=action.offset,
            length=action.length,
            bytes=data,
            crcs=crcs,
            tag=action.tag,
        ),
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
    assert process.store is not None
    status = process.store.commit(action.chunk, action.version)
    process.powered()
    assert status is Status.ok or process.store.failed(), f"commit refused: {status}"


def drop(process: "StorageProcess", action: Any) -> None:
    assert process.store is not None
    status = process.store.drop(action.chunk, action.version)
    process.powered()
    assert status is Status.ok or process.store.failed(), f"drop refused: {status}"
    wait_for_sync(process, action.op)


def mark(process: "StorageProcess", action: Any) -> None:
    assert process.store is not None
    words = list(process.store.state())
    words[COMPLETE] = 1
    process.store.keep_state(words)
    for client in sorted({tagged.tag.client for tagged in process.store.tags()}):
        process.store.forget_client(client)
    process.powered()


def conclude(process: "StorageProcess", action: Any) -> None:
    assert process.store is not None
    words = list(process.store.state())
    words[COMPLETE] = 0
    process.store.keep_state(words)
    process.store.raise_floor(action.floor)
    for tagged in process.payloads.get(action.payload, ()):
        process.store.keep_tag(tagged)
    process.store.clear_damage()
    process.powered()
    wait_for_sync(process, action.op)


def wait_for_sync(process: "StorageProcess", op: int) -> None:
    """`op` is done when the next sync is."""
    process.riding.append(op)
    process.sync_soon()


def send(process: "StorageProcess", action: Any) -> None:
    message, to = action.message, action.to
    cargo: Any = None
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


def without_pending(process: "StorageProcess", tagged: Any) -> Any:
    """A tag as the target that syncs may know it: of a write that is pending yet, that it did not happen."""
    assert process.store is not None
    entry = process.store.entry(tagged.chunk)
    if not tagged.version or entry.pending.version != tagged.version:
        return tagged
    return store.Tagged(tagged.tag, tagged.chunk, 0, 0)


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
    """Takes hold of the bytes now and sends them a little later."""
    asked, answer = process.reads.pop(action.op), process.clients.pop(action.op)
    assert process.store is not None
    reading = process.store.read(action.chunk, action.version, asked.offset, asked.length)
    process.powered()
    if reading.status is Status.not_found:
        # A newer version, committed in its own record, is durable but not reported yet.
        reading = process.store.read(action.chunk, 0, asked.offset, asked.length)
        process.powered()
    if reading.status is not Status.ok:
        answer(ReadAnswer(reading.status))
        return
    process.readings[action.op] = reading
    process.later(process.disk_time(), deliver, process, action.op, answer)


def deliver(process: "StorageProcess", op: int, answer: Callable[[Any], None]) -> None:
    """The process alone holds the reading: it must be gone before the store is, wherever the process ends."""
    reading = process.readings.pop(op)
    data = reading.copy()
    status = Status.io_error if data is None else Status.ok
    answer(
        ReadAnswer(
            status,
            reading.version,
            reading.chunk_length,
            reading.offset,
            data or b"",
            tuple(reading.crcs),
        )
    )


def pause(process: "StorageProcess", action: Any) -> None:
    process.later(process.world.rng.uniform(0.01, 0.08), process.step, replica.Retry(action.op))


def local_state(process: "StorageProcess", action: Any) -> None:
    process.local = (LOCAL[action.state], action.version)
    process.later(0.0, process.beat)


def release(process: "StorageProcess", action: Any) -> None:
    del process.payloads[action.payload]


def unrepairable(process: "StorageProcess", action: Any) -> None:
    process.machine.cluster.unrepairable.append((process.name, action.chunk, action.version))


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
