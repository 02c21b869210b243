"""Summary of checks over all planes of a network, as plain values."""

from collections.abc import Sequence
from typing import Any

from fireflyer.fabric.net import Net
from fireflyer.fabric.routing import Routes
from fireflyer.fabric.verify import Check, random_load, shift_load

MOST_SHIFTS = 1_000_000
"""Approximate maximum number of flows in all shifts of a plane's shift test. One shift has a flow
for each endpoint."""


def checked(planes: Sequence[tuple[Net, Routes]]) -> dict[str, Any]:
    """Checks each plane with its routes.

    Returns:
        `switches`, `endpoints`, `pairs` (of endpoints of the same plane), `unreachable` (pairs),
        `unreachable_though_connected` (pairs), `credit_loops`, `max_link_load` (flows on the fullest
        cable, see `shift_load`), `shifts` (number of tested shifts), `random_link_load`,
        `routes_per_link` (minimum and maximum) and `lanes`. With zones, also `cross_link_spread` and
        `gateway_link_spread`, which are ratios of the maximum to the mean number of routes of a
        link. `loops` shows one cycle of each credit loop.
    """
    result: dict[str, Any] = {"switches": 0, "endpoints": 0, "pairs": 0, "unreachable": 0}
    result |= {"unreachable_though_connected": 0, "credit_loops": 0, "max_link_load": 0}
    shifts, least, most, randoms = 0, [], [], []
    spreads: dict[str, list[float]] = {"cross_link_spread": [], "gateway_link_spread": []}
    loops = []
    for net, routes in planes:
        check = Check(net, routes.tables, routes.lanes)
        result["switches"] += len(net.switches)
        result["endpoints"] += len(net.endpoints)
        result["pairs"] += check.pairs
        result["unreachable"] += check.unreachable
        result["unreachable_though_connected"] += check.unreachable_though_connected
        result["credit_loops"] += len(check.credit_loops)
        loops += [_describe(net, loop.lane, loop.channels) for loop in check.credit_loops]
        load, tried = shift_load(check, max(20, MOST_SHIFTS // max(len(net.endpoints), 1)))
        result["max_link_load"] = max(result["max_link_load"], load)
        shifts = max(shifts, tried)
        randoms.append(random_load(check))
        used = check.routes_per_port[net.peers >= 0]
        least += [int(used.min())] if len(used) else []
        most += [int(used.max())] if len(used) else []
        for name, spread in (
            ("cross_link_spread", check.cross_spread()),
            ("gateway_link_spread", check.gateway_spread()),
        ):
            spreads[name] += [] if spread is None else [spread]
    result |= {"shifts": shifts, "random_link_load": max(randoms)}
    result["routes_per_link"] = [min(least, default=0), max(most, default=0)]
    result |= {name: max(found) for name, found in spreads.items() if found}
    return {**result, "lanes": max(int(one.lanes.max()) for _, one in planes) + 1, "loops": loops}


def _describe(net: Net, lane: int, channels: Sequence[tuple[int, int]]) -> str:
    """Names the switches of a cycle."""
    names = [net.switches[one] for one, _ in channels]
    return f"lane {lane}: {' -> '.join([*names, names[0]])}"
