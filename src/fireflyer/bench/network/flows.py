"""Measures computing the end times of flows, by our solver and by SimGrid, for the same links, routes
and bytes."""

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from fireflyer._native import fabric as native
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row
from fireflyer.fabric.flows import Paths, link_capacities
from fireflyer.fabric.net import Floats
from fireflyer.fabric.routing import route
from fireflyer.fabric.topologies import preset, two_zone
from fireflyer.fabric.traffic import Traffic, traffic
from fireflyer.fabric.verify import Check

SYSTEM_PYTHON = "/usr/bin/python3"
MERGES = (0.0, 0.01)

Solve = Callable[[], tuple[float, Floats]]
"""Function that runs a solver; returns the solver's seconds, and the end time of each flow."""


@dataclass(frozen=True)
class Case:
    """Links and flows, ready for either solver."""

    capacities: Floats
    paths: Paths
    of: Traffic
    sizes: Floats

    @classmethod
    def mixed(cls, hosts: int) -> "Case":
        """Makes two trees of 93 MB over the compute nodes, and 8 reads of 4 to 16 MiB by each
        node."""
        stores = max(2, hosts // 5)
        radix = _radix(hosts)
        net = two_zone(hosts - stores, stores // 2, radix=radix, cross=min(20, radix))
        tree = traffic(net, "tree")
        random = np.random.default_rng(1)
        ends = np.arange(len(net.endpoints), dtype=np.int32)
        is_store = np.array([name.startswith("store") for name in net.endpoints], bool)
        clients = np.repeat(ends[~is_store], 8)
        sources = random.choice(ends[is_store], len(clients)).astype(np.int32)
        reads = random.integers(4 << 20, (16 << 20) + 1, len(clients)).astype(float)
        of = Traffic(
            np.concatenate([tree.senders, sources]),
            np.concatenate([tree.receivers, clients]),
            np.concatenate([tree.weights * 93e6, reads]),
        )
        paths = Paths.over(Check(net, route(net).tables), of)
        return cls(link_capacities(net), paths, of, of.weights)

    @classmethod
    def paper(cls) -> "Case":
        """Makes storage reads of 4 to 16 MiB in the paper's network: 14,400 flows."""
        net = preset("fire-flyer2")[0]
        of = traffic(net, "storage")
        sizes = np.random.default_rng(1).integers(4 << 20, 16 << 20, len(of.senders)).astype(float)
        paths = Paths.over(Check(net, route(net).tables), of)
        return cls(link_capacities(net), paths, of, sizes)

    def ours(self, merge: float) -> tuple[float, Floats]:
        """Runs our solver; returns the solver's seconds, and the end time of each flow."""
        begin = time.perf_counter()
        solver = native.Flows(self.capacities, self.paths.begin, self.paths.links, self.sizes)
        solver.run(math.inf, merge)
        return time.perf_counter() - begin, solver.ends()

    def by_simgrid(self) -> tuple[float, Floats]:
        """Runs SimGrid; returns its seconds, and the end time of each flow.

        The seconds include neither SimGrid's start nor the making of its links and hosts.
        """
        begin, links = self.paths.begin.tolist(), self.paths.links.tolist()
        flows = [
            [int(a), int(b), links[begin[n] : begin[n + 1]], float(size)]
            for n, (a, b, size) in enumerate(
                zip(self.of.senders, self.of.receivers, self.sizes, strict=True)
            )
        ]
        used = np.unique(self.paths.links).tolist()
        rates = {str(link): float(self.capacities[link]) for link in used}
        with tempfile.TemporaryDirectory() as folder:
            job, result = Path(folder, "job.json"), Path(folder, "result.json")
            job.write_text(json.dumps({"links": rates, "flows": flows}))
            with as_file(files("fireflyer.bench.network") / "simgrid_ends.py") as script:
                command = [SYSTEM_PYTHON, str(script), str(job), str(result)]
                subprocess.run(command, check=True, capture_output=True, timeout=600)
            found = json.loads(result.read_text())
        return float(found["seconds"]), np.array(found["ends"])


def _radix(hosts: int) -> int:
    """Returns the smallest number of ports per switch with which two zones hold the hosts."""
    return next(radix for radix in range(8, 129, 4) if radix * radix - 2 * radix >= hosts + 40)


def has_simgrid() -> bool:
    """Returns True if the system's Python has SimGrid."""
    try:
        done = subprocess.run(
            [SYSTEM_PYTHON, "-c", "import simgrid"], capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def run(hosts: int, rounds: int) -> list[Row]:
    """Measures the solver against SimGrid, and alone on the paper's network."""
    case = Case.mixed(hosts)
    candidates: dict[str, Solve] = {"exact": partial(case.ours, 0.0)}
    if has_simgrid():
        candidates["simgrid"] = case.by_simgrid
    found = interleaved(candidates, rounds)
    ours = [seconds for seconds, _ in found["exact"]]
    theirs = [seconds for seconds, _ in found.get("simgrid", [])]
    peer = "SimGrid CM02" if theirs else "SimGrid: install python3-simgrid"
    name = f"{hosts} hosts, {len(case.sizes):,} flows"
    rows = [Row.of_times(f"{name}, ends", "s", ours, peer, theirs, (), *goals.FLOWS_SPEED)]
    if theirs:
        expected = found["simgrid"][0][1]
        errors = [float(np.max(np.abs(ends / expected - 1))) for _, ends in found["exact"]]
        errors = [max(error, 1e-16) for error in errors]
        rows.append(Row.of_times(
            f"{name}, largest relative difference", "1", errors, "allowed",
            [1e-6] * len(errors), (), 1.0,
        ))  # fmt: skip
    paper = Case.paper()
    solvers: dict[str, Solve] = {str(merge): partial(paper.ours, merge) for merge in MERGES}
    turns = interleaved(solvers, rounds)
    for merge, allowed in zip(MERGES, goals.FLOWS_SECONDS, strict=True):
        seconds = [took for took, _ in turns[str(merge)]]
        kind = f"merged {merge:.0%}" if merge else "exact"
        rows.append(Row.of_times(
            f"fire-flyer2, {len(paper.sizes):,} flows, {kind}", "s", seconds, "allowed",
            [allowed[0]] * len(seconds), (), 1.0, allowed[0] / allowed[1],
        ))  # fmt: skip
    return rows
