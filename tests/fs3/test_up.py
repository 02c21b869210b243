"""`fireflyer fs up`: whole file systems in processes of their own, killed and started again."""

import contextlib
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest
from tests.ports import take_ports
from tests.waiting import LIMIT_S, until

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError, FileError, ProtocolMismatch, Unavailable
from fireflyer.fs3 import survey
from fireflyer.fs3.cleanup import Cleanup
from fireflyer.fs3.client import Settings, connect
from fireflyer.fs3.client.discovery import attach, find
from fireflyer.fs3.config import FILE, ClusterConfig, embed, load
from fireflyer.fs3.process import ALL, Process
from fireflyer.fs3.roles import Role

SIZES = [0, 1, 70_000, 1 << 20, (9 << 20) + 3]


class Service:
    """`fireflyer fs up` as a process."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-P", "-m", "fireflyer.cli", "fs", "up", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ready(self) -> str:
        """The line that it prints then."""
        return self._line(self.process.stdout)

    def says(self, text: str) -> None:
        """Waits for a line of its log."""
        while text not in self._line(self.process.stderr):
            pass

    def _line(self, pipe: IO[bytes] | None) -> str:
        assert pipe
        number = pipe.fileno()
        line, end = b"", time.monotonic() + LIMIT_S
        while not line.endswith(b"\n"):
            there, _, _ = select.select([number], [], [], max(0, end - time.monotonic()))
            assert there, line
            byte = os.read(number, 1)
            assert byte, (line, self.process.communicate())
            line += byte
        return line.decode()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode


Start = Callable[..., Service]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Service] = []

    def begin(*arguments: str | Path) -> Service:
        running.append(Service(*arguments))
        return running[-1]

    yield begin
    for service in running:
        if service.process.poll() is None:
            service.end(signal.SIGKILL)


def fs(where: Path, *words: str | Path, code: int = 0) -> None:
    verb, *rest = map(str, words)
    assert run_line(["fs", verb, "--dir", str(where), *rest]) == code


def wait_until_whole(where: Path) -> None:
    """Until each chain has all its replicas."""
    until(lambda: all(c.state == "whole" for c in survey.health(find(str(where))).chains))


def make_tree(folder: Path) -> dict[str, bytes]:
    """Files of many sizes, two directories deep, and their contents by name."""
    rng = random.Random(5)
    made = {f"{'abc'[i % 3]}/deep/{size}": rng.randbytes(size) for i, size in enumerate(SIZES)}
    for name, data in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_was_put_is_there_after_a_kill(tmp_path: Path, start: Start, replicas: int) -> None:
    where = tmp_path / "fs"
    made = make_tree(tmp_path / "in")
    arguments = ("--dir", where, "--replicas", str(replicas))
    service = start(*arguments)
    assert str(where) in service.ready()
    fs(where, "put", "-r", tmp_path / "in", "/in")
    with attach(str(where)) as client:
        file = client.open("/open", "wb")
        file.write(b"not closed")
        file.fsync()
        file.write(b", not even said")
        service.end(signal.SIGKILL)
        if replicas > 1:
            shutil.rmtree(where / "s1" / "target-000")
        again = start(*arguments)
        again.ready()
        assert file.pwrite(b"!", 3) == 1  # the client finds it again
        file.close()
    fs(where, "get", "-r", "/in", tmp_path / "out")
    assert contents(tmp_path / "out") == made
    with attach(str(where)) as client, client.open("/open") as seen:
        assert seen.read() == b"not!closed, not even said"
    wait_until_whole(where)
    fs(where, "check")
    assert again.end(signal.SIGTERM) == 0


def test_only_the_owner_can_look_into_its_folder(tmp_path: Path, start: Start) -> None:
    where = tmp_path / "fs"
    service = start("--dir", where)
    service.ready()
    for path in (where, *where.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert service.end(signal.SIGINT) == 0


def test_another_secret_is_refused(tmp_path: Path, start: Start) -> None:
    where = tmp_path / "fs"
    start("--dir", where).ready()
    other = tmp_path / "other"
    other.write_text("a secret, but not that one")
    other.chmod(0o600)
    address = find(str(where)).addresses
    with pytest.raises(ProtocolMismatch, match="another secret"):
        connect(address, secret_file=other)
    with pytest.raises(
        ProtocolMismatch,
        match="no secret was given here; name its file by secret_file= or FIREFLYER_FS",
    ):
        connect(address)
    fs(where, "ls")


def test_a_folder_is_served_once(
    tmp_path: Path, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "fs"
    first = start("--dir", where)
    first.ready()
    second = start("--dir", where)
    _, said = second.process.communicate(timeout=LIMIT_S)
    assert second.process.returncode == 1
    assert f"process {first.process.pid} uses this metadata".encode() in said
    assert f"the file system answers at unix:{where}/manager.sock\n".encode() in said
    fs(where, "ls")
    assert first.end(signal.SIGTERM) == 0
    fs(where, "ls", code=1)
    assert "is not running" in capfd.readouterr().err


def write_cluster(folder: Path) -> Path:
    """Three nodes; ports of loopback."""
    manager, *ports = take_ports(4)
    (folder / "secret").write_text("the secret of three nodes")
    (folder / "secret").chmod(0o600)
    nodes = "".join(
        f'\n[nodes.n{i + 1}]\naddress = "127.0.0.1:{port}"\ntargets = 2\n'
        for i, port in enumerate(ports)
    )
    path = folder / FILE
    path.write_text(
        f'manager = "127.0.0.1:{manager}"\nsecret_file = "secret"\n'
        f"replicas = 2\nfailover_s = 0.8\n{nodes}"
    )
    assert len(path.read_text().splitlines()) <= 20
    return path


def test_three_nodes_in_three_processes(tmp_path: Path, start: Start) -> None:
    config = write_cluster(tmp_path)
    made = make_tree(tmp_path / "in")
    n3 = start("--config", config, "--role", "storage", "--name", "n3")
    n1 = start("--config", config, "--role", "manager,meta,storage", "--name", "n1")
    n2 = start("--config", config, "--role", "storage", "--name", "n2")
    for service in (n1, n2, n3):
        assert "ready" in service.ready()
    fs(config, "put", "-r", tmp_path / "in", "/in")
    fs(tmp_path, "ls", "/in")  # the folder of cluster.toml names the file system, too
    with attach(str(tmp_path)) as client:
        assert client.stat("/in").st_nlink
    n3.end(signal.SIGKILL)
    fs(config, "get", "-r", "/in", tmp_path / "out")
    assert contents(tmp_path / "out") == made
    back = start("--config", config, "--role", "storage", "--name", "n3")
    back.ready()
    n1.end(signal.SIGKILL)
    n1 = start("--config", config, "--role", "manager,meta,storage", "--name", "n1")
    n1.ready()
    wait_until_whole(config)
    fs(config, "check")
    for service in (back, n2, n1):
        assert service.end(signal.SIGTERM) == 0


@pytest.mark.full  # tests/fs3/manager fails over in one process
def test_a_standby_takes_the_place_of_a_killed_manager(tmp_path: Path, start: Start) -> None:
    config = write_cluster(tmp_path)
    managing = ("--config", config, "--role", "manager,meta")
    services = [
        start("--config", config, "--role", "storage", "--name", f"n{n}") for n in (1, 2, 3)
    ]
    first = start(*managing)
    assert "ready" in first.ready()
    standby, another = start(*managing, "--standby"), start(*managing, "--standby")
    standby.says("standby")
    another.says("standby")
    with attach(str(config)) as client:
        file = client.open("/a", "wb")
        file.write(b"before, ")
        first.end(signal.SIGKILL)
        file.write(b"after")
        file.close()
        assert client.stat("/a").st_size == len(b"before, after")
    assert standby.process.stdout
    assert another.process.stdout
    outputs = [standby.process.stdout.fileno(), another.process.stdout.fileno()]
    taken, _, _ = select.select(outputs, [], [], LIMIT_S)
    both = (standby, another)
    active, waiting = both if taken == outputs[:1] else both[::-1]
    assert "ready" in active.ready()
    assert waiting.end(signal.SIGTERM) == 0
    for service in (*services, active):
        assert service.end(signal.SIGTERM) == 0


def test_a_signal_ends_it_while_it_waits_for_others(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_cluster(tmp_path)
    service = start("--config", config, "--name", "n1")
    service.says("is primary manager")
    with (
        attach(str(config), settings=Settings(deadline_s=0.5)) as client,
        pytest.raises(Unavailable, match="being set up"),
    ):
        client.listdir("/")
    capsys.readouterr()
    fs(config, "status")
    assert "does not answer requests: the file system is being set up" in capsys.readouterr().out
    assert service.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 9", r"cluster.toml: Object contains unknown field `speed`"),
        ("[nodes.n1]\ndisks = 2", r"unknown field `disks` - at `\$.nodes\[...\]`"),
        ('replicas = "two"', r"Expected `int`, got `str` - at `\$.replicas`"),
        ("replicas = 0", "Expected `int` >= 1"),
        ("replicas = 5", "invalid replicas 5: expected at most 1, the number of nodes"),
        ("replicas = 3\n[nodes.a]\n[nodes.b]", "expected at most 2, the number of nodes"),
        ("replicas = 5\none_node = true", "expected at most 4, the number of targets"),
        ("chunk_kib = 100", "invalid chunk_kib 100: expected a power of two"),
        ("failover_s = 0", "Expected `float` > 0"),
        ("[nodes]", "invalid nodes: expected at least one"),
        ('[nodes."../x"]', "without slashes"),
        ('manager = "nowhere"', "invalid address 'nowhere'"),
        ("= 3", "cluster.toml: Invalid"),
        ("# nothing", "cluster.toml is empty: restore it"),
        ("[nodes.n1]\nreserve_mib = -1", "Expected `int` >= 0"),
    ],
)
def test_a_bad_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        load(tmp_path / "absent.toml")
    (tmp_path / FILE).write_text("[nodes.n1]")
    config = load(tmp_path / FILE)
    with pytest.raises(ConfigError, match="run both in one process"):
        Process(config, {Role.MANAGER, Role.STORAGE}, ["n1"])
    with pytest.raises(
        ConfigError, match="a standby has the roles manager and meta, and no others"
    ):
        Process(config, ALL, ["n1"], standby=True)
    with pytest.raises(ConfigError, match="unknown node 'n2': the configuration has n1"):
        Process(config, {Role.STORAGE}, ["n2"])
    (tmp_path / FILE).write_text('manager = "0.0.0.0:0"\n')
    with pytest.raises(ConfigError, match="other machines can reach it"):
        Process(load(tmp_path / FILE), ALL, ["n1"])
    (tmp_path / FILE).write_text('secret_file = "absent"\n')
    with pytest.raises(ConfigError, match="absent cannot be read"):
        Process(load(tmp_path / FILE), ALL, ["n1"])
    made = embed(tmp_path / "fs", 2, 3)
    assert (made.replicas, [its.targets for its in made.nodes.values()]) == (2, [6])
    assert embed(tmp_path / "fs", None, 3) == made
    with pytest.raises(ConfigError, match="has replicas = 2, not 1"):
        embed(tmp_path / "fs", 1, None)
    of_cluster = rf"`fireflyer fs up --config {tmp_path}/cluster\.toml --name NODE` starts a node"
    (tmp_path / FILE).write_text("[nodes.n1]")
    with pytest.raises(Unavailable, match=of_cluster):
        find(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has the nodes n1; start each of them with .* --config"):
        embed(tmp_path, None, None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold a file system"):
        embed(tmp_path / "file", None, None)


def test_a_folder_without_its_configuration_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "fs"
    config = embed(folder, 2, 3)
    whole = (folder / FILE).read_text()
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        with connect(process.manager, secret_file=config.secret_file) as client:
            client.mkdir("/kept")
    (folder / FILE).unlink()
    lost = r"holds a file system without its cluster\.toml; replicas times targets was 6"
    for asked in ((None, None), (2, 3)):
        with pytest.raises(ConfigError, match=lost):
            embed(folder, *asked)
    assert not (folder / FILE).exists()
    (folder / FILE).touch()
    with pytest.raises(ConfigError, match=r"cluster\.toml is empty"):
        embed(folder, None, None)
    embed(tmp_path / "like", 2, 3)
    assert (tmp_path / "like" / FILE).read_text() == whole
    shutil.copy(tmp_path / "like" / FILE, folder)
    config = embed(folder, None, None)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        with connect(process.manager, secret_file=config.secret_file) as client:
            assert client.listdir("/") == ["kept"]


def test_a_long_path_takes_a_port_in_place_of_a_socket(tmp_path: Path) -> None:
    config = embed(tmp_path / ("long" * 30), None, None)
    assert config.manager == config.node("s1").address == "127.0.0.1:0"
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        with connect(process.manager, secret_file=config.secret_file) as client:
            assert client.listdir("/") == []


def test_every_field_has_a_default() -> None:
    assert ClusterConfig().times.lease_s == 3.0


@contextlib.contextmanager
def sweeping(process: Process, config: ClusterConfig) -> Iterator[Cleanup]:
    """A sweep beside the one of the process."""
    control = process._control
    assert control
    sweep = Cleanup(control.execute, process.manager, config.secret, control.session_ns)
    yield sweep
    sweep.close()


def test_what_has_no_name_any_more_is_freed(tmp_path: Path) -> None:
    config = embed(tmp_path / "fs", None, None)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        [node] = process.nodes.values()
        with connect(process.manager, secret_file=config.secret_file) as client:
            with client.open("/a", "wb") as file:
                file.write(bytes(5 << 20))
            assert node.statistics()["chunks"] == 5
            client.unlink("/a")
            with sweeping(process, config) as sweep:
                sweep.round()
            assert node.statistics()["chunks"] == 0


def test_the_file_of_a_vanished_writer_gets_its_length(tmp_path: Path) -> None:
    config = msgspec.structs.replace(embed(tmp_path / "fs", None, None), session_s=0.2)
    silent = Settings(alive_s=3600.0)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        secret = config.secret_file
        with (
            connect(process.manager, secret_file=secret, settings=silent) as vanished,
            connect(process.manager, secret_file=secret) as client,
            sweeping(process, config) as sweep,
        ):
            file = vanished.open("/a", "wb")
            file.write(bytes(range(256)) * 10_000)
            while not client.stat("/a").st_size:
                sweep.round()
            with client.open("/a") as seen:
                assert seen.read() == bytes(range(256)) * 10_000
            with pytest.raises(FileError, match="file descriptor"):
                file.close()
