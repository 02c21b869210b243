"""Readers of traces: Philly CSV, `sacct --parsable2`, the Standard Workload Format, `fireflyer
events --json`.

A reader rejects an invalid line, and the error names the line. Valid records that do not count as
jobs (no GPU, never started, a step of a job) are left out and counted.
"""

import csv
import gzip
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from fireflyer.errors import TraceError
from fireflyer.hai.simulation import history, sacct
from fireflyer.hai.simulation.trace import LONGEST_MS, Record, Source, Trace, assemble

MOST_BYTES = 4 << 30
"""Maximum size of an unpacked trace, because the trace is read into memory."""

LONGEST_S = LONGEST_MS / 1000

PHILLY = ("timestamp", "duration", "num_gpus")
"""Required columns; `cluster` is optional, other columns are ignored."""

SWF_FIELDS = 18


def read(path: Path, kind: str | None = None) -> Trace:
    """Reads a trace. `kind` is a key of FORMATS; None: the format is detected from the content.
    Files `*.gz` are unpacked.

    Raises:
        TraceError: the file is not a trace, or a line of it is damaged.
        OSError: the file cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from None
    if len(data) > MOST_BYTES:
        raise TraceError(f"{path} is larger than {MOST_BYTES >> 30} GiB; split it")
    text = data.decode("utf-8-sig", errors="replace")
    return parse(text, path.name, kind)


def parse(text: str, name: str, kind: str | None = None) -> Trace:
    """Parses the text of a trace. `name`: name of the file, for error messages.

    Raises:
        TraceError: as `read`.
    """
    source = Source(name)
    kind = kind or guess(text, name)
    if kind not in FORMATS:
        raise TraceError(f"invalid trace format {kind!r}: expected one of {', '.join(FORMATS)}")
    return assemble(source, kind, FORMATS[kind](source, text))


def guess(text: str, name: str) -> str:
    """Returns the format of a trace, detected from the first line that is not a comment.

    Raises:
        TraceError: the format is not known.
    """
    start = text.lstrip()
    if start[:1] in ("[", "{"):
        return "events"
    lines = (line.strip() for line in start.splitlines())
    line = next((line for line in lines if line and line[0] not in ";#"), "")
    columns = [column.strip().strip('"') for column in line.split(",")]
    if set(PHILLY) <= set(columns):
        return "philly"
    if "|" in line and any(word.startswith("JobID") for word in line.split("|")):
        return "sacct"
    if start.startswith(";") or len(line.split()) == SWF_FIELDS:
        return "swf"
    raise TraceError(
        f"{name} is not a trace of a known format ({', '.join(FORMATS)}); "
        "its first line is " + repr(line[:80])
    )


def philly(source: Source, text: str) -> Iterator[Record]:
    """Reads the Philly trace in the CSV form of the Sia artifact:
    `timestamp,duration,num_gpus[,gpu_time][,cluster]`."""
    rows = csv.reader(text.splitlines())
    column: dict[str, int] = {}
    try:
        for row in rows:
            line = rows.line_num
            if not row or row[0].startswith("#") or not any(row):
                continue
            if not column:
                column = {name.strip(): place for place, name in enumerate(row)}
                if missing := [name for name in PHILLY if name not in column]:
                    raise source.damaged(line, f"the header has no column {missing[0]!r}")
                when, lasts, wants = (column[name] for name in PHILLY)
                cluster = column.get("cluster")
                continue
            if len(row) != len(column):
                raise source.damaged(line, f"{len(row)} fields, the header has {len(column)}")
            gpus = source.count(line, "num_gpus", row[wants])
            run_s = source.number(line, "duration", row[lasts], LONGEST_S)
            submit_s = instant(source, line, "timestamp", row[when])
            if gpus:
                yield Record(
                    name=f"j{line}", submit_s=submit_s, run_s=run_s, gpus=gpus,
                    group=row[cluster] if cluster is not None else "",
                )  # fmt: skip
            else:
                source.left_out["without a GPU"] += 1
    except csv.Error as error:
        raise source.damaged(rows.line_num, str(error)) from None


def swf(source: Source, text: str) -> Iterator[Record]:
    """Reads the Standard Workload Format of the Parallel Workloads Archive, version 2; a processor
    counts as a GPU."""
    for line, words in enumerate(map(str.split, text.splitlines()), start=1):
        if not words or words[0].startswith((";", "#")):
            continue
        if len(words) != SWF_FIELDS:
            raise source.damaged(line, f"{len(words)} fields, a line of SWF has {SWF_FIELDS}")
        job, submit, _, run, allocated, _, _, requested = words[:8]
        user, group, queue = words[11], words[12], words[14]
        if run.startswith("-"):
            source.left_out["without a run time"] += 1
            continue
        size = requested if allocated.startswith("-") or allocated == "0" else allocated
        gpus = 0 if size.startswith("-") else source.count(line, "processors", size)
        run_s = source.number(line, "run time", run, LONGEST_S)
        if not gpus or not run_s:
            source.left_out["that never started"] += 1
            continue
        yield Record(
            name=job, submit_s=source.number(line, "submit time", submit, 1e12), run_s=run_s,
            gpus=gpus, user=_known(user, "u"), group=_known(group, "g") or _known(queue, "q"),
        )  # fmt: skip


def instant(source: Source, line: int, name: str, text: str) -> float:
    """Returns the seconds since 1970 of an ISO time; a time without a zone is taken as UTC.

    Raises:
        TraceError: the text is not a time.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise source.damaged(line, f"invalid {name} {text!r}: expected a time") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _known(number: str, prefix: str) -> str:
    return "" if number.startswith("-") else prefix + number


FORMATS: dict[str, Callable[[Source, str], Iterator[Record]]] = {
    "philly": philly,
    "sacct": lambda source, text: sacct.records(source, text, instant),
    "swf": swf,
    "events": history.records,
}
