"""Rules that turn measures into findings, ranked by the time that could be saved.

A finding reports that a rank or a phase exceeds a limit that healthy runs keep. Its evidence names
the numbers.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.explain.measures import RankMeasures, line
from fireflyer.haiprof.explain.paired import PairedSteps
from fireflyer.haiprof.records import RankProfile

FEWEST_STEPS = 5
"""Minimum number of steps for any finding."""

SLOW_SHARE = 0.15
"""Share of a step by which a rank must be slower than the others for a finding."""

DATA_SHARE = 0.15
"""Minimum share of the step for a finding about data. The next four shares are the limits for
communication, callbacks, unattributed time and locks. BLOCKED_SHARE is a limit of
`_slow_network`."""
COMMUNICATION_SHARE = 0.25
CALLBACKS_SHARE = 0.05
OTHER_SHARE = 0.10
LOCK_SHARE = 0.10
BLOCKED_SHARE = 0.05
GPU_BUSY = 0.5
"""Mean utilisation below which a GPU counts as idle."""
LEAK_BYTES_A_STEP = 200_000
"""Minimum growth of resident memory per step for a finding."""
LEAK_FIT = 0.8
"""Minimum r² of the straight line through the growth of memory."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of lost time or memory."""

    kind: str
    """slow-rank-cpu, slow-rank-disk, slow-rank-data, slow-network, lock, data, communication,
    memory-growth, gpu-idle, callbacks, framework or other."""
    sentence: str
    evidence: list[str]
    gain_s: float
    """Maximum seconds of a step that could be saved; 0 for a finding that is not about time."""
    share: float
    """`gain_s` as a share of the step."""
    rank: int | None = None


def explain(profiles: Sequence[RankProfile]) -> list[Finding]:
    """Returns the findings, the largest possible saving first."""
    ranks = [m for p in profiles if (m := RankMeasures(p)).steps >= FEWEST_STEPS]
    if not ranks:
        return []
    locks = list(_locks(ranks))
    paired = PairedSteps(ranks)
    slow = list(_slow_ranks(ranks, paired, {finding.rank for finding in locks}))
    network = [] if slow or locks else list(_slow_network(ranks, paired))
    found = [*locks, *slow, *network, *_memory_growth(ranks), *_gpu_idle(ranks)]
    found += [*_callbacks(ranks), *_framework(ranks), *_other(ranks)]
    if not any(finding.kind == "slow-rank-data" for finding in slow):
        found += _data(ranks)
    if not (slow or locks or network):
        found += _communication(ranks, paired)
    return sorted(found, key=lambda finding: -finding.gain_s)


def verdict(profiles: Sequence[RankProfile]) -> str:
    """Returns a sentence that names the two phases with the most time of a step."""
    ranks = [m for p in profiles if (m := RankMeasures(p)).steps]
    if not ranks:
        return "No training step was seen: no optimizer stepped during the session."
    step = median(m.step_s for m in ranks)
    parts = {name: median(m.phases[name] for m in ranks) for name in PHASES}
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    return (
        f"A step takes {_time(step)}; {first} bounds it with {_percent(parts[first], step)}, "
        f"{second} follows with {_percent(parts[second], step)}."
    )


def _slow_ranks(
    ranks: list[RankMeasures], paired: PairedSteps, locked: set[int | None]
) -> Iterator[Finding]:
    """Yields a finding for each rank that delays the others."""
    for index, one in enumerate(ranks):
        others = [m for m in ranks if m is not one]
        if not others or one.rank in locked:
            continue
        if not paired.is_late(index, SLOW_SHARE * one.step_s):
            continue
        typical = median(m.own_s for m in others)
        late = median(paired.lateness(index))
        excess = {
            name: one.phases[name] - median(m.phases[name] for m in others)
            for name in PHASES
            if name != "communication"
        }
        phase = max(excess, key=lambda name: excess[name])
        cause, evidence = _cause(one, others, phase)
        text = {"cpu": "it lacks processor time", "disk": "it waits for the disk",
                "data": "its data comes late"}[cause]  # fmt: skip
        yield Finding(
            kind=f"slow-rank-{cause}",
            rank=one.rank,
            sentence=f"Rank {one.rank} makes the others wait {_time(late)} a step in {phase}: {text}.",
            evidence=[
                f"without waits its step takes {_time(one.own_s)}, that of the others "
                f"{_time(typical)}",
                f"{phase} takes {_time(one.phases[phase])}, {_time(excess[phase])} more than elsewhere",
                *evidence,
            ],
            gain_s=late,
            share=late / one.step_s,
        )


