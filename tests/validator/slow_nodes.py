"""Rounds of measurements of eight nodes of which one may be slowed down.

The nodes of a round take turns several times, so that a stall of the machine, which all of them
share, meets the reference nodes as often as the slowed one. Rounds without a slow node are short:
a quarter of the time for each measurement, or less, which other processes disturb more. A round
that names a node is repeated, and counts only if the repetition names the node, too.

`python -m tests.validator.slow_nodes --clean 50` counts the false alarms of rounds without a slow
node; `--slow 8` slows each node once.
"""

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.validator.control_groups import Group, Missing

from fireflyer.errors import LabError
from fireflyer.lab import Lab, namespaces
from fireflyer.validator import fleet, pairs
from fireflyer.validator.checks import cpu, disk
from fireflyer.validator.fleet import Measurements
from fireflyer.validator.model import Settings

NODES = 8
SECRET = b"secret of these tests"

LINE_MBIT = 100
LINE_BYTES = 1 << 20
LINE_BURST = 32 << 10
"""Bytes that a node may send above its rate; small, so that a transfer takes the time of its rate."""

LINE_TURNS = 3
LINE_BEST_OF = 4
"""Transfers, in turn, of which the best is a sample: other processes only slow a transfer down."""

CPU_TURNS = 5
"""Turns of all nodes in a round, as `DISK_TURNS` are."""

DISK_TURNS = 6
DISK_BEST_OF = 5
"""Windows of a turn. The best of all turns is the sample of a node, as with the lines."""

Named = set[tuple[str, str]]
"""Node and check of each defective node."""

Samples = dict[str, list[float]]


class Fleet:
    """Measurements of one round and of its repetition."""

    def __init__(self) -> None:
        self._found: dict[str, Measurements] = {}
        self._failed: dict[str, Named] = {}

    def add(
        self, of_round: str, node: int, check: str, values: list[float], *, less: bool = False
    ) -> None:
        of_check = self._found.setdefault(check, Measurements("less" if less else "more", {}))
        of_check.add(f"n{node}", values, of_round)

    def fail(self, of_round: str, node: int, check: str) -> None:
        """Records a check that failed by itself."""
        self._failed.setdefault(of_round, set()).add((f"n{node}", check))

    def named(self, rounds: tuple[str, ...]) -> Named:
        """Returns what the judgement of these rounds names, and what failed in each of them."""
        judged = fleet.judge_fleet(self._found)
        failed = [self._failed.get(of_round, set()) for of_round in rounds]
        worse = {(n.node, of.check) for of in judged for n in of.nodes if n.defective}
        return worse | set.intersection(*failed)


REPEATED: list[Named] = []
"""What the first round named, of each round that was repeated."""


def confirmed(measure: Callable[[Fleet, str], None]) -> Named:
    """Returns what a round and, if it names a node, its repetition name."""
    found = Fleet()
    measure(found, "first")
    if named := found.named(("first",)):
        REPEATED.append(named)
        measure(found, "second")
        named = found.named(("first", "second"))
    return named


class Lines:
    """Nodes of a lab that send to a hub, one at a time. A context manager."""

    def __init__(self) -> None:
        self._lab = Lab(hosts=NODES + 1, rate=f"{LINE_MBIT}mbit")
        self._links: list[pairs.Link] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Lines":
        lab = self._stack.enter_context(self._lab)
        hub = lab.hosts[NODES]
        listener = hub.call(lambda: pairs.listen((hub.address, 0), SECRET))
        self._stack.enter_context(listener)
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        address = listener.getsockname()[:2]
        for node in range(NODES):
            self._shape(node, 1.0)
        for host in lab.hosts[:NODES]:
            self._links.append(
                self._stack.enter_context(host.call(lambda: pairs.Link(address, SECRET)))
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, slow: int | None) -> Named:
        """Measures all nodes; the line of `slow` has lost a fifth of its rate."""
        if slow is not None:
            self._shape(slow, 0.8)
        size = LINE_BYTES if slow is not None else LINE_BYTES // 4

        def measure(found: Fleet, of_round: str) -> None:
            for _ in range(LINE_TURNS):
                rates = [[link.send(size) for link in self._links] for _ in range(LINE_BEST_OF)]
                for node, of_node in enumerate(zip(*rates, strict=True)):
                    found.add(of_round, node, "network bandwidth", [max(of_node)])

        named = confirmed(measure)
        if slow is not None:
            self._shape(slow, 1.0)
        return named

    def _shape(self, node: int, share: float) -> None:
        bits = round(share * LINE_MBIT * 1e6)
        namespaces.tool(
            "tc", "-n", str(self._lab.hosts[node].namespace), "qdisc", "change", "dev", "eth0",
            "root", "tbf", "rate", f"{bits}bit", "burst", f"{LINE_BURST}b", "latency", "50ms",
        )  # fmt: skip


