"""Fault rules: the action for each observation. Pure, except that `load` reads the files.

The first rule that matches decides. An operator's file `faults.toml` in the home has rules of the
same form. A rule with the name of a default rule replaces the default rule; all other rules of the
file come before the defaults.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.hai.model import Event
from fireflyer.hai.model.observations import (
    KINDS,
    Exit,
    Hang,
    Loss,
    Memory,
    Network,
    Observation,
    OutOfMemory,
    Seen,
    Validator,
    Xid,
    kind,
)

ActionName = Literal["note", "restart", "restart elsewhere", "drain node", "stop task"]
Cause = Literal["script", "node", "network"]

ACTIONS: tuple[ActionName, ...] = get_args(ActionName)
"""Actions, from the mildest to the most severe."""

NAME = "faults.toml"
"""Name of the operator's file in the home."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of the table."""

    name: str
    on: str
    """Kind of observation."""
    action: ActionName
    cause: Cause = "script"
    """Cause of the fault; the cause determines which budget a restart is charged to."""
    why: str = ""
    source: str = ""
    """Public source of the rule, so that readers can check it."""
    codes: tuple[int, ...] = ()
    """Xid codes or exit codes; empty: any."""
    signals: tuple[int, ...] = ()
    """Signals of an exit; empty: any."""
    states: tuple[str, ...] = ()
    """States, empty: any. Of `network`: up, down, error; of `memory`: corrected, uncorrected; of
    `validator`: passed, failed; of `hang`: one (a rank is behind all others), all; of `loss`: rank,
    node (the rank was lost with its node); of `oom`: limit (of the task's memory), node."""
    at_least: int = 1
    """Minimum number of matching observations of the same node for which the rule applies. For
    `exit`: minimum number of matching consecutive exits of the same task."""
    within_s: float = 0.0
    """Seconds within which these observations must occur; for `exit`, the maximum duration of each
    attempt. 0: any time."""
    end: bool = False
    """True if the rule ends an attempt that still runs. Otherwise the action applies when the
    attempt ends by itself."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the table for one observation."""

    action: ActionName
    rule: str
    """Name of the rule; "" if no rule matches, so that no action is taken."""
    cause: Cause = "script"
    why: str = ""
    end: bool = False


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Rules in force, and past observations and actions."""

    rules: tuple[Rule, ...]
    """Rules in order; the first that matches decides."""
    events: tuple[Event, ...]
    """The newest events `observed` and `acted`, oldest first."""


NOTHING = Decision(action="note", rule="")


def decide(
    rules: Sequence[Rule], observation: Observation, history: Sequence[Seen], task: str = ""
) -> Decision:
    """Returns the decision about an observation.

    Args:
        rules: the table, in order.
        observation: the current observation.
        history: earlier observations, oldest first, without the current observation.
        task: the observed task, for rules that count consecutive exits.
    """
    for rule in rules:
        if _fits(rule, observation) and _count(rule, observation, history, task) >= rule.at_least:
            return Decision(
                action=rule.action, rule=rule.name, cause=rule.cause, why=rule.why, end=rule.end
            )
    return NOTHING


def _fits(rule: Rule, observation: Observation) -> bool:
    if rule.on != kind(observation):
        return False
    state: str | None = None
    match observation:
        case Exit():
            if rule.signals and observation.signal not in rule.signals:
                return False
            if rule.codes and observation.code not in rule.codes:
                return False
            # A rule that counts consecutive exits is meant for a script that exits in the same way
            # each time, so ranks that a signal killed do not count.
            return rule.at_least == 1 or observation.code is not None
        case Loss():
            state = "node" if observation.with_node else "rank"
        case Xid():
            return not rule.codes or observation.code in rule.codes
        case Network():
            state = observation.state
        case Hang():
            state = "all" if observation.rank is None else "one"
        case OutOfMemory():
            state = "limit" if observation.limited else "node"
        case Memory():
            state = "corrected" if observation.corrected else "uncorrected"
        case Validator():
            state = "passed" if observation.passed else "failed"
    return not rule.states or state in rule.states


def _count(rule: Rule, observation: Observation, history: Sequence[Seen], task: str) -> int:
    if rule.at_least == 1:
        return 1
    if isinstance(observation, Exit):
        return _in_a_row(rule, observation, history, task)
    since = observation.wall - rule.within_s if rule.within_s else float("-inf")
    return 1 + sum(
        seen.observation.node == observation.node
        and seen.observation.wall >= since
        and _fits(rule, seen.observation)
        for seen in history
    )


def _in_a_row(rule: Rule, last: Exit, history: Sequence[Seen], task: str) -> int:
    """Returns how many of the task's last attempts ended with the same code at the same place, each
    within the rule's time span."""
    count = 0
    mine = [seen.observation for seen in history if seen.task == task]
    for past in [last, *reversed([past for past in mine if isinstance(past, Exit)])]:
        same = (past.code, past.signal, past.place) == (last.code, last.signal, last.place)
        if not same or (rule.within_s and past.ran_s > rule.within_s):
            return count
        count += 1
    return count


