"""Agent: the thread of a session in the profiled process.

The agent detaches when the profiler disappears or asks the agent to detach, and at the latest when
the requested time is over. The agent then removes every hook and closes the socket, and the thread
ends.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from fireflyer.haiprof.events import OTHER
from fireflyer.haiprof.inside import points
from fireflyer.haiprof.inside.buffer import EventBuffer
from fireflyer.haiprof.inside.modules import SEARCH_EVERY, RootModules
from fireflyer.haiprof.inside.operators import OperatorRecorder
from fireflyer.haiprof.inside.sampler import StackSampler
from fireflyer.haiprof.messages import (
    VERSION,
    Batch,
    Bye,
    FromAgent,
    Hello,
    Request,
    is_private,
    meeting_folder,
    peer_uid,
    socket_path,
)
from fireflyer.rpc import FrameBuffer, frame

FLUSH_NS = 100_000_000
"""Interval between two batches of events."""
SEND_TIMEOUT_S = 10.0
"""Time after which the agent detaches from a profiler that does not read."""

_session: "Session | None" = None
_watches_forks = False


def serve(renew_lock: Callable[[], None]) -> None:
    """Runs one session with the profiler that waits for this process; returns if no profiler waits.

    Args:
        renew_lock: called in a child that is forked during the session, so that a
            profiler can attach to the child.
    """
    connection = _connect()
    if connection is None:
        return
    with connection:
        try:
            request = _receive_request(connection)
            if request is not None:
                Session(connection, request, renew_lock).run()
        except OSError:
            return  # the profiler is gone


def _connect() -> socket.socket | None:
    """Connects to the profiler; returns None if no profiler of the same user listens."""
    uid = os.geteuid()
    if not is_private(meeting_folder(uid), uid):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(SEND_TIMEOUT_S)
        connection.connect(str(socket_path(os.getpid(), uid)))
        if peer_uid(connection) in (uid, 0):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _receive_request(connection: socket.socket) -> Request | None:
    buffer = FrameBuffer()
    while data := connection.recv(1 << 16):
        for payload in buffer.feed(data):
            with contextlib.suppress(msgspec.MsgspecError):
                request = msgspec.msgpack.decode(payload, type=Request)
                return request if request.version == VERSION else None
            return None
    return None


class Session:
    """One session: installs hooks, sends records, removes hooks."""

    def __init__(
        self, connection: socket.socket, request: Request, renew_lock: Callable[[], None]
    ) -> None:
        self._connection, self._request = connection, request
        self.renew_lock = renew_lock
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer = EventBuffer()
        self._undo: list[Callable[[], None]] = []
        self._roots: RootModules | None = None
        self._points = points.PointHooks(self._buffer)
        self._looked_at = (0, False)
        self._operators = OperatorRecorder(request.operator_steps)
        period = int(1e9 / request.rate_hz) if request.rate_hz > 0 else 0
        self._sampler = StackSampler(period) if period else None
        self._stacks: list[tuple[int, list[tuple[str, str, int]], bool]] = []
        self._samples: list[tuple[int, int, int, int]] = []
        self._reducers: list[Any] = []  # modules of torch DDP whose logging is on
        self._searched = 0  # number of roots that were searched for reducers
        self._training_thread = 0
        self._failure = ""
        self._torch_known = False
        self._sampled_at = 0

    def run(self) -> None:
        """Serves until the end of the session, then removes all hooks."""
        global _session
        _session = self
        _watch_forks()
        try:
            self._torch_known = _torch_is_loaded()
            self._send(self._hello(self._torch_known))
            self._put_hooks()
            self._serve_until_end()
        finally:
            self._end()
            _session = None
        self._flush()
        self._send(Bye(failure=self._failure or self._operators.failure))

    def _hello(self, torch: bool) -> Hello:
        rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        numbers = (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)
        distributed = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):
            if distributed is not None and distributed.is_initialized():
                numbers = (distributed.get_rank(), distributed.get_world_size())
        return Hello(
            pid=os.getpid(),
            base_ns=self._buffer.base_ns,
            rank=numbers[0],
            world=numbers[1],
            torch=torch,
        )

    def _put_hooks(self) -> None:
        """Installs the hooks of each module once the module is loaded; torch must be loaded
        first."""
        buffer = self._buffer
        if self._roots is not None:
            self._put_point_hooks()
        if self._roots is not None or not self._request.phases or not _torch_is_loaded():
            return
        if not self._torch_known:
            self._send(self._hello(True))
        if self._request.collectives:
            buffer.collectives = []
        buffer.active = True
        self._roots = RootModules(buffer)
        self._undo.append(self._roots.undo)
        self._put_point_hooks()
        self._undo.append(points.OptimizerHooks(buffer, self._at_step).undo)

    def _put_point_hooks(self) -> None:
        """Installs hooks in modules that were imported since the last call. Also searches once more
        after the first step."""
        loaded = (len(sys.modules), self._training_thread != 0)
        if loaded != self._looked_at:
            self._looked_at = loaded
            for replacement in self._points.search():
                self._undo.append(replacement.undo)

    def _at_step(self, steps: int) -> int:
        """Runs in the training thread at the end of an optimizer's step. Never raises. Returns the
        number of steps until the next call.
        """
        try:
            self._training_thread = threading.get_ident()
            following = SEARCH_EVERY
            if self._roots is not None:
                following = self._roots.at_step(steps)
                self._report_reducers(self._roots)
            self._operators.at_step()
            return 1 if self._reducers or self._operators.wanted else following
        except Exception as error:  # noqa: BLE001  # a fault of ours must not reach the training
            self._failure = f"{type(error).__name__}: {error}"
            self._buffer.active = False
            return 1

    def _report_reducers(self, roots: RootModules) -> None:
        """Reports how long the reducer of torch DDP waited in native code."""
        for module in self._reducers:
            found = module.logger._get_ddp_logging_data().ints_map
            exposed = found.get("backward_comm_time", 0) - found.get(
                "backward_compute_comm_overlap_time", 0
            )
            if exposed > 0:
                self._buffer.log.report(OTHER, exposed)
        if roots.found != self._searched:
            self._searched = roots.found
            self._log_reducers(roots.modules)

    def _log_reducers(self, modules: list[Any]) -> None:
        """Enables the log of new reducers, for every step from the next on."""
        for module in modules:
            logged = hasattr(vars(module).get("logger"), "_get_ddp_logging_data")
            if logged and not any(module is known for known in self._reducers):
                module._set_ddp_runtime_logging_sample_rate(1)
                self._reducers.append(module)
                self._undo.append(partial(module._set_ddp_runtime_logging_sample_rate, 100))

    def _serve_until_end(self) -> None:
        now = time.monotonic_ns()
        end = now + int(self._request.seconds * 1e9)
        flush_at = now
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while now < end and not self._failure:
            until = min(end, flush_at)
            if self._sampler is not None:
                until = min(until, self._sampled_at + self._sampler.period_ns)
            if poll.poll(max(0, -(-(until - now) // 1_000_000))):
                return  # the profiler detaches or has died: it sends nothing after its request
            now = time.monotonic_ns()
            if self._sampler is not None and now >= self._sampled_at + self._sampler.period_ns:
                self._sample(now)
            if now >= flush_at:
                self._put_hooks()
                self._flush()
                flush_at = now + FLUSH_NS

    def _sample(self, now: int) -> None:
        sampler = self._sampler
        if sampler is None:
            return
        due = (now - self._sampled_at) // sampler.period_ns if self._sampled_at else 1
        self._sampled_at = self._sampled_at + due * sampler.period_ns if self._sampled_at else now
        at = now - self._buffer.base_ns
        for thread, number, new in sampler.take():
            if new is not None:
                self._stacks.append((new.number, new.frames, new.waits_for_lock))
            self._samples.append((at, thread, number, due))

    def _end(self) -> None:
        self._buffer.active = False
        for undo in reversed(self._undo):
            with contextlib.suppress(Exception):
                undo()
        self._undo = []  # drops the hooks, which refer to this session
        if self._operators.running:  # the thread that trains has not come to the end of a step
            with contextlib.suppress(Exception):
                self._operators.stop()

    def _flush(self) -> None:
        events, labels = self._buffer.drain()
        names = self._sampler.new_names() if self._sampler is not None else {}
        stacks, self._stacks = self._stacks, []
        samples, self._samples = self._samples, []
        collectives = self._buffer.collectives or []
        if self._buffer.collectives:
            self._buffer.collectives = []
        if events or samples or collectives:
            self._send(
                Batch(
                    events=events, labels=labels, stacks=stacks,
                    samples=samples, threads=names, collectives=collectives,
                    training_thread=self._training_thread,
                    main_thread=threading.main_thread().ident or 0,
                    dropped=self._buffer.dropped,
                )
            )  # fmt: skip
        for operators in self._operators.taken():
            self._send(operators)

    def _send(self, message: FromAgent) -> None:
        self._connection.sendall(frame(self._encode(message)))

    def abandon(self) -> None:
        """Ends the session in a forked child, which has no agent."""
        self._end()
        self._connection.close()


def _torch_is_loaded() -> bool:
    """Returns True if the import of torch has completed."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and "torch.optim.optimizer" in sys.modules
        and not getattr(torch.__spec__, "_initializing", False)
    )


def _watch_forks() -> None:
    global _watches_forks
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _session
    session, _session = _session, None
    if session is not None:
        session.abandon()
        session.renew_lock()
