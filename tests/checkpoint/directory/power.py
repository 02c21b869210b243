"""A power cut for `DirectoryStorage`: what it does to files is noted, and what a cut may leave is made.

A file's bytes are certain after fsync of it; a name is certain after fsync of its directory. What was not
synced may be there or not, each change by itself; of an unsynced file any part may be there. Only a
rename within a directory happens as a whole.
"""

import fcntl
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

BLOCK = 512


class Call(NamedTuple):
    """One call as it was noted: open (of a new file), sync, fsync, replace, link, remove, mkdir or ack."""

    kind: str
    path: str = ""
    """From the root, as is `target`."""
    target: str = ""
    data: bytes = b""
    """For fsync: the file's."""
    number: int = 0
    """For ack: what was acknowledged."""


class Journal:
    """Notes the calls of one directory, of all threads and processes in one order, in a file beside it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root.with_name(f"{root.name}.journal")
        self._path.touch(exist_ok=False)
        self._lock = threading.Lock()
        self._pauses: random.Random | None = None

    def ack(self, number: int) -> None:
        with self._alone() as log:
            _note(log, Call("ack", number=number))

    @contextmanager
    def noting(self, pauses: random.Random | None = None) -> Iterator[None]:
        """
        Args:
            pauses: lets up to 3 ms pass before each sync of a directory: others see what is not durable.
        """
        self._pauses = pauses
        with pytest.MonkeyPatch.context() as patch:
            for name, noted in (
                ("open", self._open),
                ("fsync", self._fsync),
                ("replace", self._two_names("replace")),
                ("link", self._two_names("link")),
                ("unlink", self._one_name("remove")),
                ("rmdir", self._one_name("remove")),
                ("mkdir", self._one_name("mkdir")),
            ):
                patch.setattr(os, name, self._around(getattr(os, name), noted))
            yield

    def history(self) -> "History":
        return History(self._path.read_bytes())

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """One thread and process at a time; a file's lock belongs to who has opened it."""
        with self._lock, self._path.open("ab", buffering=0) as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            yield log.fileno()

    def _around(
        self, real: Callable[..., Any], noted: Callable[..., Call | None]
    ) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._pauses is not None and real.__name__ == "fsync" and _is_directory(args[0]):
                threading.Event().wait(self._pauses.uniform(0, 0.003))
            with self._alone() as log:
                result = real(*args, **kwargs)
                call = noted(*args)
                if call is not None:
                    _note(log, call)
            return result

        return called

    def _at(self, path: Any) -> str | None:
        """From the root, which is ""; None for others."""
        text = os.fspath(path)
        if text == str(self._root):
            return ""
        if not isinstance(text, str) or not text.startswith(f"{self._root}/"):
            return None
        return text[len(str(self._root)) + 1 :]

    def _open(self, path: Any, flags: int, *_: Any) -> Call | None:
        place = self._at(path)
        return Call("open", place) if place and flags & os.O_CREAT else None

    def _fsync(self, fd: int) -> Call | None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        place = self._at(path)
        if place is None:
            return None
        if _is_directory(fd):
            return Call("sync", place)
        return Call("fsync", place, data=Path(path).read_bytes())

    def _one_name(self, kind: str) -> Callable[..., Call | None]:
        def noted(path: Any, *_: Any) -> Call | None:
            place = self._at(path)
            return Call(kind, place) if place else None

        return noted

    def _two_names(self, kind: str) -> Callable[..., Call | None]:
        def noted(old: Any, new: Any, **_: Any) -> Call | None:
            source, target = self._at(old), self._at(new)
            return Call(kind, source, target) if source and target else None

        return noted


def _is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def _note(log: int, call: Call) -> None:
    frame = msgspec.msgpack.encode(call)
    os.write(log, len(frame).to_bytes(4, "little") + frame)


class Event(NamedTuple):
    """What a call did: `kind` is name (changes of the names in one directory), sync, fsync or ack."""

    kind: str
    directory: str = ""
    changes: tuple[tuple[str, str | int | None], ...] = ()
    """Name, and what it stands for from now on: a directory's path, a file's number, or nothing."""
    number: int = 0
    """Of a file; for ack, what was acknowledged."""


