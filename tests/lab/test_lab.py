"""The lab: hosts apart from one another, bytes counted, cables cut, nothing left behind."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

from fireflyer.errors import LabError
from fireflyer.lab import Lab, namespaces, remove_stale
from fireflyer.lab.hosts import parse_rate

MISSING = namespaces.why_not()
DEADLINE_S = LIMIT_S


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if MISSING is not None:
        pytest.skip(f"no lab here: {MISSING}")
    with Lab(hosts=3, rate="500mbit") as made:
        yield made


def ours() -> list[str]:
    """Namespaces of this process's labs."""
    return [
        name for name in os.listdir(namespaces.NETNS) if name.startswith(f"fflab-{os.getpid()}-")
    ]


def connected(lab: Lab, source: int, target: int) -> tuple[socket.socket, socket.socket]:
    """A TCP connection between two hosts: (end at source, end at target)."""
    address = lab.hosts[target].address
    with lab.hosts[target].call(lambda: socket.create_server((address, 0))) as server:
        server.settimeout(DEADLINE_S)
        port = server.getsockname()[1]
        near = lab.hosts[source].call(lambda: socket.create_connection((address, port), DEADLINE_S))
        far, _ = server.accept()
    far.settimeout(DEADLINE_S)
    return near, far


def transfer(near: socket.socket, far: socket.socket, size: int) -> None:
    sender = threading.Thread(target=near.sendall, args=(bytes(size),))
    sender.start()
    left = size
    while left:
        left -= len(far.recv(min(left, 1 << 20)))
    sender.join()


def wait_for_end(pidfd: int) -> None:
    readable, _, _ = select.select([pidfd], [], [], DEADLINE_S)
    os.close(pidfd)
    assert readable, "the process still lives"


@pytest.mark.netns
def test_counters_count_a_transfer_to_within_its_headers(lab: Lab) -> None:
    size = 8 << 20
    near, far = connected(lab, 0, 1)
    before = [(host.tx_bytes, host.rx_bytes) for host in lab.hosts]
    transfer(near, far, size)
    after = [(host.tx_bytes, host.rx_bytes) for host in lab.hosts]
    near.close()
    far.close()
    sent = after[0][0] - before[0][0]
    received = after[1][1] - before[1][1]
    # A full frame carries 1448 bytes of payload in 1514; 16 KiB for ARP and what is sent twice.
    bound = size * 1514 // 1448 + (16 << 10)
    assert size <= sent <= bound
    assert size <= received <= bound
    assert after[1][0] - before[1][0] < size // 20, "the receiver sends only acknowledgements"
    assert after[2][0] - before[2][0] < 1024, "a host that takes no part is silent"


@pytest.mark.netns
def test_cables_are_shaped_at_both_ends(lab: Lab) -> None:
    name = lab.hosts[1].namespace
    assert name is not None
    switch = name.replace("-h1", "-switch")
    for namespace, device in ((name, "eth0"), (switch, "p1")):
        shown = subprocess.run(
            ["tc", "-n", namespace, "-j", "qdisc", "show", "dev", device],
            check=True,
            capture_output=True,
        )
        [qdisc] = json.loads(shown.stdout)
        assert qdisc["kind"] == "tbf"
        assert qdisc["options"]["rate"] == 500_000_000 // 8


@pytest.mark.netns
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_short_queue_drops_what_a_long_one_holds() -> None:
    drops = {}
    for queue_ms in (0.5, 500.0):
        with Lab(hosts=3, rate="100mbit", queue_ms=queue_ms) as lab:
            assert lab.switched(0)[1] == 0
            pairs = [connected(lab, source, 0) for source in (1, 2)]
            senders = [threading.Thread(target=transfer, args=(*pair, 4 << 20)) for pair in pairs]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            packets, drops[queue_ms] = lab.switched(0)
            assert packets > (8 << 20) // 1514 // 64, "packets may be joined, 64 KiB at most"
            for near, far in pairs:
                near.close()
                far.close()
    assert drops[0.5] > 0
    assert drops[500.0] == 0


def test_packets_are_counted_by_the_switch_of_a_shaped_lab_alone() -> None:
    with pytest.raises(LabError, match="queue of 0 ms"):
        Lab(queue_ms=0)
    with (
        Lab(hosts=1, fallback=True) as plain,
        pytest.raises(LabError, match="namespaces and a rate"),
    ):
        plain.switched(0)


