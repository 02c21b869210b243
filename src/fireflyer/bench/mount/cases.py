"""Cases of `fireflyer bench mount`: sequential reads, new files, `find`."""

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fireflyer.bench.fs.cluster import Worker, together
from fireflyer.bench.fs.context import DEPTH, Setting, Spec, contents
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.report import Row
from fireflyer.bench.mount.mounts import OurMount, Passthrough
from fireflyer.bench.peers.juicefs import JuiceFS
from fireflyer.bench.peers.mounting import Mounted
from fireflyer.bench.peers.worker import drop_cache
from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost

BLOCK = 1 << 20
WRITTEN = 4096
TREE = "/tree"
"""Folder that `find` visits; a peer's root may contain other files."""
A_FOLDER = 1000
"""Number of files in each folder that `find` visits."""
CALLERS = (1, 16)
MAKERS = 16
"""Number of threads that make the files for `find` on a peer."""

Rate = Callable[[], float]
_Maker = Callable[[Setting], Mounted]


def _juicefs(setting: Setting) -> Mounted:
    return JuiceFS(setting.work / "juicefs", setting.spec.peers)


def _passthrough(setting: Setting) -> Mounted:
    return Passthrough(setting.work / "passthrough", setting.spec.passthrough)


class Mounts:
    """Our mount and those of the available peers; the reasons why other peers are missing."""

    def __init__(self, setting: Setting, stack: ExitStack, peers: dict[str, _Maker]) -> None:
        """Mounts all file systems until the stack closes; raises ConfigError if ours cannot be
        mounted."""
        self.ours = stack.enter_context(OurMount(setting.work / "ours"))
        self.peers: dict[str, Mounted] = {}
        self._missing: dict[str, str] = {}
        for name, make in peers.items():
            try:
                self.peers[name] = stack.enter_context(make(setting))
            except (ConfigError, PeerLost, DeadlineExceeded) as error:
                self._missing[name] = f"{name}: {error}"

    def all(self) -> dict[str, Mounted]:
        return {"ours": self.ours, **self.peers}

    def title(self, name: str) -> str:
        return self.peers[name].title if name in self.peers else self._missing[name]


def _worker(stack: ExitStack, name: str, mount: Mounted) -> Worker:
    return stack.enter_context(Worker(name, {"do": "mounted", "root": str(mount.root)}))


def read(setting: Setting) -> list[Row]:
    """Measures 1 MiB reads, in order, of a file that is not in memory."""
    case = f"{size_text(BLOCK)} reads in order, cold"
    count = setting.sizes.data // BLOCK
    with ExitStack() as stack:
        mounts = Mounts(setting, stack, {"passthrough_hp": _passthrough, "juicefs": _juicefs})
        candidates: dict[str, Rate] = {}
        for name, mount in mounts.all().items():
            setting.say(f"{case}: writing {size_text(setting.sizes.data)} to {name}")
            _put(mount.root / "data", setting.sizes.data)
            candidates[name] = _reads(_worker(stack, name, mount), mount, count)
        client = stack.enter_context(mounts.ours.files.worker("client"))
        candidates["client"] = _reads(client, mounts.ours, count)
        found = setting.rounds(case, candidates)
    rows = []
    for name in ("passthrough_hp", "client", "juicefs"):
        must, aim = goals.mount("read", name)
        title = f"our client, {DEPTH} a call" if name == "client" else mounts.title(name)
        rates = found.get(name, [])
        rows.append(Row.of_speeds(case, "GB/s", found["ours"], title, rates, goal=must, aim=aim))
    return rows


def _put(path: Path, size: int) -> None:
    data = memoryview(contents(size))
    with open(path, "wb", buffering=0) as file:
        for at in range(0, size, BLOCK):
            file.write(data[at : at + BLOCK])
        os.fsync(file.fileno())


def _reads(worker: Worker, mount: Mounted, count: int) -> Rate:
    command = {
        "do": "read", "path": "/data", "block": BLOCK, "depth": DEPTH, "count": count, "seed": 0,
    }  # fmt: skip

    def run() -> float:
        drop_cache(mount.folder)  # drops the mount's own pages, and those of the underlying files
        return count * BLOCK / 1e9 / together([worker], [command])

    return run


