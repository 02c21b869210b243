"""Records of a profile, in the form that files and reports use.

A profile is a folder with one file a rank, `rank<N>.jsonl`: a `Header`, then records in the order in
which they were made. Times are nanoseconds of the machine's monotonic clock, so the ranks of one
machine share a time line. `Header.wall_ns` relates the time lines of several machines.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from fireflyer.haiprof.phases import Row

FORMAT = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """Profiled process, and the options of the session."""

    format: int = FORMAT
    rank: int = 0
    world: int = 1
    pid: int
    host: str = ""
    command: str = ""
    monotonic_ns: int
    """Monotonic clock at the start of the session."""
    wall_ns: int
    """Wall clock at the same moment, nanoseconds since 1970."""
    rate_hz: float = 0.0
    """Stack samples a second; 0: none."""
    missing: dict[str, str] = {}
    """Recorders that this machine or process cannot serve, with the reason."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """Values of one recorder at one moment."""

    recorder: str
    at_ns: int
    values: dict[str, float]
    """Gauges and counters by name; a name that ends in `_total` is a counter. Only the difference
    of two samples of a counter has a meaning."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A training step; `row.begin_ns` is on the machine's monotonic clock."""

    row: Row


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One function on a stack."""

    function: str
    file: str
    line: int


class StackRecord(msgspec.Struct, frozen=True, kw_only=True, tag="stack"):
    """A stack that later samples refer to by its number."""

    number: int
    frames: tuple[Frame, ...]
    """Outermost function first."""
    waits_for_lock: bool = False
    """True if the innermost function acquires a lock."""


class StackSamples(msgspec.Struct, frozen=True, kw_only=True, tag="samples"):
    """Stacks of one thread in time order."""

    thread: str
    main: bool
    """True for the thread that trains."""
    at_ns: list[int]
    stacks: list[int]
    weights: list[int]
    """Weight of each sample in sampling intervals; more than 1 for a delayed sample."""


class Span(msgspec.Struct, frozen=True, kw_only=True, tag="span"):
    """Phase with its begin and end, for the trace."""

    phase: str
    name: str
    begin_ns: int
    end_ns: int


class Collective(msgspec.Struct, frozen=True, kw_only=True, tag="collective"):
    """A call of a collective."""

    name: str
    at_ns: int
    nbytes: int
    peers: list[int]
    """Global ranks of the group."""


class Operator(msgspec.Struct, frozen=True, kw_only=True, tag="operator"):
    """An operator of torch, from torch.profiler."""

    name: str
    begin_ns: int
    end_ns: int
    thread: int


Record = Header | Sample | StepRecord | StackRecord | StackSamples | Span | Collective | Operator


class RankProfile:
    """All records of one rank."""

    def __init__(self, header: Header, records: Iterable[Record] = ()) -> None:
        self.header = header
        self.steps: list[Row] = []
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.stacks: dict[int, StackRecord] = {}
        self.stack_samples: list[StackSamples] = []
        self.spans: list[Span] = []
        self.collectives: list[Collective] = []
        self.operators: list[Operator] = []
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Adds a record."""
        match record:
            case StepRecord():
                self.steps.append(record.row)
            case Sample():
                self.samples[record.recorder].append(record)
            case StackRecord():
                self.stacks[record.number] = record
            case StackSamples():
                self.stack_samples.append(record)
            case Span():
                self.spans.append(record)
            case Collective():
                self.collectives.append(record)
            case Operator():
                self.operators.append(record)
            case Header():
                self.header = record


def summary(steps: Sequence[Row]) -> dict[str, object]:
    """Returns `steps`, `step_s`, `covered` (1 - other / step), and the dicts `phases` and `between`
    (seconds per step).

    `covered` is None without steps.
    """
    total = sum(row.seconds for row in steps)
    count = len(steps)
    phases: dict[str, float] = {}
    between: dict[str, float] = {}
    for row in steps:
        for name, seconds in row.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds / count
        for name, seconds in row.between.items():
            between[name] = between.get(name, 0.0) + seconds / count
    covered = 1 - phases.get("other", 0.0) * count / total if total else None
    return {
        "steps": count,
        "step_s": total / count if count else None,
        "covered": covered,
        "phases": phases,
        "between": between,
    }
