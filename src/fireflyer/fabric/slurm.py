"""Slurm's topology files: leaves with their compute hosts, a switch per zone, and a root.

Slurm's topology is a tree, so all spines of a zone count as one switch. Hosts with endpoints at
several leaves (the storage nodes of two zones) do not fit into a tree and are omitted.
"""

import re

import numpy as np

from fireflyer.errors import FabricError
from fireflyer.fabric.net import NOWHERE, Net


def _tree(net: Net) -> list[tuple[str, str, list[str]]]:
    """Returns name, "nodes" or "children", and members of each switch of the tree, leaves first."""
    at, _ = net.attached
    leaves: dict[int, list[str]] = {}
    homes: dict[str, set[int]] = {}
    for end, name in enumerate(net.endpoints):
        homes.setdefault(name.rpartition("/")[0], set()).add(int(at[end]))
    for host, switches in homes.items():
        if len(switches) == 1 and NOWHERE not in switches:
            leaves.setdefault(next(iter(switches)), []).append(host)
    if not leaves:
        raise FabricError("no host has all its endpoints at one leaf; Slurm's tree would be empty")
    zones: dict[int, list[str]] = {}
    for leaf in sorted(leaves):
        zones.setdefault(int(net.zones[leaf]), []).append(net.switches[leaf])
    tree = [(net.switches[leaf], "nodes", leaves[leaf]) for leaf in sorted(leaves)]
    tree += [(f"zone{zone}", "children", names) for zone, names in sorted(zones.items())]
    if len(zones) > 1 and len(np.unique(net.components()[sorted(leaves)])) == 1:
        tree.append(("zones", "children", [f"zone{zone}" for zone in sorted(zones)]))
    return tree


def topology_conf(net: Net) -> str:
    """Returns `topology.conf` for the plugin topology/tree.

    Raises:
        FabricError: no host fits into a tree.
    """
    words = {"nodes": "Nodes", "children": "Switches"}
    lines = [f"SwitchName={name} {words[kind]}={hostlist(of)}" for name, kind, of in _tree(net)]
    return "\n".join([*lines, ""])


def topology_yaml(net: Net) -> str:
    """Returns `topology.yaml`, which Slurm reads from version 25.05 on.

    Raises:
        FabricError: no host fits into a tree.
    """
    lines = ["---", "- topology: fabric", "  cluster_default: true", "  tree:", "    switches:"]
    for name, kind, members in _tree(net):
        lines += [f"      - switch: {name}", f"        {kind}: {hostlist(members)}"]
    return "\n".join([*lines, ""])


def hostlist(names: list[str]) -> str:
    """Abbreviates names in Slurm's form: "n[0-3,7],login"."""
    groups: dict[str, list[int]] = {}
    single = []
    for name in names:
        found = re.fullmatch(r"(.*?\D)(0|[1-9]\d*)", name)
        if found is None:
            single.append(name)
        else:
            groups.setdefault(found[1], []).append(int(found[2]))
    parts = []
    for prefix, numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
        one = len(runs) == 1 and runs[0][0] == runs[0][1]
        parts.append(f"{prefix}{texts[0]}" if one else f"{prefix}[{','.join(texts)}]")
    return ",".join([*parts, *single])
