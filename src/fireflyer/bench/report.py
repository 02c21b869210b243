"""The one format of every benchmark: rows of ours against a peer, as a table and as JSON."""

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison; a ratio above 1 always means that ours is better."""

    case: str
    unit: str
    ours: float
    peer: str
    peer_value: float
    ratio: float
    bound: float | None
    """The physical or measured raw limit, in the same unit."""
    of_bound: float | None
    """How much of the limit is reached: 1 is all of it."""
    rounds: int
    spread: float
    """Slowest over fastest round of ours."""
    goal: float | None
    """The ratio that is asked for."""

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
    ) -> "Row":
        """A row of durations, one value a round; less is better."""
        mine, theirs = statistics.median(ours), statistics.median(peers)
        bound = statistics.median(bounds) if bounds else None
        return cls(
            case=case,
            unit=unit,
            ours=mine,
            peer=peer,
            peer_value=theirs,
            ratio=theirs / mine,
            bound=bound,
            of_bound=bound / mine if bound is not None else None,
            rounds=len(ours),
            spread=max(ours) / min(ours),
            goal=goal,
        )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran."""

    cpu: str
    cores: int
    memory: int
    """Bytes."""
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
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            load=os.getloadavg(),
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    bench: str
    command: str
    machine: Machine
    rows: list[Row]


def emit(report: Report, json_to: str | None) -> None:
    """Writes JSON to a file or, for "-", to standard output alone; the table goes to the terminal."""
    if json_to is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        if json_to == "-":
            sys.stdout.write(text.decode() + "\n")
            return
        Path(json_to).write_bytes(text + b"\n")
    _print_table(report)


def _print_table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.command}\n{report.machine.cpu}, {report.machine.cores} cores")
    table.add_column("case", no_wrap=True)
    for name in ("ours", "peer", "", "ratio", "goal", "of limit", "spread"):
        table.add_column(name, justify="right")
    for row in report.rows:
        missed = row.goal is not None and row.ratio < row.goal
        table.add_row(
            row.case,
            f"{row.ours:,.0f} {row.unit}",
            f"{row.peer_value:,.0f} {row.unit}",
            row.peer,
            f"{row.ratio:.1f}x" + (" (below goal)" if missed else ""),
            "" if row.goal is None else f"{row.goal:g}x",
            "" if row.of_bound is None else f"{row.of_bound:.2f}",
            f"{row.spread:.2f}",
            style="red" if missed else None,
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)
