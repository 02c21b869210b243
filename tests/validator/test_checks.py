"""The built-in checks: injected faults are found; recorded outputs of hardware are judged."""

import contextlib
import errno
import hashlib
import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests import waiting
from tests.draws import cases, drawn

from fireflyer.cli.app import run_line
from fireflyer.validator import fleet, pairs
from fireflyer.validator.checks import cpu, devices, gemm, memory, network, nvidia, system
from fireflyer.validator.model import Measured, NotRun, Settings

# -- flipped bits ----------------------------------------------------------------------------------


def test_a_flipped_bit_of_any_product_is_found() -> None:
    """Any bit of any element, in both types."""
    draw = drawn("flipped bits of gemm")
    for _ in range(cases(200)):
        at = draw.randrange(2)

        def flip(product: Any, number: int, at: int = at) -> None:
            if number == at:
                words = product.reshape(-1).view(np.uint64 if product.itemsize == 8 else np.uint32)
                bit = draw.randrange(8 * product.itemsize)
                words[draw.randrange(len(words))] ^= words.dtype.type(1 << bit)

        with pytest.raises(gemm.Wrong, match=r"^1$"):
            gemm.multiply(0.0, flip, size=24)


def test_products_without_a_fault_are_right() -> None:
    for seed in range(3):
        assert gemm.multiply(0.0, lambda *_: None, seed=seed, size=64) > 0


def test_sums_are_exact_in_both_types() -> None:
    draw = np.random.default_rng(0)
    for dtype, largest in gemm.DTYPES:
        left, right, _ = gemm._case(draw, dtype, largest, gemm.SIZE)
        bound = float(np.abs(left).max() * np.abs(right).max() * gemm.SIZE)
        assert bound < 2 ** (np.finfo(dtype).nmant + 1)


def test_a_flipped_bit_of_memory_is_found() -> None:
    """Any bit of any word, before any verification, also at the ends of pieces."""
    draw = drawn("flipped bits of memory")
    words = np.empty(3 * memory.CHUNK_BYTES // 8 // 2, np.uint64)
    for _ in range(cases(60)):
        when = draw.randrange(3 * len(memory.PATTERNS))
        place = draw.choice([0, len(words) - 1, draw.randrange(len(words))])

        def flip(found: memory.Words, number: int, when: int = when, place: int = place) -> None:
            if number == when:
                found[place] ^= np.uint64(1 << draw.randrange(64))

        assert memory.verify_pattern(words, flip) == 1
    assert memory.verify_pattern(words, lambda *_: None) == 0


def test_a_stuck_bit_is_found_by_every_pattern_that_it_contradicts() -> None:
    words = np.empty(1 << 12, np.uint64)

    def stuck(found: memory.Words, number: int) -> None:
        found[17] |= np.uint64(1)

    assert memory.verify_pattern(words, stuck) >= len(memory.PATTERNS)


@pytest.mark.parametrize(
    ("drill", "check"), [("gemm", "gemm"), ("memory pattern", "memory pattern")]
)
def test_a_drill_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, drill: str, check: str
) -> None:
    monkeypatch.setenv("FIREFLYER_VALIDATOR_DRILL", drill)
    line = ["validate", "--quick", "--check", check, "--memory", "8", "--json"]
    assert run_line(line) == 1
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert set(found) == {"name", "status", "value", "unit", "reason"}
    assert (found["name"], found["status"]) == (check, "failed")
    assert found["reason"]


