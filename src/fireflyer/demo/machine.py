"""Description of the machine on which the demo ran."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe() -> dict[str, str]:
    """Returns the processor, cores, memory, kernel, load and versions of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "Processor": _processor(),
        "Cores": str(len(os.sched_getaffinity(0))),
        "Memory": f"{memory:.0f} GiB",
        "Kernel": f"{platform.system()} {platform.release()}",
        "Load (1, 5, 15 min)": load,
        "Python": platform.python_version(),
        "PyTorch": _version("torch"),
        "Fireflyer": _version("fireflyer"),
    }


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
