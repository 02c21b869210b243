"""Execution of requests on an engine: idempotency, inode numbers, liveness of clients. No network.

Thread contract: any thread may call `execute` and `execute_many`; the requests of one call share
commits. Invariants: an answer is returned only after it is durable; an inode number is never
reused.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fireflyer.errors import FileError, FireflyerError, ProtocolMismatch, Stale
from fireflyer.fs3.kv.run import Job, record_key, run, run_many
from fireflyer.fs3.kv.transaction import Engine, Transaction, counter, counter_value
from fireflyer.fs3.meta import (
    attributes,
    directories,
    files,
    messages,
    names,
    rename,
    sessions,
    xattrs,
)
from fireflyer.fs3.meta.context import Context
from fireflyer.fs3.meta.inode import (
    ALLOCATOR,
    DIRECTORY,
    FILES,
    NAME_MAX,
    ROOT,
    Inode,
    Layout,
    encode,
    entry_key,
    inode_key,
)
from fireflyer.fs3.meta.messages import Answer, Request

NUMBERS_AT_ONCE = 1024
"""Number of inode numbers that the allocator reserves in one transaction."""
RECORDS_KEPT = 64
"""Number of acknowledged requests of a client after which their records are cleared together."""
FOLDERS_KNOWN = 1024
"""Maximum number of directories in the cache `Folders`."""
SESSION_NS = 60_000_000_000
DEFAULT_LAYOUT = Layout(1, 1, 1 << 20, 16)

Operation = Callable[[Transaction, Context, Any], Answer]

_READS: dict[type, Operation] = {
    messages.Stat: attributes.stat,
    messages.StatMany: attributes.stat_many,
    messages.ReadDirectory: directories.read_directory,
    messages.ReadLink: names.read_link,
    messages.Names: names.names,
    messages.GetXattr: xattrs.get_xattr,
    messages.ListXattrs: xattrs.list_xattrs,
    messages.Statfs: attributes.statfs,
    messages.Collect: sessions.collect,
}
_WRITES: dict[type, tuple[Operation, type]] = {
    messages.Create: (files.create, Inode),
    messages.CreateMany: (files.create_many, messages.Inodes),
    messages.Open: (files.open_file, Inode),
    messages.Close: (files.close, Inode),
    messages.ReportLength: (files.report_length, Inode),
    messages.ExtendStripe: (files.extend_stripe, Inode),
    messages.Append: (files.append, Inode),
    messages.Truncate: (files.truncate, Inode),
    messages.MakeDirectory: (directories.make_directory, Inode),
    messages.RemoveDirectory: (directories.remove_directory, messages.Done),
    messages.Unlink: (names.unlink, messages.Done),
    messages.Rename: (rename.rename, messages.Done),
    messages.Link: (names.link, Inode),
    messages.Symlink: (names.symlink, Inode),
    messages.MakeNode: (names.make_node, Inode),
    messages.ChangeMode: (attributes.change_mode, Inode),
    messages.ChangeOwner: (attributes.change_owner, Inode),
    messages.SetTimes: (attributes.set_times, Inode),
    messages.SetAttributes: (attributes.set_attributes, Inode),
    messages.SetXattr: (xattrs.set_xattr, messages.Done),
    messages.RemoveXattr: (xattrs.remove_xattr, messages.Done),
    messages.SetLayout: (attributes.set_layout, Inode),
    messages.KeepAlive: (sessions.keep_alive, messages.Done),
    messages.EndClient: (sessions.end_client, messages.Done),
    messages.Expire: (sessions.expire, messages.Removals),
    messages.Settle: (sessions.settle, Inode),
    messages.Collected: (sessions.collected, messages.Done),
}
_DECODERS: dict[type, Callable[[msgspec.Raw], Answer]] = {
    call: msgspec.msgpack.Decoder(kind).decode for call, (_, kind) in _WRITES.items()
}


def initialize(t: Transaction, now: int, layout: Layout = DEFAULT_LAYOUT) -> None:
    """Makes the root directory (mode 0755 of root) if there is none."""
    if not is_made(t):
        root = Inode(
            1, ROOT, DIRECTORY, 0o755, 0, 0, 2, now, now, now, now, 0, 0, layout, 1, ROOT, b""
        )
        t.set(inode_key(ROOT), encode(root))
        t.add(FILES, 1)
        t.set(ALLOCATOR, counter_value(ROOT + 1))


def is_made(t: Transaction) -> bool:
    """Returns whether the file system is set up: it has a root directory."""
    return t.get(inode_key(ROOT)) is not None


def is_reading(request: Request) -> bool:
    """Returns whether a request changes nothing, so that it need not wait for writes."""
    return type(request.call) in _READS


def _keeps_state(request: Request) -> bool:
    """Returns whether the store keeps an answer or an open file of the client.

    Only such a request records that the client is alive.
    """
    if request.client == 0 or isinstance(request.call, messages.EndClient):
        return False
    return request.number > 0 or getattr(request.call, "handle", 0) > 0


REFUSED = b"\xc1"  # prefix of a recorded error; no msgpack value begins with this byte


def _refusal(error: FireflyerError) -> bytes:
    """Encodes the record of a rejected request; raises an error that is not recorded."""
    if isinstance(error, FileError):
        path = os.fsencode(error.filename or "")  # a name may be invalid UTF-8
        return REFUSED + encode((error.errno or 0, path, error.detail))
    raise error


def _recorded(record: bytes) -> msgspec.Raw | FireflyerError:
    """Returns the answer in a record, still encoded, or the recorded error."""
    if record.startswith(REFUSED):
        return FileError(*msgspec.msgpack.decode(record[1:], type=tuple[int, bytes, str]))
    return msgspec.Raw(record)


def _answer(request: Request, raw: msgspec.Raw) -> Answer | FireflyerError:
    try:
        return _DECODERS[type(request.call)](raw)
    except (msgspec.DecodeError, ValueError):
        return ProtocolMismatch(
            f"request number {request.number} of client {request.client} was used for another request"
        )


class Numbers:
    """Allocator of inode numbers, which reserves blocks in the store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._next = self._end = 0

    def take(self, count: int) -> int:
        """Allocates `count` consecutive numbers; returns the first.

        REQUIRES: the caller has no open transaction.
        """
        with self._lock:
            if self._end - self._next < count:
                size = max(count, NUMBERS_AT_ONCE)
                self._next = run(self._engine, lambda t: self._reserve(t, size))
                self._end = self._next + size
            first = self._next
            self._next += count
            return first

    @staticmethod
    def _reserve(t: Transaction, size: int) -> int:
        first = counter(t.get(ALLOCATOR))
        t.set(ALLOCATOR, counter_value(first + size))
        return first