def _serve(listener: socket.socket) -> None:
    """Serves each sender in a thread until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


def _serve_one(connection: socket.socket) -> None:
    with connection:
        pairs.serve(connection, SECRET)


class Processors:
    """Nodes that are control groups of the CPU. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._groups = [Group("cpu", f"cpu{node}") for node in range(NODES)]

    def __enter__(self) -> "Processors":
        for group in self._groups:
            self._stack.enter_context(group)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, slow: int | None) -> Named:
        """Checks all nodes; the quota of `slow` has lost 15 % of the machine's CPUs."""
        cpus = len(os.sched_getaffinity(0))
        if slow is not None:
            self._groups[slow].limit_cpus(0.85 * cpus)

        def measure(found: Fleet, of_round: str) -> None:
            for _ in range(CPU_TURNS):
                for node, group in enumerate(self._groups):
                    for figure, values in group.run(lambda: _check_cpu(short=slow is None)).items():
                        if figure == "cpu speed":
                            found.add(of_round, node, figure, values)
                        elif figure.endswith(" failed"):
                            found.fail(of_round, node, figure.removesuffix(" failed"))

        named = confirmed(measure)
        if slow is not None:
            self._groups[slow].limit_cpus(cpus)
        return named


def _check_cpu(*, short: bool) -> Samples:
    cpu.LOAD_S = 0.1 if short else 0.4
    found: Samples = {}
    for each in cpu.run(Settings()):
        found[each.name + (" failed" if each.failed else "")] = list(each.samples)
    return found


class Disks:
    """Nodes that are control groups of the disk of the temporary files. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._groups = [Group("io", f"io{node}") for node in range(NODES)]
        self._folder = Path(".")

    def __enter__(self) -> "Disks":
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        for group in self._groups:
            self._stack.enter_context(group)
            group.limit_disk(self._folder, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, slow: int | None) -> Named:
        """Checks all nodes; the disk of `slow` has a fifth of the speed of the others."""
        if slow is not None:
            rates = [
                group.run(lambda: _check_disk(self._folder, slow=slow))["disk write"]
                for group in self._groups
            ]
            limit = round(statistics.median(map(max, rates)) / 5 * 1e6)
            self._groups[slow].limit_disk(self._folder, limit)

        def measure(found: Fleet, of_round: str) -> None:
            turns: list[list[Samples]] = [[] for _ in self._groups]
            for _ in range(DISK_TURNS):
                for of_node, group in zip(turns, self._groups, strict=True):
                    of_node.append(group.run(lambda: _check_disk(self._folder, slow=slow)))
            for node, of_node in enumerate(turns):
                for figure in of_node[0]:
                    less = figure == "fsync latency"
                    values = [value for turn in of_node for value in turn[figure]]
                    best = min(values) if less else max(values)
                    found.add(of_round, node, figure, [best], less=less)

        named = confirmed(measure)
        if slow is not None:
            self._groups[slow].limit_disk(self._folder, 0)
        return named


def _check_disk(folder: Path, *, slow: int | None) -> Samples:
    """Runs the disk check with fewer windows: of a slow round only the transfers, which a throttle
    slows down; of other rounds all figures, in windows of 0.01 s."""
    disk.QUICK_BYTES, disk.BEST_OF = 16 << 20, DISK_BEST_OF
    if slow is None:
        disk.WINDOW_S = 0.01
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        measured = disk.run(Settings(directory=scratch))
        wanted = measured if slow is None else itertools.islice(measured, 2)
        return {each.name: list(each.samples) for each in wanted}


KINDS: dict[str, Callable[[], Lines | Processors | Disks]] = {
    "line": Lines, "cpu": Processors, "disk": Disks,
}  # fmt: skip

RIGHT = {
    "line": {"network bandwidth"}, "cpu": {"cpu quota"}, "disk": {"disk write", "disk read"},
}  # fmt: skip
"""Figures that must name a slowed node, at least one of them."""

ALLOWED = {
    "line": {"network bandwidth"},
    "cpu": {"cpu quota", "cpu speed"},
    "disk": {"disk write", "disk read"},
}
"""Figures that may name it."""


def rightly(kind: str, slow: int, named: Named) -> bool:
    """Returns whether the slowed node, and no other, is named by the right check."""
    figures = {figure for node, figure in named if node == f"n{slow}"}
    alone = all(node == f"n{slow}" for node, _ in named)
    return alone and bool(figures & RIGHT[kind]) and figures <= ALLOWED[kind]


@contextlib.contextmanager
def nodes(kind: str) -> Iterator[Lines | Processors | Disks]:
    """Makes the nodes of a kind.

    Raises:
        Missing: this machine cannot.
    """
    if kind == "line" and (reason := namespaces.why_not()) is not None:
        raise Missing(reason)
    try:
        with KINDS[kind]() as made:
            yield made
    except LabError as error:
        raise Missing(str(error)) from None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    options = parser.parse_args()
    for kind in options.kind or KINDS:
        begun = time.monotonic()
        try:
            with nodes(kind) as made:
                _count(kind, made, options.clean, options.slow)
        except Missing as missing:
            _say(f"{kind}: not run: {missing}")
            continue
        _say(f"{kind}: {time.monotonic() - begun:.0f} s, load {os.getloadavg()[0]:.1f}")
    return 0


def _count(kind: str, made: Lines | Processors | Disks, clean: int, slow: int) -> None:
    """Runs rounds of one kind and prints what they name."""
    REPEATED.clear()
    alarms = 0
    for number in range(1, clean + 1):
        named = made.round(None)
        alarms += bool(named)
        _say(f"{kind}: {alarms} of {number} clean rounds with a false alarm {named or ''}")
    _say(f"{kind}: {len(REPEATED)} of {clean} clean rounds were repeated: {REPEATED}")
    right = 0
    for number in range(slow):
        named = made.round(number % NODES)
        right += rightly(kind, number % NODES, named)
        _say(f"{kind}: {right} of {number + 1} slowed nodes named rightly {named}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
