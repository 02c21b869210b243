"""Implementation of `fireflyer failures`."""

import csv
import datetime
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.cli.printing import show_result, table
from fireflyer.errors import ConfigError, ValidatorError
from fireflyer.program import plain
from fireflyer.validator.failures import generate as traces
from fireflyer.validator.failures import report as reports
from fireflyer.validator.failures.records import Source, from_events, parse

BEGIN = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
BAR = 40
"""Width of the longest bar in characters."""


def report(
    files: list[Path], home: Path | None, nodes: int | None, days: float | None, *, paper: bool,
    json: bool,
) -> None:  # fmt: skip
    """Prints the report of some files, of a platform or of the paper."""
    if sum((bool(files), home is not None, paper)) != 1:
        raise ConfigError("failures report needs one of FILE..., --home DIR and --paper")
    if paper:
        sources, nodes = reports.paper(), nodes or reports.PAPER_NODES
    elif home is not None:
        sources, nodes = _of_platform(home, nodes)
    else:
        sources = [parse(_text(file), str(file)) for file in files]
    result = reports.report(sources, nodes=nodes, days=days)
    show_result(result, lambda: _show(result), json=json)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValidatorError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValidatorError(f"cannot read {file}: expected text in UTF-8") from None


def _of_platform(home: Path, nodes: int | None) -> tuple[list[Source], int]:
    """Returns all observations of a server, and the number of its nodes."""
    from fireflyer.hai.client import Client

    client = Client(home)
    found: list[Any] = []
    after = 0
    while more := client.events(after=after):
        found += [event for event in more if event.kind == "observed"]
        after = more[-1].seq
    source = from_events(msgspec.to_builtins(found), f"the platform at {home}")
    return [source], nodes or len(client.nodes())


def _show(result: dict[str, Any]) -> None:
    if result["table_vi"]:
        _title("Xid errors (form of Table VI)")
        rows = [(f"{r['xid']}", f"{r['count']:,}", f"{r['percent']:.2f} %", r["class"])
                for r in result["table_vi"]["rows"]]  # fmt: skip
        rows += [("", f"{entry['count']:,}", f"{entry['percent']:.2f} %", f"all {name}")
                 for name, entry in result["table_vi"]["classes"].items()]  # fmt: skip
        rows.append(("", f"{result['table_vi']['total']:,}", "", "total"))
        table(("XID", "COUNT", "SHARE", "CLASS"), rows)
    if result["table_vii"]:
        _title("Failures of hardware by month (form of Table VII)")
        names = [*result["table_vii"]["columns"], "total"]
        months: list[tuple[str, ...]] = [(r["month"], *(f"{r[name]}" for name in names))
                for r in result["table_vii"]["rows"]]  # fmt: skip
        months.append(("sum", *(f"{result['table_vii']['sums'][name]}" for name in names)))
        table(("MONTH", *(name.upper() for name in names)), months)
    if result["table_viii"]:
        _show_days(result["table_viii"])
    _title("Mean time between failures of the fleet, with its 95 % confidence interval")
    heads = ("CLASS", "FAILURES", "DAYS", "MTBF", "FROM", "TO", "BURSTS", "/1000 NODE-DAYS")
    table(heads, [_rate_row(found) for found in result["rates"]])
    if result["lemons"]:
        _title("Nodes that fail more often than chance explains")
        table(
            ("NODE", "FAILURES", "EXPECTED", "CHANCE"),
            [(one["node"], f"{one['failures']}", f"{one['expected']:.2f}", f"{one['chance']:.1e}")
             for one in result["lemons"]],
        )  # fmt: skip
    if result["contradictions"]:
        _title("Contradictions")
        for one in result["contradictions"]:
            sys.stdout.write(f"{plain(one['subject'])}: {plain(one['text'])}\n")
    for note in result["notes"]:
        sys.stdout.write(f"note: {plain(note)}\n")


def _title(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


def _show_days(found: dict[str, Any]) -> None:
    _title("Network failures by month and day (form of Table VIII)")
    most = max(found["months"].values())
    days: dict[str, list[str]] = {month: [] for month in found["months"]}
    for row in found["rows"]:
        days.setdefault(row["date"][:7], []).append(f"{row['date'][8:]}:{row['events']}")
    rows = [
        (month, f"{found['months'].get(month, 0)}",
         "#" * round(BAR * found["months"].get(month, 0) / most), " ".join(of_month))
        for month, of_month in days.items()
    ]  # fmt: skip
    table(("MONTH", "CUTS", "BAR", "NOTE"), [*rows, ("sum", f"{found['total']}", "", "")])


def _rate_row(found: dict[str, Any]) -> tuple[str, ...]:
    def hours(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f} h"

    bursts, per_node = found["dispersion"], found["per_1000_node_days"]
    return (
        found["of"], f"{found['failures']:,}", f"{found['days']:g}", hours(found["mtbf_h"]),
        hours(found["low_h"]), hours(found["high_h"]), "-" if bursts is None else f"{bursts:.1f}",
        "-" if per_node is None else f"{per_node:.3g}",
    )  # fmt: skip


def generate(
    name: str, nodes: int | None, days: float, seed: int, output: Path | None, *, json: bool
) -> None:
    """Writes a trace."""
    if json and output is None:
        raise ConfigError("failures generate --json needs --output FILE for the trace")
    preset = traces.preset(name)
    count = nodes or preset.nodes
    found = traces.generate(preset, count, days, seed, BEGIN.timestamp())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("time", "node", "class", "xid"))
    for failure in found:
        when = datetime.datetime.fromtimestamp(failure.when, datetime.UTC)
        xid = "" if failure.xid is None else failure.xid
        writer.writerow((when.isoformat(timespec="seconds"), failure.node, failure.of, xid))
    if output is None:
        sys.stdout.write(text.getvalue())
        return
    output.write_text(text.getvalue(), encoding="utf-8")
    counts = dict(Counter(failure.of for failure in found).most_common())
    result = {"preset": name, "source": preset.source, "nodes": count, "days": days, "seed": seed,
              "failures": len(found), "classes": counts, "file": str(output)}  # fmt: skip
    line = f"{len(found):,} failures in {plain(str(output))}\n{preset.source}\n"
    show_result(result, lambda: sys.stdout.write(line), json=json)
