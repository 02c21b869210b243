"""What is read from the kernel's log: the lines that are known, and any bytes."""

import os
import select
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.hai.model.observations import Memory, Network, OutOfMemory, Xid
from fireflyer.hai.supervisor.kernel_log import KernelLog, chosen, open_kernel_log
from fireflyer.hai.supervisor.kernel_messages import LINE_BYTES, message, parse

XID = "NVRM: Xid (PCI:0000:3b:00): "
MLX = "mlx5_core 0000:5e:00.0"
KNOWN = [
    (XID + "79, pid=1234, name=python, GPU has fallen off the bus.", Xid, (79, "0000:3b:00", 1234)),
    (XID + "43, Ch 00000010", Xid, (43, "0000:3b:00", None)),
    (XID + "31, pid='<unknown>', name=<unknown>, Ch 00000008", Xid, (31, "0000:3b:00", None)),
    ("NVRM: Xid (PCI:0000:c1:00 GPU-I:03): 94, pid='77', name=train", Xid, (94, "0000:c1:00", 77)),
    ("NVRM: Xid (0000:86:00): 119, Timeout", Xid, (119, "0000:86:00", None)),
    (MLX + " ib0: Link down", Network, ("ib0", "down")),
    (MLX + " eth2: Link up", Network, ("eth2", "up")),
    (MLX + ": Port module event: module 0, Cable unplugged", Network, ("0000:5e:00.0", "error")),
    ("bnxt_en 0000:18:00.0 eno1: NIC Link is Down", Network, ("eno1", "down")),
    ("e1000e: eno1 NIC Link is Up 1000 Mbps Full Duplex", Network, ("eno1", "up")),
    ("Out of memory: Killed process 1234 (python) total-vm:1kB", OutOfMemory, (1234,)),
    ("Memory cgroup out of memory: Killed process 99 (python3) anon", OutOfMemory, (99,)),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Chan#1_DIMM#0", Memory, (False,)),
    ("EDAC skx MC1: 3 CE memory read error on CPU_SrcID#0", Memory, (True,)),
    ("mce: [Hardware Error]: CPU 1: Uncorrected error", Memory, (False,)),
]

STRANGE = [
    "usb 1-1: new high-speed USB device number 2",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
    "NVRM: Xid",
    "mlx5_core 0000:5e:00.0: firmware version: 16.35.2000",
    "Out of memory and out of time",
    "",
]


def fields(found: object) -> tuple[object, ...]:
    match found:
        case Xid():
            return (found.code, found.device, found.pid)
        case Network():
            return (found.device, found.state)
        case OutOfMemory():
            return (found.pid,)
        case Memory():
            return (found.corrected,)
    raise AssertionError(found)


@pytest.mark.parametrize("frame", ["{}", "4,1234,5678901,-;{}\n SUBSYSTEM=pci\n", "[ 12.3456] {}"])
@pytest.mark.parametrize(("line", "kind", "wanted"), KNOWN)
def test_a_known_line(frame: str, line: str, kind: type, wanted: tuple[object, ...]) -> None:
    found = parse(frame.format(line).encode(), "n3", 17.5)
    assert type(found) is kind
    assert found is not None
    assert (found.node, found.wall) == ("n3", 17.5)
    assert fields(found) == wanted
    assert line in found.line


@pytest.mark.parametrize("line", STRANGE)
def test_other_lines_say_nothing(line: str) -> None:
    assert parse(line.encode(), "n0", 0.0) is None


PIECES = st.sampled_from(
    [line.encode() for line, _, _ in KNOWN]
    + [
        b"NVRM: Xid (",
        b"PCI:",
        b"): ",
        b"pid=",
        b"mlx5_core ",
        b"Link ",
        b"down",
        b";",
        b"4,1,2,-;",
    ]
    + [
        b"Killed process ",
        b"EDAC MC",
        b"[Hardware Error]",
        b"99999999999999999999",
        b"\n",
        b"\0\xff",
    ]
)


@settings(max_examples=cases(500), deadline=None)
@given(st.lists(st.one_of(PIECES, st.binary(max_size=30)), max_size=12).map(b"".join))
def test_no_bytes_break_it(record: bytes) -> None:
    text = message(record)
    assert len(text) <= LINE_BYTES
    assert text.isprintable()
    found = parse(record, "n0", 1.0)
    if found is not None:
        assert found.line == text
        assert found.node == "n0"
    if isinstance(found, Xid):
        assert 0 <= found.code < 100_000


def ready(log: KernelLog) -> bool:
    return bool(select.select([log.descriptor], [], [], 0)[0])


def test_a_file_is_read_from_its_end_on_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_bytes(b"old\n")
    log = KernelLog(str(path))
    assert not ready(log)
    assert log.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntwo\nthr")
        assert ready(log)
        assert log.read() == [b"one", b"two"]
        assert not ready(log)
        file.write(b"ee\n")
        assert ready(log)
        assert log.read() == [b"three"]
    log.close()


def test_none_where_it_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("off", "", str(tmp_path / "missing"), str(tmp_path / "pipe"), "/dev/null"):
        assert open_kernel_log(path) is None
    monkeypatch.delenv("FIREFLYER_KERNEL_LOG", raising=False)
    assert chosen() == "/dev/kmsg"
    monkeypatch.setenv("FIREFLYER_KERNEL_LOG", "off")
    assert chosen() == "off"
