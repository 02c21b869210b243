"""Failures of a site as records, independent of the file format. Pure.

A record is one failure, or a count of failures of one class in one day, month or year.
docs/guide/validator.md describes the file formats.
"""

import csv
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from fireflyer.errors import ValidatorError

Period = Literal["moment", "day", "month", "year"]

XID_CLASSES: Mapping[int, str] = {
    **dict.fromkeys((13, 31, 43, 45), "software"),
    74: "nvlink",
    **dict.fromkeys((63, 64, 94, 95), "gpu_ecc"),
    **dict.fromkeys((44, 48, 61, 62, 69, 79), "uncorrectable"),
    119: "gsp",
}
"""Classes of the paper's Table V, by NVIDIA Xid code."""

OTHER_XID = "other_xid"

MEMORY = "main_memory_ecc"
NETWORK = "network"
SOFTWARE = "software"

KINDS = {"silence": "node_lost", "hang": "hang", "oom": "out_of_memory"}
"""Class of each kind of observation of the platform whose class depends on no other field."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure, or `count` failures of one class within a period."""

    when: float
    """Start of the period, in UTC seconds since 1970; 0: unknown."""
    period: Period = "moment"
    of: str
    """Class: a value of XID_CLASSES, main_memory_ecc, network, disk, or a class of the site."""
    xid: int | None = None
    node: str = ""
    count: int = 1


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one file, and the totals and classes that the file states."""

    name: str
    failures: tuple[Failure, ...]
    days: tuple[str, ...] = ()
    """Dates that the file lists, including those with 0 failures."""
    totals: dict[str, int] = {}
    """Sums that the file states, by month."""
    classes: dict[int, str] = {}
    """Class that the file states for each Xid."""


def class_of_xid(code: int) -> str:
    """Returns the class of an Xid code."""
    return XID_CLASSES.get(code, OTHER_XID)


def class_of(detail: Mapping[str, Any]) -> str | None:
    """Returns the class of one of the platform's observations; None: not a hardware failure.

    Args:
        detail: fields of an event `observed`, as `fireflyer events --json` prints them.
    """
    match detail.get("what"):
        case "xid":
            return class_of_xid(int(detail["code"]))
        case "network":
            return NETWORK if detail.get("state") in ("down", "error") else None
        case "memory":
            return None if detail.get("corrected") else MEMORY
        case "validator":
            return None if detail.get("passed") else "validator"
        case kind:
            return KINDS.get(str(kind))


def from_events(events: Iterable[Mapping[str, Any]], name: str) -> Source:
    """Converts the platform's `observed` events; skips all other events.

    Raises:
        ValidatorError: an event lacks a field.
    """
    found = []
    for number, event in enumerate(events, 1):
        try:
            if event["kind"] != "observed":
                continue
            detail = event["detail"]
            of = class_of(detail)
            if of is not None:
                xid = int(detail["code"]) if detail["what"] == "xid" else None
                when = float(detail.get("wall") or event["wall"])
                found.append(Failure(when=when, of=of, xid=xid, node=str(detail.get("node", ""))))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValidatorError(
                f"{name}, event {number}: expected an event as `fireflyer events --json` prints it"
            ) from None
    return Source(name=name, failures=tuple(found))


def parse(text: str, name: str) -> Source:
    """Parses the text of a file; its header or first character tells the format.

    Raises:
        ValidatorError: the format is unknown, or a line is damaged; the error names the line.
    """
    if text.lstrip()[:1] in ("[", "{"):
        return from_events(_json_events(text, name), name)
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        raise ValidatorError(f"{name} is empty: expected a header and a line for each failure")
    header = next(csv.reader([lines[0][1]]))
    rows = _Rows(name, header, lines[1:])
    fields = set(header)
    if {"xid", "count"} <= fields:
        return _xid_counts(rows)
    if header[0] == "month":
        return _months(rows)
    if {"date", "events"} <= fields:
        return _days(rows)
    if {"time", "class"} <= fields or {"time", "xid"} <= fields:
        return _moments(rows)
    raise ValidatorError(
        f"{name} has an unknown header {','.join(header)[:80]!r}: expected xid,count,class or "
        "month,CLASS... or date,events or time,node,class,xid, or the events of `fireflyer events`"
    )


def _json_events(text: str, name: str) -> list[Any]:
    try:
        if text.lstrip().startswith("["):
            found = json.loads(text)
            return found if isinstance(found, list) else []
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ValidatorError(f"{name} is not valid JSON: {error}") from None


class _Rows:
    """Rows of a CSV file with their line numbers."""

    def __init__(self, name: str, header: list[str], lines: Sequence[tuple[int, str]]) -> None:
        self.name = name
        self.header = header
        self._lines = lines

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        for number, line in self._lines:
            cells = next(csv.reader([line]))
            if len(cells) != len(self.header):
                raise self.wrong(number, f"{len(cells)} cells: expected {len(self.header)}")
            yield number, dict(zip(self.header, (cell.strip() for cell in cells), strict=True))

    def wrong(self, line: int, what: str) -> ValidatorError:
        return ValidatorError(f"{self.name}, line {line}: {what}")

    def count(self, line: int, text: str) -> int:
        """Parses a count: a whole number that is not negative."""
        if not text.isdecimal() or len(text) > 12:
            raise self.wrong(
                line, f"invalid count {text[:40]!r}: expected a whole number of at least 0"
            )
        return int(text)

    def moment(self, line: int, text: str, form: str) -> float:
        """Parses a date in this form of `strptime`; returns UTC seconds."""
        try:
            found = datetime.datetime.strptime(text, form)
        except ValueError:
            shown = {"%Y-%m": "YYYY-MM", "%Y-%m-%d": "YYYY-MM-DD"}[form]
            raise self.wrong(line, f"invalid date {text[:40]!r}: expected {shown}") from None
        return found.replace(tzinfo=datetime.UTC).timestamp()


def _xid_counts(rows: _Rows) -> Source:
    found, classes = [], {}
    for line, row in rows:
        code = rows.count(line, row["xid"])
        if code in classes:
            raise rows.wrong(line, f"Xid {code} is listed twice")
        classes[code] = row.get("class") or class_of_xid(code)
        count = rows.count(line, row["count"])
        found.append(Failure(when=0, period="year", of=classes[code], xid=code, count=count))
    return Source(name=rows.name, failures=tuple(found), classes=classes)


def _months(rows: _Rows) -> Source:
    found, totals = [], {}
    for line, row in rows:
        when = rows.moment(line, row["month"], "%Y-%m")
        for column in rows.header[1:]:
            count = rows.count(line, row[column])
            if column == "total":
                totals[row["month"]] = count
                continue
            code = column.removeprefix("xid")
            xid = int(code) if column.startswith("xid") and code.isdecimal() else None
            of = column if xid is None else class_of_xid(xid)
            found.append(Failure(when=when, period="month", of=of, xid=xid, count=count))
    return Source(name=rows.name, failures=tuple(found), totals=totals)


def _days(rows: _Rows) -> Source:
    found, days = [], []
    for line, row in rows:
        when = rows.moment(line, row["date"], "%Y-%m-%d")
        if row["date"] in days:
            raise rows.wrong(line, f"the date {row['date']} is listed twice")
        days.append(row["date"])
        of = row.get("class") or NETWORK
        count = rows.count(line, row["events"])
        found.append(Failure(when=when, period="day", of=of, count=count))
    return Source(name=rows.name, failures=tuple(found), days=tuple(days))


def _moments(rows: _Rows) -> Source:
    found = []
    for line, row in rows:
        code = row.get("xid", "")
        xid = rows.count(line, code) if code else None
        of = row.get("class") or ("" if xid is None else class_of_xid(xid))
        if not of:
            raise rows.wrong(line, "the row has neither class nor xid")
        when = _time(rows, line, row["time"])
        found.append(Failure(when=when, of=of, xid=xid, node=row.get("node", "")))
    return Source(name=rows.name, failures=tuple(found))


def _time(rows: _Rows, line: int, text: str) -> float:
    try:
        when = float(text)
    except ValueError:
        try:
            found = datetime.datetime.fromisoformat(text)
        except ValueError:
            found = None
        if found is None:
            raise rows.wrong(
                line, f"invalid time {text[:40]!r}: expected ISO 8601 or seconds since 1970"
            ) from None
        when = found.replace(tzinfo=found.tzinfo or datetime.UTC).timestamp()
    if not math.isfinite(when) or not 0 <= when < 253_370_764_800:
        raise rows.wrong(line, f"invalid time {text[:40]!r}: expected a time from 1970 to 9999")
    return when
