"""Recorder `gpu`: utilisation, memory, power, temperature and PCIe traffic, through NVML.

NVML comes with NVIDIA's driver. On a machine without NVML, `missing` returns the reason.
"""

import contextlib
from collections.abc import Callable
from typing import Any


class Gpu:
    """Values of each GPU, as `gpu<N>_<name>`, and the GPU memory of the process."""

    name = "gpu"
    interval_s = 0.5

    def __init__(self, pid: int, nvml: Any = None) -> None:
        self._pid = pid
        self._devices: list[Any] = []
        self._reason: str | None = None
        if nvml is None:
            import pynvml

            nvml = pynvml
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(count)]
        except nvml.NVMLError as error:
            self._reason = f"NVML: {error}"
        if not self._devices and self._reason is None:
            self._reason = "NVML: this machine has no NVIDIA GPU"

    def missing(self) -> str | None:
        return self._reason

    def sample(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for number, device in enumerate(self._devices):
            for name, read in self._reads(device):
                with contextlib.suppress(self._nvml.NVMLError):  # a card may lack a counter
                    values[f"gpu{number}_{name}"] = float(read())
        return values

    def _reads(self, device: Any) -> list[tuple[str, Callable[[], float]]]:
        nvml = self._nvml
        return [
            ("busy", lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
            ("memory_busy", lambda: nvml.nvmlDeviceGetUtilizationRates(device).memory / 100),
            ("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(device).used),
            ("process_memory_bytes", lambda: self._held(device)),
            ("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
            ("celsius", lambda: nvml.nvmlDeviceGetTemperature(device, 0)),
            ("pcie_sent_bytes_s", lambda: nvml.nvmlDeviceGetPcieThroughput(device, 0) * 1024),
            ("pcie_received_bytes_s", lambda: nvml.nvmlDeviceGetPcieThroughput(device, 1) * 1024),
        ]

    def _held(self, device: Any) -> float:
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
        return float(sum(p.usedGpuMemory or 0 for p in processes if p.pid == self._pid))
