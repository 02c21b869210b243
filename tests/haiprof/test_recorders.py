"""Recorders: of this process, of a recorded machine, of recorded answers of NVML."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.waiting import until

from fireflyer.haiprof.recorders import Recorder, available
from fireflyer.haiprof.recorders.gpu import Gpu
from fireflyer.haiprof.recorders.host import InfiniBand, Numa
from fireflyer.haiprof.recorders.process import InputOutput


def test_each_recorder_serves_or_says_why_not() -> None:
    for name, make in available().items():
        recorder: Recorder = make(os.getpid())
        assert recorder.name == name
        assert recorder.interval_s > 0
        reason = recorder.missing()
        if reason is None:
            found = recorder.sample()
            assert found
            assert all(isinstance(value, float) and value >= 0 for value in found.values())
        else:
            assert len(reason) > 10


def test_counters_of_this_process_grow(tmp_path: Path) -> None:
    cpu, io = available()["cpu"](os.getpid()), available()["io"](os.getpid())
    before, written = cpu.sample(), io.sample()
    until(lambda: cpu.sample()["run_s_total"] > before["run_s_total"])
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    assert io.sample()["written_chars_total"] >= written["written_chars_total"] + (1 << 20)


FAMILIES = [socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_that_a_peer_does_not_take_are_seen_with_its_address(
    family: socket.AddressFamily,
) -> None:
    dual = {"family": family, "dualstack_ipv6": family == socket.AF_INET6}
    with (
        socket.create_server(("", 0), **dual) as listener,  # type: ignore[arg-type]
        socket.socket(family) as sender,
    ):
        here = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
        sender.connect((here, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sender.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        found = InputOutput(os.getpid()).sample()
        accepted.close()
    assert found["blocked_127.0.0.1"] > 0


def test_infiniband_and_numa_of_a_recorded_machine(tmp_path: Path) -> None:
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("25\n")
    (counters / "link_downed").write_text("2\n")
    ib = InfiniBand(1, tmp_path)
    assert ib.missing() is None
    assert ib.sample() == {"mlx5_0_1_sent_bytes_total": 100.0, "mlx5_0_1_link_downed_total": 2.0}
    assert InfiniBand(1, tmp_path / "none").missing() == "this machine has no InfiniBand port"
    for node in range(2):
        folder = tmp_path / "nodes" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "numastat").write_text(f"numa_hit 10\nnuma_miss {node}\ninterleave_hit 3\n")
    numa = Numa(1, tmp_path / "nodes")
    assert numa.missing() is None
    assert numa.sample()["node1_numa_miss_total"] == 1.0
    assert "node1_interleave_hit_total" not in numa.sample()


class Nvml:
    """Answers of NVML in the form of the interface; power is not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 1, failure: str = "") -> None:
        self.count, self.failure = count, failure

    def nvmlInit(self) -> None:  # noqa: N802
        if self.failure:
            raise self.NVMLError(self.failure)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:  # noqa: N802
        raise self.NVMLError("Not Supported")

    def __getattr__(self, name: str) -> Any:
        processes = [SimpleNamespace(pid=7, usedGpuMemory=3 << 30),
                     SimpleNamespace(pid=8, usedGpuMemory=None)]  # fmt: skip
        answers = {
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=83, memory=41),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=4 << 30),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPcieThroughput": 2048,
            "nvmlDeviceGetComputeRunningProcesses": processes,
        }
        return lambda *_: answers[name]


def test_gpus_through_recorded_answers() -> None:
    gpu = Gpu(7, Nvml())
    assert gpu.missing() is None
    assert gpu.sample() == {
        "gpu0_busy": 0.83, "gpu0_memory_busy": 0.41, "gpu0_memory_bytes": float(4 << 30),
        "gpu0_process_memory_bytes": float(3 << 30), "gpu0_celsius": 61.0,
        "gpu0_pcie_sent_bytes_s": 2048.0 * 1024, "gpu0_pcie_received_bytes_s": 2048.0 * 1024,
    }  # fmt: skip
    assert Gpu(7, Nvml(0)).missing() == "NVML: this machine has no NVIDIA GPU"
    assert "Driver Not Loaded" in (Gpu(7, Nvml(failure="Driver Not Loaded")).missing() or "")
