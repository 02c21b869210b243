"""CPU: frequency, thermal throttling, quotas, and the speed of each core."""

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fireflyer.validator.model import Check, Figure, Measured, Settings, read_text

CHECKS = (
    Check(
        name="cpu",
        figures=(
            Figure("cpu frequency", "MHz"),
            Figure("cpu throttling", "events", "less"),
            Figure("cpu quota", "% throttled", "less"),
            Figure("cpu speed", "MB/CPU-s"),
        ),
        duration_s=1.5,
        function="fireflyer.validator.checks.cpu:run",
    ),
)

BLOCK = bytes(1 << 16)
LOAD_S = 1.0

QUOTA_PERCENT = 1.0
"""Percentage of time for which quotas may hold the CPUs back before the check fails."""


def run(settings: Settings) -> Iterator[Measured]:
    """Loads all CPUs for half a second of CPU time; reads counters before and after the load."""
    del settings
    sys_, proc, groups = Path("/sys"), Path("/proc"), cgroups(Path("/proc/self/cgroup"))
    hot, held = thermal_events(sys_), throttled_s(groups)
    begin = time.monotonic()
    frequencies: list[float] = []
    speeds = on_each_cpu(_hash_for, lambda: frequencies.extend(frequency_mhz(sys_, proc)))
    wall = time.monotonic() - begin
    if frequencies:
        yield Measured("cpu frequency", min(frequencies), samples=tuple(frequencies))
    else:
        yield Measured("cpu frequency", skipped="neither cpufreq nor /proc/cpuinfo has it")
    now = thermal_events(sys_)
    if hot is None or now is None:
        yield Measured("cpu throttling", skipped="the kernel has no thermal_throttle counters")
    else:
        failed = f"{now - hot} thermal events under load" if now > hot else ""
        yield Measured("cpu throttling", float(now - hot), failed)
    yield _quota(groups, held, wall, len(speeds))
    yield Measured("cpu speed", min(speeds.values()), samples=tuple(speeds.values()))


def _quota(groups: list[Path], held: float | None, wall: float, cpus: int) -> Measured:
    after = throttled_s(groups)
    if held is None or after is None:
        return Measured("cpu quota", skipped="no cgroup with cpu.stat is visible")
    percent = 100 * (after - held) / (wall * cpus)
    failed = ""
    allowed = quota_cpus(groups)
    if allowed is not None and allowed < 0.99 * cpus:
        failed = f"a CPU quota of its cgroup leaves {allowed:.2f} of {cpus} CPUs"
    elif percent > QUOTA_PERCENT:
        failed = f"a CPU quota of its cgroup held the node back {percent:.1f} % of the time"
    return Measured("cpu quota", percent, failed)


def _hash_for(cpu: int) -> float:
    """Returns MB hashed per second of this process's CPU time, so other processes do not count."""
    del cpu
    begin, count = time.process_time(), 0
    while time.process_time() - begin < LOAD_S / 2:
        hashlib.sha256(BLOCK).digest()
        count += 1
    return count * len(BLOCK) / 1e6 / (time.process_time() - begin)


def on_each_cpu(
    function: Callable[[int], float], meanwhile: Callable[[], object] = lambda: None
) -> dict[int, float]:
    """Calls a function at the same time in a process on each CPU that this process may use.

    Args:
        function: receives the number of the CPU to which its process is bound.
        meanwhile: called once in this process after those processes have started.

    Raises:
        RuntimeError: a process ended without a result.
    """
    readers: dict[int, tuple[int, int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.sched_setaffinity(0, {cpu})
                os.write(writing, struct.pack("d", function(cpu)))
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        readers[cpu] = (pid, reading)
    meanwhile()
    found = {}
    for cpu, (pid, reading) in readers.items():
        data = os.read(reading, 8)
        os.close(reading)
        os.waitpid(pid, 0)
        if len(data) != 8:
            raise RuntimeError(f"the process on CPU {cpu} ended without a result")
        found[cpu] = float(struct.unpack("d", data)[0])
    return found


def frequency_mhz(sys_: Path, proc: Path) -> list[float]:
    """Returns the present frequency of each CPU, in MHz; [] if the kernel does not report it."""
    files = sorted(sys_.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
    found = [text for text in map(read_text, files) if text and text.isdecimal()]
    if found:
        return [int(text) / 1000 for text in found]
    lines = (read_text(proc / "cpuinfo") or "").splitlines()
    return [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]


def thermal_events(sys_: Path) -> int | None:
    """Returns the sum of thermal throttling events of all cores; None: the kernel has no
    counter."""
    files = sys_.glob("devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count")
    found = [int(text) for text in map(read_text, files) if text and text.isdecimal()]
    return sum(found) if found else None


def cgroups(membership: Path, root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Returns the CPU control groups (version 1 or 2) of a process, and all their ancestors."""
    found: list[Path] = []
    for line in (read_text(membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        bases = [root / "cpu", root / "cpu,cpuacct"] if controllers else [root, root / "unified"]
        for base in bases:
            folder = base / path.lstrip("/")
            while folder != base.parent and base in (folder, *folder.parents):
                if (folder / "cpu.stat").exists() and folder not in found:
                    found.append(folder)
                folder = folder.parent
    return found


def quota_cpus(groups: list[Path]) -> float | None:
    """Returns the CPUs that the tightest quota of these groups allows; None: there is no quota."""
    found: list[float] = []
    for group in groups:
        texts = (read_text(group / "cpu.max") or "").split()
        if not texts:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            texts = [read_text(group / name) or "" for name in names]
        if len(texts) == 2 and all(text.isdecimal() for text in texts) and int(texts[1]):
            found.append(int(texts[0]) / int(texts[1]))
    return min(found, default=None)


def throttled_s(groups: list[Path]) -> float | None:
    """Returns the largest throttled time of these groups, in seconds summed over all CPUs.

    Returns None if there is no counter.
    """
    found: list[float] = []
    for group in groups:
        fields = dict(
            line.split(" ", 1)
            for line in (read_text(group / "cpu.stat") or "").splitlines()
            if " " in line
        )
        if "throttled_usec" in fields:
            found.append(int(fields["throttled_usec"]) / 1e6)
        elif "throttled_time" in fields:
            found.append(int(fields["throttled_time"]) / 1e9)
    return max(found, default=None)
