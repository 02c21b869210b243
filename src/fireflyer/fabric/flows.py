"""Max-min fair rates of flows over static routes, and the time at which each flow ends.

The model has no queues, so it does not show congestion that spreads from one kind of traffic to
another. It is therefore valid only if virtual lanes isolate the kinds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fireflyer._native import fabric as native
from fireflyer.fabric.net import Floats, Ints, Net
from fireflyer.fabric.routing import route
from fireflyer.fabric.traffic import Traffic
from fireflyer.fabric.verify import Check


@dataclass(frozen=True)
class Paths:
    """Links that each flow uses.

    Links have consecutive numbers. First come the cables: the cable that leaves a switch through a
    port has the number switch * (P + 1) + port (see `Net`). Then come the sending ports of the
    endpoints, then their receiving ports. The last link has no capacity; flows without a route use
    this link.

    Attributes:
        begin: int64 (F + 1,) for F flows; flow i uses `links[begin[i]:begin[i + 1]]`.
        links: int32; the links of the first flow, then those of the second flow, and so on.
    """

    begin: NDArray[np.int64]
    links: Ints

    @classmethod
    def over(cls, check: Check, of: Traffic) -> "Paths":
        """Determines the links that the flows use, from the routes in `check`."""
        net = check.net
        size, ends, (at, _) = net.peers.size, len(net.endpoints), net.attached
        cabled = (at[of.senders] >= 0) & (at[of.receivers] >= 0)
        arrives = cabled & check.arrives[np.where(cabled, at[of.senders], 0), of.receivers]
        cables = check.cables(of.senders, of.receivers).T
        nowhere = np.full(len(arrives), size + 2 * ends)
        ports = np.stack([size + of.senders, size + ends + of.receivers, nowhere], axis=1)
        whole = np.concatenate([cables < size, np.ones((len(cables), 2), bool)], axis=1)
        used = np.concatenate([whole & arrives[:, None], ~arrives[:, None]], axis=1)
        begin = np.zeros(len(used) + 1, np.int64)
        np.cumsum(used.sum(axis=1), out=begin[1:])
        return cls(begin, np.concatenate([cables, ports], axis=1)[used].astype(np.int32))


def fair_rates(paths: Paths, capacities: Floats) -> Floats:
    """Computes the max-min fair rate of each flow, in bytes a second.

    With these rates, no flow can get a higher rate unless a flow of the same or a lower rate gets
    less.

    Raises:
        ValueError: a flow uses no link, so its rate has no bound, or an index is out of range.
    """
    sizes = np.ones(len(paths.begin) - 1)
    return native.Flows(capacities, paths.begin, paths.links, sizes).rates()


@dataclass(frozen=True)
class Failure:
    """Failure of a group of cables.

    Attributes:
        at_s: seconds from the start.
        switches: switches whose cables fail.
        links: cables that fail, each as (switch, port) of one end.
        until_s: seconds from the start to the repair; infinity if there is no repair.
    """

    at_s: float
    switches: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    until_s: float = math.inf


@dataclass(frozen=True)
class Run:
    """Result of a run.

    Attributes:
        ends_s: seconds at which each flow ends; infinity: the flow never ends.
        events: number of times that the rates were computed.
    """

    ends_s: Floats
    events: int


def run_flows(
    net: Net, of: Traffic, size: float, failures: Sequence[Failure] = (), *,
    reroute_s: float = 1.0, merge: float = 0.0,
) -> Run:  # fmt: skip
    """Simulates flows until they end, with failures of cables.

    Flows over a failed cable wait. New tables take effect `reroute_s` seconds after each change.
    Table entries whose route still works stay unchanged.

    Args:
        net: the network without failures.
        of: the flows.
        size: bytes that the user requests; a flow transfers `size` times its weight (see
            `traffic.KINDS`).
        failures: failures of cables and switches.
        reroute_s: seconds from a change of the network to its new tables.
        merge: maximum relative error of the end times; flows whose end times differ by less are
            treated as ending together.
    """
    left, ends, events = of.weights * size, np.full(len(of.senders), math.inf), 0
    marks = _change_times(failures, reroute_s)
    routes, routed = route(net), net
    for number, (now, seen_at) in enumerate(marks):
        if seen_at is not None:
            routed = _at(net, failures, seen_at)
            routes = route(net) if routed is net else route(routed, routes)
        running = np.flatnonzero(np.isinf(ends))
        if not len(running):
            break
        rest = Traffic(of.senders[running], of.receivers[running], left[running])
        paths = Paths.over(Check(routed, routes.tables), rest)
        capacities = link_capacities(_at(net, failures, now))
        solver = native.Flows(capacities, paths.begin, paths.links, rest.weights)
        solver.run(marks[number + 1][0] - now if number + 1 < len(marks) else math.inf, merge)
        ends[running] = now + solver.ends()
        left[running] = solver.left()
        events += solver.events
    return Run(ends, events)


def _change_times(
    failures: Sequence[Failure], reroute_s: float
) -> list[tuple[float, float | None]]:
    """Returns the times at which cables or tables change, in ascending order.

    If new tables take effect at a time, the time is paired with the earlier time whose cables these
    tables are for. Otherwise it is paired with None.
    """
    marks: dict[float, float | None] = {0.0: None}
    changes = sorted({t for one in failures for t in (one.at_s, one.until_s) if math.isfinite(t)})
    for at in changes:
        marks.setdefault(at, None)
    for at in changes:
        marks[at + reroute_s] = at
    return sorted(marks.items())


def _at(net: Net, failures: Sequence[Failure], now: float) -> Net:
    """Returns the network with the cables that work at time `now`."""
    down = [one for one in failures if one.at_s <= now < one.until_s]
    if not down:
        return net
    switches = [switch for one in down for switch in one.switches]
    return net.without(switches, [link for one in down for link in one.links])


def link_capacities(net: Net) -> Floats:
    """Returns the capacity of each link of `Paths`; 0 for cables and ports that do not work."""
    cables = np.where(net.peers >= 0, net.rates, 0.0).ravel()
    return np.concatenate([cables, net.endpoint_rates, net.endpoint_rates, np.zeros(1)])


def flow_figures(net: Net, of: Traffic) -> dict[str, Any]:
    """Computes statistics of the rates of flows over a network's routes.

    Returns:
        `flows`, `total_bytes_s`, `ceiling_bytes_s` (total capacity of the senders' or the
        receivers' ports, whichever is lower), `of_ceiling` (`total_bytes_s` / `ceiling_bytes_s`),
        and the minimum and mean rate of a flow.
    """
    paths = Paths.over(Check(net, route(net).tables), of)
    rates = fair_rates(paths, link_capacities(net))
    ceiling = min(float(net.endpoint_rates[np.unique(of.senders)].sum()),
                  float(net.endpoint_rates[np.unique(of.receivers)].sum()))  # fmt: skip
    return {
        "flows": len(rates), "total_bytes_s": float(rates.sum()), "ceiling_bytes_s": ceiling,
        "of_ceiling": float(rates.sum() / ceiling), "least_bytes_s": float(rates.min()),
        "mean_bytes_s": float(rates.mean()),
    }  # fmt: skip
