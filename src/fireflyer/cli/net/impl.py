"""Implementation of `fireflyer net`."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fireflyer.cli.net.output import show, write_page
from fireflyer.cli.net.sources import sites, text
from fireflyer.cli.printing import show_result, table
from fireflyer.errors import ConfigError, FabricError
from fireflyer.fabric import infiniband, report, sizing, slurm, topologies
from fireflyer.fabric import plan as plans
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.findings import checked
from fireflyer.fabric.job_order import job_order
from fireflyer.fabric.routing import on_one_lane, route
from fireflyer.program import plain


def plan(
    preset: str | None, nodes: int | None, storage: int | None, cross: int | None, *, compare: bool,
    dollars: bool, catalogue: Path | None, html: Path | None, json: bool,
) -> None:  # fmt: skip
    """Prints a plan, networks side by side, or the tables of the paper."""
    if (preset is None) == (nodes is None and not compare):
        raise ConfigError("net plan needs one of --preset NAME, --nodes N and --compare")
    if dollars and preset is None:
        raise ConfigError("--dollars needs --preset NAME")
    if nodes is None and (storage, cross) != (None, None):
        raise ConfigError("--storage and --cross need --nodes N")
    storage, cross = storage or 0, cross or 20
    parts = Catalogue.read(catalogue)
    if compare:
        if nodes is None:
            _tables(parts, html, json=json)
        else:
            _side_by_side(nodes, storage, cross, parts, html, json=json)
        return
    if preset is not None:
        result, planes = plans.planned(preset, parts), topologies.preset(preset)
        if dollars:
            result["dollars"] = plans.dollars(preset, parts)
    else:
        result = plans.planned_zones(nodes or 0, storage, cross, parts)
        planes = [topologies.two_zone(nodes or 0, storage, cross=cross)]
    if html is not None:
        write_page(html, report.plan_page(result["description"], planes, result, parts))
    show(result, json=json)


def verify(
    preset: str | None, ibnetdiscover: Path | None, lfts: Path | None, *, html: Path | None,
    json: bool,
) -> int:  # fmt: skip
    """Prints what a check found; returns 1 if a pair is unreachable or a loop exists."""
    if lfts is not None and ibnetdiscover is None:
        raise ConfigError("--lfts needs the network, --ibnetdiscover FILE")
    begin = time.perf_counter()
    planes = []
    for whole in sites(preset, ibnetdiscover):
        if lfts is None:
            planes.append((whole.net, route(whole.net)))
        else:
            tables = infiniband.read_tables(text(lfts), whole, str(lfts))
            planes.append((whole.net, on_one_lane(tables)))
    result = checked(planes)
    result["wall_s"] = round(time.perf_counter() - begin, 4)
    if html is not None:
        write_page(html, report.verify_page(planes, result))
    show(result, json=json)
    return 1 if result["unreachable"] or result["credit_loops"] else 0


def export(preset: str | None, to: Path | None, *, json: bool) -> None:
    """Writes the files of a network and prints their paths."""
    if preset is None or to is None:
        raise ConfigError("net export needs --preset NAME and --to DIR")
    written: list[str] = []
    planes = topologies.preset(preset)
    for number, net in enumerate(planes):
        folder = to if len(planes) == 1 else to / f"plane{number}"
        folder.mkdir(parents=True, exist_ok=True)
        whole = infiniband.site(net)
        texts = {
            "ibnetdiscover.txt": infiniband.write_net(whole),
            "opensm-lfts.dump": infiniband.write_tables(whole, route(net).tables),
            "topology.conf": slurm.topology_conf(net),
            "topology.yaml": slurm.topology_yaml(net),
        }
        for name, content in texts.items():
            (folder / name).write_text(content)
            written.append(str(folder / name))
    show_result({"files": written}, lambda: _write_lines(written), json=json)


def order(job: Path | None, preset: str | None, ibnetdiscover: Path | None, *, json: bool) -> None:
    """Prints the hosts of a job in rank order."""
    if job is None:
        raise ConfigError("net order needs --job FILE, the names of the hosts")
    hosts = [line.strip() for line in text(job).splitlines() if line.strip()]
    result = job_order([whole.net for whole in sites(preset, ibnetdiscover)], hosts)
    show_result(result, lambda: _write_lines(result["hosts"]), json=json)


def _write_lines(names: Iterable[str]) -> None:
    for name in names:
        sys.stdout.write(f"{plain(name)}\n")


def _side_by_side(
    nodes: int, storage: int, cross: int, parts: Catalogue, html: Path | None, *, json: bool
) -> None:
    """Prints the networks that hold the nodes, and the reasons why other networks cannot."""
    rows: list[dict[str, Any]] = []
    for topology in sizing.TOPOLOGIES:
        try:
            size = sizing.sized(topology, nodes, storage, cross=cross)
        except FabricError as refusal:
            rows.append({"topology": topology, "switches": None, "host_ports": None, "cables": None,
                         "network_price": None, "note": str(refusal)})  # fmt: skip
            continue
        price = sizing.network_price(size, parts)
        note = ", ".join(f"{count:,} {name}" for name, count in size.cables.items())
        rows.append({"topology": topology, "switches": size.switches,
                     "host_ports": size.host_ports, "cables": sum(size.cables.values()),
                     "network_price": price, "note": note})  # fmt: skip
    if html is not None:
        write_page(html, report.compare_page(rows, parts))
    result = {"nodes": nodes, "storage": storage, "networks": rows}
    show_result(result, lambda: _networks_text(rows), json=json)


def _networks_text(rows: list[dict[str, Any]]) -> None:
    cells = [["" if v is None else f"{v:,.0f}" if isinstance(v, int | float) else v
              for v in row.values()] for row in rows]  # fmt: skip
    table(
        ("TOPOLOGY", "SWITCHES", "PORTS", "CABLES", "PRICE", "CABLES BY CLASS, OR WHY NOT"), cells
    )
    sys.stdout.write(
        "\nPrices are estimates in units of Table III, by the price of a switch there.\n"
    )


def _tables(parts: Catalogue, html: Path | None, *, json: bool) -> None:
    two, three = plans.table_two(parts), plans.table_three(parts)
    if html is not None:
        write_page(html, report.compare_page(three, parts))
    result = {"table_two": two, "table_three": three}
    show_result(result, lambda: _tables_text(two, three), json=json)


def _tables_text(two: Mapping[str, Any], three: Sequence[Mapping[str, Any]]) -> None:
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
