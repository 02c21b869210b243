"""Parsers of `--quota`, `--window` and `--types` of `fireflyer sim`.

The words of quotas and windows mean the same as in `fireflyer quota` and `fireflyer window`.
"""

import re
from collections.abc import Collection, Iterable

from fireflyer.errors import ConfigError
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.model.devices import is_type
from fireflyer.hai.model.identity import Quota
from fireflyer.hai.scheduling.cluster import Window
from fireflyer.hai.simulation.trace import Trace
from fireflyer.units import parse_seconds

MOST = 1_000_000_000


def quota(text: str) -> Quota:
    """Parses a quota, e.g. "user=ada priority=high gpus=16".

    Raises:
        ConfigError: the text is not a quota, or sets no limit.
    """
    bare, words = _words("--quota", text, ("user", "group", "priority", "gpus", "nodes"))
    if bare:
        raise ConfigError(f"invalid --quota {text!r}: expected WORD=VALUE, not {bare[0]!r}")
    if not {"gpus", "nodes"} & words.keys():
        raise ConfigError(f"--quota {text!r} limits nothing; give gpus=N or nodes=N")
    priority = words.get("priority", "")
    if priority and priority not in PRIORITIES:
        known = ", ".join(PRIORITIES)
        raise ConfigError(f"invalid --quota {text!r}: expected one of these priorities: {known}")
    return Quota(
        user=words.get("user", ""), group=words.get("group", ""), priority=priority,
        gpus=_amount(text, words.get("gpus")), nodes=_amount(text, words.get("nodes")),
    )  # fmt: skip


def window(text: str, number: int, nodes: int) -> Window:
    """Parses a window, e.g. "n0-n7 n9 from=36h until=40h user=ada".

    Times count from the first submission.

    Args:
        text: nodes by name, as a range of names or as a share ("25%": the first quarter). The
            defaults are from 0s until 1d.
        number: number of the window, for its id: w1, w2, ...
        nodes: number of nodes of the cluster: n0, n1, ...

    Raises:
        ConfigError: the text is not a window, names no node or an unknown node, or its duration is
            not positive.
    """
    bare, words = _words("--window", text, ("from", "until", "user", "group"))
    places = {place for word in bare for place in _places(text, word, nodes)}
    if not places:
        raise ConfigError(f"--window {text!r} names no node; write e.g. n0-n7 from=36h until=40h")
    begin, end = (
        round(parse_seconds(words.get(word, default), f"--window {word}") * 1000) / 1000
        for word, default in (("from", "0s"), ("until", "1d"))
    )
    if not begin < end:
        raise ConfigError(f"invalid --window {text!r}: expected an end after the start")
    return Window(
        id=f"w{number}", nodes=frozenset(f"n{place}" for place in places), begin=begin, end=end,
        user=words.get("user", ""), group=words.get("group", ""),
    )  # fmt: skip


def check_names(trace: Trace, quotas: Iterable[Quota], windows: Iterable[Window]) -> None:
    """Rejects rules for users and groups that have no job in the trace.

    Raises:
        ConfigError: such a rule exists; the message names the user or group.
    """
    users = {job.user for job in trace.jobs}
    groups = {job.group for job in trace.jobs}
    rules: list[tuple[str, Quota | Window]] = [("--quota", each) for each in quotas]
    rules += [("--window", each) for each in windows]
    for option, rule in rules:
        for kind, name, known in (("user", rule.user, users), ("group", rule.group, groups)):
            if name and name not in known:
                raise ConfigError(f"{option}: no job of {trace.source} has the {kind} {name!r}")


def _words(option: str, text: str, known: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Splits the text at spaces or commas into bare words and named values."""
    bare: list[str] = []
    named: dict[str, str] = {}
    for word in filter(None, re.split(r"[\s,]+", text)):
        name, equals, value = word.partition("=")
        if not equals:
            bare.append(word)
        elif name not in known or name in named or not value:
            raise ConfigError(
                f"invalid {option} {text!r}: expected WORD=VALUE, at most once each of {', '.join(known)}"
            )
        else:
            named[name] = value
    return bare, named


def _amount(text: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,10}", value, re.ASCII) or int(value) > MOST:
        raise ConfigError(
            f"invalid --quota {text!r}: expected a number of GPUs or nodes, not {value!r}"
        )
    return int(value)


def _places(text: str, word: str, nodes: int) -> range:
    """Returns the node numbers that a word selects."""
    share = re.fullmatch(r"(\d{1,3})%", word, re.ASCII)
    if share is not None and 0 < int(share[1]) <= 100:
        return range(-(-nodes * int(share[1]) // 100))
    found = re.fullmatch(r"n(\d{1,6})(?:-n(\d{1,6}))?", word, re.ASCII)
    if found is not None:
        first, last = int(found[1]), int(found[2] or found[1])
        if first <= last < nodes:
            return range(first, last + 1)
    raise ConfigError(
        f"invalid --window {text!r}: no nodes {word!r} among n0 to n{nodes - 1}; expected e.g. n3, n0-n7 "
        "or 25%"
    )


def types(text: str, nodes: int) -> tuple[tuple[str, int], ...]:
    """Returns the types of `--types` with their numbers of nodes.

    Raises:
        ConfigError: the text is invalid, or names another number of nodes.
    """
    found = []
    for part in filter(None, text.lower().split(",")):
        kind, _, count = part.partition(":")
        if not is_type(kind) or not (count.isascii() and count.isdecimal() and len(count) < 7):
            raise ConfigError(f"invalid --types {text!r}: expected e.g. a100:40,v100:40")
        found.append((kind, int(count)))
    if found and sum(count for _, count in found) != nodes:
        total = sum(count for _, count in found)
        raise ConfigError(
            f"invalid --types {text!r}: expected {nodes} nodes (--nodes), not {total}"
        )
    return tuple(found)
