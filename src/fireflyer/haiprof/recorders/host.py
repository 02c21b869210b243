"""Recorders of the machine: `ib`, `numa`. They read /sys."""

import contextlib
from pathlib import Path


class InfiniBand:
    """Bytes and errors of the InfiniBand ports."""

    name = "ib"
    interval_s = 1.0

    COUNTERS = (
        ("port_xmit_data", "sent_bytes_total", 4),
        ("port_rcv_data", "received_bytes_total", 4),
        ("port_xmit_wait", "send_wait_total", 1),
        ("symbol_error", "symbol_errors_total", 1),
        ("link_downed", "link_downed_total", 1),
    )
    """File, name of the value, and factor: the data counters count words of four bytes."""

    def __init__(self, pid: int, root: Path = Path("/sys/class/infiniband")) -> None:
        self._root = root

    def missing(self) -> str | None:
        return None if self._ports() else "this machine has no InfiniBand port"

    def sample(self) -> dict[str, float]:
        values = {}
        for port in self._ports():
            label = f"{port.parent.parent.name}_{port.name}"
            for file, name, unit in self.COUNTERS:
                with contextlib.suppress(OSError, ValueError):
                    text = (port / "counters" / file).read_text()
                    values[f"{label}_{name}"] = float(int(text) * unit)
        return values

    def _ports(self) -> list[Path]:
        return sorted(self._root.glob("*/ports/*"))


class Numa:
    """Pages that each NUMA node allocated as requested (numa_hit), in place of another node
    (numa_miss), or for a process on another node (other_node)."""

    name = "numa"
    interval_s = 1.0

    def __init__(self, pid: int, root: Path = Path("/sys/devices/system/node")) -> None:
        self._pid, self._root = pid, root

    def missing(self) -> str | None:
        return None if len(self._nodes()) > 1 else "this machine has one NUMA node"

    def sample(self) -> dict[str, float]:
        values = {}
        for node in self._nodes():
            for line in (node / "numastat").read_text().splitlines():
                key, _, number = line.partition(" ")
                if key in ("numa_hit", "numa_miss", "other_node"):
                    values[f"{node.name}_{key}_total"] = float(number)
        return values

    def _nodes(self) -> list[Path]:
        return sorted(self._root.glob("node[0-9]*"))
