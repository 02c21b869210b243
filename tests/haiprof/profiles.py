"""Synthetic profiles: ranks with known steps, recorder values and stacks."""

from collections.abc import Mapping, Sequence

from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.phases import Row
from fireflyer.haiprof.records import (
    Frame,
    Header,
    RankProfile,
    Sample,
    StackRecord,
    StackSamples,
    StepRecord,
)

HEALTHY = {"data": 0.002, "forward": 0.03, "backward": 0.05, "optimizer": 0.01,
           "communication": 0.006, "other": 0.002}  # fmt: skip
STEPS = 60


def rank(
    number: int,
    phases: Mapping[str, float] = HEALTHY,
    *,
    jitter: Sequence[float] = (1.0, 1.02, 0.98),
    steps: int = STEPS,
    world: int = 4,
) -> RankProfile:
    """Returns a rank whose steps take these phases, times `jitter` in turn."""
    header = Header(
        rank=number, world=world, pid=1000 + number, host="h", command="train.py",
        monotonic_ns=0, wall_ns=10**18, rate_hz=100.0,
    )  # fmt: skip
    profile = RankProfile(header)
    at = 0
    for step in range(steps):
        factor = jitter[step % len(jitter)]
        spent = {name: phases.get(name, 0.0) * factor for name in PHASES}
        seconds = sum(spent.values())
        callbacks = {"Reports": spent["callbacks"]} if "callbacks" in phases else {}
        row = Row(
            step=step, begin_ns=at, seconds=seconds, phases=spent, between={}, callbacks=callbacks
        )  # fmt: skip
        profile.add(StepRecord(row=row))
        at += round(seconds * 1e9)
    return profile


def length_ns(profile: RankProfile) -> int:
    return sum(round(row.seconds * 1e9) for row in profile.steps)


def values(
    profile: RankProfile, recorder: str, first: Mapping[str, float], last: Mapping[str, float],
    count: int = 20,
) -> None:  # fmt: skip
    """Adds samples that go from `first` to `last` in equal steps over the whole profile."""
    whole = length_ns(profile)
    for n in range(count):
        part = n / (count - 1)
        profile.add(
            Sample(
                recorder=recorder,
                at_ns=round(part * whole),
                values={k: first[k] + (last[k] - first[k]) * part for k in first},
            )
        )


def stacks(profile: RankProfile, shares: Mapping[tuple[str, str, bool], int]) -> None:
    """Adds 100 samples of the training thread: (function, file, waits for a lock) to a count."""
    at = step = length_ns(profile) // 101
    for number, ((function, file, waits), count) in enumerate(shares.items()):
        frames = (Frame("main", "train.py", 1), Frame(function, file, 7))
        profile.add(StackRecord(number=number, frames=frames, waits_for_lock=waits))
        times = [at + n * step for n in range(count)]
        at += count * step
        profile.add(
            StackSamples(
                thread="MainThread", main=True, at_ns=times, stacks=[number] * count,
                weights=[1] * count,
            )
        )  # fmt: skip
