"""Table of rules that choose the algorithm between hosts: its file, and its distribution to ranks.

    # Written by `fireflyer bench tune`.
    version = 1
    machine = "2 cores, Linux 6.1, 1gbit"
    hosts = 4

    [[rules]]
    kind = "allreduce"     # or "broadcast", "reduce"
    hosts = 4              # minimum number of hosts of a group
    bytes = 65536          # maximum size of a call; omitted: any size
    algorithm = "direct"   # see ALGORITHMS
    lanes = 1              # maximum; lane k consists of the k-th rank of each host; 0 or omitted:
                           # as many as the smallest host has ranks

The first rule that applies counts. If none applies, the engine's own rules decide. Rank 0 of the
group reads the file named by FIREFLYER_HFREDUCE_TABLE, and its `RankInfo` carries the rules to the
other ranks.
"""

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError
from fireflyer.hfreduce.topology import RankInfo

VARIABLE = "FIREFLYER_HFREDUCE_TABLE"
VERSION = 1
ALGORITHMS = {
    "allreduce": ("ring", "tree", "direct"),
    "broadcast": ("chain", "tree", "direct"),
    "reduce": ("chain", "tree"),
}
_TOML_LINE = re.compile(r" \(at line (\d+), column \d+\)$")
_PLACE = re.compile(r" - at `\$(?:\.rules\[(\d+)\])?(?:\.(\w+))?`$")
_FIELD = re.compile(r"field `(\w+)`")


@dataclass(frozen=True)
class Table:
    """Content of a table file.

    Attributes:
        machine: description of the machine that was measured.
        hosts: number of hosts in the measurement.
    """

    machine: str
    hosts: int
    rules: tuple[native.Rule, ...]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["allreduce", "broadcast", "reduce"]
    hosts: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]
    algorithm: str
    bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    lanes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    machine: str
    hosts: Annotated[int, msgspec.Meta(ge=2)]
    rules: list[_Row]


def load(path: str) -> Table:
    """Reads the table in a file.

    Raises:
        ConfigError: the file cannot be read or is not a valid table; the error names file and line.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot read this table: {reason}") from error
    return parse(text, path)


def parse(text: str, path: str) -> Table:
    """Parses the text of the table file at `path`.

    Raises:
        ConfigError: see `load`.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _TOML_LINE.search(str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise ConfigError(f"{path}:{line}: {_TOML_LINE.sub('', str(error))}") from error
    if (version := values.get("version")) != VERSION:
        said = "no version" if version is None else f"version {version!r}"
        raise ConfigError(f"{path}:{_line(text, None, 'version')}: {said}, not {VERSION}")
    try:
        file = msgspec.convert(values, _File)
    except msgspec.ValidationError as error:
        place, field = _PLACE.search(str(error)), _FIELD.search(str(error))
        rule = int(place[1]) if place and place[1] else None
        key = field[1] if field else place[2] if place else None
        line = _line(text, rule, key)
        raise ConfigError(f"{path}:{line}: {_PLACE.sub('', str(error))}") from error
    for number, row in enumerate(file.rules):
        if row.algorithm not in ALGORITHMS[row.kind]:
            line = _line(text, number, "algorithm")
            known = ", ".join(ALGORITHMS[row.kind])
            raise ConfigError(f"{path}:{line}: {row.kind} by {row.algorithm!r}: use {known}")
    return Table(file.machine, file.hosts, tuple(_rule(row) for row in file.rules))


def dump(table: Table) -> str:
    """Returns the text of a table's file; `parse` converts it back."""
    lines = [
        "# Written by `fireflyer bench tune`.",
        f"version = {VERSION}",
        f"machine = {json.dumps(table.machine, ensure_ascii=False)}",
        f"hosts = {table.hosts}",
    ]
    if not table.rules:
        lines.append("rules = []")
    for rule in table.rules:
        lines += ["", "[[rules]]", f'kind = "{rule.kind.name.lower()}"', f"hosts = {rule.hosts}"]
        if rule.bytes != native.ANY_BYTES:
            lines.append(f"bytes = {rule.bytes}")
        lines += [f'algorithm = "{rule.algorithm.name.lower()}"', f"lanes = {rule.lanes}"]
    return "\n".join(lines) + "\n"


def publish(info: RankInfo) -> RankInfo:
    """Returns rank 0's info with the rules of the file that FIREFLYER_HFREDUCE_TABLE names.

    Raises:
        ConfigError: the variable names no valid table.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return info
    try:
        rules = load(path).rules
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}={error}") from error
    return msgspec.structs.replace(info, rules=tuple(_packed(rule) for rule in rules))


def spread(infos: Sequence[RankInfo]) -> list[RankInfo]:
    """Returns the infos with rank 0's rules in all of them.

    Thus any rank can pass the rules on when the group is formed anew.
    """
    return [msgspec.structs.replace(info, rules=infos[0].rules) for info in infos]


def rules_of(info: RankInfo) -> list[native.Rule]:
    """Returns the rules in an info."""
    return [
        native.Rule(
            kind=native.Kind(kind),
            hosts=hosts,
            bytes=native.ANY_BYTES if size < 0 else size,
            algorithm=native.Algorithm(algorithm),
            lanes=lanes,
        )
        for kind, hosts, size, algorithm, lanes in info.rules
    ]


def _packed(rule: native.Rule) -> tuple[int, int, int, int, int]:
    size = -1 if rule.bytes == native.ANY_BYTES else rule.bytes
    return rule.kind.value, rule.hosts, size, rule.algorithm.value, rule.lanes


def _rule(row: _Row) -> native.Rule:
    return native.Rule(
        kind=native.Kind[row.kind.upper()],
        hosts=row.hosts,
        bytes=native.ANY_BYTES if row.bytes is None else row.bytes,
        algorithm=native.Algorithm[row.algorithm.upper()],
        lanes=row.lanes,
    )


def _line(text: str, rule: int | None, key: str | None) -> int:
    """Returns the line of a key; else the line of its rule; else the first line."""
    found, section = 1, -1
    wanted = -1 if rule is None else rule
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace(" ", "")
        if words.startswith("[["):
            section += 1
            if section == wanted:
                found = number
        elif section == wanted and key is not None and words.startswith(f"{key}="):
            return number
    return found