@pytest.mark.netns
def test_cut_stops_every_byte_and_mend_lets_them_pass(lab: Lab) -> None:
    near, far = connected(lab, 0, 2)
    lab.cut(2)
    before = lab.hosts[2].rx_bytes
    near.sendall(b"lost" * 1000)
    far.settimeout(0.3)
    with pytest.raises(TimeoutError):
        far.recv(1)
    with pytest.raises(OSError, match=r"timed out|unreachable|No route"):
        lab.hosts[1].call(lambda: socket.create_connection((lab.hosts[2].address, 9), 0.3))
    assert lab.hosts[2].rx_bytes == before
    lab.mend(2)
    far.settimeout(DEADLINE_S)
    got = 0
    while got < 4000:
        got += len(far.recv(4000))
    near.close()
    far.close()
    assert lab.hosts[2].rx_bytes >= before + 4000


@pytest.mark.netns
def test_two_labs_do_not_see_one_another(lab: Lab) -> None:
    with Lab(hosts=2) as other:
        assert other.hosts[0].address == lab.hosts[0].address
        before = [host.rx_bytes for host in lab.hosts]
        near, far = connected(other, 0, 1)
        transfer(near, far, 1 << 20)
        near.close()
        far.close()
        assert other.hosts[1].rx_bytes > 1 << 20
        assert [host.rx_bytes for host in lab.hosts] == before
    near, far = connected(lab, 0, 1)
    near.close()
    far.close()


@pytest.mark.netns
def test_run_executes_on_the_host(lab: Lab) -> None:
    done = lab.run(1, ["ip", "-br", "-4", "addr", "show", "dev", "eth0"])
    assert done.returncode == 0
    assert lab.hosts[1].address.encode() in done.stdout
    with pytest.raises(LabError, match="no such program"):
        lab.run(1, ["no-such-program"])
    with pytest.raises(LabError, match="longer than"):
        lab.run(1, ["sleep", "1000"], timeout_s=0.1)


@pytest.mark.netns
def test_a_job_finds_its_place_in_the_environment(lab: Lab) -> None:
    port = lab.hosts[0].free_port()
    assert lab.job_env(2, port) == {
        "FIREFLYER_LAB_HOST": "2",
        "FIREFLYER_LAB_HOSTS": "3",
        "FIREFLYER_NODE": "h2",
        "FIREFLYER_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": lab.hosts[0].address,
        "MASTER_PORT": str(port),
        "RANK": "2",
        "WORLD_SIZE": "3",
    }