# -- the processor ---------------------------------------------------------------------------------


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_counters_of_the_processor(tmp_path: Path) -> None:
    base = "devices/system/cpu"
    written(tmp_path, {
        f"{base}/cpu0/cpufreq/scaling_cur_freq": "2400000",
        f"{base}/cpu1/cpufreq/scaling_cur_freq": "800000",
        f"{base}/cpu0/thermal_throttle/core_throttle_count": "3",
        f"{base}/cpu1/thermal_throttle/core_throttle_count": "4",
    })  # fmt: skip
    assert cpu.frequency_mhz(tmp_path, tmp_path) == [2400.0, 800.0]
    assert cpu.thermal_events(tmp_path) == 7
    assert cpu.thermal_events(tmp_path / "none") is None
    written(tmp_path, {"cpuinfo": "cpu MHz\t\t: 2596.1\nflags: x\ncpu MHz : 2500.5"})
    assert cpu.frequency_mhz(tmp_path / "none", tmp_path) == [2596.1, 2500.5]


@pytest.mark.parametrize(
    ("membership", "stat", "seconds"),
    [
        ("0::/a/b", "usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000", 1.5),
        ("3:cpu:/a/b\n2:memory:/", "nr_periods 7\nthrottled_time 2500000000", 2.5),
    ],
)
def test_quotas_of_all_groups_above(
    tmp_path: Path, membership: str, stat: str, seconds: float
) -> None:
    root = tmp_path / ("cpu" if "cpu" in membership else ".")
    written(root, {"a/cpu.stat": stat, "a/b/cpu.stat": "nr_periods 0\nthrottled_usec 0"})
    written(tmp_path, {"membership": membership})
    groups = cpu.cgroups(tmp_path / "membership", tmp_path)
    assert {group.name for group in groups} >= {"a", "b"}
    assert cpu.throttled_s(groups) == seconds
    assert cpu.throttled_s([]) is None


def test_a_quota_is_named_before_it_is_reached(tmp_path: Path) -> None:
    """A busy machine may never reach its quota, so the quota itself counts."""
    written(tmp_path, {
        "one/cpu.cfs_quota_us": "-1", "one/cpu.cfs_period_us": "100000",
        "two/cpu.max": "max 100000", "three/cpu.max": "170000 100000",
        "four/cpu.cfs_quota_us": "340000", "four/cpu.cfs_period_us": "100000",
        "four/cpu.stat": "throttled_time 0",
    })  # fmt: skip
    assert cpu.quota_cpus([tmp_path / "one", tmp_path / "two"]) is None
    assert cpu.quota_cpus([tmp_path / name for name in ("two", "three", "four")]) == 1.7
    found = cpu._quota([tmp_path / "four"], 0.0, 1.0, 4)
    assert found.failed == "a CPU quota of its cgroup leaves 3.40 of 4 CPUs"
    assert cpu._quota([tmp_path / "four"], 0.0, 1.0, 3).failed == ""


def test_every_cpu_runs_its_own_process() -> None:
    seen = cpu.on_each_cpu(lambda number: float(os.sched_getaffinity(0) == {number}))
    assert seen == dict.fromkeys(os.sched_getaffinity(0), 1.0)
    with pytest.raises(RuntimeError, match="ended without a result"):
        cpu.on_each_cpu(lambda _: os._exit(1))


def test_numa_nodes(tmp_path: Path) -> None:
    written(tmp_path, {
        "devices/system/node/node0/cpulist": "0-3,8",
        "devices/system/node/node1/cpulist": "4-7",
        "devices/system/node/node2/cpulist": "",
    })  # fmt: skip
    found = memory.numa_nodes(tmp_path, {2, 3, 4, 8})
    assert found == {"node0": {2, 3, 8}, "node1": {4}}
    assert memory.numa_nodes(tmp_path / "none", {1}) == {"node0": {1}}


# -- clock and kernel log --------------------------------------------------------------------------


def test_clocks() -> None:
    assert system.skew(0x2001, 3.0) == Measured("clock skew", 3.0)
    assert "150 ms" in system.skew(0x2001, 150.0).failed
    assert "no NTP" in system.skew(0x40, 16000.0).skipped