def gravest(decisions: Iterable[Decision]) -> Decision:
    """Returns the decision with the most severe action; among equals, the first. Returns NOTHING if
    there are no decisions."""
    return max(decisions, key=lambda decision: ACTIONS.index(decision.action), default=NOTHING)


# -- files -----------------------------------------------------------------------------------------


def default_rules() -> tuple[Rule, ...]:
    """Returns the default rules, which the package contains."""
    file = resources.files("fireflyer.hai.faults") / "default.toml"
    return parse(file.read_text(encoding="utf-8"), "the default table")


def load(home: Path) -> tuple[Rule, ...]:
    """Returns the table of a home: the operator's rules and the defaults, as `merged` orders
    them.

    Raises:
        ConfigError: the file has an error; the text names its line.
    """
    path = home / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return default_rules()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return merged(parse(text, str(path)), default_rules())


def merged(own: Sequence[Rule], defaults: Sequence[Rule]) -> tuple[Rule, ...]:
    """Replaces default rules by `own` rules of the same name; the remaining own rules come
    first."""
    by_name = {rule.name: rule for rule in own}
    known = {rule.name for rule in defaults}
    first = tuple(rule for rule in own if rule.name not in known)
    return first + tuple(by_name.get(rule.name, rule) for rule in defaults)


def parse(text: str, where: str) -> tuple[Rule, ...]:
    """Parses the rules of a file.

    Raises:
        ConfigError: names `where` and the line.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: {error}") from None
    lines = _Lines(text)
    if unknown := sorted(set(tables) - {"rule"}):
        raise ConfigError(
            f"{where}, line {lines.of_key(unknown[0])}: unknown {unknown[0]!r}; expected [[rule]]"
        )
    found = tables.get("rule", [])
    if not isinstance(found, list):
        raise ConfigError(
            f"{where}, line {lines.of_key('rule')}: write [[rule]], with two brackets"
        )
    rules: dict[str, Rule] = {}
    for number, table in enumerate(found):
        try:
            rule = _rule(table)
            if rule.name in rules:
                raise _Wrong("name", f"the name {rule.name!r} is used twice")
        except _Wrong as wrong:
            raise ConfigError(f"{where}, line {lines.of(number, wrong.key)}: {wrong}") from None
        rules[rule.name] = rule
    return tuple(rules.values())


class _Wrong(Exception):
    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def _rule(table: Mapping[str, Any]) -> Rule:
    for key in table:
        if key not in Rule.__struct_fields__:
            raise _Wrong(key, f"unknown key {key!r}; known: {', '.join(Rule.__struct_fields__)}")
    for key in ("name", "on", "action"):
        if key not in table:
            raise _Wrong("", f"the rule has no {key!r}")
    for key, value in table.items():
        try:
            needed = {"name": "x", "on": "x", "action": "note"} | {key: value}
            msgspec.convert(needed, Rule)
        except msgspec.ValidationError as error:
            allowed = f"; expected one of {', '.join(ACTIONS)}" if key == "action" else ""
            raise _Wrong(key, f"{str(error).split(' - at')[0]}{allowed}") from None
    rule = msgspec.convert(table, Rule)
    _check(rule)
    return rule


def _check(rule: Rule) -> None:
    """Checks constraints that the types do not express."""
    if rule.on not in KINDS:
        raise _Wrong("on", f"unknown observation {rule.on!r}: expected one of {', '.join(KINDS)}")
    if not rule.name:
        raise _Wrong("name", "the name is empty")
    if rule.at_least < 1:
        raise _Wrong("at_least", f"at_least must be 1 or more, not {rule.at_least}")
    if not 0 <= rule.within_s < float("inf"):
        raise _Wrong("within_s", f"within_s must be 0 or more seconds, not {rule.within_s}")
    fitting = {"codes": ("xid", "exit"), "signals": ("exit",)}
    fitting["states"] = ("network", "memory", "validator", "hang", "loss", "oom")
    for key, kinds in fitting.items():
        if getattr(rule, key) and rule.on not in kinds:
            raise _Wrong(
                key, f"{key} cannot be used with {rule.on!r}, only with {', '.join(kinds)}"
            )


class _Lines:
    """Line numbers of the keys of each rule in the text."""

    def __init__(self, text: str) -> None:
        self._heads: list[int] = []
        self._keys: dict[tuple[int, str], int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(r"\s*\[\[\s*rule\s*\]\]", line):
                self._heads.append(number)
            elif found := re.match(r"\s*\[{0,2}\s*[\"']?([\w-]+)", line):
                self._keys.setdefault((len(self._heads) - 1, found[1]), number)

    def of(self, rule: int, key: str) -> int:
        """Returns the line of a rule's key, or of its head."""
        head = self._heads[rule] if rule < len(self._heads) else 1
        return self._keys.get((rule, key), head)

    def of_key(self, key: str) -> int:
        return min((n for (_, k), n in self._keys.items() if k == key), default=1)