@pytest.mark.netns
def test_kill_reaches_descendants_that_left_the_group(lab: Lab) -> None:
    process = lab.popen(
        1, ["sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    grandchild = os.pidfd_open(int(process.stdout.readline()))
    process.stdout.close()
    bystander = lab.popen(0, ["sleep", "1000"])
    lab.kill(1)
    assert process.returncode == -signal.SIGKILL
    wait_for_end(grandchild)
    assert bystander.poll() is None
    lab.kill(0)
    assert bystander.returncode == -signal.SIGKILL


@pytest.mark.netns
def test_freeze_stands_still_and_thaw_goes_on(lab: Lab) -> None:
    process = lab.popen(0, ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"a\n"
    lab.freeze(0)
    assert Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    process.stdin.write(b"b\n")
    process.stdin.flush()
    assert select.select([process.stdout], [], [], 0.2)[0] == []
    lab.thaw(0)
    assert process.stdout.readline() == b"b\n"
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()


@pytest.mark.netns
def test_a_forked_child_can_enter_and_does_not_take_the_lab_down(lab: Lab) -> None:
    child = os.fork()
    if child == 0:
        lab.hosts[2].enter()
        with socket.socket() as probe:
            probe.bind((lab.hosts[2].address, 0))
        lab.close()
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert lab.run(2, ["true"]).returncode == 0


@pytest.mark.netns
@pytest.mark.skipif(MISSING is not None, reason=f"no lab here: {MISSING}")
def test_an_exception_leaves_nothing() -> None:
    before = ours()
    started: list[subprocess.Popen[bytes]] = []

    def work() -> None:
        with Lab(hosts=2) as lab:
            started.append(lab.popen(1, ["sleep", "1000"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert ours() == before
    assert started[0].returncode == -signal.SIGKILL


OWNER = """
import sys
from fireflyer.lab import Lab
with Lab(hosts=2) as lab:
    process = lab.popen(0, ["sleep", "1000"])
    print(process.pid, flush=True)
    sys.stdin.read()
"""


def start_owner() -> tuple[subprocess.Popen[bytes], int, list[str]]:
    """A process with a lab and a command on host 0: (process, pidfd of the command, namespaces)."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    command = os.pidfd_open(int(owner.stdout.readline()))
    names = [
        name for name in os.listdir(namespaces.NETNS) if name.startswith(f"fflab-{owner.pid}-")
    ]
    assert len(names) == 3
    return owner, command, names


def end_owner(owner: subprocess.Popen[bytes], number: signal.Signals) -> int:
    owner.send_signal(number)
    status = owner.wait(DEADLINE_S)
    for stream in (owner.stdin, owner.stdout):
        assert stream is not None
        stream.close()
    return status


@pytest.mark.netns
@pytest.mark.skipif(MISSING is not None, reason=f"no lab here: {MISSING}")
def test_sigterm_of_the_owner_leaves_nothing() -> None:
    owner, command, names = start_owner()
    assert end_owner(owner, signal.SIGTERM) == 128 + signal.SIGTERM
    wait_for_end(command)
    assert not set(names) & set(os.listdir(namespaces.NETNS))


@pytest.mark.netns
@pytest.mark.skipif(MISSING is not None, reason=f"no lab here: {MISSING}")
def test_clean_removes_what_a_killed_owner_left_and_nothing_else(lab: Lab) -> None:
    owner, command, names = start_owner()
    assert set(names) & set(remove_stale()) == set(), "a live owner's lab is not stale"
    end_owner(owner, signal.SIGKILL)
    assert set(names) <= set(os.listdir(namespaces.NETNS))
    done = subprocess.run(
        [sys.executable, "-m", "fireflyer.lab", "--clean"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {f"removed {name}" for name in names} <= set(done.stdout.splitlines())
    wait_for_end(command)
    assert not set(names) & set(os.listdir(namespaces.NETNS))
    assert lab.run(0, ["true"]).returncode == 0


@pytest.mark.netns
@pytest.mark.skipif(MISSING is not None, reason=f"no lab here: {MISSING}")
def test_command_line_prefixes_output_and_ends_with_the_worst_status() -> None:
    script = (
        'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR on $FIREFLYER_IFNAME"; exit $FIREFLYER_LAB_HOST'
    )
    argv = [
        sys.executable,
        "-m",
        "fireflyer.lab",
        "--hosts",
        "3",
        "--rate",
        "1gbit",
        "--",
        "sh",
        "-c",
        script,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert sorted(done.stdout.splitlines()) == [
        f"h{rank}| {rank} of 3 at 10.77.0.1 on eth0" for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give a command after --"),
        (["--fly"], 2, "No such option: --fly"),
        (["--hosts", "two", "true"], 2, "Invalid value for '--hosts'"),
        (["--fallback", "--rate", "fast", "true"], 1, "rate"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], code: int, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fireflyer.lab", *arguments], capture_output=True, text=True
    )
    assert done.returncode == code
    assert re.fullmatch(r"fireflyer: [^\n]+\n", done.stderr), done.stderr
    assert message in done.stderr


def test_help_names_the_command_as_people_call_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fireflyer.lab", "-h"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lstrip().startswith("Usage: fireflyer lab [OPTIONS]")


def test_without_namespaces_it_refuses_or_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "why_not", lambda: "namespaces need root")
    with pytest.raises(LabError, match="need root"), Lab(hosts=2):
        pytest.fail("a lab without namespaces")
    with pytest.raises(LabError, match="need root"):
        remove_stale()
    with Lab(hosts=2, rate="1gbit", fallback=True) as lab:
        assert not lab.isolated
        assert len({host.address for host in lab.hosts}) == 2
        assert all(host.address.startswith("127.0.") for host in lab.hosts)
        near, far = connected(lab, 0, 1)
        transfer(near, far, 1000)
        near.close()
        far.close()
        with pytest.raises(LabError, match="count bytes"):
            assert lab.hosts[0].tx_bytes
        with pytest.raises(LabError, match="no cables"):
            lab.cut(0)
        process = lab.popen(1, ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        process.stdout.close()
        lab.freeze(1)
        lab.thaw(1)
    assert process.returncode == -signal.SIGKILL
    wait_for_end(child)


@pytest.mark.parametrize(
    ("text", "bits"), [("1gbit", 10**9), ("1.5Mbit", 1_500_000), ("64kbit", 64_000)]
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "1", "fast", "-1gbit", "0gbit", "1gbps"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="invalid rate"):
        parse_rate(text)


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_a_bad_number_of_hosts_is_refused(hosts: int) -> None:
    with pytest.raises(LabError, match="1 to 250"):
        Lab(hosts=hosts)
