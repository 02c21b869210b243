"""Use of the hardware by the ranks of a node, which their supervisor samples once a second.

The sampler keeps totals since its start: seconds of CPU, bytes of I/O, and sums over all samples of
memory and GPU load. It writes the totals in place to a small file in the attempt's folder. A reader
takes the difference between two reads, so it may skip reads, and the file never grows. This module
imports neither asyncio nor torch.

    <attempt>/<node>.usage      Usage as one line of JSON
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

SAMPLE_S = 1.0
"""Seconds between two samples."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

WRITE_EVERY = 10
"""Number of samples between two writes of the file."""


class RankUsage(msgspec.Struct):
    """Totals of one incarnation of a rank, including child processes."""

    rank: int
    pid: int
    cpu_s: float = 0.0
    read: int = 0
    written: int = 0
    """Bytes read from and written to storage."""
    memory_sum: float = 0.0
    """Resident bytes, added up over `samples`."""
    samples: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Totals of a node's part of an attempt."""

    node: str
    seconds: float = 0.0
    """Time since the first sample."""
    samples: int = 0
    ranks: list[RankUsage] = []
    received: int = 0
    sent: int = 0
    """Bytes through the network interfaces of the node since its boot, without loopback."""
    gpus: int = 0
    """Number of sampled GPUs."""
    gpu_sum: float = 0.0
    """Load of the sampled GPUs from 0 to 1 each, added up over GPUs and samples."""
    gpu_memory_sum: float = 0.0
    """Used memory of the sampled GPUs in bytes, added up over GPUs and samples."""


class Sampler:
    """Sampler of one part of an attempt.

    Args:
        path: the file.
        node: name of the node.
        devices: indexes of the part's GPUs in NVML.
        nvml: the NVML library, initialised by the caller; None: no GPU is sampled.
    """

    def __init__(
        self, path: Path, node: str, devices: Sequence[int] = (), nvml: Any = None
    ) -> None:
        self._path = path
        self._usage = Usage(node=node)
        self._ranks: dict[int, RankUsage] = {}
        self._began: float | None = None
        self._nvml = nvml
        self._handles: list[Any] = []
        if nvml is not None:
            for device in devices:
                with contextlib.suppress(nvml.NVMLError):
                    self._handles.append(nvml.nvmlDeviceGetHandleByIndex(device))
        self._usage.gpus = len(self._handles)

    def sample(self, running: Mapping[int, int], now: float) -> None:
        """Takes one sample of the running ranks (pid -> rank). Writes the file every WRITE_EVERY
        samples."""
        usage = self._usage
        if self._began is None:
            self._began = now
        usage.seconds = now - self._began
        usage.samples += 1
        for pid, rank in running.items():
            self._sample_rank(pid, rank)
        usage.received, usage.sent = network()
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                usage.gpu_sum += self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                usage.gpu_memory_sum += self._nvml.nvmlDeviceGetMemoryInfo(handle).used
        if usage.samples % WRITE_EVERY == 1:
            self.write()

    def _sample_rank(self, pid: int, rank: int) -> None:
        totals = self._ranks.get(rank)
        if totals is None or totals.pid != pid:
            totals = self._ranks[rank] = RankUsage(rank=rank, pid=pid)
        cpu, memory, read, written = 0.0, 0, 0, 0
        for member in tree(pid):
            try:
                found = counters(member)
            except OSError:
                continue  # the process has ended; its parent's totals include its CPU time once it is reaped
            cpu += found[0]
            memory += found[1]
            read += found[2]
            written += found[3]
        # From the end of a child until its parent has reaped it, the sums lack the child's part. So
        # `max` keeps the totals from falling.
        totals.cpu_s = max(totals.cpu_s, cpu)
        totals.read, totals.written = max(totals.read, read), max(totals.written, written)
        totals.memory_sum += memory
        totals.samples += 1

    def write(self) -> None:
        """Writes the totals. Ignores errors, so that a full disk does not end the rank."""
        if not self._usage.samples:
            return
        self._usage.ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        data = msgspec.json.encode(self._usage) + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, data, 0)
                os.ftruncate(descriptor, len(data))
            finally:
                os.close(descriptor)


def usage_path(attempt: Path, node: str) -> Path:
    return attempt / f"{node}.usage"


def read_usage(path: Path) -> Usage | None:
    """Returns the totals in a file; None if the file is missing, or was read during a write."""
    try:
        data = path.read_bytes()
        return msgspec.json.decode(data, type=Usage) if data.endswith(b"\n") else None
    except (OSError, msgspec.MsgspecError):
        return None


def tree(pid: int) -> list[int]:
    """Returns a process and those of its descendants that were started by main threads."""
    found = [pid]
    for process in found:
        try:
            with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found


def counters(pid: int) -> tuple[float, int, int, int]:
    """Returns a process's CPU seconds, including reaped children, its resident bytes, and its bytes
    read from and written to storage (0 if the kernel does not report them). Reads only two files of
    proc(5), because this function runs once a second for each process.

    Raises:
        OSError: the process has ended.
    """
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        text = file.read(4096)
    fields = text[text.rindex(b")") + 2 :].split()  # the command name before it may contain blanks
    ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    moved: dict[bytes, bytes] = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", "rb", buffering=0) as file:
        words = file.read(4096).split()
        moved = dict(zip(words[::2], words[1::2], strict=False))
    read, written = moved.get(b"read_bytes:", 0), moved.get(b"write_bytes:", 0)
    return ticks / _TICKS, int(fields[21]) * _PAGE, int(read), int(written)


def network() -> tuple[int, int]:
    """Returns the bytes that the node's interfaces have received and sent, without loopback."""
    received = sent = 0
    with open("/proc/net/dev", encoding="ascii") as file:
        for line in file.readlines()[2:]:
            name, _, figures = line.partition(":")
            if name.strip() != "lo":
                words = figures.split()
                received, sent = received + int(words[0]), sent + int(words[8])
    return received, sent


def open_nvml(devices: Sequence[int]) -> Any:
    """Returns the initialised NVML library; None if `devices` is empty or the driver is missing."""
    if not devices:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def next_sample(last: float) -> float:
    """Returns the time.monotonic() of the sample after the sample at `last`. Missed samples are
    skipped."""
    return max(last + SAMPLE_S, time.monotonic())
