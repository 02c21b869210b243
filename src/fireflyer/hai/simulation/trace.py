"""The jobs of a trace, independent of its format. Times are integer milliseconds, so that sums are
exact."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from fireflyer.errors import TraceError

UserFrom = Literal["job", "user", "group", "cluster"]

HOUR_MS = 3_600_000
LONGEST_MS = 100 * 365 * 24 * HOUR_MS
"""Maximum run time of a job; a line with a longer run time is damaged."""
MOST_GPUS = 1_000_000


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a job, and its undisturbed run time."""

    name: str
    user: str = ""
    """User; empty if the trace has no users."""
    group: str = ""
    """Account, queue or virtual cluster."""
    submit_ms: int
    """Milliseconds since the first arrival of the trace."""
    run_ms: int
    """Milliseconds of work; at least 1."""
    gpus: int
    """GPUs over all nodes of the gang; 0: all GPUs of its nodes, for traces that count only
    nodes."""
    gpu_type: str = ""
    """Type of GPUs that the job asked for; empty: any."""
    nodes: int = 0
    """Nodes that the job ran on or asked for; 0: unknown."""
    priority: str = "normal"


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in order of arrival."""

    source: str
    """File name, or name of the generator."""
    format: str
    jobs: tuple[Job, ...]
    left_out: Mapping[str, int] = {}
    """Number of records that do not count as jobs, by reason."""


class Record(msgspec.Struct, kw_only=True):
    """A job of a trace file, with times that are not yet relative to the first arrival."""

    name: str
    submit_s: float
    run_s: float
    gpus: int
    gpu_type: str = ""
    nodes: int = 0
    user: str = ""
    group: str = ""
    priority: str = "normal"


class Source:
    """Source of a trace; builds errors that name the line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left_out: Counter[str] = Counter()

    def damaged(self, line: int, what: str) -> TraceError:
        """Returns the error to raise about a line (counted from 1)."""
        return TraceError(f"{self.name}, line {line}: {what}; correct or remove the line")

    def number(self, line: int, name: str, text: str, most: float) -> float:
        """Returns a finite number from 0 to `most`.

        Raises:
            TraceError: the text is not such a number.
        """
        try:
            value = float(text)
        except ValueError:
            raise self.damaged(line, f"invalid {name} {text!r}: expected a number") from None
        if not 0 <= value <= most:  # also rejects NaN
            raise self.damaged(line, f"{name} is out of range: {text!r}")
        return value

    def count(self, line: int, name: str, text: str, most: int = MOST_GPUS) -> int:
        """Returns a whole number from 0 to `most`.

        Raises:
            TraceError: the text is not such a number.
        """
        value = self.number(line, name, text, most)
        if value != int(value):
            raise self.damaged(line, f"invalid {name} {text!r}: expected an integer")
        return int(value)


def assemble(source: Source, kind: str, records: Iterable[Record]) -> Trace:
    """Builds a trace: sorts records by arrival (equal times keep their order) and makes times
    relative to the first arrival.

    Raises:
        TraceError: there is no record.
    """
    found = sorted(records, key=lambda record: record.submit_s)
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in source.left_out.items())
        raise TraceError(
            f"{source.name} holds no job that ran on GPUs" + (f" ({why})" if why else "")
        )
    first = found[0].submit_s
    jobs = tuple(
        Job(
            name=record.name, user=record.user, group=record.group, gpus=record.gpus,
            gpu_type=record.gpu_type.lower(), nodes=record.nodes, priority=record.priority,
            submit_ms=round((record.submit_s - first) * 1000),
            run_ms=max(round(record.run_s * 1000), 1),
        )
        for record in found
    )  # fmt: skip
    return Trace(source=source.name, format=kind, jobs=jobs, left_out=dict(source.left_out))


def with_users(trace: Trace, source: UserFrom | None) -> Trace:
    """Returns the trace with the users of its jobs set from `source`: the column `group` (`cluster`
    is a synonym), the column `user`, or `job`, which gives each job a user of its own. None: `user`
    if the trace has that column, else `job`.

    Raises:
        TraceError: the trace does not have the column.
    """
    if source is None:
        source = "user" if any(job.user for job in trace.jobs) else "job"
    column = "group" if source == "cluster" else source
    if column == "job":
        users = [job.name for job in trace.jobs]
    else:
        users = [getattr(job, column) or "unknown" for job in trace.jobs]
        if set(users) == {"unknown"}:
            raise TraceError(
                f"{trace.source} does not contain the {source} of its jobs; "
                "use --user-from job, which makes each job its own user"
            )
    jobs = tuple(
        msgspec.structs.replace(job, user=user) for job, user in zip(trace.jobs, users, strict=True)
    )
    return msgspec.structs.replace(trace, jobs=jobs)


def head(trace: Trace, jobs: int) -> Trace:
    """Returns the trace with only its first jobs."""
    return msgspec.structs.replace(trace, jobs=trace.jobs[:jobs])
