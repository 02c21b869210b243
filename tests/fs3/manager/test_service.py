"""Managers on real connections: nodes, pushes, a second manager that takes over, a store that fails."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.fs3.manager.store import Store
from tests.waiting import until

from fireflyer.errors import ConfigError, DeadlineExceeded, NoSpace, NotPrimary, Stale
from fireflyer.fs3.manager.admission import REFUSED_KEPT, Refused
from fireflyer.fs3.manager.chains import Local, LocalState, Public
from fireflyer.fs3.manager.core import Registered
from fireflyer.fs3.manager.leases import NodeLease, Times
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import PRIMARY_KEY, SLOTS, Routing
from fireflyer.fs3.manager.service import Manager
from fireflyer.rpc.client import Client
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.policy import Policy
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

TIMES = Times(lease_s=1.0)
SECRET = Secret(b"the secret of these tests")


class Running:
    """A manager process of the tests': its server, its tasks, its address."""

    def __init__(self, loop: LoopThread, store: Store, times: Times, alone: bool) -> None:
        self._loop, self._store, self._times, self._alone = loop, store, times, alone
        self.address = loop.run(self._start())

    async def _start(self) -> str:
        self._server = Server(SECRET, 1)
        address = str(await self._server.listen("127.0.0.1:0"))
        self.manager = Manager(self._server, self._store, address, self._times, alone=self._alone)
        self._task = asyncio.ensure_future(self.manager.run())
        return address

    async def _stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._server.close()

    def stop(self) -> None:
        self._loop.run(self._stop())