LINES = {
    "mce: [Hardware Error]: CPU 3: Machine Check: Uncorrected error": "uncorrected machine check",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#1": "uncorrected memory error",
    "NVRM: Xid (PCI:0000:3d:00): 79, pid=1, GPU has fallen off the bus.": "Xid of failed hardware",
    "NVRM: Xid (PCI:0000:3d:00): 74, NVLink: fatal error": "Xid of failed hardware",
    "blk_update_request: I/O error, dev sda, sector 12": "disk error",
    "critical medium error, dev nvme0n1, sector 5 op 0x0": "disk error",
    "EXT4-fs error (device sda1): ext4_find_entry": "file system error",
    "CPU7: Core temperature above threshold, cpu clock throttled": "overheated core",
    "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received": "PCIe error",
}


@pytest.mark.parametrize("line", LINES)
def test_messages_of_failed_hardware(line: str) -> None:
    found = system.kernel_log(["usb 1-1: new device", line])
    assert (found.value, found.failed) == (1.0, f"{LINES[line]}: 1")


def test_messages_that_are_no_failure() -> None:
    harmless = [
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#1",
        "NVRM: Xid (PCI:0000:3d:00): 31, pid=1, MMU fault",
        "mlx5_core 0000:01:00.0: eth0: Link down",
        "mlx5_core 0000:01:00.0: eth0: Link up",
        "EXT4-fs (sda1): mounted filesystem",
    ]
    assert system.kernel_log(harmless) == Measured("kernel log", 0.0)
    cuts = [harmless[2]] * 3
    assert system.kernel_log(cuts).failed == "link lost: 3"


# -- devices, from recorded outputs ----------------------------------------------------------------


def pci(root: Path, name: str, kind: str, width: str, speed: str) -> None:
    base = f"bus/pci/devices/{name}"
    files = dict(zip(("current_link_width", "max_link_width"), width.split("|"), strict=True))
    files |= dict(zip(("current_link_speed", "max_link_speed"), speed.split("|"), strict=True))
    written(root / base, files | {"class": kind})


def test_pcie_links(tmp_path: Path) -> None:
    pci(tmp_path, "0000:01:00.0", "0x030200", "16|16", "2.5 GT/s PCIe|16.0 GT/s PCIe")
    pci(tmp_path, "0000:02:00.0", "0x020700", "16|16", "16.0 GT/s PCIe|16.0 GT/s PCIe")
    pci(tmp_path, "0000:00:01.0", "0x060400", "8|16", "16.0 GT/s PCIe|16.0 GT/s PCIe")
    pci(tmp_path, "0000:00:02.0", "0x010802", "0|4", "Unknown|8.0 GT/s PCIe")
    assert devices.pcie(tmp_path) == Measured("pcie links", 0.0)
    pci(tmp_path, "0000:03:00.0", "0x030200", "8|16", "16.0 GT/s PCIe|16.0 GT/s PCIe")
    pci(tmp_path, "0000:04:00.0", "0x020700", "16|16", "8.0 GT/s PCIe|16.0 GT/s PCIe")
    found = devices.pcie(tmp_path)
    assert found.value == 2.0
    assert found.failed == ("0000:03:00.0 has 8 of 16 lanes; 0000:04:00.0 runs at 8 of 16 GT/s")
    with pytest.raises(NotRun):
        devices.pcie(tmp_path / "none")


def test_infiniband_ports(tmp_path: Path) -> None:
    port = "class/infiniband/mlx5_0/ports/1"
    written(tmp_path, {f"{port}/state": "4: ACTIVE", f"{port}/counters/link_downed": "1"})
    assert devices.infiniband(tmp_path) == Measured("infiniband ports", 0.0)
    written(tmp_path, {f"{port}/counters/symbol_error": "65535"})
    assert devices.infiniband(tmp_path).failed == "mlx5_0 port 1 counts 65535 of symbol_error"
    written(tmp_path, {f"{port}/state": "1: DOWN", f"{port}/counters/symbol_error": "0"})
    assert devices.infiniband(tmp_path).failed == "mlx5_0 port 1 is DOWN"
    with pytest.raises(NotRun, match="no InfiniBand"):
        devices.infiniband(tmp_path / "none")


