"""One trace of all ranks, in the Chrome JSON format that Perfetto and chrome://tracing open. Pure.

A rank is a process of the trace. Its tracks: steps, phases, samples of each thread, operators,
collectives, counters. Ranks of one machine share its monotonic clock. Ranks of several machines are
aligned by the machines' wall clocks, so the alignment is only as exact as these clocks;
`otherData.clocks` names the clocks in use.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from fireflyer.haiprof.records import RankProfile

STEPS, PHASES, COLLECTIVES, SAMPLES, OPERATORS = 1, 2, 3, 10, 1000

MOST_GAP = 3
"""Two samples of the same stack are in one slice if the gap between them is at most this number of
sampling intervals."""


def trace(profiles: Sequence[RankProfile]) -> bytes:
    """Returns the trace as JSON. Times are microseconds since the start of the earliest session."""
    if not profiles:
        return b'{"traceEvents":[]}'
    hosts = {p.header.host for p in profiles}
    zero = min(p.header.wall_ns for p in profiles)
    events: list[dict[str, Any]] = []
    for profile in profiles:
        shift = profile.header.wall_ns - profile.header.monotonic_ns
        if len(hosts) == 1:
            shift = profiles[0].header.wall_ns - profiles[0].header.monotonic_ns
        events += _rank(profile, zero - shift)
    return msgspec.json.encode(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "producer": "fireflyer haiprof",
                "clocks": "one monotonic clock" if len(hosts) == 1 else "wall clocks of the hosts",
            },
        }
    )


def _rank(profile: RankProfile, zero: int) -> Iterator[dict[str, Any]]:
    header = profile.header
    pid = header.rank
    name = f"rank {pid} ({header.host}, pid {header.pid})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    tracks = [(STEPS, "steps"), (PHASES, "phases")]
    for number, thread in enumerate(dict.fromkeys(o.thread for o in profile.operators)):
        tracks.append((OPERATORS + number, f"operators of thread {thread}"))
    if profile.collectives:
        tracks.append((COLLECTIVES, "collectives"))
    for number, track in tracks:
        yield _thread_name(pid, number, track)
    for row in profile.steps:
        step = _slice(pid, STEPS, f"step {row.step}", row.begin_ns - zero, int(row.seconds * 1e9))
        yield step | {"args": {"phases_s": row.phases}}
    for span in sorted(profile.spans, key=lambda s: (s.begin_ns, -s.end_ns)):
        one = _slice(pid, PHASES, span.phase, span.begin_ns - zero, span.end_ns - span.begin_ns)
        yield one | {"args": {"name": span.name}}
    for call in profile.collectives:
        arguments = {"bytes": call.nbytes, "peers": call.peers}
        yield {"ph": "i", "s": "t", "pid": pid, "tid": COLLECTIVES, "name": call.name,
               "ts": (call.at_ns - zero) / 1e3, "args": arguments}  # fmt: skip
    threads: dict[int, int] = {}
    for operator in profile.operators:
        track_of = threads.setdefault(operator.thread, OPERATORS + len(threads))
        yield _slice(
            pid, track_of, operator.name, operator.begin_ns - zero,
            operator.end_ns - operator.begin_ns,
        )  # fmt: skip
    yield from _stacks(profile, zero)
    yield from _counters(profile, zero)


def _stacks(profile: RankProfile, zero: int) -> Iterator[dict[str, Any]]:
    """Yields nested slices: a slice lasts while consecutive samples have the same functions down to
    its depth."""
    period = int(1e9 / profile.header.rate_hz) if profile.header.rate_hz else 10_000_000
    threads: dict[str, list[tuple[int, int, int]]] = {}
    for part in profile.stack_samples:
        threads.setdefault(part.thread, []).extend(
            zip(part.at_ns, part.stacks, part.weights, strict=True)
        )
    for number, (thread, samples) in enumerate(sorted(threads.items())):
        tid = SAMPLES + number
        yield _thread_name(profile.header.rank, tid, f"samples: {thread}")
        open_: list[tuple[str, int]] = []
        last_end = 0
        for at, stack_number, weight in sorted(samples):
            begin = at - (weight - 1) * period
            stack = profile.stacks.get(stack_number)
            names = [frame.function for frame in stack.frames] if stack else []
            same = 0
            if begin - last_end <= MOST_GAP * period:
                while same < min(len(open_), len(names)) and open_[same][0] == names[same]:
                    same += 1
            close_at = min(last_end, begin)
            while len(open_) > same:
                name, since = open_.pop()
                yield _slice(profile.header.rank, tid, name, since - zero, close_at - since)
            start = max(begin, last_end)
            open_ += [(name, start) for name in names[same:]]
            last_end = at + period
        while open_:
            name, since = open_.pop()
            yield _slice(profile.header.rank, tid, name, since - zero, last_end - since)


def _counters(profile: RankProfile, zero: int) -> Iterator[dict[str, Any]]:
    """Yields the values of gauges, and counters as rates a second."""
    for recorder, samples in profile.samples.items():
        last: dict[str, tuple[int, float]] = {}
        for sample in samples:
            for name, value in sample.values.items():
                shown = value
                if name.endswith("_total"):
                    before = last.get(name)
                    last[name] = (sample.at_ns, value)
                    if before is None or sample.at_ns <= before[0]:
                        continue
                    shown = (value - before[1]) / ((sample.at_ns - before[0]) / 1e9)
                yield {
                    "ph": "C", "pid": profile.header.rank,
                    "name": f"{recorder} {name.removesuffix('_total')}",
                    "ts": (sample.at_ns - zero) / 1e3, "args": {"value": shown},
                }  # fmt: skip


def _thread_name(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, begin_ns: int, duration_ns: int) -> dict[str, Any]:
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin_ns / 1e3,
        "dur": max(0, duration_ns) / 1e3,
    }  # fmt: skip
