"""The supervisor's loop: one thread, a selector, and no timers except pending deadlines and the
samples of running ranks.

Every input is a readable descriptor: an engine's request, the fork server's reply, the guard's
death (a pidfd), a descendant's death (SIGCHLD through a wakeup socket), a newcomer's admission (a
pipe). After each round of inputs, `_advance` kills the remaining processes of an attempt that is
over, and records its end. The loop then exits if the supervisor is no longer needed.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from fireflyer.errors import ProtocolMismatch
from fireflyer.hai.processes import (
    children,
    describe_exit,
    kill,
    kill_descendants,
)
from fireflyer.hai.supervisor.attempt import Attempt, server_environment
from fireflyer.hai.supervisor.forks import ForkServer, start_server
from fireflyer.hai.supervisor.keeper_activation import KeeperActivation, keeper_path
from fireflyer.hai.supervisor.kernel_log import KernelLog, open_kernel_log
from fireflyer.hai.supervisor.kernel_messages import parse
from fireflyer.hai.supervisor.messages import (
    Attach,
    Attached,
    Condemn,
    Decide,
    End,
    Enlist,
    Forked,
    Freeze,
    Launch,
    Launched,
    Leave,
    RankSpec,
    Record,
    Refused,
    Reply,
    Request,
    Start,
)
from fireflyer.hai.supervisor.parts import read_part, server_handshake
from fireflyer.hai.supervisor.rankstart import exec_rank
from fireflyer.rpc import FrameBuffer, frame

if TYPE_CHECKING:
    from fireflyer.rpc.handshake import Handshake

IDLE_S = 60.0
"""Seconds that a supervisor without an attempt waits for an engine to connect before it exits."""

UNAUTHENTICATED = 64
"""Maximum number of unauthenticated connections; a further connection drops all of them."""

BACKLOG_BYTES = 4 << 20
"""Unsent bytes above which a connection is dropped; the engine gets all records again when it
reconnects."""


def leave(status: int) -> NoReturn:
    """Exits without cleanup. The listening socket closes with the process, so a client whose
    connection is refused knows that the process has ended."""
    sys.stderr.flush()
    os._exit(status)


class Connection:
    """Non-blocking connection of an engine."""

    def __init__(self, stream: socket.socket, handshake: "Handshake | None") -> None:
        stream.setblocking(False)
        self.socket = stream
        self.handshake = handshake
        """Handshake in progress; None: complete, or not needed."""
        self.attached: int | None = None
        """Attempt whose records the connection gets."""
        self.buffer = FrameBuffer()
        self.unsent = bytearray()

    def flush(self) -> None:
        """Sends as much as the socket accepts without blocking. Raises OSError if the connection is
        lost."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

    def proven(self, data: bytes) -> bytes:
        """Returns the received bytes that follow the handshake.

        Raises:
            ProtocolMismatch: the peer cannot prove the secret.
        """
        if self.handshake is None:
            return data
        self.unsent += self.handshake.feed(data)
        self.flush()
        if not self.handshake.done:
            return b""
        rest, self.handshake = self.handshake.rest, None
        return rest