def create(setting: Setting) -> list[Row]:
    """Measures how many files per second one caller, and 16 callers, create, write and close."""
    rows = []
    with ExitStack() as stack:
        mounts = Mounts(setting, stack, {"juicefs": _juicefs})
        workers = {name: _worker(stack, name, mount) for name, mount in mounts.all().items()}
        for callers in CALLERS:
            who = "one caller" if callers == 1 else f"{callers} callers"
            case = f"create, write {size_text(WRITTEN)}, close: {who}"
            total = setting.sizes.written * (1 if callers == 1 else 4)
            candidates = {}
            for name, mount in mounts.all().items():
                (mount.root / f"by-{callers}").mkdir()
                candidates[name] = _creates(workers[name], f"/by-{callers}", total, callers)
            found = setting.rounds(case, candidates)
            must, aim = goals.mount(f"create by {callers}", "juicefs")
            rates, title = found.get("juicefs", []), mounts.title("juicefs")
            ours = found["ours"]
            rows.append(Row.of_speeds(case, "files/s", ours, title, rates, goal=must, aim=aim))
    return rows


def _creates(worker: Worker, directory: str, total: int, callers: int) -> Rate:
    numbers = itertools.count()
    command = {
        "do": "create", "directory": directory, "count": total, "threads": callers,
        "bytes": WRITTEN,
    }  # fmt: skip

    def run() -> float:
        prefix = str(next(numbers))
        return total / together([worker], [{**command, "prefix": prefix}])

    return run


def find(setting: Setting) -> list[Row]:
    """Measures `find` over a tree: with names only, and with the attributes of each file."""
    total = setting.sizes.found
    with ExitStack() as stack:
        mounts = Mounts(setting, stack, {"juicefs": _juicefs})
        for name, mount in mounts.all().items():
            setting.say(f"find: making {total:,} files of {name}")
            _make_tree(stack, name, mount, total)
        rows = []
        for what, words in (("names", []), ("sizes", ["-size", "+1G"])):
            case = f"find over {total:,} files, {what}"
            runs = {n: _finding(m.root / TREE[1:], words, total) for n, m in mounts.all().items()}
            found = setting.rounds(case, runs)
            must, aim = goals.mount("find", "juicefs")
            seconds, title = found.get("juicefs", []), mounts.title("juicefs")
            rows.append(Row.of_times(case, "s", found["ours"], title, seconds, goal=must, aim=aim))
    return rows


def _make_tree(stack: ExitStack, name: str, mount: Mounted, total: int) -> None:
    folders = [(f"{TREE}/d{n:06}", min(A_FOLDER, total - n)) for n in range(0, total, A_FOLDER)]
    if isinstance(mount, OurMount):
        with mount.files.attach() as client:
            client.mkdir(TREE)
            for folder, count in folders:
                client.mkdir(folder)
                client.create_many(folder, [f"file-{number}" for number in range(count)])
        return
    worker = _worker(stack, name, mount)
    (mount.root / TREE[1:]).mkdir()
    for folder, count in folders:
        (mount.root / folder[1:]).mkdir()
        made: dict[str, Any] = {"directory": folder, "prefix": "file", "count": count}
        worker.ask({"do": "create", "threads": MAKERS, **made})


def _finding(root: Path, words: Iterable[str], total: int) -> Rate:
    def run() -> float:
        begun = time.monotonic()
        done = subprocess.run(
            ["find", root, "-type", "f", *words], capture_output=True, check=False
        )
        took = time.monotonic() - begun
        seen = done.stdout.count(b"\n")
        if done.returncode or seen != (0 if words else total):
            raise PeerLost(f"find in {root} saw {seen} files: {done.stderr.decode()[-200:]}")
        return took

    return run


CASES: dict[str, Callable[[Setting], list[Row]]] = {"read": read, "create": create, "find": find}


def run(spec: Spec, say: Callable[[str], None]) -> list[Row]:
    """Runs the cases of `spec.only`, in the order of CASES, and returns their rows.

    Raises:
        ConfigError: nothing can be mounted here.
        FireflyerError: a service or a client failed.
    """
    with Setting(spec, say) as setting:
        return [row for name, case in CASES.items() if name in spec.only for row in case(setting)]
