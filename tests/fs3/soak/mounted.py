"""A checker of one file of a mount, like fsx.

`python -m tests.fs3.soak.mounted FILE SEED`, until its stdin ends. It writes, reads, maps, cuts, extends and
reopens the file, and compares each byte with a copy in memory. Any error of the system ends it. The last line
of stdout has the counts of its operations and the SHA-256 of the copy.
"""

import hashlib
import json
import mmap
import os
import random
import select
import sys
from collections import Counter
from pathlib import Path

MOST = 1 << 20
LONGEST = 100_000
TOLD = 20
KINDS = (
    "write",
    "read",
    "map_write",
    "map_read",
    "truncate",
    "append",
    "punch",
    "reopen",
    "sync",
    "look",
    "rename",
)
WEIGHTS = (12, 12, 6, 6, 3, 3, 2, 3, 2, 4, 1)
KEEP_SIZE, PUNCH_HOLE = 1, 2


class Different(Exception):
    """The file differs from the copy."""


class Checker:
    """One file, and the copy of what it must hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance = path, random.Random(seed)
        self.copy = bytearray()
        self.counts: Counter[str] = Counter()
        self.last: list[str] = []
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def step(self) -> None:
        """Does one operation; raises Different or OSError."""
        kind = self.chance.choices(KINDS, WEIGHTS)[0]
        if kind.startswith("map") and not self.copy:
            kind = "write"
        at, size = self._range(
            len(self.copy) if kind in ("read", "map_write", "map_read") else MOST
        )
        self.last = [*self.last[-TOLD:], f"{kind} {at} {size}"]
        getattr(self, kind)(at, size)
        self.counts[kind] += 1

    def _range(self, end: int) -> tuple[int, int]:
        at = self.chance.randrange(max(1, end))
        return at, min(self.chance.randrange(1, LONGEST), end - at)

    def _same(self, seen: bytes, at: int) -> None:
        wanted = self.copy[at : at + len(seen)]
        if seen != wanted:
            first = next(
                (n for n, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b),
                len(wanted),
            )
            raise Different(f"byte {at + first} of {len(self.copy)} differs")

    def write(self, at: int, size: int) -> None:
        data = self.chance.randbytes(size)
        written = os.pwrite(self.file, data, at)
        if written != size:
            raise Different(f"{written} of {size} bytes were written at {at}")
        self.copy.extend(bytes(max(0, at - len(self.copy))))
        self.copy[at : at + size] = data

    def append(self, _: int, size: int) -> None:
        self.write(min(len(self.copy), MOST - size), size)

    def read(self, at: int, size: int) -> None:
        seen = os.pread(self.file, size, at)
        if len(seen) != size:
            raise Different(f"{len(seen)} of {size} bytes were read at {at}")
        self._same(seen, at)

    def map_write(self, at: int, size: int) -> None:
        data = self.chance.randbytes(size)
        with mmap.mmap(self.file, len(self.copy)) as memory:
            memory[at : at + size] = data
            memory.flush()
        self.copy[at : at + size] = data

    def map_read(self, at: int, size: int) -> None:
        with mmap.mmap(self.file, len(self.copy), prot=mmap.PROT_READ) as memory:
            self._same(memory[at : at + size], at)

    def truncate(self, at: int, _: int) -> None:
        os.ftruncate(self.file, at)
        self.copy[at:] = bytes(max(0, at - len(self.copy)))

    def punch(self, at: int, size: int) -> None:
        """Zeros by way of fallocate, which Python has not."""
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        place = ctypes.c_long(at), ctypes.c_long(size)
        if libc.fallocate(self.file, KEEP_SIZE | PUNCH_HOLE, *place):
            raise OSError(ctypes.get_errno(), "fallocate")
        end = min(at + size, len(self.copy))
        self.copy[at:end] = bytes(max(0, end - at))

    def reopen(self, _at: int, _size: int) -> None:
        os.close(self.file)
        self.file = os.open(self.path, os.O_RDWR)
        self.look(0, 0)

    def sync(self, _at: int, _size: int) -> None:
        os.fsync(self.file)

    def look(self, _at: int, _size: int) -> None:
        size = os.fstat(self.file).st_size
        if size != len(self.copy):
            raise Different(f"the file has {size} bytes, not {len(self.copy)}")

    def rename(self, _at: int, _size: int) -> None:
        other = self.path.with_name(f"{self.path.name}.other")
        os.rename(self.path, other)
        os.rename(other, self.path)

    def end(self) -> None:
        """Closes the file and compares all of it."""
        os.close(self.file)
        seen = self.path.read_bytes()
        if len(seen) != len(self.copy):
            raise Different(f"the file has {len(seen)} bytes at the end, not {len(self.copy)}")
        self._same(seen, 0)


def main() -> int:
    path, seed = sys.argv[1:]
    checker = Checker(Path(path), int(seed))
    print("ready", flush=True)
    try:
        while not select.select([sys.stdin], [], [], 0)[0]:
            checker.step()
        checker.end()
    except (Different, OSError) as error:
        print(f"{path}: {error!r} after {checker.last}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps([checker.counts, hashlib.sha256(checker.copy).hexdigest()]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