class History:
    """What was noted, in order."""

    def __init__(self, log: bytes) -> None:
        self.events: list[Event] = []
        self._contents: dict[int, bytes] = {}
        """By file, as of its fsync: each is written once."""
        self._names: dict[str, int] = {}
        self._numbers = itertools.count(1)
        place = 0
        while place < len(log):
            end = place + 4 + int.from_bytes(log[place : place + 4], "little")
            self._take(msgspec.msgpack.decode(log[place + 4 : end], type=Call))
            place = end

    def _take(self, call: Call) -> None:
        path, target = call.path, call.target
        if call.kind == "ack":
            self.events.append(Event("ack", number=call.number))
        elif call.kind == "sync":
            self.events.append(Event("sync", path))
        elif call.kind == "fsync":
            number = self._names[path]
            self._contents[number] = call.data
            self.events.append(Event("fsync", number=number))
        elif call.kind == "open":
            self._names[path] = next(self._numbers)
            self._change(path, self._names[path])
        elif call.kind == "mkdir":
            self._change(path, path)
        elif call.kind == "remove":
            self._names.pop(path, None)
            self._change(path, None)
        elif call.kind == "link":
            self._names[target] = self._names[path]
            self._change(target, self._names[path])
        else:
            self._replace(path, target)

    def _replace(self, old: str, new: str) -> None:
        number = self._names[new] = self._names.pop(old)
        (here, was), (there, name) = _split(old), _split(new)
        if here == there:
            self.events.append(Event("name", here, ((was, None), (name, number))))
        else:
            self._change(new, number)
            self._change(old, None)

    def _change(self, path: str, meaning: str | int | None) -> None:
        directory, name = _split(path)
        self.events.append(Event("name", directory, ((name, meaning),)))

    def cut(self, count: int, rng: random.Random, target: Path) -> int:
        """Makes the disk that a cut after `count` events may leave; returns what was last acknowledged."""
        certain: dict[str, dict[str, str | int]] = {}
        pending: dict[str, list[Event]] = {}
        synced: set[int] = set()
        acknowledged = 0
        for event in self.events[:count]:
            if event.kind == "name":
                pending.setdefault(event.directory, []).append(event)
            elif event.kind == "sync":
                for late in pending.pop(event.directory, []):
                    _apply(certain, late)
            elif event.kind == "fsync":
                synced.add(event.number)
            else:
                acknowledged = max(acknowledged, event.number)
        for events in pending.values():
            odds = rng.choice((0.0, 0.5, 1.0))
            for event in events:
                if rng.random() < odds:
                    _apply(certain, event)
        self._make(certain, "", target, synced, rng)
        return acknowledged

    def _make(
        self,
        names: dict[str, dict[str, str | int]],
        directory: str,
        target: Path,
        synced: set[int],
        rng: random.Random,
    ) -> None:
        target.mkdir(parents=True)
        for name, meaning in names.get(directory, {}).items():
            if isinstance(meaning, str):
                self._make(names, meaning, target / name, synced, rng)
            else:
                data = self._contents.get(meaning, b"")
                (target / name).write_bytes(data if meaning in synced else _torn(data, rng))


def _split(path: str) -> tuple[str, str]:
    """Directory and name."""
    directory, _, name = path.rpartition("/")
    return directory, name


def _apply(names: dict[str, dict[str, str | int]], event: Event) -> None:
    here = names.setdefault(event.directory, {})
    for name, meaning in event.changes:
        if meaning is None:
            here.pop(name, None)
        else:
            here[name] = meaning


def _torn(data: bytes, rng: random.Random) -> bytes:
    """Some of its blocks, zeros for others, and any length."""
    torn = bytearray(data)
    for start in range(0, len(torn), BLOCK):
        if rng.random() < 0.5:
            torn[start : start + BLOCK] = bytes(len(torn[start : start + BLOCK]))
    return bytes(torn[: rng.choice((0, rng.randint(0, len(torn)), len(torn)))])
