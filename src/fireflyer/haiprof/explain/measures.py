"""Measures of one rank that the rules compare."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.records import RankProfile, Sample, StackRecord


class RankMeasures:
    """Typical step of a rank, and the values of its recorders."""

    def __init__(self, profile: RankProfile) -> None:
        steps = profile.steps
        self.profile = profile
        self.rank = profile.header.rank
        self.steps = len(steps)
        self.step_s = median(row.seconds for row in steps) if steps else 0.0
        self.phases = {
            name: median(row.phases.get(name, 0.0) for row in steps) if steps else 0.0
            for name in PHASES
        }
        own = [row.seconds - row.phases.get("communication", 0.0) for row in steps]
        self.own_s = median(own) if steps else 0.0
        """Median time of a step without its communication, in which the rank may wait for other
        ranks."""
        self._first_ns = steps[0].begin_ns if steps else 0
        self.mean_s = sum(row.seconds for row in steps) / len(steps) if steps else 0.0

    def rate(self, recorder: str, name: str) -> float:
        """Returns the growth of a counter, per second; 0 without two samples."""
        return growth(self.profile.samples.get(recorder, ()), name)

    def mean(self, recorder: str, name: str) -> float:
        """Returns the mean of a gauge; 0 without samples."""
        values = [
            sample.values[name]
            for sample in self.profile.samples.get(recorder, ())
            if name in sample.values
        ]
        return sum(values) / len(values) if values else 0.0

    def lock_share(self) -> tuple[float, str]:
        """Returns the share of the training thread's samples that wait for a lock, and the place in
        the code with the most of them. Waits in data loading and communication do not count."""
        waiting: Counter[str] = Counter()
        total = 0
        for _, stack, weight in self._training_samples():
            total += weight
            if not stack.waits_for_lock:
                continue
            if any(_waits_by_design(frame.file) for frame in stack.frames):
                continue
            where = next(
                (f for f in reversed(stack.frames) if not f.file.endswith("threading.py")),
                stack.frames[-1],
            )
            waiting[f"{where.function} ({where.file}:{where.line})"] += weight
        if not waiting:
            return 0.0, ""
        return sum(waiting.values()) / total, waiting.most_common(1)[0][0]

    def leaders(self, most: int = 3, phase: str | None = None) -> list[tuple[str, float]]:
        """Returns the functions with the most samples of the training thread, each with its share
        of these samples. `phase`: count only samples within this phase."""
        spans = self._spans_of(phase)
        found: Counter[str] = Counter()
        total = 0
        for at, stack, weight in self._training_samples():
            if spans is not None and not _within(at, spans):
                continue
            total += weight
            frame = stack.frames[-1]
            found[f"{frame.function} ({frame.file}:{frame.line})"] += weight
        return [(name, count / total) for name, count in found.most_common(most)] if total else []

    def _training_samples(self) -> Iterator[tuple[int, StackRecord, int]]:
        """Yields the samples of the training thread since the first step: time, stack, weight."""
        for samples in self.profile.stack_samples:
            if not samples.main:
                continue
            for at, number, weight in zip(
                samples.at_ns, samples.stacks, samples.weights, strict=True
            ):
                stack = self.profile.stacks.get(number)
                if stack is not None and at >= self._first_ns:
                    yield at, stack, weight

    def _spans_of(self, phase: str | None) -> list[tuple[int, int]] | None:
        if phase is None:
            return None
        return [(s.begin_ns, s.end_ns) for s in self.profile.spans if s.phase == phase]


def growth(samples: Sequence[Sample], name: str) -> float:
    """Returns the growth of a counter, per second; 0 without two samples."""
    points = [(s.at_ns, s.values[name]) for s in samples if name in s.values]
    if len(points) < 2 or points[-1][0] == points[0][0]:
        return 0.0
    return (points[-1][1] - points[0][1]) / ((points[-1][0] - points[0][0]) / 1e9)


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns slope and r² of the line of least squares; (0, 0) if the points determine no line."""
    pairs = list(points)
    if len(pairs) < 3:
        return 0.0, 0.0
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    xx = sum((x - mean_x) ** 2 for x, _ in pairs)
    yy = sum((y - mean_y) ** 2 for _, y in pairs)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    if not xx or not yy:
        return 0.0, 0.0
    return xy / xx, xy * xy / (xx * yy)


def _waits_by_design(file: str) -> bool:
    return any(
        part in file
        for part in ("/torch/utils/data/", "/torch/distributed/", "fireflyer/hfreduce/",
                     "fireflyer/datasets/", "fireflyer/ffrecord/", "concurrent/futures/")
    )  # fmt: skip


def _within(at: int, spans: list[tuple[int, int]]) -> bool:
    return any(begin <= at < end for begin, end in spans)
