"""`--quota` and `--window` of `fireflyer sim`, in the words of `fireflyer quota set` and `window add`."""

import re
from collections.abc import Collection, Iterable

from fireflyer.cli.durations import seconds
from fireflyer.errors import ConfigError
from fireflyer.hai.identity import Quota
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.scheduling.cluster import Window
from fireflyer.hai.simulation.trace import Trace

MOST = 1_000_000_000


def quota(text: str) -> Quota:
    """Of e.g. "user=ada priority=high gpus=16".

    Raises:
        ConfigError: it is not understood, or limits nothing.
    """
    bare, words = _words("--quota", text, ("user", "group", "priority", "gpus", "nodes"))
    if bare:
        raise ConfigError(f"--quota {text!r}: write WORD=VALUE, not {bare[0]!r}")
    if not {"gpus", "nodes"} & words.keys():
        raise ConfigError(f"--quota {text!r} limits nothing; give gpus=N or nodes=N")
    priority = words.get("priority", "")
    if priority and priority not in PRIORITIES:
        raise ConfigError(f"--quota {text!r}: the priorities are {', '.join(PRIORITIES)}")
    return Quota(
        user=words.get("user", ""), group=words.get("group", ""), priority=priority,
        gpus=_amount(text, words.get("gpus")), nodes=_amount(text, words.get("nodes")),
    )  # fmt: skip


def window(text: str, number: int, nodes: int) -> Window:
    """Of e.g. "n0-n7 n9 from=36h until=40h user=ada"; times count from the first submission.

    Args:
        text: nodes by name, as a range of names or as a share ("25%": the first quarter); from 0s until 1d
            unless it says otherwise.
        number: names it: w1, w2, ...
        nodes: of the cluster: n0, n1, ...

    Raises:
        ConfigError: it is not understood, names no node or one that there is not, or has no length.
    """
    bare, words = _words("--window", text, ("from", "until", "user", "group"))
    places = {place for word in bare for place in _places(text, word, nodes)}
    if not places:
        raise ConfigError(f"--window {text!r} names no node; write e.g. n0-n7 from=36h until=40h")
    begin, end = (
        round(seconds(words.get(word, default), f"--window {word}") * 1000) / 1000
        for word, default in (("from", "0s"), ("until", "1d"))
    )
    if not begin < end:
        raise ConfigError(f"--window {text!r}: it has to end after it begins")
    return Window(
        id=f"w{number}", nodes=frozenset(f"n{place}" for place in places), begin=begin, end=end,
        user=words.get("user", ""), group=words.get("group", ""),
    )  # fmt: skip


def check_names(trace: Trace, quotas: Iterable[Quota], windows: Iterable[Window]) -> None:
    """Refuses rules for users and groups that no job of the trace is of.

    Raises:
        ConfigError: there is one; it is named.
    """
    users = {job.user for job in trace.jobs}
    groups = {job.group for job in trace.jobs}
    rules: list[tuple[str, Quota | Window]] = [("--quota", each) for each in quotas]
    rules += [("--window", each) for each in windows]
    for option, rule in rules:
        for kind, name, known in (("user", rule.user, users), ("group", rule.group, groups)):
            if name and name not in known:
                raise ConfigError(f"{option}: no job of {trace.source} is of the {kind} {name!r}")


def _words(option: str, text: str, known: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Words alone, and values by name; they are apart by spaces or commas."""
    bare: list[str] = []
    named: dict[str, str] = {}
    for word in filter(None, re.split(r"[\s,]+", text)):
        name, equals, value = word.partition("=")
        if not equals:
            bare.append(word)
        elif name not in known or name in named or not value:
            raise ConfigError(f"{option} {text!r}: each of {', '.join(known)} once, as WORD=VALUE")
        else:
            named[name] = value
    return bare, named


def _amount(text: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,10}", value, re.ASCII) or int(value) > MOST:
        raise ConfigError(f"--quota {text!r}: {value!r} is no number of GPUs or nodes")
    return int(value)


def _places(text: str, word: str, nodes: int) -> range:
    """The numbers of the nodes that a word stands for."""
    share = re.fullmatch(r"(\d{1,3})%", word, re.ASCII)
    if share is not None and 0 < int(share[1]) <= 100:
        return range(-(-nodes * int(share[1]) // 100))
    found = re.fullmatch(r"n(\d{1,6})(?:-n(\d{1,6}))?", word, re.ASCII)
    if found is not None:
        first, last = int(found[1]), int(found[2] or found[1])
        if first <= last < nodes:
            return range(first, last + 1)
    raise ConfigError(
        f"--window {text!r}: {word!r} are none of the nodes n0 to n{nodes - 1}; write n3, n0-n7 or 25%"
    )
