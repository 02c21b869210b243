"""Heartbeat of a rank: its progress, in a small file that its environment names.

`beat` stores into the mapped file without a system call, so a rank may call it as often as it
likes. The last record survives the death of the rank. `read` is for monitors. The file
(FIREFLYER_PULSE) holds one record, little-endian:

    4s magic  u32 number  f64 first beat  f64 last beat  f64 last save  i64 step  i64 saved step
    u64 n  STEPS x { i64 step  f64 seconds }  f64 loss  u32 number

`n` is the number of durations stored so far; duration i, from 0, is in slot i % STEPS. Times are
wall clock, seconds since 1970; 0 means never. A step of -1 means that no step was reported; a loss
of NaN means that no loss was reported. Older records have the magic FFP1 and no loss.

Both fields `number` count the writes. The writer sets the second field first and the first field
last. A record that was read during a write therefore has two different numbers.

Importing this module in a rank also registers a SIGURG handler. The handler writes the rank's
stacks to the file of FIREFLYER_STACKS. A process without a SIGURG handler ignores the signal.
"""

import contextlib
import faulthandler
import fcntl
import math
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

STEPS = 64
"""Number of latest steps whose durations are kept."""

STACKS_SIGNAL = signal.SIGURG

STACKS_DESCRIPTOR = 900
"""Descriptor of the stacks file; high, so that a script that closes inherited descriptors does not
soon reuse the number.
"""

_MAGIC = b"FFP2"
_MAGIC_WITHOUT_LOSS = b"FFP1"
_NUMBER = struct.Struct("<I")
_BODY = struct.Struct("<dddqqQ")
_STEP = struct.Struct("<qd")
_BODY_AT = 8
_STEPS_AT = _BODY_AT + _BODY.size
_LOSS = struct.Struct("<d")
_LOSS_AT = _STEPS_AT + STEPS * _STEP.size
_END_AT = _LOSS_AT + _LOSS.size
SIZE = _END_AT + _NUMBER.size
"""Size of a record in bytes."""


class Heartbeat(NamedTuple):
    """Last record of a rank."""

    first: float
    """Wall clock of the first beat."""
    last: float
    """Wall clock of the last beat."""
    saved: float
    """Wall clock of the last reported save; 0: none."""
    step: int
    """Current step; -1 if no step was reported."""
    saved_step: int
    steps: tuple[tuple[int, float], ...]
    """The latest durations, oldest first: pairs of a step and the seconds that the rank took for
    the step before it."""
    loss: float = math.nan
    """Last loss that was reported; NaN: none."""


class Writer:
    """Writer of one rank's heartbeat file. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._failed = False
        self._lock = threading.Lock()
        self._number = 0
        self._count = 0
        self._first = 0.0
        self._saved = 0.0
        self._step = -1
        self._saved_step = -1
        self._stepped_at = 0.0
        self._loss = math.nan

    def beat(self) -> None:
        """Records that the rank is alive."""
        with self._lock:
            self._write()

    def step(self, step: int, busy_s: float | None, loss: float | None = None) -> None:
        """Records the start of `step`, and the duration and loss of the previous step.

        Args:
            busy_s: duration of the previous step; None: the time since its start.
            loss: loss of the previous step.
        """
        now = time.monotonic()
        with self._lock:
            self._loss = self._loss if loss is None else loss
            took: float | None = None
            if step != self._step:
                if self._step >= 0:
                    took = now - self._stepped_at
                took = took if busy_s is None else busy_s
                self._step, self._stepped_at = step, now
            self._write(took)

    def saved(self, step: int, taken: float) -> None:
        """Records that the state of `step`, as of time `taken`, is durable."""
        with self._lock:
            self._saved, self._saved_step = taken, step
            self._write()

    def _write(self, took: float | None = None) -> None:
        page = self._map
        if page is None:
            page = self._open()
        if page is None:
            return
        wall = time.time()
        self._first = self._first or wall
        self._number = (self._number + 1) & 0xFFFFFFFF
        _NUMBER.pack_into(page, _END_AT, self._number)
        if took is not None:
            slot = _STEPS_AT + self._count % STEPS * _STEP.size
            _STEP.pack_into(page, slot, self._step, took)
            self._count += 1
        _BODY.pack_into(
            *(page, _BODY_AT, self._first, wall, self._saved, self._step, self._saved_step),
            self._count,
        )
        _LOSS.pack_into(page, _LOSS_AT, self._loss)
        _NUMBER.pack_into(page, 4, self._number)

    def _open(self) -> mmap.mmap | None:
        if self._failed:
            return None
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, _MAGIC.ljust(SIZE, b"\0"), 0)  # allocates disk space
                self._map = mmap.mmap(descriptor, SIZE)
            finally:
                os.close(descriptor)
        except OSError:
            self._failed = True  # the rank continues; its log still shows progress
        return self._map


def decode(data: bytes) -> Heartbeat | None:
    """Decodes a record; None if `data` is not a record or was read during a write."""
    whole = len(data) == SIZE and data[:4] == _MAGIC
    older = len(data) == SIZE - _LOSS.size and data[:4] == _MAGIC_WITHOUT_LOSS
    if not (whole or older) or data[4:8] != data[-_NUMBER.size :]:
        return None
    first, last, saved, step, saved_step, count = _BODY.unpack_from(data, _BODY_AT)
    if not first:
        return None
    kept = min(count, STEPS)
    slots = [_STEPS_AT + n % STEPS * _STEP.size for n in range(count - kept, count)]
    steps = tuple(_STEP.unpack_from(data, slot) for slot in slots)
    loss = _LOSS.unpack_from(data, _LOSS_AT)[0] if whole else math.nan
    return Heartbeat(first, last, saved, step, saved_step, steps, loss)


def read(path: Path) -> Heartbeat | None:
    """Reads the heartbeat of a rank; None if the file is missing or holds no valid record."""
    try:
        return decode(path.read_bytes())
    except OSError:
        return None


_writer: Writer | None = None


def writer() -> Writer | None:
    """Returns the writer of this rank; None outside a task."""
    global _writer
    path = os.environ.get("FIREFLYER_PULSE")
    if path is None:
        return None
    if _writer is None or _writer.path != path:
        _writer = Writer(path)
    return _writer


def beat(step: int | None = None, busy_s: float | None = None, loss: float | None = None) -> None:
    """Reports that this rank makes progress. Does nothing outside a task.

    Args:
        step: the step that begins now; the time between two steps is the duration of a step.
        busy_s: seconds that this rank itself worked on the previous step, without its waits for
            other ranks.
        loss: loss of the previous step, for charts.
    """
    mine = writer()
    if mine is None:
        return
    if step is None:
        mine.beat()
    else:
        mine.step(step, busy_s, None if loss is None else float(loss))


def saved(step: int, taken: float | None = None) -> None:
    """Reports that the state of `step` is durable: a later fault loses only the work after it.

    Args:
        step: the step.
        taken: wall clock at which the state was captured; default: now.
    """
    mine = writer()
    if mine is not None:
        mine.saved(step, time.time() if taken is None else taken)


def write_stacks_on_signal() -> None:
    """Makes STACKS_SIGNAL append the stacks of all threads to the file of FIREFLYER_STACKS."""
    path = os.environ.get("FIREFLYER_STACKS")
    if not path:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, STACKS_DESCRIPTOR)
        finally:
            os.close(low)
        faulthandler.register(STACKS_SIGNAL, file=high, all_threads=True)


write_stacks_on_signal()
