"""Wedges that others met, told step by step on the real replicas, stores and manager: each must end with
every target serving the same, and every answer explained."""

from collections.abc import Callable

import pytest
from tests.fs3.sim.clients import CHAIN, Attempt, Habits
from tests.fs3.sim.cluster import Cluster, Machine
from tests.fs3.sim.history.chunk_history import ChunkOp
from tests.fs3.sim.history.linearize import UNKNOWN
from tests.fs3.sim.profiles import Profile
from tests.fs3.sim.storage import INODE
from tests.fs3.sim.world import World

from fireflyer.fs3.manager.chains import Public


class Stage:
    """A quiet cluster of three targets and a client that does what it is told."""

    def __init__(self, seed: int) -> None:
        self.cluster = Cluster(
            World(seed), Profile(clients=1, habits=Habits(operations=0, deadline=20.0, chunks=2))
        )
        self.until(self.cluster.all_serve)

    @property
    def path(self) -> list[Machine]:
        """The serving targets, head first."""
        of = {machine.target: machine for machine in self.cluster.machines}
        return [of[target] for target in self.cluster.serving()]

    def until(self, condition: Callable[[], bool], within: float = 10.0) -> None:
        """Runs until the condition holds."""
        end = self.cluster.world.now + within
        while not condition():
            assert self.cluster.world.now < end
            self.cluster.world.run(self.cluster.world.now + 0.0001)

    def begin(self, data: bytes, chunk: int = 0) -> ChunkOp:
        """A write, not waited for."""
        op = ChunkOp(1, "write", self.cluster.world.now, length=len(data), data=data, chunk=chunk)
        Attempt(self.cluster.clients[0], op)
        return op

    def write(self, data: bytes, chunk: int = 0) -> ChunkOp:
        op = self.begin(data, chunk)
        self.until(lambda: op.end != UNKNOWN)
        return op

    def cut(self, source: str, target: str) -> None:
        self.cluster.network.cut.add((source, target))

    def state(self, machine: Machine) -> Public:
        return next(m.state for m in self.cluster.chain.members if m.target == machine.target)

    def ends_well(self, *written: ChunkOp) -> None:
        """Links are joined and machines started; all must serve, hold the same and explain all answers."""
        self.cluster.finish()
        assert all(op.end != UNKNOWN and op.version for op in written)


def versions(machine: Machine, chunk: int = 0) -> tuple[int, int]:
    """Of the chunk, in the machine's store: committed and pending."""
    assert machine.process is not None
    assert machine.process.store is not None
    entry = machine.process.store.entry(INODE, chunk)
    return entry[2], entry[6]


@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_issue_345_the_tail_committed_and_crashed_before_its_answer(
    seed: int, power: bool, everybody: bool
) -> None:
    stage = Stage(seed)
    first = stage.write(b"a" * 5000)
    _, middle, tail = path = stage.path
    stage.cut(tail.name, middle.name)
    second = stage.begin(b"b" * 3000)
    stage.until(lambda: versions(tail) == (first.version + 1, 0))
    assert versions(middle) == (first.version, first.version + 1)
    for machine in path if everybody else [tail]:
        machine.power_cut() if power else machine.crash()
    stage.cluster.network.cut.clear()
    stage.cluster.world.run(stage.cluster.world.now + 0.2)
    tail.start()
    stage.until(lambda: versions(tail)[0] > first.version)
    assert second.end == UNKNOWN or not everybody
    stage.ends_well(first, second)


@pytest.mark.parametrize("meanwhile", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_issue_345_the_tail_comes_back_ahead_of_a_chain_that_went_on(
    seed: int, meanwhile: int
) -> None:
    """While it was away the others gave their version of the same number to the same write, and more."""
    stage = Stage(seed)
    first = stage.write(b"a" * 5000)
    _, middle, tail = stage.path
    stage.cut(tail.name, middle.name)
    second = stage.begin(b"b" * 3000)
    stage.until(lambda: versions(tail)[0] == first.version + 1)
    tail.crash()
    stage.cluster.network.cut.clear()
    stage.until(lambda: second.end != UNKNOWN)
    later = [stage.write(bytes([number]) * 100) for number in range(meanwhile)]
    tail.start()
    stage.until(stage.cluster.all_serve)
    assert versions(tail) == versions(middle) == (first.version + 1 + meanwhile, 0)
    stage.ends_well(first, second, *later)


@pytest.mark.parametrize("seed", range(3))
def test_issue_229_the_predecessor_knows_an_older_chain(seed: int) -> None:
    stage = Stage(seed)
    first = stage.write(b"a" * 5000)
    _, middle, tail = stage.path
    known = stage.cluster.chain.version
    stage.cut("mgr1", middle.name)  # it is heard, and hears nothing
    tail.crash()
    tail.start()
    stage.until(lambda: stage.state(tail) is Public.SYNCING)
    second = stage.begin(b"b" * 3000)
    stage.cluster.world.run(stage.cluster.world.now + 1.5)
    assert middle.process is not None
    assert middle.process.view.chains[CHAIN].version == known < stage.cluster.chain.version
    assert second.end == UNKNOWN
    assert stage.state(tail) is Public.SYNCING
    stage.ends_well(first, second)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("running", [False, True])
def test_issue_335_a_replaced_disk_is_filled(place: int, running: bool) -> None:
    """Empty, in place of any member's disk, while the others serve or all are down."""
    stage = Stage(place)
    written = [stage.write(bytes([chunk + 1]) * 9000, chunk) for chunk in range(2)]
    machine = stage.path[place]
    others = [other for other in stage.path if other is not machine]
    if not running:
        for other in others:
            other.power_cut()
    machine.wipe()
    machine.start()
    if not running:
        stage.cluster.world.run(stage.cluster.world.now + 1.0)
        assert not stage.cluster.serving()
        for other in others:
            other.start()
    stage.until(lambda: stage.state(machine) not in (Public.SERVING, Public.LASTSRV))
    stage.until(lambda: bool(stage.cluster.serving()))
    assert stage.cluster.serving()[0] != machine.target
    stage.until(stage.cluster.all_serve)
    assert [versions(machine, chunk)[0] for chunk in range(2)] == [op.version for op in written]
    stage.ends_well(*written)
