"""Checks that do what a check must not do."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings


def check(function: str) -> Check:
    """Returns a check with the figures `speed` and `time` that runs a function of this module."""
    return Check(
        name=function,
        figures=(Figure("speed", "MB/s"), Figure("time", "s", "less")),
        duration_s=0.1,
        function=f"tests.validator.misbehaving:{function}",
    )


def good(settings: Settings) -> Iterator[Measured]:
    yield Measured("speed", 100.0, samples=(99.0, 101.0))
    yield Measured("time", 2.0)


def hang(settings: Settings) -> Iterator[Measured]:
    """Measures one figure, starts a child, and hangs; ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield Measured("speed", 100.0)
    if not os.fork():
        Path(os.environ["CHILD"]).write_text(str(os.getpid()))
    threading.Event().wait()


def crash(settings: Settings) -> Iterator[Measured]:
    yield Measured("speed", 100.0)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(settings: Settings) -> Iterator[Measured]:
    os._exit(3)


def forget(settings: Settings) -> Iterator[Measured]:
    yield Measured("speed", 100.0)


def garbage(settings: Settings) -> Iterator[Measured]:
    yield Measured("speed", 100.0)
    os.write(3, b"\x00\xff{]\n")


def flood(settings: Settings) -> Iterator[Measured]:
    yield from iter(lambda: Measured("speed", 1.0), None)


def scream(settings: Settings) -> Iterator[Measured]:
    yield Measured("speed", 100.0)
    while True:
        os.write(2, bytes(1 << 16))


def chatter(settings: Settings) -> Iterator[Measured]:
    """Prints to stdout and stderr, as libraries do."""
    print("{}", flush=True)
    os.write(2, b"warning\n")
    yield from good(settings)


def stranger(settings: Settings) -> Iterator[Measured]:
    yield Measured("height", 1.0)


def fill(settings: Settings) -> Iterator[Measured]:
    for number in range(10_000):
        path = Path(settings.directory, "folder", f"{number}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1 << 20))
    threading.Event().wait()
    yield Measured("speed", 1.0)


def large_file(settings: Settings) -> Iterator[Measured]:
    with Path(settings.directory, "large").open("wb") as file:
        file.truncate(1 << 40)
    yield Measured("speed", 1.0)


def needs_root(settings: Settings) -> Iterator[Measured]:
    raise PermissionError(13, "Permission denied", "/dev/mem")


def lacks(settings: Settings) -> Iterator[Measured]:
    raise NotRun("the node has no\nsuch card\x1b[31m")


def broken(settings: Settings) -> Iterator[Measured]:
    raise ValueError("no such thing")


def bad_hardware(settings: Settings) -> Iterator[Measured]:
    yield Measured("speed", 3.0, "two lanes of sixteen")
    yield Measured("time", skipped="no clock")
