"""Preparation of a process, so that a profiler can attach to it at any later time.

A prepared process has a handler of one real-time signal, an exit handler that makes the process
ignore that signal, and one inaccessible page of address space that marks the process. Until the
signal arrives, the preparation adds no thread, open file or timer. The mark is a mapping of this
file whose offset, in pages, is the signal's number. The profiler reads the mark from
/proc/PID/maps, so it never signals a process that the signal would kill.

This module imports nothing costly, because it runs at the start of every interpreter.
"""

import _thread
import atexit
import ctypes
import mmap
import os
import signal
import sys
from types import FrameType

MARK = __file__
"""The file whose mapping marks a prepared process."""

ENDING = os.path.join("haiprof", "inside", "prepare.py")
"""End of MARK in any installation."""

_prepared: int | None = None
_refused = False
_busy = _thread.allocate_lock()


def prepare() -> int | None:
    """Prepares this process; returns the number of its signal.

    Returns None and does nothing outside the main thread, after `refuse`, or if no real-time signal
    is free. Forked children are prepared, too; an exec ends the preparation.
    """
    global _prepared
    if _refused or _prepared is not None:
        return _prepared
    number = _free_signal()
    if number is None:
        return None
    try:
        signal.signal(number, _wake)
    except ValueError:  # not the main thread
        return None
    signal.siginterrupt(number, False)
    if not _map_mark(number):
        signal.signal(number, signal.SIG_DFL)
        return None
    atexit.register(signal.signal, number, signal.SIG_IGN)
    _prepared = number
    return number


def refuse() -> None:
    """Keeps this process unprepared, because it forks ranks and must never have a second thread."""
    global _refused
    _refused = True
    for finder in [f for f in sys.meta_path if isinstance(f, TorchWatch)]:
        sys.meta_path.remove(finder)


def allow() -> None:
    """Ends `refuse`; called in a forked rank."""
    global _refused
    _refused = False


def renew_lock() -> None:
    """Makes a forked child attachable: renews the lock, whose holder does not exist in the
    child."""
    global _busy
    _busy = _thread.allocate_lock()


class TorchWatch:
    """Import hook that prepares the process when torch is imported, then removes itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Finds no module itself; prepares the process when torch is imported."""
        if name == "torch":
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            prepare()


def _free_signal() -> int | None:
    """Returns the highest real-time signal that still has its default action."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return int(number)
    return None


def _map_mark(number: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    try:
        file = os.open(MARK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        at = libc.mmap(None, mmap.PAGESIZE, 0, mmap.MAP_PRIVATE, file, number * mmap.PAGESIZE)
    finally:
        os.close(file)
    return at not in (None, ctypes.c_void_p(-1).value)


def _wake(number: int, frame: FrameType | None) -> None:
    """Starts the agent. Takes no lock and imports nothing, because it interrupts arbitrary code."""
    busy = _busy
    if busy.acquire(blocking=False):
        try:
            _thread.start_new_thread(_run_agent, (busy,))
        except RuntimeError:  # no thread can be started: the profiler gives up after its timeout
            busy.release()


def _run_agent(busy: _thread.LockType) -> None:
    from fireflyer.haiprof.inside.agent import serve

    try:
        serve(renew_lock)
    finally:
        busy.release()
