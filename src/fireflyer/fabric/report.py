"""HTML pages with drawings of a network, its load, its flows, and its cost by size."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fireflyer.charts import Axis, Markup, Section, Series, heat_map, line_chart, page, table
from fireflyer.errors import FabricError
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.drawing import groups
from fireflyer.fabric.flows import Paths, fair_rates, link_capacities
from fireflyer.fabric.net import Floats, Net
from fireflyer.fabric.routing import Routes, route
from fireflyer.fabric.sizing import TOPOLOGIES, network_price, sized
from fireflyer.fabric.topologies import two_zone
from fireflyer.fabric.traffic import Traffic, traffic
from fireflyer.fabric.verify import Check

FIGURE_7A = {2: 8.10, 16: 7.78, 128: 6.31, 180: 6.99}
"""Rate of HFReduce's allreduce of 186 MiB, in GB/s, by number of nodes (arXiv 2408.14158v2, Figure
7a)."""

FIGURE_7B = {2: 19.18, 4: 13.0, 8: 12.07, 16: 10.3, 32: 9.66, 64: 8.56, 128: 7.99}
"""Rate of the same allreduce with NVLink, in GB/s, by number of nodes in one zone (Figure 7b)."""


def plan_page(
    title: str, planes: Sequence[Net], result: Mapping[str, Any], parts: Catalogue
) -> str:
    """Draws a planned network, and the cost of networks against their size."""
    return page(title, [
        Section("Plan", result.get("notes", ()), [_figures(result)]),
        _network(planes),
        cost_against_scale(parts),
    ])  # fmt: skip


def compare_page(rows: Sequence[Mapping[str, Any]], parts: Catalogue) -> str:
    """Draws networks side by side for one number of nodes."""
    heads = list(rows[0])
    cells = [[row[head] for head in heads] for row in rows]
    return page("Networks side by side", [
        Section("Side by side", (), [table(heads, cells)]), cost_against_scale(parts),
    ])  # fmt: skip


def verify_page(planes: Sequence[tuple[Net, Routes]], result: Mapping[str, Any]) -> str:
    """Draws the load of the cables of the first plane under all routes."""
    sections = [Section("Findings", result.get("loops", ()), [_figures(result)])]
    sections.append(_network([net for net, _ in planes]))
    net, routes = planes[0]
    used = Check(net, routes.tables, routes.lanes).routes_per_port
    text = ["Routes (leaf, endpoint) that leave a switch through its cables to each switch above."]
    if len(planes) > 1:
        text.append(f"The first of {len(planes)} planes.")
    sections.append(Section("Routes on the cables", text, _maps(net, used.astype(float), "")))
    return page("Check of routes", sections)


def flows_page(
    preset: str, net: Net, of: Traffic, result: Mapping[str, Any], runs: Mapping[str, Floats]
) -> str:
    """Draws the load of the cables at the start of the traffic, and the share of ended flows over
    time."""
    check = Check(net, route(net).tables)
    paths = Paths.over(check, of)
    rates = fair_rates(paths, link_capacities(net))
    flow = np.repeat(np.arange(len(rates)), np.diff(paths.begin))
    load = np.bincount(paths.links, rates[flow], minlength=int(paths.links.max()) + 1)
    carried = load[: net.peers.size].reshape(net.peers.shape)
    on_cables = np.divide(carried * 100, net.rates, where=net.rates > 0, out=np.zeros_like(carried))
    sections = [
        Section("Figures", (), [_figures(result)]),
        Section("Load of the cables", ["Share of a cable's capacity in use while all flows run."],
                _maps(net, on_cables, " %", 100.0)),
    ]  # fmt: skip
    if runs:
        series = [Series(name, _ended(ends)) for name, ends in runs.items()]
        chart = line_chart("Flows that have ended", Axis("seconds"), Axis("share of flows"), series)
        sections.append(Section("Ends of flows", (), [chart]))
    if result["traffic"] == "tree":
        sections.append(figure_seven())
    return page(f"Flows: {result['traffic']} on {preset}", sections)


def cost_against_scale(parts: Catalogue) -> Section:
    """Draws the number of switches and the network price against the number of nodes, up to 16,000."""
    counts = [int(n) for n in np.unique(np.geomspace(32, 16_000, 60).astype(int))]
    switches, prices = [], []
    for topology in TOPOLOGIES:
        fitting = []
        for count in counts:
            try:
                fitting.append((count, sized(topology, count)))
            except FabricError:
                continue
        switches.append(Series(topology, [(n, one.switches) for n, one in fitting]))
        priced = [(n, network_price(one, parts)) for n, one in fitting]
        known = [(float(n), price / n) for n, price in priced if price is not None]
        prices += [Series(topology, known)] if known else []
    across = Axis("nodes with one port", log=True)
    return Section(
        "Cost against scale",
        ["Switches of 40 ports, no oversubscription. Prices are estimates: the price per switch of "
         "the network of Table III with as many layers. A line ends where the nodes no longer fit."],
        [line_chart("Switches", across, Axis("switches", log=True), switches),
         line_chart("Network price of a node", across, Axis("units of Table III"), prices)],
    )  # fmt: skip


def allreduce_model() -> dict[int, float]:
    """Computes the network's upper bound of the rate of an allreduce by two trees in one zone.

    Returns:
        GB/s by number of nodes.
    """
    net = two_zone(360, 0)
    check = Check(net, route(net).tables)
    capacities, found = link_capacities(net), {}
    for nodes in sorted(FIGURE_7A | FIGURE_7B):
        of = traffic(net, "tree", nodes)
        rates = fair_rates(Paths.over(check, of), capacities)
        found[nodes] = float((rates / of.weights).min() / 1e9)
    return found


def figure_seven() -> Section:
    """Draws Figure 7 of the paper beside the model, and names each deviation above 10 %."""
    model = allreduce_model()
    series = [Series("network model", [(n, v) for n, v in model.items()], marks=True)]
    text = [
        "The model is the ceiling of the network: two trees, full ports, no latency. The paper's "
        "HFReduce first meets the limits of the host's memory and root complex."
    ]
    for name, points in (("Figure 7a", FIGURE_7A), ("Figure 7b, NVLink", FIGURE_7B)):
        series.append(Series(name, [(n, v) for n, v in points.items()], marks=True))
        ratios = {n: model[n] / v - 1 for n, v in points.items()}
        far = [f"{n} nodes: {off:+.0%}" for n, off in ratios.items() if abs(off) > 0.1]
        text.append(f"Model against {name}, where off by more than 10 %: {', '.join(far) or '-'}.")
    chart = line_chart("Allreduce of 186 MiB", Axis("nodes", log=True), Axis("GB/s"), series)
    return Section("Figure 7 of the paper", text, [chart])


def _figures(result: Mapping[str, Any]) -> str:
    plain = [(k, v) for k, v in result.items() if not isinstance(v, list | dict) and v is not None]
    return table(("figure", "value"), plain)


def _network(planes: Sequence[Net]) -> Section:
    text = [
        "One box for all switches of a level and zone; the numbers beside the lines count cables."
    ]
    if len(planes) > 1:
        text.append(f"One of {len(planes)} equal planes; no cable joins two planes.")
    return Section("Network", text, [groups(planes[0])])


def _ended(ends: Floats) -> list[tuple[float, float]]:
    whole = np.sort(ends[np.isfinite(ends)])
    shown = np.linspace(0, len(whole) - 1, min(len(whole), 400))
    places: list[int] = np.unique(shown.astype(int)).tolist()
    return [(0.0, 0.0)] + [(float(whole[n]), (n + 1) / len(ends)) for n in places]


def _maps(net: Net, values: Floats, unit: str, high: float | None = None) -> list[Markup]:
    """Draws a heat map of the upward cables for each zone and pair of neighbouring levels."""
    parts = []
    rows, ports = np.nonzero(net.peers >= 0)
    peers = net.peers[rows, ports]
    up = net.levels[peers] > net.levels[rows]
    for level in range(int(net.levels.max())):
        for zone in np.unique(net.zones[net.levels == level]).tolist():
            for direction in ("up", "down"):
                mine = up & (net.levels[rows] == level) & (net.zones[rows] == zone)
                if not mine.any():
                    continue
                lower, upper = np.unique(rows[mine]), np.unique(peers[mine])
                total = np.zeros((len(lower), len(upper)))
                count = np.zeros_like(total)
                at = (np.searchsorted(lower, rows[mine]), np.searchsorted(upper, peers[mine]))
                one, port = rows[mine], ports[mine]
                if direction == "down":
                    one, port = net.peers[one, port], net.peer_ports[one, port]
                np.add.at(total, at, values[one, port])
                np.add.at(count, at, 1)
                cells = [
                    [v / n if n else None for v, n in zip(vs, ns, strict=True)]
                    for vs, ns in zip(total.tolist(), count.tolist(), strict=True)
                ]
                where = f"zone {zone}, " if zone >= 0 else ""
                title = f"{where}level {level} to {level + 1}, {direction}wards"
                names = [net.switches[n] for n in lower], [net.switches[n] for n in upper]
                parts.append(heat_map(title, *names, cells, unit, high))
    return parts