_MAKING = messages.Create | messages.MakeDirectory | messages.Symlink | messages.MakeNode


def _max_new_inodes(call: messages.Call) -> int:
    """Returns the maximum number of inodes that a call makes."""
    if isinstance(call, messages.CreateMany):
        return len(call.names)
    return int(isinstance(call, _MAKING))


class Folders:
    """Cache of directory numbers by path. It may be outdated, so it is only used to read ahead."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], int] = {}

    def keys(self, call: Any) -> tuple[bytes, ...]:
        """Predicts the keys that a call on a path's last name reads."""
        path, start = getattr(call, "path", None), getattr(call, "inode", 0)
        if not path:
            return (inode_key(start),) if start else ()
        above, slash, name = path.rpartition(b"/")
        if slash:
            start = ROOT if not above else self._known.get((start, above), 0)
        if not start or len(name) > NAME_MAX:
            return ()
        return inode_key(start), entry_key(start, name)

    def learn(self, call: Any, answer: Answer) -> None:
        if isinstance(call, messages.Create) and isinstance(answer, Inode):
            above = call.path.rpartition(b"/")[0]
            if above:
                if len(self._known) >= FOLDERS_KNOWN:
                    self._known.clear()
                self._known[call.inode, above] = answer.parent


class MetaService:
    """Metadata service of one file system, on an engine that the caller closes.

    Args:
        engine: store of the metadata; an empty store gets a root directory with `layout`.
        now: function that returns the time in ns since 1970.
        session_ns: time in ns without requests after which a client's sessions expire; it
            determines how often the store records that a client is alive.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        now: Callable[[], int] = time.time_ns,
        layout: Layout = DEFAULT_LAYOUT,
        session_ns: int = SESSION_NS,
    ) -> None:
        self._engine = engine
        self._now = now
        self._refresh_ns = session_ns // 6
        self._numbers = Numbers(engine)
        self._folders = Folders()
        self._tables: dict[int, tuple[int, int]] = {}
        self._seen: dict[int, int] = {}
        self._cleared: dict[int, int] = {}
        run(engine, lambda t: initialize(t, now(), layout))

    def use_table(self, table: int, version: int, chains: int) -> None:
        """Makes new files use this version of the table, and at most `chains` chains each.

        Before the first call, new files use the version and the stripe of their directory.
        Thread-safe.
        """
        self._tables = {**self._tables, table: (version, chains)}

    def execute(self, request: Request) -> Answer:
        """Executes a request; durable when it returns.

        Raises:
            FileError: the request was rejected and changed nothing.
            Unavailable: too many conflicts.
            StorageError: the store failed; the request may or may not have been executed.
        """
        (answer,) = self.execute_many((request,))
        if isinstance(answer, FireflyerError):
            raise answer
        return answer

    def execute_many(self, requests: Sequence[Request]) -> list[Answer | FireflyerError]:
        """Executes independent requests as if they were concurrent: reads first, then writes.

        Returns the answer or the error of each request.

        Raises:
            StorageError: the store failed; any request may or may not have been executed.
        """
        return [
            _answer(request, answer) if isinstance(answer, msgspec.Raw) else answer
            for request, answer in zip(requests, self.answer_many(requests), strict=True)
        ]

    def answer_many(
        self, requests: Sequence[Request]
    ) -> list[Answer | msgspec.Raw | FireflyerError]:
        """Executes requests like `execute_many`, but does not decode recorded answers."""
        now = self._now()
        answers: list[Any] = [None] * len(requests)
        writes: list[tuple[int, Request, Job[bytes | Answer]]] = []
        for at, request in enumerate(requests):
            operation = _READS.get(type(request.call))
            if operation is not None:
                answers[at] = self._read(operation, request, now)
            else:
                writes.append((at, request, self._job(request, now)))
        if writes:
            run_many(self._engine, [job for _, _, job in writes])
        for at, request, job in writes:
            answers[at] = self._done(request, job.result, now)
        return answers

    def _read(self, operation: Operation, request: Request, now: int) -> Answer | FireflyerError:
        t = self._engine.begin()
        try:
            return operation(t, self._context(request, now), request.call)
        except FireflyerError as error:
            return error
        finally:
            t.end()

    def _context(self, request: Request, now: int) -> Context:
        return Context(request.user, request.client, now, self._tables)

    def _job(self, request: Request, now: int) -> Job[bytes | Answer]:
        call = request.call
        operation, _ = _WRITES[type(call)]
        client, number = request.client, request.number
        context = self._context(request, now)
        made = _max_new_inodes(call)
        ends = isinstance(call, messages.EndClient)
        kept = number > 0 and not ends
        refresh = (
            _keeps_state(request)
            and now - self._seen.get(client, -self._refresh_ns) >= self._refresh_ns
        )
        clear_to = request.acknowledged
        if ends or clear_to - self._cleared.get(client, 0) < RECORDS_KEPT:
            clear_to = 0
        else:
            self._cleared[client] = clear_to  # if this fails, a later request clears these records

        def body(t: Transaction) -> bytes | Answer:
            if kept and number <= counter(t.get(record_key(client, 0))):
                raise Stale(
                    f"request {number} of client {client} was answered, and its answer is no longer stored"
                )
            answer = operation(t, context, call)
            self._folders.learn(call, answer)
            if refresh:
                sessions.record_alive(t, client, now)
            if clear_to:
                t.clear_range(record_key(client, 1), record_key(client, clear_to + 1))
                t.set(record_key(client, 0), counter_value(clear_to))
            return encode(answer) if kept else answer

        def before() -> None:
            context.number = self._numbers.take(made)

        keys = self._folders.keys(call)
        return Job(
            body,
            (client, number) if kept else None,
            _refusal if request.again else None,
            (record_key(client, 0), *keys) if kept else keys,
            before if made else None,
        )

    def _done(self, request: Request, result: Any, now: int) -> Any:
        """Returns the answer for a job's result; notes that the client's liveness is recorded."""
        if isinstance(result, bytes):
            result = _recorded(result)
        if isinstance(result, FireflyerError):
            return result
        client, call = request.client, request.call
        if isinstance(call, messages.EndClient):
            self._forget([client])
            return result
        if isinstance(call, messages.Expire):
            limit = now - call.timeout_ns
            self._forget([known for known, seen in list(self._seen.items()) if seen <= limit])
        if (
            _keeps_state(request)
            and now - self._seen.get(client, -self._refresh_ns) >= self._refresh_ns
        ):
            self._seen[client] = now
        return result

    def _forget(self, clients: Sequence[int]) -> None:
        for client in clients:
            self._seen.pop(client, None)
            self._cleared.pop(client, None)
