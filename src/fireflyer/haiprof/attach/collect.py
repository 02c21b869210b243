"""Collection from one or several processes: their sessions and recorders, for a limited time."""

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from fireflyer.errors import ConfigError, ProfileError
from fireflyer.haiprof.attach.session import ANSWER_TIMEOUT_S, Session
from fireflyer.haiprof.attach.target import Target
from fireflyer.haiprof.messages import Request
from fireflyer.haiprof.recorders import Recorder, available, chosen
from fireflyer.haiprof.records import RankProfile, Record, Sample, StepRecord

DETACH_TIMEOUT_S = 20.0
"""Seconds for the agent to send its pending records. Records of operators from torch.profiler take
seconds to send."""

LONGEST_S = 86_400.0
"""Maximum time for a script to reach its first step. After this time the agent detaches by
itself."""

SPARE_S = 30.0
"""Time after the end of the time limit at which the agent detaches even without a request."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a collection: the values to record, and the time limit."""

    seconds: float = 5.0
    recorders: str = "basic,cpu,mem,io,phase"
    intervals: Mapping[str, float] = field(default_factory=dict)
    rate_hz: float = 100.0
    """Stack samples a second; 0: none."""
    trace_steps: int = 0
    """Number of steps to record with torch.profiler. If above 0, spans and collectives are
    recorded, too."""
    most_steps: int | None = None
    """Detach after this number of steps."""
    timeout_s: float = ANSWER_TIMEOUT_S
    from_first_step: bool = False
    """Start the time limit at the first step of an optimizer."""

    def check(self) -> None:
        """Raises ConfigError if a value is invalid."""
        if not self.seconds > 0:
            raise ConfigError(
                f"invalid time {self.seconds:g}: expected a positive number of seconds"
            )
        chosen(self.recorders, self.intervals)

    def request(self) -> Request:
        """Returns the request to the agent."""
        _, inside = chosen(self.recorders, self.intervals)
        tracing = self.trace_steps > 0 or "trace" in inside
        steps = (self.trace_steps or 3) if tracing else 0
        longest = LONGEST_S if self.from_first_step else 0.0
        return Request(
            seconds=self.seconds + SPARE_S + longest, phases="phase" in inside or tracing,
            rate_hz=self.rate_hz, operator_steps=steps, collectives=tracing,
        )  # fmt: skip


@dataclass
class Attached:
    """One process during a collection."""

    session: Session
    profile: RankProfile
    recorders: list[Recorder]
    due: dict[str, float] = field(default_factory=dict)
    first_step_s: float | None = None
    """Seconds from the attachment until the first step's record arrived."""


def collect(
    pids: list[int],
    options: Options,
    folder: Path | None = None,
    on_progress: Callable[[list[Attached]], None] = lambda _: None,
) -> list[Attached]:
    """Profiles processes until the time is up, or all have ended; returns the processes with their
    records.

    Args:
        folder: folder for one file per rank, to which records are written as they arrive; None:
            write no files.
        on_progress: called about ten times a second.

    Raises:
        ProfileError: a process cannot be attached to. In this case no process stays attached.
        ConfigError: an option cannot work.
    """
    options.check()
    outside, _ = chosen(options.recorders, options.intervals)
    request = options.request()
    with contextlib.ExitStack() as stack:
        attached = []
        for pid in pids:
            target = stack.enter_context(Target(pid))
            session = stack.enter_context(Session(target, request, options.timeout_s))
            attached.append(_begin(session, outside, options))
        files = _open_files(attached, folder, stack)
        _loop(attached, options, files, on_progress)
    return attached


def _begin(session: Session, outside: list[str], options: Options) -> Attached:
    recorders, missing = [], {}
    makers = available()
    for name in outside:
        recorder = makers[name](session.target.pid)
        reason = recorder.missing()
        if reason:
            missing[name] = reason
            continue
        recorder.interval_s = options.intervals.get(name, recorder.interval_s)
        recorders.append(recorder)
    if session.request.phases and not session.hello.torch and not options.from_first_step:
        missing["phase"] = "the process has not imported torch"
    header = session.header(options.rate_hz, missing)
    return Attached(session, RankProfile(header), recorders)