def _cause(one: RankMeasures, others: list[RankMeasures], phase: str) -> tuple[str, list[str]]:
    """Returns the resource that a slow rank lacks ("disk", "data" or "cpu"), with evidence."""
    waits = one.mean("io", "in_disk_wait")
    usual = median(m.mean("io", "in_disk_wait") for m in others)
    moved = one.rate("io", "read_bytes_total") + one.rate("io", "written_bytes_total")
    usually = median(
        m.rate("io", "read_bytes_total") + m.rate("io", "written_bytes_total") for m in others
    )
    busy = f"it moved {moved / 1e6:.1f} MB/s to and from disks, the others {usually / 1e6:.1f}"
    if waits > 0.08 and waits > 3 * usual:
        share = f"it was seen waiting for a disk {waits:.0%} of the time, the others {usual:.0%}"
        return "disk", [share, busy]
    if moved > 1e6 and moved > 4 * usually:
        return "disk", [busy]
    queue = one.rate("cpu", "main_queue_s_total")
    elsewhere = median(m.rate("cpu", "main_queue_s_total") for m in others)
    ran = one.rate("cpu", "main_run_s_total")
    evidence = [
        f"its training thread ran {ran:.0%} of the time and queued for a processor {queue:.0%}, "
        f"elsewhere {elsewhere:.0%}"
    ]
    return ("data" if phase == "data" and queue < 0.1 else "cpu"), evidence


def _slow_network(ranks: list[RankMeasures], paired: PairedSteps) -> Iterator[Finding]:
    """Yields a finding for the rank at one end of most connections with unacknowledged bytes, if
    all ranks wait.

    A slow cable delays bytes to and from its host, so the slow rank is at one end of each blocked
    connection. If the whole network is slow, each of n ranks is at one end of a share 2 / n of the
    blocked connections.
    """
    step = median(m.step_s for m in ranks)
    waiting = paired.waiting()
    if len(ranks) < 3 or waiting < SLOW_SHARE * step:
        return
    blocked = _blocked(ranks)
    whole = sum(blocked.values())
    at = {m.rank: sum(v for ends, v in blocked.items() if m.rank in ends) for m in ranks}
    rank = max(at, key=lambda number: at[number])
    even = 2 / len(ranks)
    if at[rank] < BLOCKED_SHARE * len(ranks) or at[rank] / whole < (1 + even) / 2:
        return
    yield Finding(
        kind="slow-network",
        rank=rank,
        sentence=f"The network of rank {rank} is slow: all ranks wait {_time(waiting)} a step.",
        evidence=[
            f"{at[rank] / whole:.0%} of the connections that held bytes back begin or end at rank "
            f"{rank}; if they were evenly spread, it would be {even:.0%}",
            f"communication takes {_percent(waiting, step)} of the step on every rank",
        ],
        gain_s=waiting,
        share=waiting / step,
    )


def _blocked(ranks: list[RankMeasures]) -> Counter[tuple[int, int]]:
    """Returns the share of the samples in which a connection had unacknowledged bytes, by the two
    ranks that it connects."""
    found: Counter[tuple[int, int]] = Counter()
    addresses = _addresses(ranks)
    for one in ranks:
        samples = one.profile.samples.get("io", ())
        for sample in samples:
            for name, value in sample.values.items():
                peer = addresses.get(name.removeprefix("blocked_"))
                if value > 0 and peer not in (None, one.rank):
                    found[one.rank, peer] += 1 / len(samples)  # type: ignore[assignment]
    return found


def _addresses(ranks: list[RankMeasures]) -> dict[str, int]:
    """Returns the rank of each address: the only rank without a connection to that address, because
    a rank does not connect to itself."""
    named: dict[str, set[int]] = {}
    for one in ranks:
        for sample in one.profile.samples.get("io", ()):
            for name in sample.values:
                if name.startswith("blocked_"):
                    named.setdefault(name[len("blocked_") :], set()).add(one.rank)
    every = {one.rank for one in ranks}
    found = {}
    for address, by in named.items():
        missing = every - by
        if len(missing) == 1:
            found[address] = missing.pop()
    return found


def _locks(ranks: list[RankMeasures]) -> Iterator[Finding]:
    for one in ranks:
        share, where = one.lock_share()
        if share >= LOCK_SHARE:
            gain = share * one.mean_s
            yield Finding(
                kind="lock",
                rank=one.rank,
                sentence=f"Rank {one.rank} waits {_time(gain)} a step for a lock in {where}.",
                evidence=[
                    f"{share:.0%} of the samples of its training thread are inside the call that "
                    "acquires the lock; other threads hold it"
                ],
                gain_s=gain,
                share=share,
            )


def _data(ranks: list[RankMeasures]) -> Iterator[Finding]:
    step = median(m.step_s for m in ranks)
    data = median(m.phases["data"] for m in ranks)
    if data < DATA_SHARE * step:
        return
    leaders = ranks[0].leaders(1, "data")
    queue = median(m.rate("cpu", "main_queue_s_total") for m in ranks)
    yield Finding(
        kind="data",
        sentence=f"Steps wait {_time(data)} for data, {_percent(data, step)} of their time.",
        evidence=[f"data takes {_time(m.phases['data'])} on rank {m.rank}" for m in ranks[:4]]
        + [f"within it, {share:.0%} of the samples are in {name}" for name, share in leaders]
        + [f"the training thread queued for a processor {queue:.0%} of the time"],
        gain_s=data,
        share=data / step,
    )


