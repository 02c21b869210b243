"""Random batch reads of record files against other formats and against memory and disk.

In each round all candidates get the same indices in the same order, one candidate after the other.
Our reader and the loose files run in this process; each peer runs in its own process. The unit is
microseconds per sample; less is better.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.bench.records import cases
from fireflyer.bench.records.cases import Indices, Timed
from fireflyer.bench.records.data import DataSet, drop_cache, order, tiny_samples, warm
from fireflyer.bench.records.peers import REQUIRES, Peer, started
from fireflyer.errors import ConfigError, PeerLost

UNIT = "us a sample"
PACKED_BYTES = 2 << 30
LARGE_BATCH, SMALL_BATCH = 128, 256
OPENED = 10_000_000

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Options of one run of the benchmark.

    Attributes:
        peers: folder of the peers' environments; None: no peer is available.
        work: folder of the data sets, which are created once.
        scale: factor of the number of samples; the goals hold for 1.
        only: groups to run, from GROUPS.
    """

    peers: Path | None
    work: Path
    scale: float
    rounds: int
    only: tuple[str, ...]


class Bench:
    """Data sets and available peers of a run; its methods are the groups of cases."""

    def __init__(
        self, spec: Spec, peers: Sequence[Peer], missing: dict[str, str], say: Say
    ) -> None:
        self.spec, self.peers, self.missing, self.say = spec, peers, missing, say
        large = max(256, int(20_000 * spec.scale))
        small = max(1024, int(300_000 * spec.scale))
        files = max(256, int(60_000 * spec.scale))
        folder = spec.work
        self.large = DataSet(
            name="64 KiB", folder=folder / "large", count=large, mean=65 << 10, deviation=20 << 10,
            loose=large,
        )  # fmt: skip
        self.small = DataSet(
            name="1 KiB", folder=folder / "small", count=small, mean=1024, deviation=0, loose=files
        )
        self.files = DataSet(
            name="files", folder=folder / "files", count=files, mean=16 << 10, deviation=5 << 10,
            loose=files,
        )  # fmt: skip

    def made(self, data: DataSet) -> DataSet:
        self.say(f"data set of {data.count:,} samples of {data.name}")
        data.make()
        return data

    def reading(self, data: DataSet, batch: int, samples: int, *, cold: bool) -> list[Row]:
        """Measures our reads against every peer, loose files, and the limit: fio if `cold`, else
        memcpy."""
        self.made(data)
        candidates: dict[str, Timed] = {"ours": cases.ours(data, cold=cold)}
        missing = dict(self.missing)
        candidates["loose files"] = cases.loose(data, cold=cold)
        limit = "fio" if cold else "memcpy"
        try:
            candidates[limit] = cases.fio(data) if cold else cases.memcpy(data)
        except ConfigError as error:
            missing[limit] = str(error)
        for peer in self.peers:
            work = self.spec.work / "peers" / peer.name / data.folder.name
            self.say(f"{peer.name} {peer.version}: {data.name}")
            try:
                peer.prepare(data.folder, work)
            except PeerLost as error:
                missing[peer.name] = str(error)
                continue
            candidates[peer.name] = self._peer(peer, work, cold=cold, views=False)
        if not cold:
            for path in (data.record, data.folder / "loose", self.spec.work / "peers"):
                if path.exists():
                    warm(path)
        wanted = min(samples, data.count * 2)
        times = self._rounds(candidates, data.count, wanted, batch)
        return self._rows(data, times, missing, cold=cold)

    def _peer(self, peer: Peer, work: Path, *, cold: bool, views: bool) -> Timed:
        name = self.spec.work / "indices.npy"

        def run(indices: Indices, size: int) -> float:
            np.save(name, indices)
            return peer.round(work, name, size, cold=cold, views=views)

        return run

    def _rounds(
        self, candidates: dict[str, Timed], count: int, wanted: int, batch: int
    ) -> dict[str, list[float]]:
        """Returns microseconds per sample, by candidate and round, after an unmeasured round."""
        times: dict[str, list[float]] = {name: [] for name in candidates}
        names = list(candidates)
        for number in range(-1, self.spec.rounds):
            indices = order(number + 1, count, wanted)
            turn = max(number, 0) % len(names)
            for name in names[turn:] + names[:turn]:
                seconds = candidates[name](indices, batch)
                if number >= 0:
                    times[name].append(seconds / wanted * 1e6)
            self.say(f"round {number + 1} of {self.spec.rounds}")
        return times

    def _rows(
        self, data: DataSet, times: dict[str, list[float]], missing: dict[str, str], *, cold: bool
    ) -> list[Row]:
        case = f"{'cold' if cold else 'warm'} {data.name}"
        limit = "fio" if cold else "memcpy"
        bound = times.get(limit, [])
        mine = times["ours"]
        there = [peer for peer in self.peers if peer.name in times]
        # The goal holds against the fastest peer with random access; for large warm samples, against
        # the fastest peer that also verifies the data.
        copying = [peer.name for peer in there if not peer.sequential]
        if not cold and data is self.large:
            copying = [peer.name for peer in there if peer.verifies]
        best = min(copying, key=lambda name: float(np.median(times[name])), default=None)
        rows = []
        for name, theirs in times.items():
            if name not in ("ours", limit):
                goal = goals.records(case, "peer") if name == best else None
                rows.append(Row.of_times(case, UNIT, mine, self._title(name), theirs, bound, goal))
        if bound:
            goal = goals.records(case, limit)
            rows.append(Row.of_times(case, UNIT, mine, limit, bound, bound, goal))
        rows += [Row.of_times(case, UNIT, mine, why, [], bound) for why in missing.values()]
        return rows

    def _title(self, name: str) -> str:
        for peer in self.peers:
            if peer.name == name:
                notes = ", verified" if peer.verifies else ", in order" if peer.sequential else ""
                return f"{name} {peer.version}{notes}"
        return name

    def views(self) -> list[Row]:
        """Measures views of the mapped file, against LMDB's views."""
        data = self.made(self.large)
        mine = cases.views(data)
        warm(data.record)
        case = f"warm {data.name} views"
        candidates = {"ours": mine}
        why = self.missing.get("lmdb", "")
        for peer in self.peers:
            if peer.views:
                work = self.spec.work / "peers" / peer.name / data.folder.name
                peer.prepare(data.folder, work)
                warm(work)
                candidates[peer.name] = self._peer(peer, work, cold=False, views=True)
        wanted = min(10_240, data.count * 2)
        times = self._rounds(candidates, data.count, wanted, LARGE_BATCH)
        ours = times.pop("ours")
        goal = goals.records(case, "peer")
        rows = [
            Row.of_times(case, UNIT, ours, self._title(name), theirs, goal=goal)
            for name, theirs in times.items()
        ]
        return rows or [Row.of_times(case, UNIT, ours, why, [])]

    def loader(self) -> list[Row]:
        """Measures batches of torch's DataLoader against single items, for large and small
        samples."""
        rows = []
        for data, batch in ((self.large, LARGE_BATCH), (self.small, SMALL_BATCH)):
            self.made(data)
            warm(data.record)
            rows += [self._loader_row(data, batch, workers) for workers in (0, 2)]
        return rows

    def _loader_row(self, data: DataSet, batch: int, workers: int) -> Row:
        candidates = {
            kind: cases.torch_loader(data, kind, workers) for kind in ("batched", "single")
        }
        times = self._rounds(candidates, data.count, min(data.count, 8192), batch)
        name = "DataLoader" if data is self.large else f"DataLoader {data.name}"
        case = f"{name}, {workers} workers" if workers else f"{name}, in process"
        goal = goals.records(case, "one by one")
        return Row.of_times(case, UNIT, times["batched"], "one by one", times["single"], goal=goal)

    def small_files(self) -> list[Row]:
        """Measures a loader over a record file against loaders over the same samples as files.

        The loaders over files run in process and with 2 workers.
        """
        data = self.made(self.files)
        rows = []
        for cold in (False, True):
            if not cold:
                warm(data.folder)
            candidates = {
                "ours": cases.torch_loader(data, "batched", 0, cold=cold),
                "files, in process": cases.torch_loader(data, "loose", 0, cold=cold),
                "files, 2 workers": cases.torch_loader(data, "loose", 2, cold=cold),
            }
            wanted = min(data.count, 20_000)
            times = self._rounds(candidates, data.count, wanted, SMALL_BATCH)
            case = f"{'cold' if cold else 'warm'} loader of {data.count:,} files"
            mine = times.pop("ours")
            best = min(times, key=lambda name: float(np.median(times[name])))
            for name, theirs in times.items():
                goal = goals.records("small files", "files") if name == best else None
                rows.append(Row.of_times(case, UNIT, mine, name, theirs, goal=goal))
        return rows

    def packing(self) -> list[Row]:
        """Measures packing a folder of files into a record file, against `cat` of the files."""
        data = self.made(self.large)
        folder = self.spec.work / "packed"
        total = self._link_files(data, folder, int(PACKED_BYTES * self.spec.scale))
        warm(folder)
        ours, cats = [], []
        for number in range(self.spec.rounds):
            ours.append(cases.packing(folder, self.spec.work / "packed.ffr"))
            cats.append(cases.concatenating(folder, self.spec.work / "packed.cat"))
            self.say(f"round {number + 1} of {self.spec.rounds}")
        for name in ("packed.ffr", "packed.cat"):
            (self.spec.work / name).unlink()
        case = f"packing {total / 2**30:.1g} GiB of files"
        goal = goals.records("packing", "cat")
        return [Row.of_times(case, "s", ours, "cat", cats, cats, goal)]

    def _link_files(self, data: DataSet, folder: Path, size: int) -> int:
        """Makes hard links to loose files with at least `size` bytes in all; returns their bytes.

        Several links may refer to the same file.
        """
        folder.mkdir(exist_ok=True)
        sizes = data.sizes()
        total = number = 0
        while total < size:
            target = folder / f"{number:06d}.bin"
            with suppress(FileExistsError):
                os.link(data.loose_name(number % data.loose), target)
            total += int(sizes[number % data.loose])
            number += 1
        return total

    def opening(self) -> list[Row]:
        """Measures opening a file and reading one batch, with a warm and with a dropped cache."""
        count = max(10_000, int(OPENED * self.spec.scale))
        path = self.spec.work / f"opened-{count}.ffr"
        self.say(f"file of {count:,} samples")
        tiny_samples(path, count)
        warm(path)
        rows = []
        for cold in (False, True):
            taken = []
            for number in range(self.spec.rounds):
                if cold:
                    drop_cache(path)
                taken.append(cases.opening(path, order(number, count, LARGE_BATCH)) * 1e3)
            most = [goals.OPENING_MS]
            case = f"{'cold' if cold else 'warm'} open + batch of {count:,}"
            rows.append(Row.of_times(case, "ms", taken, "asked: at most", most, goal=1.0))
        return rows

    def warm_large(self) -> list[Row]:
        return self.reading(self.large, LARGE_BATCH, 10_240, cold=False)

    def warm_small(self) -> list[Row]:
        return self.reading(self.small, SMALL_BATCH, 102_400, cold=False)

    def cold_large(self) -> list[Row]:
        return self.reading(self.large, LARGE_BATCH, 4096, cold=True)


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "warm": Bench.warm_large,
    "views": Bench.views,
    "small": Bench.warm_small,
    "cold": Bench.cold_large,
    "loader": Bench.loader,
    "files": Bench.small_files,
    "pack": Bench.packing,
    "open": Bench.opening,
}


def run(spec: Spec, say: Say) -> list[Row]:
    """Runs all groups of `spec.only`, in the order of GROUPS, and returns their rows.

    Raises:
        PeerLost: a peer failed during a case.
    """
    spec.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with started(spec.peers, tuple(REQUIRES)) as (peers, missing):
        bench = Bench(spec, peers, missing, say)
        for name, group in GROUPS.items():
            if name in spec.only:
                rows += group(bench)
    return rows