def _open_files(
    attached: list[Attached], folder: Path | None, stack: contextlib.ExitStack
) -> dict[int, IO[bytes]]:
    if folder is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, IO[bytes]] = {}
    for one in attached:
        header = one.profile.header
        path = folder / f"rank{header.rank}.jsonl"
        if str(path) in {file.name for file in files.values()}:
            path = folder / f"rank{header.rank}-{header.pid}.jsonl"
        file = open(path, "wb", opener=_private)  # noqa: SIM115
        stack.callback(file.close)
        file.write(msgspec.json.encode(header) + b"\n")
        files[header.pid] = file
    return files


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _loop(
    attached: list[Attached],
    options: Options,
    files: dict[int, IO[bytes]],
    on_progress: Callable[[list[Attached]], None],
) -> None:
    begin = time.monotonic()
    end, detaching = begin + options.seconds, False
    while live := [one for one in attached if not one.session.over]:
        now = time.monotonic()
        if (
            options.from_first_step
            and not detaching
            and not any(o.session.training_thread for o in live)
        ):
            end = now + options.seconds
        enough = options.most_steps is not None and all(
            len(one.profile.steps) >= options.most_steps for one in live
        )
        if (now >= end or enough) and not detaching:
            detaching = True
            end = now + DETACH_TIMEOUT_S
            for one in live:
                one.session.detach()
        elif now >= end:
            for one in live:
                one.session.over = True
                one.session.failure = "the process did not answer the request to detach"
            break
        due = [at for one in live for at in one.due.values()] if not detaching else []
        wait = min([end, now + 0.1, *due]) - now
        readable, _, _ = select.select([one.session for one in live], [], [], max(0.0, wait))
        for one in live:
            if one.session in readable:
                for record in one.session.read():
                    _keep(one, record, files)
            if not detaching:
                _sample(one, files)
        on_progress(attached)


def _sample(one: Attached, files: dict[int, IO[bytes]]) -> None:
    """Reads the recorders that are due."""
    now = time.monotonic()
    for recorder in one.recorders:
        if now < one.due.get(recorder.name, 0.0):
            continue
        one.due[recorder.name] = now + recorder.interval_s
        with contextlib.suppress(OSError, IndexError):  # the process has ended
            values = recorder.sample()
            _keep(
                one, Sample(recorder=recorder.name, at_ns=time.monotonic_ns(), values=values), files
            )


def _keep(one: Attached, record: Record, files: dict[int, IO[bytes]]) -> None:
    if isinstance(record, StepRecord) and one.first_step_s is None:
        one.first_step_s = time.monotonic() - one.session.started_at
    one.profile.add(record)
    if file := files.get(one.profile.header.pid):
        file.write(msgspec.json.encode(record) + b"\n")


def read_profile(folder: Path) -> list[RankProfile]:
    """Reads a stored profile and returns its ranks in order. Ignores an incomplete last line of a
    file.

    Raises:
        ProfileError: the folder is missing or holds no profile, or a file is damaged.
    """
    decode = msgspec.json.Decoder(Record).decode
    profiles = []
    for path in sorted(folder.glob("rank*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        records: list[Record] = []
        for number, line in enumerate(lines[:-1], 1):
            try:
                records.append(decode(line))
            except msgspec.MsgspecError as error:
                raise ProfileError(f"{path}, line {number}: {error}") from None
        if not records or not hasattr(records[0], "format"):
            raise ProfileError(f"{path} is not a profile: it has no header")
        profiles.append(RankProfile(records[0], records[1:]))  # type: ignore[arg-type]
    if not profiles:
        raise ProfileError(f"{folder} holds no profile: expected files rank<N>.jsonl")
    return sorted(profiles, key=lambda profile: profile.header.rank)