def _communication(ranks: list[RankMeasures], paired: PairedSteps) -> Iterator[Finding]:
    step = median(m.step_s for m in ranks)
    waiting = paired.waiting()
    if waiting < COMMUNICATION_SHARE * step:
        return
    backward = median(m.phases["backward"] for m in ranks)
    hidden = min(waiting, backward)
    yield Finding(
        kind="communication",
        sentence=(
            f"Every rank waits {_time(waiting)} a step for communication that nothing hides, "
            f"{_percent(waiting, step)} of the time."
        ),
        evidence=[f"a backward of {_time(backward)} could hide at most {_time(hidden)} of it"],
        gain_s=waiting,
        share=waiting / step,
    )


def _memory_growth(ranks: list[RankMeasures]) -> Iterator[Finding]:
    for one in ranks:
        rows = one.profile.steps
        points = []
        for sample in one.profile.samples.get("basic", ()):
            done = (sample.at_ns - rows[0].begin_ns) / 1e9 / one.mean_s
            if done >= 0 and "rss_bytes" in sample.values:
                points.append((done, sample.values["rss_bytes"]))
        points = points[len(points) // 5 :]  # the start of the session allocates memory, too
        slope, fit = line(points)
        if len(points) < 5 or slope < LEAK_BYTES_A_STEP or fit < LEAK_FIT:
            continue
        yield Finding(
            kind="memory-growth",
            rank=one.rank,
            sentence=f"Memory of rank {one.rank} grows by {slope / 1e6:.2f} MB a step.",
            evidence=[
                f"resident memory rose from {points[0][1] / 1e6:.0f} to {points[-1][1] / 1e6:.0f} MB "
                f"in {points[-1][0] - points[0][0]:.0f} steps, on a line (r² {fit:.2f})"
            ],
            gain_s=0.0,
            share=0.0,
        )


def _gpu_idle(ranks: list[RankMeasures]) -> Iterator[Finding]:
    for one in ranks:
        samples = one.profile.samples.get("gpu", ())
        names = sorted(
            {n for s in samples for n in s.values if n.endswith("_busy") and "mem" not in n}
        )
        for name in names:
            if one.mean("gpu", name.replace("_busy", "_process_memory_bytes")) <= 0:
                continue
            busy = one.mean("gpu", name)
            if busy < GPU_BUSY:
                yield Finding(
                    kind="gpu-idle",
                    rank=one.rank,
                    sentence=f"{name[:-5].upper()} of rank {one.rank} is idle {1 - busy:.0%} of the time.",
                    evidence=[f"mean utilisation {busy:.0%} over {len(samples)} samples"],
                    gain_s=(1 - busy) * one.step_s,
                    share=1 - busy,
                )


def _callbacks(ranks: list[RankMeasures]) -> Iterator[Finding]:
    """Yields a finding about callbacks. Compares means over the steps, not medians, because most
    callbacks are slow in only a few steps."""
    step = sum(m.mean_s for m in ranks) / len(ranks)
    spent: dict[str, float] = {}
    for one in ranks:
        for row in one.profile.steps:
            for name, seconds in row.callbacks.items():
                spent[name] = spent.get(name, 0.0) + seconds / one.steps / len(ranks)
    whole = sum(spent.values())
    if whole < CALLBACKS_SHARE * step:
        return
    yield Finding(
        kind="callbacks",
        sentence=f"Callbacks take {_time(whole)} of each step, {_percent(whole, step)}.",
        evidence=[
            f"{name} takes {_time(spent[name])}"
            for name in sorted(spent, key=lambda name: -spent[name])[:3]
        ],
        gain_s=whole,
        share=whole / step,
    )


def _framework(ranks: list[RankMeasures]) -> Iterator[Finding]:
    step = median(m.step_s for m in ranks)
    loop = median(m.phases["framework"] for m in ranks)
    if loop < OTHER_SHARE * step:
        return
    yield Finding(
        kind="framework",
        sentence=f"The Trainer's own loop takes {_time(loop)} of each step, {_percent(loop, step)}.",
        evidence=["it takes about the same time for a larger batch or model"],
        gain_s=loop,
        share=loop / step,
    )


def _other(ranks: list[RankMeasures]) -> Iterator[Finding]:
    step = median(m.step_s for m in ranks)
    rest = median(m.phases["other"] for m in ranks)
    if rest < OTHER_SHARE * step:
        return
    leaders = ranks[0].leaders(3)
    yield Finding(
        kind="other",
        sentence=f"{_time(rest)} of each step, {_percent(rest, step)}, lies outside of all phases.",
        evidence=[f"{share:.0%} of all samples are in {name}" for name, share in leaders],
        gain_s=rest,
        share=rest / step,
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
