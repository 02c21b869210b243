"""What is dropped ends in a thread that holds no lock: once, at the latest with the process."""

import gc
import os
import subprocess
import sys
import threading

import pytest
from tests.waiting import LIMIT_S

from fireflyer.finalizer import Finalizer


class Holder:
    pass


def test_dropped_by_a_thread_that_holds_the_lock_of_the_callback() -> None:
    lock, called = threading.Lock(), threading.Event()

    def callback() -> None:
        with lock:
            called.set()

    holder: Holder | None = Holder()
    Finalizer(holder, callback)
    with lock:
        holder = None
        assert not called.is_set()
    assert called.wait(LIMIT_S)


def test_a_cycle_is_dropped_by_the_collector() -> None:
    called = threading.Event()
    holder: Holder | None = Holder()
    holder.itself = holder  # type: ignore[union-attr]
    Finalizer(holder, called.set)
    holder = None
    gc.collect()
    assert called.wait(LIMIT_S)


def test_called_once() -> None:
    calls: list[int] = []
    holder = Holder()
    finalizer = Finalizer(holder, calls.append, 1)
    finalizer()
    assert calls == [1]  # in the caller's thread
    finalizer()
    assert not finalizer.detach()
    last = threading.Event()
    Finalizer(holder, last.set)
    del holder
    assert last.wait(LIMIT_S)
    assert calls == [1]


def test_detached() -> None:
    calls: list[int] = []
    holder = Holder()
    finalizer = Finalizer(holder, calls.append, 1)
    assert finalizer.detach()
    assert not finalizer.detach()
    finalizer()
    assert calls == []


def test_an_error_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()
    for callback in (lambda: 1 // 0, called.set):
        holder = Holder()
        Finalizer(holder, callback)
        del holder
    assert called.wait(LIMIT_S)
    assert "ZeroDivisionError" in caplog.text


AT_EXIT = """
import os, threading
from fireflyer.finalizer import Finalizer

class Holder: pass

kept = Holder()
for name in "abc":
    Finalizer(kept, print, name)
Finalizer(kept, lambda: 1 // 0)
dropped = Holder()
Finalizer(dropped, print, "dropped")
del dropped
"""


def test_at_the_end_of_the_process_the_youngest_comes_first() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=LIMIT_S
    )
    words = ended.stdout.split()
    assert [word for word in words if word != "dropped"] == ["c", "b", "a"]
    assert sorted(words) == ["a", "b", "c", "dropped"]
    assert ended.returncode == 0


def test_a_forked_child_leaves_all_to_its_parent() -> None:
    read, write = os.pipe()
    holder: Holder | None = Holder()
    finalizer = Finalizer(holder, os.write, write, b"x")
    own = Holder()
    pid = os.fork()
    if pid == 0:
        holder = None
        gc.collect()
        finalizer()
        called = threading.Event()
        Finalizer(own, called.set)
        del own
        os._exit(0 if called.wait(LIMIT_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finalizer()
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"x"


def test_a_holder_that_outlives_the_modules() -> None:
    """A model in a global: the interpreter drops it after it has emptied this module."""
    script = """
import atexit
from fireflyer import finalizer
class Holder: pass
kept = Holder()
its_end = finalizer.Finalizer(kept, print, "called")
atexit.unregister(finalizer._at_exit)
finalizer._at_exit()
vars(finalizer).update(dict.fromkeys([*vars(finalizer)]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("called\n", "")