class Supervisor:
    def __init__(
        self,
        listener: int,
        guard: int,
        node: str = "",
        attempt: str = "",
        fork_server: int | None = None,
    ) -> None:
        """Takes over the listening socket and watches the guard.

        Args:
            listener: descriptor of the listening socket.
            guard: pid of the guard, the parent of this process.
            node: name of the node.
            attempt: folder of the attempt with the secret that connections must prove; empty: the
                listener is a Unix socket, and connections prove no secret.
            fork_server: pid of the fork server that a zygote has forked as a child of this process;
                the descriptor of its socket follows `listener`.
        """
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._connections: set[Connection] = set()
        self._attempt: Attempt | None = None
        self._forks: ForkServer | None = None
        self._keeper: KeeperActivation | None = None
        self._early: dict[int, tuple[int | None, int | None]] = {}
        """Exit code and signal, by pid, of processes that the fork server has not reported yet."""
        self._waiting: list[RankSpec] = []
        """Ranks to fork after the fork server has answered its previous request."""
        self._deferred: list[tuple[Connection, Request]] = []
        """An Enlist for a part whose processes are being killed, and the requests after it."""
        self._leaving = False
        self._idle_since: float | None = time.monotonic()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        self._node = node
        self._task = Path(attempt).parent
        self._secret = read_part(Path(attempt), node).secret if attempt else ""
        pidfd = os.pidfd_open(guard)
        if os.getppid() != guard:
            sys.exit("supervisor: the guard died at the start")
        self._watch(self._listener.fileno(), self._accept)
        self._watch(pidfd, self._guard_died)
        wakeup, notify = socket.socketpair()
        for end in (wakeup, notify):
            end.setblocking(False)
        self._wakeup, self._notify = wakeup, notify
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(notify.fileno(), warn_on_full_buffer=False)
        self._watch(wakeup.fileno(), self._reap)
        self._news, news = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._news_path = f"/proc/{os.getpid()}/fd/{news}"
        self._watch(self._news, self._read_news)
        self._kernel: KernelLog | None = None
        if fork_server is not None:
            self._use(ForkServer(fork_server, socket.socket(fileno=listener + 1)))
            self._reap()  # the fork server may have died before SIGCHLD was handled

    def run(self) -> NoReturn:
        """Serves until a Leave request, or until the supervisor is no longer needed. At its exit no
        process of the task is left."""
        while not self._done():
            for key, _ in self._selector.select(self._timeout()):
                callback: Callable[[], None] = key.data
                callback()
            self._advance()
        kill_descendants()
        leave(0)

    # -- the loop ----------------------------------------------------------------------------------

    def _watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def _busy(self) -> bool:
        return self._attempt is not None and not self._attempt.ended

    def _done(self) -> bool:
        if self._busy():
            return False
        idle = self._idle_since
        return self._leaving or (idle is not None and time.monotonic() >= idle + IDLE_S)

    def _timeout(self) -> float | None:
        pending: list[float | None] = []
        if self._attempt is not None:
            pending.append(None if self._attempt.over else self._attempt.deadline)
            pending.append(self._attempt.look_at)
            pending.append(self._attempt.sample_at)
        if self._forks is not None:
            pending.append(self._forks.give_up_at)
        if self._idle_since is not None:
            pending.append(self._idle_since + IDLE_S)
        due = [when for when in pending if when is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _advance(self) -> None:
        attempt, forks, now = self._attempt, self._forks, time.monotonic()
        if attempt is not None and not attempt.ended:
            if not attempt.over and attempt.deadline is not None and now >= attempt.deadline:
                attempt.expire()
            if attempt.look_at is not None and now >= attempt.look_at:
                attempt.look_at_ranks()
            if attempt.sample_at is not None and now >= attempt.sample_at:
                attempt.sample()
            if self._waiting and (attempt.over or attempt.deadline is not None):
                unwanted, self._waiting = self._waiting, []
                attempt.not_started(spec for spec in unwanted if spec.incarnation)
            pending = bool(self._waiting) or (forks is not None and forks.pending)
            if not attempt.over and not pending:
                attempt.all_exited()
            if attempt.over:
                if forks is not None and pending:
                    forks.give_up()
                    if forks.give_up_at is not None and now >= forks.give_up_at:
                        forks.kill()
                self._sweep(attempt)
        if not self._busy():
            self._handle_deferred()
        if self._busy() or any(c.handshake is None for c in self._connections):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def _sweep(self, attempt: Attempt) -> None:
        """Kills all child processes except fork server and keeper. Orphans of a killed process
        become children of the supervisor, which kills them after the SIGCHLD of the killed process.
        Finishes the attempt if no child is left."""
        forks = self._forks
        left = [pid for pid in self._killable() if forks is None or pid != forks.pid]
        for pid in left:
            kill(pid, signal.SIGKILL)
        if not left and not (forks is not None and forks.pending):
            attempt.finish()

    def _killable(self) -> list[int]:
        """Returns the child processes that do not outlive an attempt: all except the keeper."""
        keeper = None if self._keeper is None else self._keeper.pid
        return [pid for pid in children() if pid != keeper]

    def _guard_died(self) -> NoReturn:
        kill_descendants()
        if self._attempt is not None:
            self._attempt.remove_cgroup()
        print("supervisor: the guard died; killed all processes of the task", file=sys.stderr)  # noqa: T201
        leave(1)

    # -- processes ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        self._read_kernel()  # before exits: a log entry about a process comes first
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None:
                return
            if self._attempt is not None:  # until the process is reaped, its group id is not reused
                self._attempt.dying(result.si_pid)
            os.waitid(os.P_PID, result.si_pid, os.WEXITED)
            exited = result.si_code == os.CLD_EXITED
            code = result.si_status if exited else None
            number = None if exited else result.si_status
            self._ended(result.si_pid, code, number)

    def _ended(self, pid: int, code: int | None, number: int | None) -> None:
        attempt, forks, activation = self._attempt, self._forks, self._keeper
        if activation is not None and pid == activation.pid:
            activation.ended()
            self._watch(activation.socket.fileno(), self._start_keeper)
        elif forks is not None and pid == forks.pid:
            self._take_replies()  # replies sent before its death still count
            self._selector.unregister(forks.socket)
            forks.close()
            self._forks = None
            self._early.clear()
            if forks.pending and attempt is not None and not attempt.over:
                self._cannot_start(
                    attempt,
                    forks.asked,
                    f"the fork server on {attempt.part.node} {describe_exit(code, number)} before it had "
                    "started the ranks; its output is in the supervisor's log",
                )
                self._fork_next(attempt)
        elif attempt is not None and attempt.reaped(pid, code, number):
            pass
        elif forks is not None and forks.pending:
            self._early[pid] = (
                code,
                number,
            )  # may be a rank that the fork server has not reported yet

    def _take_replies(self) -> None:
        forks, attempt = self._forks, self._attempt
        if forks is None:
            return
        for reply in forks.replies():
            assert attempt is not None  # only an attempt requests ranks
            match reply:
                case Forked():
                    for spec, pid in zip(forks.asked, reply.pids, strict=True):
                        attempt.started(spec, pid)
                    for pid, (code, number) in self._early.items():
                        attempt.reaped(pid, code, number)
                case Refused():
                    reason = f"{attempt.part.node}: {reply.reason}"
                    self._cannot_start(attempt, forks.asked, reason)
            self._early.clear()
            self._fork_next(attempt)

    def _start(self, attempt: Attempt) -> None:
        self._open_kernel_log(attempt.part.kernel_log)
        attempt.check()
        if attempt.over:
            return
        self._begin(attempt, attempt.specs())

    def _begin(self, attempt: Attempt, specs: tuple[RankSpec, ...]) -> None:
        part, left = attempt.part, specs
        try:
            if self._keeper is None:
                path = keeper_path(os.path.dirname(part.directory), part.node)
                self._keeper = KeeperActivation(path)
                self._watch(self._keeper.socket.fileno(), self._start_keeper)
            if part.start == "exec":
                while left:
                    attempt.started(left[0], exec_rank(left[0], part.python or sys.executable))
                    left = left[1:]
        except OSError as error:
            self._cannot_start(attempt, left, f"{part.node} cannot start the ranks: {error}")
            return
        if part.start == "fork":
            self._waiting += specs
            self._fork_next(attempt)

    def _cannot_start(self, attempt: Attempt, specs: tuple[RankSpec, ...], reason: str) -> None:
        """Handles ranks that cannot start. The attempt fails if one of its first ranks cannot
        start. It continues if only newcomers cannot start."""
        if all(spec.incarnation for spec in specs):
            print(f"supervisor: {reason}", file=sys.stderr)  # noqa: T201
            attempt.not_started(specs)
        else:
            attempt.fail(reason)

    def _fork_next(self, attempt: Attempt) -> None:
        """Requests the waiting ranks, unless the previous request of the fork server is still
        pending."""
        part = attempt.part
        if not self._waiting or (self._forks is not None and self._forks.pending):
            return
        specs, self._waiting = tuple(self._waiting), []
        try:
            if self._forks is None:
                self._use(start_server(part.preload, server_environment(part), part.python))
            assert self._forks is not None
            self._forks.request(specs)
        except OSError as error:
            self._cannot_start(attempt, specs, f"{part.node} cannot start the ranks: {error}")

    def _use(self, forks: ForkServer) -> None:
        self._forks = forks
        self._watch(forks.socket.fileno(), self._take_replies)

    def _read_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._news, 4096):
                pass
        if self._attempt is not None:
            self._attempt.read_members()

    def _open_kernel_log(self, path: str) -> None:
        if self._kernel is None:
            self._kernel = open_kernel_log(path)
            if self._kernel is not None:
                self._watch(self._kernel.descriptor, self._read_kernel)

    def _read_kernel(self) -> None:
        records = [] if self._kernel is None else self._kernel.read()
        if self._attempt is not None:
            for record in records:
                found = parse(record, self._attempt.part.node, time.time())
                if found is not None:
                    self._attempt.observed(found)

    def _start_keeper(self) -> None:
        activation = self._keeper
        if activation is None:
            return
        try:
            activation.start()
            self._selector.unregister(activation.socket)
        except OSError as error:
            print(f"supervisor: cannot start the keeper: {error}", file=sys.stderr)  # noqa: T201
            activation.ended()

    # -- requests ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            handshake = server_handshake(self._secret) if self._secret else None
            unauthenticated = [c for c in self._connections if c.handshake is not None]
            for unknown in unauthenticated if len(unauthenticated) >= UNAUTHENTICATED else ():
                self._drop(unknown)
            connection = Connection(self._listener.accept()[0], handshake)
            self._connections.add(connection)
            self._selector.register(
                connection.socket, selectors.EVENT_READ, lambda: self._serve(connection)
            )

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _serve(self, connection: Connection) -> None:
        if connection not in self._connections:
            return  # dropped by an earlier event of the same round
        try:
            connection.flush()
            self._await_writable(connection)
            data = connection.socket.recv(1 << 16)
            for payload in connection.buffer.feed(connection.proven(data)):
                self._handle(connection, self._decoder.decode(payload))
        except BlockingIOError:
            return
        except (OSError, ProtocolMismatch, msgspec.MsgspecError) as error:
            print(f"supervisor: dropped a connection: {error}", file=sys.stderr)  # noqa: T201
            self._drop(connection)
            return
        if not data:
            self._drop(connection)

    def _await_writable(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        key = self._selector.get_key(connection.socket)
        if key.events != events:
            self._selector.modify(connection.socket, events, key.data)

    def _send(self, connection: Connection, message: Reply) -> None:
        if connection not in self._connections:
            return
        connection.unsent += frame(self._encode(message))
        try:
            connection.flush()
        except OSError:
            self._drop(connection)
            return
        if len(connection.unsent) > BACKLOG_BYTES:
            self._drop(connection)
        else:
            self._await_writable(connection)

    def _publish(self, record: Record) -> None:
        for connection in list(self._connections):
            if connection.attached == record.attempt:
                self._send(connection, record)

    def _handle(self, connection: Connection, request: Request) -> None:
        if isinstance(request, Leave):
            self._leaving = True
            if self._attempt is not None and not self._attempt.ended:
                self._attempt.stop(0.0)
            return
        if isinstance(request, Start):
            part = read_part(self._task / str(request.attempt), self._node)
            request = Launch(part=msgspec.structs.replace(part, port=request.port))
        elif isinstance(request, Launch | Enlist) and self._secret:
            raise ProtocolMismatch("a Launch or Enlist over the network: only Start is accepted")
        if isinstance(request, Launch):
            self._launch(connection, request)
            return
        attempt = self._attempt
        if self._deferred or (isinstance(request, Enlist) and self._is_killing_vacant()):
            self._deferred.append((connection, request))
            return
        if isinstance(request, Enlist):
            self._enlist(connection, request)
            return
        known = attempt is not None and attempt.part.attempt == request.attempt
        match request:
            case Attach():
                grace = attempt.suspend_grace_s if attempt is not None and known else None
                self._attach(connection, request.attempt)
                self._send(
                    connection, Attached(attempt=request.attempt, known=known, grace_s=grace)
                )
            case Freeze() if attempt is not None and known:
                self._send(connection, attempt.freeze(request.grace_s))
            case Decide() if attempt is not None and known:
                attempt.decide(request.number)
            case Condemn() if attempt is not None and known:
                attempt.condemn(request.reason)
            case End() if attempt is not None and known:
                if request.how == "stop":
                    attempt.stop(request.grace_s)
                else:
                    attempt.abort()

    def _attach(self, connection: Connection, number: int) -> None:
        """Sends the existing records of the attempt to the connection, and subscribes it to new
        records."""
        connection.attached = number
        attempt = self._attempt
        if attempt is not None and attempt.part.attempt == number:
            for record in list(attempt.records):
                self._send(connection, record)

    def _handle_deferred(self) -> None:
        """Handles the deferred requests. REQUIRES: the part has ended."""
        deferred, self._deferred = self._deferred, []
        for connection, request in deferred:
            self._handle(connection, request)

    def _is_killing_vacant(self) -> bool:
        return self._busy() and self._attempt is not None and self._attempt.vacant

    def _enlist(self, connection: Connection, request: Enlist) -> None:
        """Starts newcomers. Ignores a request of an older attempt, or for a part that ended for
        another cause than `vacant`."""
        attempt, part = self._attempt, request.part
        if self._leaving or (attempt is not None and attempt.part.attempt > part.attempt):
            return
        fresh = attempt is None or attempt.part.attempt < part.attempt
        if attempt is not None and fresh and not attempt.ended:
            self._end_at_once(attempt)
        if attempt is None or fresh or (attempt.ended and attempt.vacant):
            attempt = self._attempt = Attempt(part, self._publish, self._news_path, again=True)
            connection.attached = None
        if connection.attached != part.attempt:
            self._attach(connection, part.attempt)
        if not attempt.over:
            self._begin(attempt, attempt.enlist(request.newcomers))

    def _launch(self, connection: Connection, request: Launch) -> None:
        """Starts an attempt. Answers a repeated request again, and ignores a request older than the
        current attempt."""
        attempt, number = self._attempt, request.part.attempt
        if attempt is None or attempt.part.attempt < number:
            if attempt is not None and not attempt.ended:
                self._end_at_once(attempt)
            self._deferred = [(c, r) for c, r in self._deferred if not isinstance(r, Enlist)]
            self._handle_deferred()
            self._leaving = False
            attempt = self._attempt = Attempt(request.part, self._publish, self._news_path)
            connection.attached = number
            self._send(connection, Launched(attempt=number, port=attempt.port))
            self._start(attempt)
        elif attempt.part.attempt == number:
            connection.attached = number
            self._send(connection, Launched(attempt=number, port=attempt.port))

    def _end_at_once(self, attempt: Attempt) -> None:
        """Ends an attempt that a newer attempt fences. Kills its processes, and the fork server,
        whose answer the attempt may wait for."""
        attempt.abort()
        while not attempt.ended:
            killable = self._killable()
            for pid in killable:
                kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                result = os.waitid(os.P_ALL, 0, os.WEXITED) if killable else None
                if result is not None:
                    exited = result.si_code == os.CLD_EXITED
                    status = result.si_status
                    self._ended(
                        result.si_pid, status if exited else None, None if exited else status
                    )
            self._sweep(attempt)
