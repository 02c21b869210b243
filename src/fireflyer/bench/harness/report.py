"""Report of every benchmark: rows of our figures against a peer's, as a table and as JSON.

Collectives add a second table with the columns of nccl-tests; in JSON it is the list "nccl".
"""

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from fireflyer import _native
from fireflyer.program import write_json

if TYPE_CHECKING:
    from rich.table import Table


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Comparison of our value with a peer's. A ratio above 1 always means that ours is better."""

    case: str
    unit: str
    ours: float
    peer: str
    peer_value: float | None
    """Value of the peer. None if the peer cannot run the case; then `peer` holds the reason."""
    ratio: float | None
    bound: float | None
    """Physical limit or measured raw limit, in the same unit."""
    of_bound: float | None
    """Share of the limit that was reached; 1 means the whole limit."""
    rounds: int
    spread: float
    """Largest value of ours divided by the smallest, over the rounds."""
    goal: float | None
    """Required ratio."""
    aim: float | None = None
    """Desired ratio; omitted from JSON if None."""

    @classmethod
    def of_times(
        cls,
        case: str,
        unit: str,
        ours: Sequence[float],
        peer: str,
        peers: Sequence[float],
        bounds: Sequence[float] = (),
        goal: float | None = None,
        aim: float | None = None,
        *,
        more_is_better: bool = False,
    ) -> "Row":
        """Returns a row of durations or bytes, one value per round; less is better.

        Args:
            peers: values of the peer; empty if the peer cannot run the case.
            more_is_better: the values are rates.
        """
        mine = statistics.median(ours)
        theirs = statistics.median(peers) if peers else None
        bound = statistics.median(bounds) if bounds else None

        def better(one: float | None, other: float | None) -> float | None:
            if one is None or other is None:
                return None
            return one / other if more_is_better else other / one

        return cls(
            case=case,
            unit=unit,
            ours=mine,
            peer=peer,
            peer_value=theirs,
            ratio=better(mine, theirs),
            bound=bound,
            of_bound=better(mine, bound),
            rounds=len(ours),
            spread=max(ours) / min(ours),
            goal=goal if theirs is not None else None,
            aim=aim if theirs is not None else None,
        )

    @classmethod
    def of_speeds(
        cls,
        case: str,
        unit: str,
        ours: Sequence[float],
        peer: str,
        peers: Sequence[float],
        bounds: Sequence[float] = (),
        goal: float | None = None,
        aim: float | None = None,
    ) -> "Row":
        """Returns a row of rates, with the arguments of `of_times`; more is better."""
        return cls.of_times(case, unit, ours, peer, peers, bounds, goal, aim, more_is_better=True)

    @classmethod
    def of_rates(
        cls,
        case: str,
        unit: str,
        ours: Sequence[float],
        limit: str,
        limits: Sequence[float],
        goal: float | None = None,
        aim: float | None = None,
    ) -> "Row":
        """Returns a row of rates against a measured limit, one value per round; more is better."""
        return cls.of_speeds(case, unit, ours, limit, limits, limits, goal, aim)

    @classmethod
    def of_errors(
        cls,
        case: str,
        predicted: tuple[str, float],
        measured: tuple[str, float],
        allowed: float,
        aim: float | None = None,
    ) -> "Row":
        """Returns a row of a prediction's error in percent, against the allowed error.

        Args:
            predicted, measured: name of the source, and seconds.
            allowed, aim: allowed and desired error, in percent.
        """
        error = predicted[1] / measured[1] - 1
        one, other = (f"{name} {_seconds(value)}" for name, value in (predicted, measured))
        percent = max(abs(error) * 100, 1e-3)
        return cls.of_times(
            f"{case}: {one}, {other} ({error:+.1%})", "%", [percent], "allowed", [allowed], (), 1.0,
            None if aim is None else allowed / aim,
        )  # fmt: skip

    @property
    def missed(self) -> bool:
        return self.goal is not None and self.ratio is not None and self.ratio < self.goal


class NcclRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one candidate with the columns of nccl-tests."""

    who: str
    size: int
    """Size in bytes."""
    count: int
    """Number of elements of the tensor, or of one rank's part if `size` covers all ranks' parts."""
    type: str
    redop: str
    time_us: float
    algbw: float
    """Algorithm bandwidth in GB/s (10^9): size divided by time."""
    busbw: float
    """Bus bandwidth in GB/s: algbw multiplied by the collective's factor in nccl-tests."""
    wrong: int
    """Number of elements with a wrong value on any rank, in a call after the timed calls."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of a run."""

    cpu: str
    cores: int
    isa: str
    """Instruction set of the kernels, and the width of CRCs, for example "v3, 256-bit CRCs".

    FIREFLYER_ISA forces an instruction set.
    """
    memory: int
    """Memory in bytes."""
    kernel: str
    load: tuple[float, float, float]
    """Load averages before the run."""

    @classmethod
    def here(cls) -> "Machine":
        cpu = "unknown"
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        return cls(
            cpu=cpu,
            cores=len(os.sched_getaffinity(0)),
            isa=f"{_native.isa()}, {_native.crc_width()}-bit CRCs",
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            load=os.getloadavg(),
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.isa}, Linux {self.kernel}"


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Document of `--json` and `--output`; "nccl" is omitted if the list is empty."""

    bench: str
    command: str
    machine: Machine
    rows: list[Row]
    nccl: list[NcclRow] = []


def emit(report: Report, *, json: bool, output: Path | None) -> None:
    """Prints the tables, or JSON alone; writes the report to the file `output`, if it is given."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    if output is not None:
        output.write_bytes(text + b"\n")
    if json:
        write_json(text)
    else:
        _print_tables(report)


def _print_tables(report: Report) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    if report.nccl:
        console.print(_nccl_table(report.nccl))
    console.print(_row_table(report))
    missed = sum(row.missed for row in report.rows)
    asked = sum(row.goal is not None for row in report.rows)
    if asked:
        console.print(f"{asked - missed} of {asked} goals reached")


def _row_table(report: Report) -> "Table":
    from rich.table import Table

    machine = report.machine
    load = " ".join(f"{number:.2f}" for number in machine.load)
    table = Table(title=f"{report.command}\n{machine}, load {load}")
    table.add_column("case", overflow="fold")
    for name in ("ours", "peer", "", "ratio", "goal", "of limit", "spread"):
        table.add_column(name, justify="right", overflow="fold")
    for row in report.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        table.add_row(
            row.case,
            _quantity(row.ours, row.unit),
            "" if row.peer_value is None else _quantity(row.peer_value, row.unit),
            row.peer,
            ratio + (" below" if row.missed else ""),
            "" if row.goal is None else f"{row.goal:.3g}x{_aim(row)}",
            "" if row.of_bound is None else f"{row.of_bound:.2f}",
            f"{row.spread:.2f}",
            style="red" if row.missed else None,
        )
    return table


def _aim(row: Row) -> str:
    return "" if row.aim is None else f", aim {row.aim:.3g}x"


def _nccl_table(rows: list[NcclRow]) -> "Table":
    from rich.table import Table

    table = Table()
    for name in ("", "size (B)", "count", "type", "redop"):
        side: Literal["left", "right"] = "right" if name in ("size (B)", "count") else "left"
        table.add_column(name, justify=side, overflow="fold")
    for name in ("time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row.who,
            str(row.size),
            str(row.count),
            row.type,
            row.redop,
            f"{row.time_us:,.1f}",
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            str(row.wrong),
            style="red" if row.wrong else None,
        )
    return table


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.0f} ms" if value < 5 else f"{value:.3f} s"


def _quantity(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
