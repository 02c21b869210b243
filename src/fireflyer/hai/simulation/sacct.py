"""Reader of `sacct --parsable2` (or `--parsable`) output as a trace.

    sacct -aXPS 2026-01-01 -o JobID,User,Account,Submit,ElapsedRaw,AllocTRES,NNodes,State > jobs.txt

Required columns: JobID or JobIDRaw, Submit, ElapsedRaw or Elapsed (or Start and End), and a size:
AllocTRES or ReqTRES, AllocGRES or ReqGRES, else NNodes or AllocNodes. Optional columns: User,
Account, Partition, State.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from fireflyer.hai.simulation.trace import LONGEST_MS, Record, Source

Instant = Callable[[Source, int, str, str], float]

STEP = re.compile(r"\.(batch|extern|interactive|\d+)\b")
"""Suffix of the JobID of a job step, such as 17.batch or 17_3.0; the job's own line includes its
steps."""

ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d{1,6}):)?(\d{1,2}):(\d{2})(?:\.\d+)?")
"""Duration: [days-][hours:]minutes:seconds."""

GPU = re.compile(r"(?:gres/)?gpu(?::([^=:,()]+))?[=:](\d+)")
"""GPUs in TRES (gres/gpu=8, gres/gpu:a100=8) or GRES (gpu:8, gpu:a100:8)."""

UNKNOWN = ("", "Unknown", "None", "N/A", "INVALID")


def records(source: Source, text: str, instant: Instant) -> Iterator[Record]:
    """Yields the jobs. If no line of the file names a GPU, each job uses complete nodes.

    Raises:
        TraceError: a line is damaged, or the header lacks a needed column.
    """
    header: list[str] = []
    found: list[Record] = []
    for line, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        words = row.split("|")
        if not header:
            header = [word.strip() for word in words]
            _check(source, line, header)
            continue
        fields = _fields(source, line, header, words)
        if fields != dict(
            zip(header, header, strict=True)
        ):  # concatenated exports repeat the header
            record = _record(source, line, fields, instant)
            if record is not None:
                found.append(record)
    with_gpus = any(record.gpus for record in found)
    for record in found:
        if with_gpus and not record.gpus:
            source.left_out["without a GPU"] += 1
        elif not with_gpus and not record.nodes:
            source.left_out["of unknown size"] += 1
        else:
            yield record


def _check(source: Source, line: int, header: list[str]) -> None:
    names = set(header)
    for wanted in (
        ("JobID", "JobIDRaw"),
        ("Submit",),
        ("ElapsedRaw", "Elapsed", "End"),
        ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES", "NNodes", "AllocNodes"),
    ):
        if not names & set(wanted):
            raise source.damaged(line, f"the header lacks a column {' or '.join(wanted)}")


def _fields(source: Source, line: int, header: list[str], words: list[str]) -> dict[str, str]:
    """Returns the fields of a line by column. A job's name may contain the separator, which sacct
    does not escape."""
    surplus = len(words) - len(header)
    if surplus > 0 and "JobName" in header:
        place = header.index("JobName")
        words[place : place + surplus + 1] = ["|".join(words[place : place + surplus + 1])]
    if len(words) != len(header):
        raise source.damaged(line, f"{len(words)} fields, the header has {len(header)}")
    return dict(zip(header, map(str.strip, words), strict=True))


def _record(
    source: Source, line: int, fields: Mapping[str, str], instant: Instant
) -> Record | None:
    job = fields.get("JobID") or fields.get("JobIDRaw", "")
    if not job:
        raise source.damaged(line, "the job has no id")
    if STEP.search(job):
        return None
    run_s = _run_s(source, line, fields, instant)
    if not run_s:
        source.left_out["that never started"] += 1
        return None
    state = fields.get("State", "")
    if state.startswith(("RUNNING", "SUSPENDED")):
        source.left_out["still running"] += 1
        return None
    if fields["Submit"] in UNKNOWN:
        raise source.damaged(line, f"job {job} ran and has no Submit time")
    gpus = _gpus(fields)
    nodes = fields.get("NNodes") or fields.get("AllocNodes") or "0"
    return Record(
        name=job,
        submit_s=instant(source, line, "Submit", fields["Submit"]),
        run_s=run_s,
        gpus=source.count(line, "GPUs", str(gpus)),
        gpu_type=_gpu_type(fields),
        nodes=source.count(line, "nodes", nodes),
        user=fields.get("User", ""),
        group=fields.get("Account") or fields.get("Partition", ""),
    )


def _run_s(source: Source, line: int, fields: Mapping[str, str], instant: Instant) -> float:
    """Returns the seconds that the job ran; 0: the job never ran."""
    raw = fields.get("ElapsedRaw", "")
    if raw not in UNKNOWN:
        return source.number(line, "ElapsedRaw", raw, LONGEST_MS / 1000)
    elapsed = fields.get("Elapsed", "")
    if elapsed not in UNKNOWN:
        match = ELAPSED.fullmatch(elapsed)
        if match is None:
            raise source.damaged(line, f"invalid Elapsed {elapsed!r}: expected a time")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        return source.number(line, "Elapsed", str(total), LONGEST_MS / 1000)
    start, end = fields.get("Start", ""), fields.get("End", "")
    if start in UNKNOWN or end in UNKNOWN:
        return 0.0
    begun, over = instant(source, line, "Start", start), instant(source, line, "End", end)
    if over < begun:
        raise source.damaged(line, f"End {end!r} is before Start {start!r}")
    return over - begun


def _gpus(fields: Mapping[str, str]) -> int:
    """Returns the job's GPUs over all nodes. TRES has totals; GRES has the GPUs per node."""
    for column in ("AllocTRES", "ReqTRES"):
        found = GPU.findall(fields.get(column, ""))
        plain = [int(count) for kind, count in found if not kind]
        if found:
            return plain[0] if plain else sum(int(count) for _, count in found)
    for column in ("AllocGRES", "ReqGRES"):
        found = GPU.findall(fields.get(column, ""))
        if found:
            nodes = fields.get("NNodes") or fields.get("AllocNodes") or "1"
            each = sum(int(count) for _, count in found)
            return each * max(int(nodes), 1) if nodes.isdecimal() else each
    return 0


def _gpu_type(fields: Mapping[str, str]) -> str:
    """Returns the type of GPU that the job asked for; "" if it asked for no type, or for
    several."""
    for column in ("ReqTRES", "ReqGRES"):
        kinds = {kind for kind, _ in GPU.findall(fields.get(column, "")) if kind}
        if kinds:
            return kinds.pop() if len(kinds) == 1 else ""
    return ""
