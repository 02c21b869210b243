"""Metadata cases of `fireflyer bench fs`: creates by many callers and by one caller, batched
stats."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from fireflyer.bench.fs.cluster import FileSystem, Worker, together
from fireflyer.bench.fs.context import Setting
from fireflyer.bench.fs.raw import BareSqlite, rows_of_creates
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.bench.peers.juicefs import JuiceFS
from fireflyer.bench.peers.moosefs import MooseFS
from fireflyer.bench.peers.mounting import Mounted
from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost

CLIENTS = 4
"""Number of processes that create files at the same time, on our file system and on a peer."""
CALLERS = 64
STAT_BATCH = 256
_PEER_SHARE = {"juicefs": 8, "moosefs": 2}
"""Factor by which a peer creates fewer files per round than we do, because peers are slower."""

Rate = Callable[[], float]


class Peers:
    """Mounted peer file systems that are available here, and the reasons why others are missing."""

    def __init__(self, setting: Setting, stack: ExitStack, names: tuple[str, ...]) -> None:
        self.mounted: dict[str, Mounted] = {}
        self.missing: dict[str, str] = {}
        kinds: dict[str, Callable[..., Mounted]] = {"juicefs": JuiceFS, "moosefs": MooseFS}
        for name in names:
            setting.say(f"starting {name}")
            try:
                peer = kinds[name](setting.work / name, setting.spec.peers)
                self.mounted[name] = stack.enter_context(peer)
            except (ConfigError, PeerLost, DeadlineExceeded) as error:
                self.missing[name] = f"{name}: {error}"

    def title(self, name: str) -> str:
        mounted = self.mounted.get(name)
        return mounted.title if mounted else self.missing[name]


def _mounted_workers(stack: ExitStack, name: str, peer: Mounted, count: int) -> list[Worker]:
    first = {"do": "mounted", "root": str(peer.root)}
    return [stack.enter_context(Worker(f"{name} {number}", first)) for number in range(count)]


def create(setting: Setting) -> list[Row]:
    """Measures durable creates by 64 callers in 4 processes, against 4 processes on the peers."""
    case = f"creates, {CALLERS} callers"
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "create"))
        client = stack.enter_context(files.attach())
        client.mkdir("/many")
        workers = [stack.enter_context(files.worker(f"client {n}")) for n in range(CLIENTS)]
        total, threads = setting.sizes.creates, CALLERS // CLIENTS
        candidates = {
            "ours": _creates(workers, "create", "/many", total, threads),
            "opened": _creates(workers, "open", "/many", total // 2, threads),
        }
        peers = Peers(setting, stack, ("juicefs", "moosefs"))
        for name, peer in peers.mounted.items():
            (peer.root / "many").mkdir()
            theirs = _mounted_workers(stack, name, peer, CLIENTS)
            fewer = max(CLIENTS, total // _PEER_SHARE[name])
            candidates[name] = _creates(theirs, "create", "/many", fewer, 1)
        found = setting.rounds(case, candidates)
    mine, opened = found["ours"], found["opened"]
    rows = []
    for name in ("juicefs", "moosefs"):
        rates = found.get(name, [])
        must, aim = goals.fs("create", name)
        title = peers.title(name) + (f", {CLIENTS} clients" if rates else "")
        rows.append(Row.of_speeds(case, "creates/s", mine, title, rates, goal=must, aim=aim))
    whole = f"files opened new and closed, {CALLERS} callers"
    rates = found.get("juicefs", [])
    return [*rows, Row.of_speeds(whole, "files/s", opened, rows[0].peer, rates)]


def _creates(workers: list[Worker], what: str, directory: str, total: int, threads: int) -> Rate:
    numbers = itertools.count()
    count = total // len(workers)

    def run() -> float:
        number = next(numbers)
        commands: list[dict[str, Any]] = [
            {
                "do": what, "directory": directory, "prefix": f"{what}-{number}-{index}",
                "count": count, "threads": threads,
            }
            for index in range(len(workers))
        ]  # fmt: skip
        return count * len(workers) / together(workers, commands)

    return run


def one(setting: Setting) -> list[Row]:
    """Measures durable creates by one caller, against commits of the same rows to bare SQLite."""
    case, count = "creates, one caller", setting.sizes.commits
    numbers = itertools.count()
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "one"))
        client = stack.enter_context(files.attach())
        client.mkdir("/one")
        worker = stack.enter_context(files.worker("client"))
        sqlite = stack.enter_context(BareSqlite(setting.work / "bare.sqlite"))

        def commits() -> float:
            rows = rows_of_creates(count, f"create-{next(numbers)}-0")
            return count / sqlite(rows)

        candidates = {
            "ours": _creates([worker], "create", "/one", count, 1),
            "sqlite": commits,
        }
        found = setting.rounds(case, candidates)
    must, aim = goals.fs("one", "sqlite")
    title = "SQLite WAL, synchronous=FULL"
    return [Row.of_rates(case, "creates/s", found["ours"], title, found["sqlite"], must, aim)]


def stat(setting: Setting) -> list[Row]:
    """Measures stats of many names, 256 per call, against `os.stat` in a mounted JuiceFS."""
    case = f"stat, {STAT_BATCH} a call"
    total = setting.sizes.stats
    fewer = max(10, total // 20)
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "stat"))
        client = stack.enter_context(files.attach())
        client.mkdir("/looked")
        setting.say(f"{case}: making {total:,} files")
        for at in range(0, total, 1000):
            names = [f"at-{number}" for number in range(at, min(at + 1000, total))]
            client.create_many("/looked", names)
        worker = stack.enter_context(files.worker("client"))
        candidates = {"ours": _stats(worker, "/looked", itertools.repeat("at"), total)}
        peers = Peers(setting, stack, ("juicefs",))
        for name, peer in peers.mounted.items():
            # The kernel would answer from its cache for names of an earlier round, so each round has
            # other names.
            theirs = _mounted_workers(stack, name, peer, CLIENTS)
            for number in range(setting.spec.rounds + 1):
                setting.say(f"{case}: files of {name}, {number + 1} of {setting.spec.rounds + 1}")
                _make_looked(theirs, str(number), fewer)
            candidates[name] = _stats(theirs[0], "", map(str, itertools.count()), fewer)
        found = setting.rounds(case, candidates)
    must, aim = goals.fs("stat", "juicefs")
    rates = found.get("juicefs", [])
    title = peers.title("juicefs")
    return [Row.of_speeds(case, "stats/s", found["ours"], title, rates, goal=must, aim=aim)]


def _make_looked(workers: list[Worker], prefix: str, count: int) -> None:
    """Creates the files `prefix`-0, -1, ... in the root, each by one of the workers."""
    command = {"do": "create", "directory": "", "prefix": prefix, "count": count, "threads": 1}
    shares = [{**command, "first": first, "step": len(workers)} for first in range(len(workers))]
    together(workers, shares)


def _stats(worker: Worker, directory: str, prefixes: Iterator[str], count: int) -> Rate:
    def run() -> float:
        command = {
            "do": "stat", "directory": directory, "prefix": next(prefixes), "count": count,
            "batch": STAT_BATCH,
        }  # fmt: skip
        return count / together([worker], [command])

    return run
