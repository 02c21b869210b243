"""Parser of `--rehearse`, and the choice of the event that is due. Pure."""

import re
from typing import Literal

import msgspec

from fireflyer.errors import ConfigError

Kind = Literal["suspend", "resume", "kill-rank", "kill-node", "freeze-rank", "slow-node"]

KINDS: tuple[Kind, ...] = (
    "suspend", "resume", "kill-rank", "kill-node", "freeze-rank", "slow-node",
)  # fmt: skip
LASTING_S = 10.0
"""Default number of seconds for which a rank is frozen or a node is slow."""
MAX_S = 7 * 86_400.0
MAX_EVENTS = 100

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_EVENT = re.compile(
    r"(?P<kind>[a-z-]+?)(?P<index>[0-9]{1,6})?@(?P<when>[^+]+)(\+(?P<lasts>.+))?\Z", re.ASCII
)
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h)\Z", re.ASCII)
_STEP = re.compile(r"step([0-9]{1,15})\Z", re.ASCII)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a rehearsal."""

    text: str
    """Text of the event in `--rehearse`."""
    kind: Kind
    index: int = -1
    """Index of the rank, or of the node in the task, from 0; -1 for the whole task."""
    at_s: float | None = None
    """Seconds after the task first ran."""
    at_step: int | None = None
    """Step at which the event is due: the script has printed this step or a later one."""
    lasts_s: float = 0.0


def parse(text: str) -> tuple[Planned, ...]:
    """Parses events, for example "suspend@60s,kill-rank1@step40,slow-node2@2m+30s", and keeps their
    order.

    Raises:
        ConfigError: names the event and the error in it.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > MAX_EVENTS:
        raise ConfigError(f"--rehearse has {len(words)} events; at most {MAX_EVENTS}")
    return tuple(map(_event, words))


def _event(word: str) -> Planned:
    found = _EVENT.match(word)
    if found is None:
        raise ConfigError(
            f"invalid --rehearse {word!a}: expected e.g. suspend@60s, kill-rank1@90s, slow-node2@step40"
        )
    kind = next((known for known in KINDS if known == found["kind"]), None)
    if kind is None:
        raise ConfigError(
            f"invalid --rehearse {found['kind']!a}: expected one of {', '.join(KINDS)}"
        )
    whole = kind in ("suspend", "resume")
    if whole and found["index"] is not None:
        raise ConfigError(
            f"invalid --rehearse {word!a}: {kind} applies to all of the task; omit the number"
        )
    if not whole and found["index"] is None:
        what = kind.partition("-")[2]
        raise ConfigError(
            f"invalid --rehearse {word!a}: the number of the {what} is missing, "
            f"e.g. {kind}0@{found['when']}"
        )
    lasting = kind in ("freeze-rank", "slow-node")
    if found["lasts"] is not None and not lasting:
        raise ConfigError(
            f"invalid --rehearse {word!a}: {kind} has no duration; omit +{found['lasts']}"
        )
    step = _STEP.match(found["when"])
    lasts_s = LASTING_S if found["lasts"] is None else _seconds(word, found["lasts"])
    return Planned(
        text=word,
        kind=kind,
        index=-1 if whole else int(found["index"]),
        at_s=None if step else _seconds(word, found["when"]),
        at_step=int(step[1]) if step else None,
        lasts_s=lasts_s if lasting else 0.0,
    )


def _seconds(word: str, text: str) -> float:
    found = _TIME.match(text)
    value = float(found[1]) * _UNITS[found[2]] if found else -1.0
    if not 0 <= value <= MAX_S:
        raise ConfigError(
            f"invalid --rehearse {word!a}: expected a time of at most a week instead of {text!a}, e.g. 90s, "
            "500ms, 2m or step40"
        )
    return value


def shape_for(plan: tuple[Planned, ...]) -> tuple[int, int]:
    """Returns (nodes, ranks per node) of the smallest task that has all nodes and ranks of the
    plan."""
    nodes = max((event.index + 1 for event in plan if event.kind.endswith("-node")), default=1)
    ranks = max((event.index + 1 for event in plan if event.kind.endswith("-rank")), default=1)
    return nodes, -(-ranks // nodes)


def check_shape(plan: tuple[Planned, ...], nodes: int, ranks_per_node: int) -> None:
    """Rejects events for ranks and nodes that the task does not have.

    Raises:
        ConfigError: names the event.
    """
    world = nodes * ranks_per_node
    for event in plan:
        has, what = (nodes, "node") if event.kind.endswith("-node") else (world, "rank")
        if event.index >= has:
            raise ConfigError(
                f"invalid --rehearse {event.text!a}: the task has {what}s 0 to {has - 1}; "
                "give --nodes or --ranks, or another number"
            )


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """State that decides whether an event is due."""

    ran_s: float
    """Seconds since the task first ran."""
    running: bool
    suspended: bool
    step: int | None
    """Latest step printed in this attempt."""


def due(event: Planned, moment: Moment) -> bool:
    """Returns whether to inject the event now. If the task does not run when the event is due, the
    event waits until the task runs."""
    able = moment.suspended if event.kind == "resume" else moment.running
    if event.at_s is not None:
        return able and moment.ran_s >= event.at_s
    return able and moment.step is not None and moment.step >= (event.at_step or 0)
