"""Plans: counts, relative price and power of a network; Tables II and III of the paper."""

from collections.abc import Sequence
from typing import Any

from fireflyer.errors import FabricError
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.net import Net
from fireflyer.fabric.topologies import PRESETS, preset, two_zone, zone_budget

TABLE_III = ("fire-flyer2", "fat-tree3", "dgx-a100")


def counts(planes: Sequence[Net]) -> dict[str, int]:
    """Counts switches, switch-to-switch cables, and the ports of leaves that do not lead to spines.

    `host_ports` is the sum of `endpoints`, `cross_links` (links from leaves to switches between
    zones) and `spare_ports` (free ports).
    """
    leaf_ports = endpoints = free = 0
    for net in planes:
        leaf = net.levels == 0
        used = (net.hosts[leaf] >= 0) | (net.peers[leaf] >= 0)
        endpoints += len(net.endpoints)
        free += int(net.radix[leaf].sum() - used.sum())
        gates = net.zones[net.peers[leaf]] < 0
        leaf_ports += int((gates & (net.peers[leaf] >= 0)).sum())
    return {
        "switches": sum(len(net.switches) for net in planes),
        "cables": sum(net.cables for net in planes),
        "host_ports": endpoints + free + leaf_ports,
        "endpoints": endpoints,
        "cross_links": leaf_ports,
        "spare_ports": free,
    }


def planned(name: str, catalogue: Catalogue) -> dict[str, Any]:
    """Plans a network of `PRESETS`.

    Returns:
        `switches`, `gpus`, `host_ports`, `relative_price`, `power_w` and their components. A figure
        is None if it depends on an unknown figure, which `notes` names.

    Raises:
        FabricError: no network has the name.
    """
    planes = preset(name)
    result: dict[str, Any] = {"preset": name, "description": PRESETS[name][0], **counts(planes)}
    result["planes"] = len(planes)
    if name in ("fat-tree2", "mixed-speeds"):
        return {
            **result, "gpus": None, "relative_price": None, "power_w": None,
            "notes": ["the network is one zone; the paper has no such cluster, so there is no price"],
        }  # fmt: skip
    nodes, node = (
        catalogue.number("cluster", name, "nodes"),
        catalogue.entry("cluster", name)["node"],
    )
    notes: list[str] = []
    prices = {}
    for key in ("network_price", "server_price"):
        found = catalogue.value("cluster", name, key)
        prices[key] = found.amount
        notes += [f"{key} is unknown: {found.source}"] if found.amount is None else []
    watts = catalogue.value("node", node, "power_w")
    if watts.amount is None:
        notes.append(f"power of a node is unknown: {watts.source}")
    else:
        notes.append("power_w is of the GPU nodes alone; no source states that of the switches")
    if name == "fire-flyer2":
        notes.append(_fit())
    total = None if None in prices.values() else sum(one or 0.0 for one in prices.values())
    return {
        **result, "nodes": nodes, "gpus": nodes * catalogue.number("node", node, "gpus"), **prices,
        "relative_price": total,
        "power_w": None if watts.amount is None else nodes * watts.amount,
        "notes": notes,
    }  # fmt: skip


def planned_zones(nodes: int, storage: int, cross: int, catalogue: Catalogue) -> dict[str, Any]:
    """Plans two zones for a number of nodes, with the node of Fire-Flyer 2.

    Raises:
        FabricError: the nodes do not fit; the message has the possible sizes.
    """
    budget = zone_budget(nodes, storage, cross=cross)
    net = two_zone(nodes, storage, cross=cross)
    watts = catalogue.value("node", "pcie-a100", "power_w").amount
    price = catalogue.value("cluster", "fire-flyer2", "network_price").amount
    unit = catalogue.value("cluster", "fire-flyer2", "server_price").amount
    fixed = catalogue.number("cluster", "fire-flyer2", "nodes")
    return {
        "preset": None, "description": f"two zones, {nodes:,} + {storage} nodes", **counts([net]),
        "planes": 1, "nodes": nodes, "gpus": nodes * catalogue.number("node", "pcie-a100", "gpus"),
        "ports_per_zone": budget.host_ports, "endpoints_per_zone": budget.endpoints,
        "spare_per_zone": budget.spare, "network_price": price,
        "server_price": None if unit is None else nodes * unit / fixed,
        "relative_price": None if None in (unit, price) else price + nodes * unit / fixed,  # type: ignore[operator]
        "power_w": None if watts is None else nodes * watts,
        "notes": ["the prices scale Table III by nodes; storage nodes have no printed price"],
    }  # fmt: skip


def _fit() -> str:
    try:
        zone_budget(1250, 180)
    except FabricError as refusal:
        return f"the paper's 1,250 nodes do not fit its ports: {refusal}"
    return ""


def table_two(catalogue: Catalogue) -> dict[str, float]:
    """Computes the ratios of Table II: the PCIe node relative to the DGX node.

    The relative performance is the mean of the TF32 and the FP16 ratio. The paper does not state a
    rule; this rule results in the 83 % that the paper prints.
    """
    pcie, dgx = (
        {
            key: catalogue.known("node", name, key)
            for key in ("tf32_tflops", "fp16_tflops", "relative_price", "power_w")
        }
        for name in ("pcie-a100", "dgx-a100")
    )
    tf32 = pcie["tf32_tflops"] / dgx["tf32_tflops"]
    fp16 = pcie["fp16_tflops"] / dgx["fp16_tflops"]
    performance = (tf32 + fp16) / 2
    return {
        "tf32": tf32,
        "fp16": fp16,
        "relative_performance": performance,
        "relative_price": pcie["relative_price"] / dgx["relative_price"],
        "cost_performance": performance / (pcie["relative_price"] / dgx["relative_price"]),
        "power": pcie["power_w"] / dgx["power_w"],
    }


def table_three(catalogue: Catalogue) -> list[dict[str, Any]]:
    """Computes the rows of Table III, with the total relative to DGX-A100."""
    rows = [planned(name, catalogue) for name in TABLE_III]
    reference = rows[-1]["relative_price"]
    if any(row["relative_price"] is None for row in rows):
        raise FabricError("a price of Table III is unknown; the catalogue must state all of them")
    return [
        {
            "cluster": catalogue.entry("cluster", row["preset"])["title"],
            **{key: row[key] for key in ("switches", "network_price", "server_price", "power_w")},
            "relative_price": row["relative_price"],
            "of_dgx": row["relative_price"] / reference,
            "price_per_switch": row["network_price"] / row["switches"],
        }
        for row in rows
    ]


def dollars(name: str, catalogue: Catalogue) -> float:
    """Prices a network and its nodes in dollars.

    Raises:
        FabricError: a price that the sum needs is unknown.
    """
    cluster = catalogue.entry("cluster", name)
    switches = counts(preset(name))["switches"]
    nodes = catalogue.number("cluster", name, "nodes")
    each = catalogue.known("node", cluster["node"], "dollars")
    return switches * catalogue.known("switch", cluster["switch"], "dollars") + nodes * each
