"""Decisions about the validation of nodes. Pure: no I/O, no clock.

`fold` computes the state of each node from the journal's entries. `due` returns the node to
validate next, and why. `may_return` decides whether a drained node passed the checks that its fault
requires.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fireflyer.hai.model import NodeView
from fireflyer.hai.model.validations import Ended, Entry, Returned, Started, Suspected, Trigger
from fireflyer.hai.validation.settings import ValidationSettings

RETURNS_S = 30 * 86_400.0
"""Period in seconds over which the setting `most_returns` limits the returns to service."""

PATIENCE_S = 60.0
"""Seconds before a retry if a validation ended without results."""

PEERS = 3
"""Number of listeners to which the network check of a node sends. The best result counts, so that
one bad peer does not make other nodes fail."""

PROOF: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "xid": (("gpu health",), ("gpu memory",), ("gpu gemm",)),
    "memory": (("memory pattern",),),
    "network": (("infiniband ports", "network bandwidth"),),
}
"""Groups of figures by kind of fault: one figure of each group must have passed."""

DEFAULT_PROOF = (("gemm",), ("memory pattern",))


class NodeState(msgspec.Struct):
    """State of one node, computed from the journal."""

    last: float = 0.0
    """End of the last validation with results."""
    latest: Ended | None = None
    """Last validation with results."""
    tried: float = 0.0
    """End of the last validation, with or without results."""
    suspected: float = 0.0
    """Time of the last fault that no validation has followed; 0: none."""
    causes: tuple[Suspected, ...] = ()
    """Faults since the node last returned to service, or last passed a validation while in
    service."""
    drained: float = 0.0
    """Time of the last drain by a rule; 0: not drained since the last return."""
    returns: tuple[float, ...] = ()
    """Times of the newest returns to service."""
    task: str = ""
    """Task of the running validation; empty: none."""
    trigger: Trigger = "weekly"


class Summary(msgspec.Struct, frozen=True, kw_only=True, tag="summary"):
    """State of one node that results from older entries, which were compacted away."""

    node: str
    state: NodeState


def fold(states: dict[str, NodeState], entry: Entry | Summary) -> None:
    """Applies one entry to the states."""
    state = states.setdefault(entry.node, NodeState())
    match entry:
        case Summary():
            states[entry.node] = entry.state
        case Suspected():
            state.suspected = entry.wall
            state.causes = (*state.causes[-31:], entry)
            if entry.drained:
                state.drained = entry.wall
        case Started():
            state.task, state.trigger = entry.task, entry.trigger
        case Ended():
            state.task = ""
            state.tried = entry.wall
            if entry.findings:
                state.last = entry.wall
                state.latest = entry
                state.suspected = 0.0
                if not entry.failed and not state.drained:
                    state.causes = ()
        case Returned():
            state.returns = (*state.returns[-31:], entry.wall)
            state.drained = 0.0
            state.causes = ()


def due(
    nodes: Sequence[NodeView],
    states: Mapping[str, NodeState],
    requested: Iterable[str],
    settings: ValidationSettings,
    now: float,
) -> tuple[str, Trigger] | None:
    """Returns the node to validate now, and why; None: no validation is due.

    Only idle nodes are validated, one at a time. Virtual nodes share a machine, and simultaneous
    checks of the network or of a shared file system would disturb each other.
    """
    if any(state.task for state in states.values()):
        return None
    idle = [node for node in nodes if not node.tasks and node.state != "down"]
    names = {node.name for node in idle}
    for name in requested:
        if name in names:
            return name, "requested"
    waits = [node for node in idle if _may_retry(states.get(node.name, NodeState()), now)]
    for node in waits:
        state = states.get(node.name, NodeState())
        if settings.returns and drained_by_rule(node, state):
            often = len([when for when in state.returns if when > now - RETURNS_S])
            since = max(state.drained, state.tried)
            if often < settings.most_returns and now >= since + settings.retest_s:
                return node.name, "return"
    ready = [node for node in idle if node.state in ("ready", "suspect")]
    for node in ready:
        state = states.get(node.name, NodeState())
        if settings.after_faults and state.suspected > state.tried:
            return node.name, "fault"
    late = [(states.get(node.name, NodeState()).last, node.name) for node in ready if node in waits]
    if settings.every_s and late and min(late)[0] + settings.every_s <= now:
        return min(late)[1], "weekly"
    return None


def peers_of(node: str, peers: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the listeners that a node sends to: the listeners of the next PEERS nodes, in a ring.

    Args:
        peers: HOST:PORT of the listener of each node with a listener.
    """
    names = list(peers)
    begin = names.index(node) + 1 if node in peers else 0
    ring = [name for name in names[begin:] + names[:begin] if name != node]
    return tuple(peers[name] for name in ring[:PEERS])


def _may_retry(state: NodeState, now: float) -> bool:
    """Returns whether the node may be validated: its last validation had results, or ended at least
    PATIENCE_S ago."""
    return state.tried <= state.last or now >= state.tried + PATIENCE_S


def drained_by_rule(node: NodeView, state: NodeState) -> bool:
    """Returns whether a rule drained the node, and no operator has drained it since."""
    return node.state == "drained" and bool(state.drained) and "(rule " in node.reason


def may_return(ended: Ended, causes: Sequence[Suspected]) -> str:
    """Returns "" if the node passed the checks that its faults require, else the reason why it
    stays drained."""
    if not ended.findings:
        return ended.error or "the validation gave no result"
    if ended.failed:
        return "failed: " + ", ".join(found.name for found in ended.failed)
    status = {found.name: found for found in ended.findings}
    for cause in (each for each in causes if each.drained):
        groups = PROOF.get(cause.kind, DEFAULT_PROOF)
        if cause.kind == "validator":
            groups = ((cause.check,),)
        for group in groups:
            if not any(name in status and status[name].status == "passed" for name in group):
                reasons = [status[n].reason for n in group if n in status and status[n].reason]
                why = f": {reasons[0]}" if reasons else ""
                return f"{' or '.join(group)} not run{why}"
    return ""