Start = Callable[..., Running]
Link = Callable[..., ManagerLink]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(store, times=TIMES, alone=True): a manager that is stopped at the end."""
    running: list[Running] = []
    with LoopThread("managers") as loop:

        def make(store: Store, times: Times = TIMES, alone: bool = True) -> Running:
            running.append(Running(loop, store, times, alone))
            return running[-1]

        yield make
        for each in running:
            each.stop()


@pytest.fixture
def link() -> Iterator[Link]:
    """link(*addresses, **options): closed at the end."""
    links: list[ManagerLink] = []

    def make(*addresses: str, **options: object) -> ManagerLink:
        links.append(ManagerLink(addresses, SECRET, 3, **options))  # type: ignore[arg-type]
        return links[-1]

    yield make
    for each in links:
        each.close()


class Node:
    """A storage node: sends heartbeats in a thread and does at once what its chains ask."""

    def __init__(self, link: ManagerLink, name: str, slots: int = 1) -> None:
        self.link = link
        self.me: Registered = link.register(name, f"{name}.example:9", slots)
        self.lease = NodeLease(self.me.lease_s)
        self.targets = range(self.me.node * SLOTS, self.me.node * SLOTS + slots)
        self._quit = threading.Event()
        self.go_on()

    def go_on(self) -> None:
        self._quit.clear()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._quit.set()
        self._thread.join()

    def _beat(self) -> None:
        locals_ = {target: Local(self.me.session) for target in self.targets}
        while not self._quit.wait(self.me.lease_s / 20):
            for target in self.targets:
                chain = self._chain_of(target)
                if chain:
                    up = LocalState.UPTODATE
                    locals_[target] = Local(self.me.session, up, chain)
            with contextlib.suppress(Exception):
                self.link.heartbeat(self.me, self.lease, time.monotonic(), locals_)

    def _chain_of(self, target: int) -> int:
        """The version of the chain that has a task for the target, or 0."""
        for number in range(1, 10):
            chain = self.link.chain(number)
            for member in chain.members if chain else ():
                if member.target == target and member.state in (Public.SYNCING, Public.RECOVERING):
                    return chain.version if chain else 0
        return 0


def serves(link: ManagerLink, count: int) -> bool:
    status = link.status()
    return status.whole == status.chains == count


def test_a_cluster_comes_up_and_a_dead_node_is_replaced(start: Start, link: Link) -> None:
    running = start(Store())
    nodes = [Node(link(running.address), name) for name in "abc"]
    operator = link(running.address)
    assert operator.lay_out(1, 3).chains == (1,)
    until(lambda: serves(operator, 1))
    parts: list[Routing] = []
    watcher = link(running.address, on_routing=parts.append)
    watcher.refresh()
    assert watcher.address(2) == "b.example:9"
    assert watcher.table(1, 1)
    nodes[0].stop()

    def failed_over() -> bool:
        chain = watcher.chain(1)
        return chain is not None and nodes[0].targets[0] in chain.targets(Public.OFFLINE)

    until(failed_over)  # told by a push: nobody asks
    assert len(parts) >= 2
    Node(link(running.address), "a").stop()
    text = running.manager.metrics.text()
    assert "fireflyer_fs3_manager_primary 1.0" in text
    assert 'fireflyer_fs3_manager_members{state="serving"}' in text
    for node in nodes:
        node.stop()


def test_a_node_is_pushed_what_changes_between_its_heartbeats(start: Start, link: Link) -> None:
    running = start(Store())
    parts: list[Routing] = []
    silent = link(running.address, on_routing=parts.append)
    me = silent.register("a", "a.example:9", 1)
    silent.heartbeat(me, NodeLease(me.lease_s), time.monotonic(), {})
    link(running.address).register("b", "b.example:9", 1)
    until(lambda: silent.address(me.node + 1) == "b.example:9")
    assert parts[-1].nodes[0].name == "b"


def test_what_cannot_be_comes_back_typed(start: Start, link: Link) -> None:
    operator = link(start(Store()).address)
    with pytest.raises(ConfigError, match="3 replicas"):
        operator.lay_out(1, 3)
    with pytest.raises(ConfigError, match="no chain 5"):
        operator.restart_chain(5, 1)
    first = operator.register("a", "a:1", 1)
    second = operator.register("a", "a:1", 1)
    assert (first.node, second.session > first.session) == (second.node, True)
    operator.heartbeat(second, NodeLease(1.0), 0.0, {})
    with pytest.raises(Stale):
        operator.heartbeat(first, NodeLease(1.0), 0.0, {})
    assert operator.incarnation() > second.session


def test_a_second_manager_takes_over_with_everything(start: Start, link: Link) -> None:
    store, times = Store(), Times(lease_s=0.3)
    one = start(store, times, False)
    first = link(one.address)
    first.register("a", "a:1", 2)
    first.register("b", "b:1", 2)
    first.lay_out(1, 2)
    two = start(store, times, False)
    with Client(two.address, SECRET, 3, policy=Policy(attempt_s=5)) as backup:
        until(lambda: two.manager._election.primary == one.address)
        assert backup.call("incarnation", None, int) > 0  # sent on to the primary
    both = link(one.address, two.address)
    before = both.status()
    assert before.primary == one.address
    one.stop()
    after = both.status()
    assert after.primary == two.address
    assert after.epoch > before.epoch
    assert (after.version, after.nodes, after.chains) == (before.version, 2, 2)
    assert both.register("a", "a:1", 2).node == 1


def test_a_store_that_fails_ends_the_term_and_nothing_is_lost(
    start: Start, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    running = start(store, Times(lease_s=0.3))
    caller = link(running.address)
    caller.register("a", "a:1", 1)
    epoch = caller.status().epoch
    store.fails = True
    why = "the election could not be held: the store does not answer"
    with Client(running.address, SECRET, 3) as impatient:

        def refused() -> bool:
            try:
                impatient.call("status", None, msgspec.Raw, deadline_s=0.2)
            except NotPrimary as error:
                return str(error) == f"{running.address} is not the primary manager: {why}"
            except DeadlineExceeded:
                pass
            return False

        until(refused)
        tried = store.calls
        until(lambda: store.calls > tried + 5)
    assert running.manager.trouble() == why
    assert caplog.messages.count(why) == 1
    store.fails = False
    assert caller.status().nodes == 1
    assert caller.status().epoch > epoch


def test_who_is_alone_at_a_store_keeps_its_term_without_writing(start: Start, link: Link) -> None:
    store = Store()
    running = start(store, Times(lease_s=0.3))
    caller = link(running.address)
    me = caller.register("a", "a:1", 1)
    epoch, changes, calls = caller.status().epoch, store.changes, store.calls
    store.full = True
    until(lambda: store.calls > calls + 12)  # as many as there are in two leases
    assert (caller.status().epoch, store.changes) == (epoch, changes)
    caller.heartbeat(me, NodeLease(me.lease_s), time.monotonic(), {})
    with Client(running.address, SECRET, 3) as impatient:

        def refused() -> bool:
            try:
                impatient.call("register", ["b", "b:1", 1], Registered, deadline_s=0.2)
            except NoSpace as error:
                return str(error) == "the store is full"
            except DeadlineExceeded:
                pass
            return False

        until(refused)
    assert caller.status().troubles == ["the routing could not be saved: the store is full"]
    store.full = False
    assert caller.register("b", "b:1", 1).node == 2
    assert (caller.status().epoch, caller.status().troubles) == (epoch, [])


def test_what_need_not_be_saved_any_more_is_no_trouble(start: Start, link: Link) -> None:
    """A node is silent and comes back while the store is full."""
    store = Store()
    running = start(store, Times(lease_s=0.3))
    nodes = [Node(link(running.address), name) for name in "ab"]
    operator = link(running.address)
    operator.lay_out(1, 2)
    until(lambda: serves(operator, 1))
    store.full, changes = True, store.changes
    nodes[1].stop()
    until(lambda: operator.status().troubles != [])
    nodes[1].go_on()
    until(lambda: operator.status().troubles == [])
    assert serves(operator, 1)
    assert store.changes == changes
    for node in nodes:
        node.stop()


def test_a_node_of_another_file_system_is_refused_and_named(
    start: Start, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = link(start(Store()).address), link(start(Store()).address)
    me = old.register("a", "a:1", 1, identity="its folder")
    assert new.register("b", "b:1", 1).node == me.node
    with pytest.raises(
        ConfigError, match=rf"node number 1 belongs to file system {me.cluster[:8]}"
    ):
        new.heartbeat(me, NodeLease(me.lease_s), time.monotonic(), {})
    assert new.status().heard == {}
    with pytest.raises(ConfigError) as refused:
        new.register("a", "a:1", 1, identity="its folder", cluster=me.cluster, holds=True)
    assert new.status().troubles == [f"node a is refused: {refused.value}"]
    assert f"refused a process: {refused.value}" in caplog.messages
    new.register("a", "a:1", 1, identity="an empty folder")
    assert new.status().troubles == []


def test_the_refused_are_few() -> None:
    refused = Refused()
    for number in range(3 * REFUSED_KEPT):
        refused.note(f"n{number}", "it is another's")
    assert len(refused.lines()) == REFUSED_KEPT
    assert refused.lines()[-1] == f"node n{3 * REFUSED_KEPT - 1} is refused: it is another's"


def test_an_old_primary_cannot_write(start: Start, link: Link) -> None:
    """Another process takes the row; what the old one decides after that is not saved."""
    store = Store()
    running = start(store, Times(lease_s=1000.0))
    caller = link(running.address)
    caller.register("a", "a:1", 1)
    rows = dict(store.rows)
    taken = msgspec.msgpack.encode([99, 7, "", 1])
    store(lambda transaction: transaction.set(PRIMARY_KEY, taken))
    with (
        Client(running.address, SECRET, 3) as client,
        pytest.raises(NotPrimary),
    ):
        client.call("register", ["b", "b:1", 1], Registered, deadline_s=0.5)
    assert store.rows == rows | {PRIMARY_KEY: taken}
