"""Implementation of `fireflyer net`."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fireflyer.cli.printing import as_json, table
from fireflyer.errors import ConfigError
from fireflyer.fabric import plan as plans
from fireflyer.fabric import topologies
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.findings import checked
from fireflyer.fabric.routing import route
from fireflyer.program import plain


def plan(
    preset: str | None, nodes: int | None, storage: int, cross: int, *, compare: bool,
    dollars: bool, catalogue: Path | None, json: bool,
) -> None:  # fmt: skip
    """Prints a plan, or the tables of the paper."""
    if sum((preset is not None, nodes is not None, compare)) != 1:
        raise ConfigError("net plan needs one of --preset NAME, --nodes N and --compare")
    if dollars and preset is None:
        raise ConfigError("--dollars needs --preset NAME")
    parts = Catalogue.read(catalogue)
    if compare:
        _compare(parts, json=json)
        return
    if preset is not None:
        result = plans.planned(preset, parts)
        if dollars:
            result["dollars"] = plans.dollars(preset, parts)
    else:
        result = plans.planned_zones(nodes or 0, storage, cross, parts)
    _show(result, json=json)


def verify(preset: str | None, *, json: bool) -> int:
    """Prints what a check found; returns 1 if a connected pair is unreachable or a loop exists."""
    if preset is None:
        raise ConfigError("net verify needs --preset NAME")
    begin = time.perf_counter()
    result = checked([(net, route(net)) for net in topologies.preset(preset)])
    result["wall_s"] = round(time.perf_counter() - begin, 4)
    _show(result, json=json)
    return 1 if result["unreachable"] or result["credit_loops"] else 0


def _compare(parts: Catalogue, *, json: bool) -> None:
    two, three = plans.table_two(parts), plans.table_three(parts)
    if json:
        as_json({"table_two": two, "table_three": three})
        return
    table(
        ("CLUSTER", "SWITCHES", "NETWORK", "SERVERS", "TOTAL", "OF DGX"),
        [
            (
                row["cluster"], f"{row['switches']:,}", f"{row['network_price']:,.0f}",
                f"{row['server_price']:,.0f}", f"{row['relative_price']:,.0f}",
                f"{row['of_dgx']:.3f}",
            )
            for row in three
        ],
    )  # fmt: skip
    sys.stdout.write(
        f"\nPCIe node relative to DGX: performance {two['relative_performance']:.0%}, price "
        f"{two['relative_price']:.0%}, cost-performance {two['cost_performance']:.2f}, "
        f"power {two['power']:.1%}\n"
    )


def _show(result: Mapping[str, Any], *, json: bool) -> None:
    """Prints figures as lines, and notes below them."""
    if json:
        as_json(result)
        return
    for name, value in result.items():
        if name in ("notes", "loops") or value is None:
            continue
        text = f"{value:,.10g}" if isinstance(value, int | float) else str(value)
        sys.stdout.write(f"{name:<20} {plain(text)}\n")
    for note in result.get("notes", ()):
        sys.stdout.write(f"note: {plain(note)}\n")
    for loop in result.get("loops", ()):
        sys.stdout.write(f"credit loop on {plain(loop)}\n")
