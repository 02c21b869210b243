"""Session with one process: handshake, records as they arrive, detach.

If the profiler dies, its connection closes, and the agent detaches.
"""

import contextlib
import os
import platform
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fireflyer.errors import ProfileError
from fireflyer.haiprof.attach.target import Target
from fireflyer.haiprof.events import OTHER, PHASES, UPDATE, Event, unpacked
from fireflyer.haiprof.messages import (
    VERSION,
    Batch,
    Bye,
    FromAgent,
    Hello,
    Operators,
    Request,
    is_private,
    meeting_folder,
    peer_uid,
    socket_path,
)
from fireflyer.haiprof.phases import PhaseAccountant
from fireflyer.haiprof.records import (
    Collective,
    Frame,
    Header,
    Operator,
    Record,
    Span,
    StackRecord,
    StackSamples,
    StepRecord,
)
from fireflyer.rpc import FrameBuffer, frame

ANSWER_TIMEOUT_S = 10.0
"""Time for the main thread of the process to reach Python code, where it notices the signal."""

_decode = msgspec.msgpack.Decoder(FromAgent).decode


class Session:
    """One attached process. A context manager that closes the connection at its exit, so that the
    agent removes its hooks.

    Args:
        target: the process; stays open until the session ends.
        request: what to record.
        timeout_s: seconds to wait for an answer of the process.

    Raises:
        ProfileError: the process does not answer, ends, or is profiled already.
    """

    def __init__(
        self, target: Target, request: Request, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self.target, self.request = target, request
        self.started_at = time.monotonic()
        self.over = False
        self.failure = ""
        self.dropped = 0
        self.training_thread = 0
        self._frames = FrameBuffer()
        self._threads: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._accountant = PhaseAccountant(lambda label: self._labels.get(label, str(label)))
        self._open: dict[tuple[int, int, int], list[int]] = {}
        self._ready: list[FromAgent] = []
        self._connection = self._meet(timeout_s)
        try:
            self._connection.sendall(frame(msgspec.msgpack.encode(request)))
            self.hello = self._expect_hello(timeout_s)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def fileno(self) -> int:
        """Returns the descriptor that is readable when `read` has records."""
        return self._connection.fileno()

    def header(self, rate_hz: float, missing: dict[str, str]) -> Header:
        """Returns the header of this process's records."""
        try:
            words = Path(f"/proc/{self.target.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        return Header(
            rank=self.hello.rank,
            world=self.hello.world,
            pid=self.target.pid,
            host=os.environ.get("FIREFLYER_NODE") or platform.node(),
            command=" ".join(os.fsdecode(word) for word in words if word)[:500],
            monotonic_ns=self.hello.base_ns,
            wall_ns=time.time_ns() - time.monotonic_ns() + self.hello.base_ns,
            rate_hz=rate_hz,
            missing=missing,
        )

    def detach(self) -> None:
        """Asks the agent to end. `read` yields records in flight until `over` is True."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def read(self) -> Iterator[Record]:
        """Yields the records that have arrived. Call it when `fileno` is readable."""
        try:
            data = self._connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data and not self.over:
            self.over = True
            self.failure = self.failure or self._cause_of_end()
        for payload in self._frames.feed(data):
            self._ready.append(_decode(payload))
        ready, self._ready = self._ready, []
        for message in ready:
            yield from self._records(message)

    def _cause_of_end(self) -> str:
        """Returns the reason why the connection closed without a final message."""
        if self.target.alive():
            return "the process ended the session: its records were not read in time"
        return "the process ended during the session"

    def _meet(self, timeout_s: float) -> socket.socket:
        """Listens for the agent, signals the process and returns the agent's connection."""
        folder, uid = meeting_folder(self.target.uid), self.target.uid
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not is_private(folder, uid):
            raise ProfileError(f"{folder} is not a private folder of this user: remove it")
        self.target.signal_number()
        path = socket_path(self.target.pid, uid)
        if _is_connected(path):
            raise ProfileError(
                f"process {self.target.pid} is being profiled by another haiprof: wait for its end"
            )
        with socket.socket(socket.AF_UNIX) as listener:
            _bind(listener, path, self.target.pid)
            try:
                listener.listen(1)
                self.target.wake()
                return self._accept(listener, timeout_s)
            finally:
                path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket, timeout_s: float) -> socket.socket:
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if select.select([listener], [], [], min(left, 0.2))[0]:
                connection, _ = listener.accept()
                if peer_uid(connection) == self.target.uid:
                    return connection
                connection.close()
            if not self.target.alive():
                raise ProfileError(f"process {self.target.pid} ended before it answered")
            if time.monotonic() < end:
                # The ending agent of the previous session may have taken the signal.
                with contextlib.suppress(ProfileError):
                    self.target.wake()
        raise ProfileError(
            f"process {self.target.pid} did not answer within {timeout_s:g} s: it is being profiled "
            f"already, or {self.target.obstacle()}"
        )

    def _expect_hello(self, timeout_s: float) -> Hello:
        self._connection.settimeout(timeout_s)
        while not self._ready:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                data = b""
            if not data:
                raise ProfileError(f"process {self.target.pid} ended the handshake")
            self._ready += [_decode(payload) for payload in self._frames.feed(data)]
        hello = self._ready.pop(0)
        if not isinstance(hello, Hello) or hello.version != VERSION:
            raise ProfileError(
                f"process {self.target.pid} runs another version of Fireflyer: restart it"
            )
        return hello

    def _records(self, message: FromAgent) -> Iterator[Record]:
        base = self.hello.base_ns
        match message:
            case Batch():
                self.dropped = message.dropped
                self._threads.update(message.threads)
                self._labels.update(message.labels)
                self.training_thread = message.training_thread or self.training_thread
                events = list(unpacked(message.events))
                for row in self._accountant.feed(events):
                    yield StepRecord(row=msgspec.structs.replace(row, begin_ns=row.begin_ns + base))
                yield from self._spans(events, base)
                yield from self._stacks(message, base)
                for name, at, nbytes, peers in message.collectives:
                    yield Collective(name=name, at_ns=at + base, nbytes=nbytes, peers=peers)
            case Operators():
                for number, begin, end, thread in message.spans:
                    name = message.names[number]
                    yield Operator(name=name, begin_ns=begin, end_ns=end, thread=thread)
            case Hello():
                self.hello = message  # torch is loaded now
            case Bye():
                self.over, self.failure = True, message.failure

    def _spans(self, events: list[Event], base: int) -> Iterator[Span]:
        """Yields phases with their times, if a trace was requested."""
        if not self.request.collectives:
            return
        for event in events:
            if event.phase == OTHER or event.thread != self._accountant.thread:
                continue
            key = (event.thread, event.phase, event.label)
            if event.begin:
                self._open.setdefault(key, []).append(event.time_ns)
            elif self._open.get(key):
                phase = "optimizer" if event.phase == UPDATE else PHASES[event.phase]
                yield Span(
                    phase=phase,
                    name=self._labels.get(event.label, phase),
                    begin_ns=self._open[key].pop() + base,
                    end_ns=event.time_ns + base,
                )

    def _stacks(self, batch: Batch, base: int) -> Iterator[Record]:
        for number, frames, waits in batch.stacks:
            yield StackRecord(
                number=number, frames=tuple(Frame(*f) for f in frames), waits_for_lock=waits
            )
        by_thread: dict[int, list[tuple[int, int, int]]] = {}
        for at, thread, stack, weight in batch.samples:
            by_thread.setdefault(thread, []).append((at + base, stack, weight))
        for thread, samples in by_thread.items():
            times, stacks, weights = (list(column) for column in zip(*samples, strict=True))
            yield StackSamples(
                thread=self._threads.get(thread, f"thread {thread}"),
                main=thread == (self.training_thread or batch.main_thread),
                at_ns=times,
                stacks=stacks,
                weights=weights,
            )


def _is_connected(path: Path) -> bool:
    """Returns whether a session with the process of this meeting socket is in progress."""
    connected, number = "03", 5
    with contextlib.suppress(OSError), open("/proc/net/unix") as file:
        for line in file:
            words = line.split(maxsplit=7)
            if len(words) == 8 and words[number] == connected and words[7].rstrip() == str(path):
                return True
    return False


def _bind(listener: socket.socket, path: Path, pid: int) -> None:
    """Binds the meeting socket; replaces the socket that a killed profiler left."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise ProfileError(f"another profiler is attaching to process {pid}")
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ProfileError(f"cannot listen on {path}: {error.strerror}") from None
