"""NVIDIA GPUs: health by NVML; memory and matrix products by torch (`validator/gpu.py`)."""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings

CHECKS = (
    Check(
        name="gpu health",
        figures=(Figure("gpu health", "bad GPUs", "less"),),
        needs="an NVIDIA GPU and its driver",
        duration_s=1.0,
        function="fireflyer.validator.checks.nvidia:run",
    ),
    Check(
        name="gpu memory",
        figures=(Figure("gpu memory", "GB tested"),),
        needs="an NVIDIA GPU and torch with CUDA",
        duration_s=8.0,
        function="fireflyer.validator.gpu:run_memory",
    ),
    Check(
        name="gpu gemm",
        figures=(Figure("gpu gemm", "TFLOP/s"), Figure("gpu transfer", "GB/s")),
        needs="an NVIDIA GPU and torch with CUDA",
        duration_s=8.0,
        function="fireflyer.validator.gpu:run_gemm",
    ),
)

HOT_C = 90
SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's throttle reasons that mean broken cooling or power."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one GPU as NVML reports it; None: the GPU does not report it."""

    name: str
    uncorrected: int | None = None
    """Uncorrected ECC errors since the last load of the driver."""
    retired_pending: bool | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttled: int = 0
    celsius: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    nvlink_errors: int = 0


class Nvml(Protocol):
    """Functions of pynvml that this module uses; tests substitute recorded answers."""

    def __getattr__(self, name: str) -> Any: ...


def run(settings: Settings) -> Iterator[Measured]:
    """Reads the state of each GPU."""
    del settings
    import pynvml

    yield health(states(pynvml))


def states(nvml: Nvml) -> list[GpuState]:
    """Reads the state of all GPUs.

    Raises:
        NotRun: there is no driver or no GPU.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NotRun(f"no NVIDIA driver: {error}") from None
    try:
        count = nvml.nvmlDeviceGetCount()
        if not count:
            raise NotRun("the driver lists no GPU")
        return [_state(nvml, index) for index in range(count)]
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Nvml, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        """Calls a function of NVML; returns None if this GPU does not support it."""
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    rows = ask("nvmlDeviceGetRemappedRows")
    retired = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    errors = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        errors += (
            ask("nvmlDeviceGetNvLinkErrorCounter", link, nvml.NVML_NVLINK_ERROR_DL_REPLAY) or 0
        )
    return GpuState(
        name=f"GPU {index}",
        uncorrected=ask(
            "nvmlDeviceGetTotalEccErrors",
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        retired_pending=None if retired is None else bool(retired),
        remapped_uncorrectable=None if rows is None else rows[1],
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        throttled=ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0,
        celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        link_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        link_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlink_errors=errors,
    )


def health(found: list[GpuState]) -> Measured:
    """Judges the states of all GPUs."""
    bad = {state.name: reasons for state in found if (reasons := _reasons(state))}
    text = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in bad.items())
    return Measured("gpu health", float(len(bad)), text)


def _reasons(state: GpuState) -> list[str]:
    found = [text for bit, text in SLOWDOWNS.items() if state.throttled & bit]
    if state.uncorrected:
        found.append(f"{state.uncorrected} uncorrected ECC errors")
    if state.remap_failed:
        found.append("a row could not be remapped: replace the GPU")
    if state.remap_pending or state.retired_pending:
        found.append("memory is to be remapped: reset the GPU")
    if state.celsius is not None and state.celsius >= HOT_C:
        found.append(f"the temperature is {state.celsius} degrees Celsius")
    width, most = state.link_width, state.link_width_max
    if width and most and width < most:
        found.append(f"{width} of {most} PCIe lanes are in use")
    if state.nvlink_errors:
        found.append(f"{state.nvlink_errors} NVLink replays")
    return found
