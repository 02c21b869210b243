"""Storage nodes under a real manager: chains come up, lose a node, take it back, heal a replaced disk."""

import asyncio
import contextlib
import logging
import os
import random
import re
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from tests.conftest import fork_child
from tests.fs3 import frames
from tests.fs3.manager.store import Store
from tests.waiting import LIMIT_S

from fireflyer._native import crc32c
from fireflyer.errors import PeerLost, ProtocolMismatch
from fireflyer.fs3 import refusal_log
from fireflyer.fs3.client import connect
from fireflyer.fs3.data_connections import Acceptor, dial
from fireflyer.fs3.manager.chains import Chain, LocalState, Public
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import Routing
from fireflyer.fs3.manager.service import Manager
from fireflyer.fs3.roles import Role
from fireflyer.fs3.storage.node import FAULTY, NodeSettings, StorageNode
from fireflyer.log import get_logger
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

SECRET_TEXT = b"the secret of these nodes"
SECRET = Secret(SECRET_TEXT)
INODE = 5


class Nodes:
    """A manager and storage nodes, each with one target, all in one chain."""

    def __init__(self, loop: LoopThread, folder: Path, count: int) -> None:
        self._loop, self._folder = loop, folder
        self.manager = loop.run(self._start())
        self._news = threading.Condition()
        self.link = ManagerLink(self.manager, SECRET, Role.CLIENT, on_routing=self._told)
        self.running = {f"n{i}": self._node(f"n{i}") for i in range(count)}
        self.link.refresh()
        self.link.lay_out(1, count)
        self.seq = 0

    async def _start(self, address: str = "127.0.0.1:0") -> str:
        self._server = Server(SECRET, Role.MANAGER)
        address = str(await self._server.listen(address))
        manager = Manager(self._server, Store(), address, Times(lease_s=0.6), alone=True)
        self._task = asyncio.ensure_future(manager.run())
        return address

    async def _stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._server.close()

    def forget(self) -> None:
        """The manager starts anew, at the same address and without its metadata."""
        self._loop.run(self._stop())
        self._loop.run(self._start(self.manager))

    def _told(self, _: Routing) -> None:
        with self._news:
            self._news.notify_all()

    def _node(self, name: str) -> StorageNode:
        settings = NodeSettings(
            directory=self._folder / name, name=name, workers=3, buffers=16 << 20
        )
        settings.directory.mkdir(exist_ok=True)
        return StorageNode(settings, self.manager, SECRET)

    def stop(self, name: str, *, wipe: bool = False) -> None:
        self.running.pop(name).close()
        if wipe:
            shutil.rmtree(self._folder / name)

    def start(self, name: str) -> None:
        self.running[name] = self._node(name)

    def chain(self, serving: int) -> Chain:
        """The chain, once so many of its members serve, all of them of nodes that run."""
        addresses = {node.address for node in self.running.values()}

        def there() -> bool:
            chain = self.link.chain(1)
            found = chain.targets(Public.SERVING) if chain is not None else []
            known = {self.link.address(target // 256) for target in found}
            return len(found) == serving and known <= addresses

        with self._news:
            assert self._news.wait_for(there, LIMIT_S), self.link.chain(1)
        chain = self.link.chain(1)
        assert chain is not None
        return chain

    def line(self, target: int) -> socket.socket:
        address = self.link.address(target // 256)
        assert address is not None
        line = dial(address, SECRET, Role.CLIENT)
        line.settimeout(LIMIT_S)
        return line

    def write(self, index: int, data: bytes) -> None:
        """Until it is acknowledged, by whoever is the head."""
        self.seq += 1
        status = -1
        while status != frames.OK:
            chain = self.link.chain(1)
            assert chain is not None
            heads = chain.targets(Public.SERVING)
            with (
                contextlib.suppress(PeerLost, AssertionError, OSError),
                self.line(heads[0]) as line,
            ):
                tag = (8, 1, self.seq)
                status = frames.write(line, (1, chain.version), (INODE, index), 0, data, tag)[0]
                assert status in (frames.OK, frames.STALE_ROUTING)

    def read(self, target: int, index: int) -> bytes:
        """From this replica."""
        while True:
            chain = self.link.chain(1)
            assert chain is not None
            with self.line(target) as line:
                found = frames.read(line, (1, chain.version), [(INODE, index, 0, 1 << 20)])[0]
            if found.status == frames.OK:
                return found.data
            assert found.status == frames.STALE_ROUTING

    def close(self) -> None:
        for node in self.running.values():
            node.close()
        self.link.close()
        self._loop.run(self._stop())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with LoopThread("manager") as loop:
        nodes = Nodes(loop, tmp_path, 3)
        yield nodes
        nodes.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("wipe", [False, True])
def test_a_node_goes_and_comes_back(nodes: Nodes, wipe: bool) -> None:
    rng = random.Random(wipe)
    model: dict[int, bytes] = {}

    def write_some() -> None:
        for _ in range(10):
            index = rng.randrange(20)
            model[index] = rng.randbytes(rng.choice((10, 5000, 70_000))).ljust(
                len(model.get(index, b""))
            )
            nodes.write(index, model[index])

    nodes.chain(3)
    write_some()
    for name in ("n0", "n2", "n1"):
        nodes.stop(name, wipe=wipe)
        nodes.chain(2)
        write_some()
        nodes.start(name)
        chain = nodes.chain(3)
        write_some()
        for target in chain.targets(Public.SERVING):
            found = {index: crc32c(nodes.read(target, index)) for index in model}
            assert found == {index: crc32c(data) for index, data in model.items()}


def test_all_nodes_stop_at_once_and_nothing_is_lost(nodes: Nodes) -> None:
    nodes.chain(3)
    for index in range(20):
        nodes.write(index, bytes([index]) * 3000)
    for name in ("n0", "n1", "n2"):
        nodes.stop(name)
    for name in ("n2", "n0", "n1"):
        nodes.start(name)
    for target in nodes.chain(3).targets(Public.SERVING):
        for index in range(20):
            assert nodes.read(target, index) == bytes([index]) * 3000


def test_a_folder_that_is_removed_is_told_and_left_alone(nodes: Nodes, tmp_path: Path) -> None:
    nodes.chain(3)
    nodes.write(0, b"x" * 3000)
    node = nodes.running["n1"]
    (target,) = node.targets()
    folder = tmp_path / "n1" / "target-000"
    shutil.rmtree(folder)
    assert target not in nodes.chain(2).targets(Public.SERVING)
    why = f"its folder was removed or replaced while it was open: {folder}"
    assert node.faults == {target: why}
    assert why in node.trouble()
    assert not folder.exists()
    folder.mkdir()  # the operator's word: fill it anew
    nodes.chain(3)
    assert nodes.read(target, 0) == b"x" * 3000
    assert target not in node.faults


def test_a_snapshot_of_a_store_is_no_removal(nodes: Nodes) -> None:
    nodes.chain(3)
    node = nodes.running["n1"]
    (target,) = node.targets()
    folder = node._folder(target)
    before = (folder / "identity").stat().st_ino
    assert node._service.scrub(target, 0, 0, 1) == (0, 0)  # nothing there: a snapshot ends it
    assert (folder / "identity").stat().st_ino != before
    node._folders_checked = 0.0
    node._check_folders()
    assert list(node.targets()) == [target]
    assert node.faults == {}


def test_a_door_without_descriptors_is_deaf_for_a_while() -> None:
    def child() -> None:
        lines: list[str] = []
        told = threading.Event()

        class Seen(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())
                told.set()

        get_logger("fs3").addHandler(Seen())
        most = max(map(int, os.listdir("/proc/self/fd"))) + 64  # earlier tests may leave some open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        admitted = threading.Event()

        def admit(descriptor: int) -> None:
            os.close(descriptor)
            admitted.set()

        acceptor = Acceptor("127.0.0.1:0", SECRET, Role.STORAGE, admit)
        caller = socket.socket()
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        caller.connect((acceptor.address.host, acceptor.address.port))
        told.wait()
        for descriptor in taken:
            os.close(descriptor)
        handshake = Handshake("client", SECRET, Role.CLIENT)
        caller.sendall(handshake.opening)
        while not handshake.done:
            caller.sendall(handshake.feed(caller.recv(4096)))
        admitted.wait()
        acceptor.close()
        assert 0 < len(lines) <= refusal_log.LINES
        assert "Too many open files" in lines[0]

    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(child), 0)[1]) == 0


@pytest.mark.parametrize("unix", [False, True])
def test_a_listener_ends_while_a_forked_child_has_copies_of_its_sockets(
    unix: bool, tmp_path: Path
) -> None:
    closed, close = os.pipe()
    end, hold = os.pipe()
    kept: list[int] = []
    where = f"unix:{tmp_path}/s" if unix else "127.0.0.1:0"
    acceptor = Acceptor(where, SECRET, Role.STORAGE, kept.append)

    def child() -> None:
        os.close(hold)
        acceptor.close()
        os.write(close, b".")
        os.read(end, 1)  # until the test is over

    pid = fork_child(child)
    try:
        os.read(closed, 1)
        dial(str(acceptor.address), SECRET, Role.CLIENT).close()  # the child ended nothing of it
        acceptor.close()
        with pytest.raises(PeerLost):
            dial(str(acceptor.address), SECRET, Role.CLIENT)
        if not unix:
            Acceptor(str(acceptor.address), SECRET, Role.STORAGE, kept.append).close()
    finally:
        for descriptor in (closed, close, end, hold, *kept):
            os.close(descriptor)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_target_that_turns_faulty_says_why(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(get_logger("fs3"), "propagate", True)
    nodes.chain(3)
    node = nodes.running["n0"]
    (target,) = node.targets()
    nodes.stop("n0")
    for _ in range(2):
        node._check_state(target, LocalState.FAULTY, 0)
    assert node.faults == {target: FAULTY}
    assert caplog.messages.count(f"target {target} is {FAULTY}") == 1
    node._check_state(target, LocalState.ONLINE, 0)
    assert node.faults == {}


def test_another_secret_is_not_let_in(nodes: Nodes) -> None:
    address = next(iter(nodes.running.values())).address
    with pytest.raises(ProtocolMismatch, match="another secret"):
        dial(address, Secret(b"some other secret, not ours"), Role.CLIENT)
    with pytest.raises(PeerLost):
        dial("127.0.0.1:1", SECRET, Role.CLIENT)


def refused_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if "refused" in line]


def test_who_is_refused_is_named_in_few_lines(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(get_logger("fs3"), "propagate", True)
    node = nodes.running["n0"]
    monkeypatch.setattr(refusal_log, "SPAN_S", 3600.0)
    for _ in range(3 * refusal_log.LINES):
        with pytest.raises(ProtocolMismatch):
            dial(node.address, Secret(b"some other secret, not ours"), Role.CLIENT)
    told = refused_lines(caplog.messages)
    assert len(told) == refusal_log.LINES
    assert all(re.match(r"a connection from 127\.0\.0\.1:\d+ was refused: ", one) for one in told)


def test_refusals_without_a_line_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(get_logger("fs3"), "propagate", True)
    now = 100.0
    these = refusal_log.RefusalLog(lambda: now)
    for n in range(1000):
        these.note(f"10.0.0.1:{n}", "another secret")
    these.flush()
    assert len(caplog.messages) == refusal_log.LINES
    assert these.due == now + refusal_log.SPAN_S
    now += refusal_log.SPAN_S
    these.flush()
    assert caplog.messages[refusal_log.LINES :] == [
        f"{1000 - refusal_log.LINES} more connections were refused within {refusal_log.SPAN_S:g} s"
    ]
    these.note("10.0.0.1:9", "another secret")
    assert caplog.messages[-1] == "a connection from 10.0.0.1:9 was refused: another secret"


def test_a_peer_on_this_machine_is_a_process() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert refusal_log.peer_of(one) == f"process {os.getpid()} of uid {os.getuid()}"


def test_the_address_of_a_storage_node_is_no_managers(nodes: Nodes, tmp_path: Path) -> None:
    address = next(iter(nodes.running.values())).address
    (tmp_path / "secret").write_bytes(SECRET_TEXT)
    (tmp_path / "secret").chmod(0o600)
    for wrong in ([address], [address, nodes.manager]):
        with pytest.raises(ProtocolMismatch, match=f"{address} is the address of a storage node"):
            connect(wrong, secret_file=tmp_path / "secret")


@pytest.fixture
def ringing() -> Iterator[None]:
    """A signal whose handler raises what a socket might, too."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the caller's own")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def test_what_a_handler_raises_in_the_handshake_is_the_callers(ringing: None) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TimeoutError, match="the caller's own"),
    ):
        dial(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, Role.CLIENT, LIMIT_S)


def test_what_a_handler_raises_while_connecting_is_the_callers(ringing: None) -> None:
    with contextlib.ExitStack() as held:
        full = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the next one waits
            line = held.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(full.getsockname())
        with pytest.raises(TimeoutError, match="the caller's own"):
            dial(f"127.0.0.1:{full.getsockname()[1]}", SECRET, Role.CLIENT, LIMIT_S)
