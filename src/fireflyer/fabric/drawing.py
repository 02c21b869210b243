"""Drawing of a network, with one box for all switches of a level and zone."""

import numpy as np

from fireflyer.charts import svg
from fireflyer.charts.svg import Markup
from fireflyer.fabric.net import Net

WIDTH, ROW, BOX_HEIGHT = 720, 92, 44


def groups(net: Net) -> Markup:
    """Draws a network as an `<svg>` element; each line is labelled with its number of cables."""
    keys = sorted({(int(a), int(b)) for a, b in zip(net.levels, net.zones, strict=True)})
    levels = sorted({level for level, _ in keys}, reverse=True)
    at: dict[tuple[int, int], tuple[float, float]] = {}
    for line, level in enumerate(levels):
        # Switches between zones stand in the middle of their row.
        row = sorted((key for key in keys if key[0] == level), key=lambda key: key[1])
        loose = [key for key in row if key[1] < 0]
        row = [key for key in row if key[1] >= 0]
        row[len(row) // 2 : len(row) // 2] = loose
        for place, key in enumerate(row):
            at[key] = ((place + 0.5) * WIDTH / len(row), 10.0 + line * ROW)
    height = 10 + len(levels) * ROW
    parts = _lines(net, at)
    at_switch, _ = net.attached
    for key, (x, y) in at.items():
        mine = (net.levels == key[0]) & (net.zones == key[1])
        ends = int(np.isin(at_switch, np.flatnonzero(mine)).sum())
        names = [net.switches[n] for n in np.flatnonzero(mine).tolist()]
        first = f"{names[0]} .. {names[-1]}" if len(names) > 1 else names[0]
        below = f"{len(names)} switches" + (f", {ends:,} endpoints" if ends else "")
        parts += [
            svg.rect(x - 92, y, 184, BOX_HEIGHT, class_="box", rx=5),
            svg.text(first, x, y + 18, "middle", "title"),
            svg.text(below, x, y + 35, "middle"),
        ]
    return svg.drawing("Network", WIDTH, height, parts)


def _lines(net: Net, at: dict[tuple[int, int], tuple[float, float]]) -> list[Markup]:
    rows, ports = np.nonzero(net.peers >= 0)
    peers = net.peers[rows, ports]
    counted: dict[tuple[tuple[int, int], tuple[int, int]], int] = {}
    for one, other in zip(rows.tolist(), peers.tolist(), strict=True):
        lower = (int(net.levels[one]), int(net.zones[one]))
        upper = (int(net.levels[other]), int(net.zones[other]))
        if lower < upper:
            counted[lower, upper] = counted.get((lower, upper), 0) + 1
    parts: list[Markup] = []
    for (lower, upper), count in sorted(counted.items()):
        (x0, y0), (x1, y1) = at[lower], at[upper]
        y1 += BOX_HEIGHT
        parts.append(svg.element("path", d=f"M{x0:.0f},{y0:.0f} L{x1:.0f},{y1:.0f}"))
        parts.append(svg.text(f"{count:,}", x0 + (x1 - x0) * 0.4 + 6, y0 + (y1 - y0) * 0.4 + 4))
    return parts
