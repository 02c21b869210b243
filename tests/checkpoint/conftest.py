"""What the checkpoint tests share: exact comparison, a storage that tells and obeys, forked children."""

import contextlib
import itertools
import os
import select
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tests.conftest import die_at_call, fork_child
from tests.waiting import LIMIT_S

from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.errors import StorageError
from fireflyer.storage import Chunk, DirectoryStorage, Range, Storage

SOAK = bool(os.environ.get("FIREFLYER_SOAK"))
"""Every point of a series is tried, not a sample of them."""


def _differs(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        if [(type(k), k) for k in a] != [(type(k), k) for k in b]:
            yield f"{path}: keys {list(a)} and {list(b)}"
        else:
            for key in a:
                yield from _differs(a[key], b[key], f"{path}[{key!r}]")
    elif type(a) is not type(b):
        yield f"{path}: {type(a)} and {type(b)}"
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{path}: lengths {len(a)} and {len(b)}"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differs(x, y, f"{path}[{index}]")
    elif isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or _bytes(a) != _bytes(b):
            yield f"{path}: {a} and {b}"
    elif isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            yield f"{path}: {a} and {b}"
    elif isinstance(a, float):
        if struct.pack("d", a) != struct.pack("d", b) and not (a != a and b != b):
            yield f"{path}: {a} and {b}"
    elif a != b:
        yield f"{path}: {a!r} and {b!r}"


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """So that a fork finds no pool of threads that it would lose."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ram_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path_factory.mktemp("ram")
        return
    with tempfile.TemporaryDirectory(prefix="ff-test-", dir=shared) as root:
        yield Path(root)


@pytest.fixture
def ram(ram_root: Path) -> Iterator[Path]:
    """As `tmp_path`, where a sync costs nothing: for tests of hundreds of saves that no power cut ends."""
    place = Path(tempfile.mkdtemp(dir=ram_root))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def differences() -> Callable[[Any, Any], list[str]]:
    """Where two states are not exactly equal: types, keys and their types, dtypes, shapes, every bit."""
    return lambda a, b: list(_differs(a, b, "state"))


class ToldStorage:
    """A storage that calls `before(call, name)` ahead of every call of another one."""

    def __init__(self, inner: Storage, before: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._before = before

    def __str__(self) -> str:
        return str(self._inner)

    def size(self, name: str) -> int | None:
        self._before("size", name)
        return self._inner.size(name)

    def stamp(self, name: str) -> str:
        self._before("stamp", name)
        return self._inner.stamp(name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        self._before("read", name)
        return self._inner.read(name, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._before("read_into", name)
        self._inner.read_into(name, offset, buffer)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        for name, _, _ in ranges:
            self._before("read_many", name)
        return self._inner.read_many(ranges)

    def read_checked(
        self, names: Sequence[str], segments: NDArray[np.int64], crcs: NDArray[np.uint32]
    ) -> None:
        for name in names:
            self._before("read_checked", name)
        self._inner.read_checked(names, segments, crcs)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        self._before("write", name)
        self._inner.write(name, chunks)

    def create(self, name: str, data: bytes) -> bool:
        self._before("create", name)
        return self._inner.create(name, data)

    def list(self, name: str = "") -> list[str]:
        self._before("list", name)
        return self._inner.list(name)

    def rename(self, old: str, new: str) -> None:
        self._before("rename", old)
        self._inner.rename(old, new)

    def delete(self, name: str) -> None:
        self._before("delete", name)
        self._inner.delete(name)


@pytest.fixture(scope="session")
def told() -> Callable[[Storage, Callable[[str, str], None]], Storage]:
    return ToldStorage


def _reap(pid: int) -> int:
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], LIMIT_S)[0]:
            os.kill(pid, 9)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="session")
def forked() -> Callable[..., list[int]]:
    """Runs each body in a forked child, side by side; returns the exit codes, -n where signal n ended one."""

    def run(*bodies: Callable[[], None]) -> list[int]:
        children = [fork_child(body) for body in bodies]
        return [_reap(child) for child in children]

    return run


class Machine:
    """The keepers that a test's ranks have started; none is left at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stores = 0

    def store(self) -> str:
        self._stores += 1
        return str(self.folder / f"store{self._stores}")

    def keepers(self) -> dict[str, int]:
        """By node: the keeper's pid."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"checkpoint.memory.keeper" in command and str(self.folder).encode() in command:
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    nodes = [v[15:] for v in environment if v.startswith(b"FIREFLYER_NODE=")]
                    found[b"".join(nodes).decode()] = int(pid)
        return found

    def kill_keeper(self, node: str) -> None:
        pid = self.keepers()[node]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], LIMIT_S)[0]
        os.close(pidfd)

    def stop_keeper(self, node: str) -> int:
        """Its pid; returns when it runs no more."""
        pid = self.keepers()[node]
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()
        return pid


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("FIREFLYER_KEEPER", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    machine = Machine(tmp_path)
    yield machine
    while keepers := machine.keepers():
        machine.kill_keeper(next(iter(keepers)))


@pytest.fixture
def job(
    tmp_path: Path, forked: Callable[..., list[int]]
) -> Callable[[int, Callable[[int], None]], None]:
    """job(world, body): runs `body(rank)` on so many ranks; all must return."""
    numbers = itertools.count()

    def rank_body(rank: int, world: int, number: int, body: Callable[[int], None]) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/meet-{number}", rank=rank, world_size=world
        )
        body(rank)
        dist.barrier()
        dist.destroy_process_group()

    def run(world: int, body: Callable[[int], None]) -> None:
        number = next(numbers)
        ranks = [lambda rank=rank: rank_body(rank, world, number, body) for rank in range(world)]
        assert forked(*ranks) == [0] * world

    return run


def untidy(place: Path) -> list[str]:
    """Files that no checkpoint of a directory needs, after a save that has succeeded."""
    catalog = Catalog(DirectoryStorage(place))
    needed = {name for _, manifest in catalog.whole() for name in manifest.files}
    needed |= {generation.manifest for generation in catalog.generations()}
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    return sorted(name for name in files - needed if name.startswith("step-"))


FILE_CALLS = (
    *("open", "close", "write", "fsync", "preadv"),
    *("replace", "link", "unlink", "mkdir", "rmdir", "listdir"),
)


@pytest.fixture(scope="session")
def die_at() -> Callable[[int], None]:
    """For forked children only."""
    return lambda call: die_at_call(FILE_CALLS, call)
