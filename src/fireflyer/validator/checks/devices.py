"""PCIe links, InfiniBand ports and disks' own health reports."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings, read_text

CHECKS = (
    Check(
        name="pcie",
        figures=(Figure("pcie links", "degraded", "less"),),
        needs="PCIe devices whose links report their speed",
        duration_s=0.3,
        function="fireflyer.validator.checks.devices:run_pcie",
    ),
    Check(
        name="infiniband",
        figures=(Figure("infiniband ports", "bad", "less"),),
        needs="an InfiniBand or RoCE card",
        duration_s=0.3,
        function="fireflyer.validator.checks.devices:run_infiniband",
    ),
    Check(
        name="smart",
        figures=(Figure("smart", "bad disks", "less"),),
        needs="smartctl and root",
        duration_s=2.0,
        function="fireflyer.validator.checks.devices:run_smart",
    ),
)

SYS = Path("/sys")
TOOL_S = 20.0

COUNTERS = {"link_downed": 10, "symbol_error": 1000, "port_rcv_errors": 1000}
"""Counters of an InfiniBand port, each with the value from which the port counts as bad."""


def run_pcie(settings: Settings) -> Iterator[Measured]:
    """Compares the speed and width of each link with the maximum that its device supports."""
    del settings
    yield pcie(SYS)


def pcie(sys_: Path) -> Measured:
    """Judges the links under a tree like /sys.

    An idle device may lower the speed of its link to save power, so speed counts only for network
    cards, which do not idle. Width counts for all devices, because a link never regains lost lanes
    by itself.
    """
    bad, seen = [], 0
    for device in sorted(sys_.glob("bus/pci/devices/*")):
        now, most = (_number(read_text(device / f"{w}_link_width")) for w in ("current", "max"))
        if not now or not most:
            continue
        seen += 1
        if now < most and not _is_bridge(device):
            bad.append(f"{device.name} has {now:.0f} of {most:.0f} lanes")
        rate, best = (_number(read_text(device / f"{w}_link_speed")) for w in ("current", "max"))
        if rate and best and rate < best and (read_text(device / "class") or "").startswith("0x02"):
            bad.append(f"{device.name} runs at {rate:g} of {best:g} GT/s")
    if not seen:
        raise NotRun("no PCIe device reports its link")
    return Measured("pcie links", float(len(bad)), "; ".join(bad))


def _is_bridge(device: Path) -> bool:
    return (read_text(device / "class") or "").startswith("0x06")


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").split(" ")[0])
    except ValueError:
        return None


def run_infiniband(settings: Settings) -> Iterator[Measured]:
    """Reads state and error counters of each port."""
    del settings
    yield infiniband(SYS)


def infiniband(sys_: Path) -> Measured:
    """Judges the ports under a tree like /sys."""
    ports = sorted(sys_.glob("class/infiniband/*/ports/*"))
    if not ports:
        raise NotRun("the node has no InfiniBand or RoCE card")
    bad = []
    for port in ports:
        name = f"{port.parent.parent.name} port {port.name}"
        state = read_text(port / "state") or "unknown"
        if "ACTIVE" not in state:
            bad.append(f"{name} is {state.partition(': ')[2] or state}")
        for counter, limit in COUNTERS.items():
            count = _number(read_text(port / "counters" / counter)) or 0
            if count >= limit:
                bad.append(f"{name} counts {count:.0f} of {counter}")
    return Measured("infiniband ports", float(len(bad)), "; ".join(bad))


def run_smart(settings: Settings) -> Iterator[Measured]:
    """Reads each disk's own health report with smartctl."""
    del settings
    tool = shutil.which("smartctl")
    if tool is None:
        raise NotRun("smartctl is not installed (package smartmontools)")
    disks = [path.name for path in sorted((SYS / "block").glob("*")) if _is_disk(path)]
    if not disks:
        raise NotRun("the node has no SATA, SAS or NVMe disk of its own")
    reports = {}
    for disk in disks:
        line = [tool, "--json", "--health", "--attributes", f"/dev/{disk}"]
        done = subprocess.run(line, capture_output=True, timeout=TOOL_S, check=False)
        reports[disk] = done.stdout.decode("utf-8", "replace")
    yield smart(reports)


def _is_disk(path: Path) -> bool:
    return path.name.startswith(("sd", "nvme")) and (path / "device").exists()


def smart(reports: dict[str, str]) -> Measured:
    """Judges the JSON that smartctl printed for each disk.

    Raises:
        NotRun: no report has a verdict.
    """
    bad, seen, reason = [], 0, ""
    for disk, text in reports.items():
        try:
            report: dict[str, Any] = json.loads(text)
            passed = report.get("smart_status", {}).get("passed")
        except (ValueError, AttributeError):
            reason = reason or f"smartctl printed no JSON for {disk}"
            continue
        if passed is None:
            messages = report.get("smartctl", {}).get("messages", [])
            reason = reason or next(
                (str(m.get("string")) for m in messages), f"{disk} reports nothing"
            )
            continue
        seen += 1
        log = report.get("nvme_smart_health_information_log", {})
        if not passed:
            bad.append(f"{disk} predicts its failure")
        elif log.get("media_errors", 0):
            bad.append(f"{disk} counts {log['media_errors']} media errors")
        elif log.get("percentage_used", 0) >= 100:
            bad.append(f"{disk} is worn out: {log['percentage_used']} % of its life used")
    if not seen:
        raise NotRun(reason)
    return Measured("smart", float(len(bad)), "; ".join(bad))
