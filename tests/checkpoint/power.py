"""A power cut for `DirectoryStorage`: what it does to files is noted, and what a cut may leave is made.

A file's bytes are certain after fsync of it; a name is certain after fsync of its directory. What was not
synced may be there or not, each change by itself; of an unsynced file any part may be there. Only a
rename within a directory happens as a whole.
"""

import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BLOCK = 512


class Event(NamedTuple):
    """One call: `kind` is name (changes of the names in one directory), sync, fsync or ack."""

    kind: str
    directory: str = ""
    changes: tuple[tuple[str, str | int | None], ...] = ()
    """Name, and what it stands for from now on: a directory's path, a file's number, or nothing."""
    number: int = 0
    """Of a file; for ack, what was acknowledged."""


class Journal:
    """Notes the calls of one directory. For one writer at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.events: list[Event] = []
        self.contents: dict[int, bytes] = {}
        """By file, as of its fsync: each is written once."""
        self._names: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def ack(self, number: int) -> None:
        self.events.append(Event("ack", number=number))

    @contextmanager
    def noting(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, note in (
                ("open", self._open),
                ("fsync", self._fsync),
                ("replace", self._replace),
                ("link", self._link),
                ("unlink", self._remove),
                ("rmdir", self._remove),
                ("mkdir", self._mkdir),
            ):
                patch.setattr(os, name, self._around(getattr(os, name), note))
            yield

    def _around(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(result, *args)
            return result

        return called

    def _at(self, path: Any) -> tuple[str, str] | None:
        """Directory and name below the root; None for others."""
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith(f"{self._root}/"):
            return None
        directory, _, name = text[len(str(self._root)) + 1 :].rpartition("/")
        return directory, name

    def _change(self, path: Any, target: str | int | None) -> None:
        place = self._at(path)
        if place is None:
            return
        directory, name = place
        self.events.append(Event("name", directory, ((name, target),)))

    def _open(self, _fd: int, path: Any, flags: int, *_: Any) -> None:
        if flags & os.O_CREAT and self._at(path) is not None:
            number = next(self._numbers)
            self._names[os.fspath(path)] = number
            self._change(path, number)

    def _fsync(self, _: None, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            if path == str(self._root):
                self.events.append(Event("sync", ""))
            elif path.startswith(f"{self._root}/"):
                self.events.append(Event("sync", path[len(str(self._root)) + 1 :]))
        elif path in self._names:
            number = self._names[path]
            self.contents[number] = Path(path).read_bytes()
            self.events.append(Event("fsync", number=number))

    def _replace(self, _: None, old: Any, new: Any) -> None:
        source, target = self._at(old), self._at(new)
        assert source is not None
        assert target is not None
        number = self._names[os.fspath(new)] = self._names.pop(os.fspath(old))
        if source[0] == target[0]:
            changes = ((source[1], None), (target[1], number))
            self.events.append(Event("name", source[0], changes))
        else:
            self._change(new, number)
            self._change(old, None)

    def _link(self, _: None, old: Any, new: Any) -> None:
        self._names[os.fspath(new)] = self._names[os.fspath(old)]
        self._change(new, self._names[os.fspath(new)])

    def _remove(self, _: None, path: Any) -> None:
        self._names.pop(os.fspath(path), None)
        self._change(path, None)

    def _mkdir(self, _: None, path: Any, *_mode: Any) -> None:
        place = self._at(path)
        if place is not None:
            self._change(path, "/".join(filter(None, place)))

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
                acknowledged = event.number
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
                data = self.contents.get(meaning, b"")
                (target / name).write_bytes(data if meaning in synced else _torn(data, rng))


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