def test_smart_reports() -> None:
    good = json.dumps({"smart_status": {"passed": True}})
    nvme: dict[str, Any] = {"smart_status": {"passed": True}}
    worn = nvme | {"nvme_smart_health_information_log": {"percentage_used": 104}}
    media = nvme | {"nvme_smart_health_information_log": {"media_errors": 7}}
    denied = json.dumps({"smartctl": {"messages": [{"string": "Permission denied"}]}})
    assert devices.smart({"sda": good}) == Measured("smart", 0.0)
    found = devices.smart({
        "sda": json.dumps({"smart_status": {"passed": False}}), "sdb": good,
        "nvme0n1": json.dumps(worn), "nvme1n1": json.dumps(media),
    })  # fmt: skip
    assert found.failed == (
        "sda predicts its failure; nvme0n1 is worn out: 104 % of its life used; "
        "nvme1n1 counts 7 media errors"
    )
    for text, reason in ((denied, "Permission denied"), ("nonsense", "no JSON"), ("[]", "no JSON")):
        with pytest.raises(NotRun, match=reason):
            devices.smart({"sda": text})


class RecordedNvml:
    """Answers of a node with 2 GPUs, of which the second is in a bad state."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = 1
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_REPLAY = 2, 0

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.answers: dict[str, list[Any]] = {
            "nvmlDeviceGetRemappedRows": [(0, 0, False, False), (2, 1, True, False)],
            "nvmlDeviceGetTotalEccErrors": [0, 3],
            "nvmlDeviceGetCurrentClocksThrottleReasons": [0x1, 0x48],
            "nvmlDeviceGetTemperature": [61, 93],
            "nvmlDeviceGetCurrPcieLinkWidth": [16, 8],
            "nvmlDeviceGetMaxPcieLinkWidth": [16, 16],
        }

    def __getattr__(self, name: str) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            return lambda: None
        if name == "nvmlDeviceGetCount":
            return lambda: self.count
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index
        if name in self.answers:
            return lambda index, *_: self.answers[name][index]

        def unsupported(*_: Any) -> Any:
            raise self.NVMLError("Not Supported")

        return unsupported


def test_gpu_health_from_recorded_answers() -> None:
    found = nvidia.health(nvidia.states(RecordedNvml()))
    assert found.value == 1.0
    assert found.failed == (
        "GPU 1: hardware slowdown, hardware thermal slowdown, 3 uncorrected ECC errors, memory is "
        "to be remapped: reset the GPU, the temperature is 93 degrees Celsius, 8 of 16 PCIe lanes "
        "are in use"
    )
    assert nvidia.health(nvidia.states(RecordedNvml(1))) == Measured("gpu health", 0.0)
    with pytest.raises(NotRun, match="lists no GPU"):
        nvidia.states(RecordedNvml(0))


def test_without_a_driver_nothing_passes() -> None:
    class NoDriver(RecordedNvml):
        def __getattr__(self, name: str) -> Any:
            def missing() -> None:
                raise self.NVMLError("Driver Not Loaded")

            return missing

    with pytest.raises(NotRun, match="no NVIDIA driver: Driver Not Loaded"):
        nvidia.states(NoDriver())


# -- transfers between nodes -----------------------------------------------------------------------

SECRET = b"sixteen bytes or more"


def test_transfers_after_a_proof(tmp_path: Path) -> None:
    with pairs.listen(("127.0.0.1", 0), SECRET) as listener:
        address = listener.getsockname()[:2]
        thread = threading.Thread(target=pairs.serve_one, args=(listener, SECRET))
        thread.start()
        with pairs.Link(address, SECRET) as link:
            assert link.send(1_000_003) > 0
            assert link.echo() > 0
        thread.join()
        thread = threading.Thread(target=pairs.serve_one, args=(listener, SECRET))
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="rejected the secret"):
            pairs.Link(address, b"some other secret")
        thread.join()


class FakeLink(contextlib.nullcontext[None]):
    """Link to a peer whose name is its speed; "down" cannot be reached."""

    def __init__(self, address: pairs.Address, secret: bytes) -> None:
        super().__init__()
        if address[0] == "down":
            raise ConnectionRefusedError("refused")
        self.speed = float(address[0])

    def __enter__(self) -> "FakeLink":  # type: ignore[override]
        return self

    def bytes_for(self, seconds: float) -> int:
        return int(seconds)

    def send(self, size: int) -> float:
        return 1e6 * self.speed

    def echo(self) -> float:
        return 1e-6 / self.speed


@pytest.mark.parametrize(
    ("peers", "any_peer", "found"),
    [
        (("4:1", "2:1"), False, (2.0, "", 0.5)),
        (("4:1", "2:1"), True, (4.0, "", 0.25)),
        (("4:1", "down:1"), False, (4.0, "down:1: refused", 0.25)),
        (("4:1", "down:1"), True, (4.0, "", 0.25)),
        (("down:1",), False, (None, "no peer can be reached: down:1: refused", None)),
    ],
)
def test_figures_of_several_peers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    peers: tuple[str, ...],
    any_peer: bool,
    found: tuple[float | None, str, float | None],
) -> None:
    """By hand the worst peer counts; for the platform one bad peer is no fault of the node."""
    monkeypatch.setattr(pairs, "Link", FakeLink)
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    settings = Settings(peers=peers, secret_file=str(path), any_peer=any_peer)
    rate, latency = network.run_pairs(settings)
    assert (rate.value, rate.failed) == found[:2]
    assert latency.value == (None if found[2] is None else pytest.approx(found[2]))


@pytest.mark.parametrize(
    ("peers", "secret", "reason"),
    [
        ((), SECRET, "no peer is given"),
        (("down:1",), SECRET, "no peer can be reached: down:1: refused"),
        (("4:1",), b"short", "fewer than 16 bytes"),
        (("4:1",), None, "cannot read the secret"),
    ],
)
def test_a_network_that_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    peers: tuple[str, ...],
    secret: bytes | None,
    reason: str,
) -> None:
    monkeypatch.setattr(pairs, "Link", FakeLink)
    path = tmp_path / "secret"
    if secret is not None:
        path.write_bytes(secret)
    with pytest.raises(NotRun, match=reason):
        list(network.run_pairs(Settings(peers=peers, secret_file=str(path), any_peer=True)))


def connected() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname(), timeout=waiting.LIMIT_S)
        there, _ = listener.accept()
    return here, there


def test_a_listener_that_does_not_know_the_secret() -> None:
    """It answers with any bytes: the sender sends nothing to it."""
    here, there = connected()

    def impostor() -> None:
        there.sendall(bytes(32))
        there.recv(64, socket.MSG_WAITALL)
        there.sendall(hashlib.sha256(b"guess").digest())

    thread = threading.Thread(target=impostor)
    thread.start()
    fake = SimpleNamespace(create_connection=lambda *_, **__: here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "socket", SimpleNamespace(**{**vars(socket), **vars(fake)}))
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            pairs.Link(("h", 1), SECRET)
    thread.join()
    there.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.0\r\n\r\n" * 9, bytes(64)])
def test_a_listener_survives_strangers(sent: bytes) -> None:
    here, there = connected()
    with here, there:
        thread = threading.Thread(target=pairs.serve, args=(there, SECRET))
        thread.start()
        here.sendall(sent)
        here.shutdown(socket.SHUT_WR)
        thread.join()
        assert len(here.recv(100)) == pairs.NONCE_BYTES, "a nonce, and nothing made with the secret"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--peer", "nowhere"], "invalid address 'nowhere'"),
        (["--check", "gem"], "invalid check 'gem'"),
        (["--directory", "/none"], "invalid --directory /none"),
        (["--limits", "/none"], "cannot read /none"),
        (["--peer", "127.0.0.1:7"], "transfers between nodes need --secret-file"),
        (["--csv", "/none/fleet.csv"], "invalid --csv /none/fleet.csv"),
        (["--csv", "/dev/full"], "expected a regular file"),
        (["--csv", __file__], "expected the columns node,check,value,better"),
        (
            ["listen", "--address", "127.0.0.1:0", "--secret-file", "/none"],
            "cannot read the secret",
        ),
    ],
)
def test_bad_requests(capsys: Any, line: list[str], message: str) -> None:
    quick = [] if line[0] == "listen" else ["--quick"]
    assert run_line(["validate", *quick, *line]) == 1
    assert message in capsys.readouterr().err


# -- the command -----------------------------------------------------------------------------------


def test_checks_append_their_samples(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "fleet.csv"
    for node in ("n1", "n2", "n3"):
        line = ["validate", "--check", "clock", "--check", "loopback", "--csv", str(path)]
        assert run_line([*line, "--node", node]) == 0
    shown = capsys.readouterr().out
    assert "loopback bandwidth" in shown
    assert run_line(["validate", "fleet", str(path), "--json"]) == 0
    checks = {one["check"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["loopback bandwidth"]["nodes"] == 3
    assert checks["loopback latency"]["better"] == "less"


def test_samples_that_cannot_be_appended_are_shown(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of the rows: none of them stays, and the results are shown."""
    path = tmp_path / "fleet.csv"
    path.write_text("node,check,value,better\nn1,gemm,1,more")
    write = os.write

    def full(file: int, data: bytes) -> int:
        if os.path.samestat(os.fstat(file), path.stat()):
            if b"loopback" not in data[:40]:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[:60]
        return write(file, data)

    line = ["validate", "--check", "loopback", "--csv", str(path), "--node", "n2"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert run_line(line) == 1
    shown = capsys.readouterr()
    assert "loopback bandwidth" in shown.out
    assert f"cannot append the samples to {path}: No space left on device" in shown.err
    assert path.read_text() == "node,check,value,better\nn1,gemm,1,more"
    assert run_line(line) == 0
    assert path.read_text().splitlines()[:2] == ["node,check,value,better", "n1,gemm,1,more"]
    assert list(fleet.read(path)["loopback latency"].values) == ["n2"]


def test_the_list_of_checks(capsys: Any) -> None:
    assert run_line(["validate", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"gemm", "disk", "gpu health"} <= {check["name"] for check in found}
    assert run_line(["validate", "--list"]) == 0
    assert "fsync latency" in capsys.readouterr().out


def test_one_kind_of_validation_at_a_time(capsys: Any) -> None:
    assert run_line(["validate", "--quick", "--full"]) == 2
    assert "give one of --quick and --full" in capsys.readouterr().err


@pytest.mark.full
def test_a_quick_validation(capsys: Any) -> None:
    assert run_line(["validate", "--quick", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert {found[name]["status"] for name in ("gemm", "memory pattern", "disk write")} == {
        "passed"
    }
    assert found["network bandwidth"]["status"] == "not run"
    for one in found.values():
        assert one["status"] != "not run" or one["reason"]


def test_gpu_products_and_memory_on_the_processor() -> None:
    """The arithmetic of the GPU checks, by torch on the CPU: right without a fault, and not with."""
    torch = pytest.importorskip("torch")
    from fireflyer.validator import gpu

    assert gpu.products(torch, "cpu", 0.0, 96, flip=False)[1] == 0
    assert gpu.products(torch, "cpu", 0.0, 96, flip=True)[1] == 1
    chunks = [torch.empty(1000, dtype=torch.int32) for _ in range(3)]
    assert gpu.verify_chunks(torch, chunks, flip=False) == 0
    assert gpu.verify_chunks(torch, chunks, flip=True) == 1
    with pytest.raises(NotRun):
        list(gpu.run_gemm(Settings()))
