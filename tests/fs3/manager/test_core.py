"""The manager's decisions on a clock of the test's: leases, deaths, versions, waits, operators."""

import random

import pytest
from tests import draws

from fireflyer.errors import ConfigError, NotPrimary, Stale, Unavailable
from fireflyer.fs3.manager.chains import Chain, Local, LocalState, Public
from fireflyer.fs3.manager.core import Beat, Core
from fireflyer.fs3.manager.leases import NodeLease, Times
from fireflyer.fs3.manager.routing import Node as NodeEntry
from fireflyer.fs3.manager.routing import Records, Routing, View

S = Public.SERVING
TIMES = Times(lease_s=3.0, recovery_wait_s=60.0)


class Node:
    """A storage node of the test's: does what its chains ask of its targets, at once."""

    def __init__(self, cluster: "Cluster", name: str, slots: int) -> None:
        self.cluster, self.name, self.slots = cluster, name, slots
        self.view = View()
        self.store = {
            slot: random.Random(f"{name} {slot}").getrandbits(60) for slot in range(slots)
        }
        self.up = True
        self.start()

    def start(self) -> None:
        registered = self.cluster.core.register(self.name, f"{self.name}:9", self.slots)
        self.cluster.settle()
        self.id, self.session, self.number = registered.node, registered.session, 0
        self.lease = NodeLease(registered.lease_s)
        self.saying = {
            self.id * 256 + slot: Local(self.session, store=self.store[slot])
            for slot in range(self.slots)
        }

    def beat(self) -> None:
        now = self.cluster.now
        for chain in self.view.chains.values():
            for member in chain.members:
                local = self.saying.get(member.target)
                asked = member.state in (Public.SYNCING, Public.RECOVERING)
                if local and asked and member.incarnation == local.incarnation:
                    up = LocalState.UPTODATE
                    done = Local(local.incarnation, up, chain.version, local.store)
                    self.saying[member.target] = done
        number = self.lease.send(now)
        part = self.cluster.core.heartbeat(self.message(number), now)
        self.lease.answered(number)
        self.view.take(part)
        assert self.view.version == part.version

    def message(self, number: int) -> Beat:
        known = (self.view.version, None, "", self.view.question)
        return Beat(self.id, self.session, number, self.saying, *known)


class Cluster:
    """Nodes and a primary, step by step."""

    def __init__(self, times: Times = TIMES) -> None:
        self.times, self.now, self.epoch = times, 1000.0, 1
        self.rows: dict[bytes, bytes] = {}
        self.core = Core(Records(), 1, times, self.now)
        self.nodes: list[Node] = []
        self.published: list[Routing] = []
        self.asked = 0

    def settle(self) -> None:
        """Saves and publishes all that is due now."""
        while change := self.core.tick(self.now):
            self.rows |= change.rows
            part = self.core.saved()
            self.published.append(part)
        if self.core.question != self.asked:
            self.asked, version = self.core.question, self.core.records.version
            for node in self.nodes:
                if node.up:
                    node.view.take(Routing(version, version, question=self.asked))
                    node.beat()

    def add(self, name: str, slots: int = 1) -> Node:
        self.nodes.append(Node(self, name, slots))
        return self.nodes[-1]

    def run(self, seconds: float) -> None:
        """Time passes; nodes that are up send heartbeats."""
        end, beats = self.now + seconds, self.times.heartbeat_s
        due = self.now
        while self.now < end:
            if self.now >= due:
                for node in self.nodes:
                    if node.up:
                        node.beat()
                due += beats
            self.settle()
            self.now += self.times.tick_s

    def new_primary(self) -> None:
        """Another process takes over with what is in the store."""
        self.epoch += 1
        records = Records.load(self.rows.items())
        self.core = Core(records, self.epoch, self.times, self.now)

    def states(self, chain: int = 1) -> list[tuple[int, str]]:
        members = self.core.records.chains[chain].members
        return [(member.target // 256, member.state.name) for member in members]


def cluster(nodes: int, slots: int = 1, replicas: int | None = None) -> Cluster:
    """Nodes a, b, c, ... whose chains all serve."""
    made = Cluster()
    for name in "abcdefgh"[:nodes]:
        made.add(name, slots)
    made.core.lay_out(1, replicas or nodes)
    made.settle()
    made.run(10)
    for chain in made.core.records.chains.values():
        assert len(chain.targets(S)) == len(chain.members)
    return made


def test_a_new_cluster_serves_and_everybody_knows() -> None:
    made = cluster(3, slots=4, replicas=2)
    assert len(made.core.records.chains) == 6
    assert made.core.records.tables[1, 1].chains == (1, 2, 3, 4, 5, 6)
    for node in made.nodes:
        assert node.view.chains == made.core.records.chains
        assert node.view.tables == made.core.records.tables
        assert [known.name for known in node.view.nodes.values()] == ["a", "b", "c"]


def test_a_dead_node_leaves_only_after_its_lease_has_ended() -> None:
    made = cluster(2)
    dead, other = made.nodes
    dead.up = False
    while made.states() != [(2, "SERVING"), (1, "OFFLINE")]:
        assert made.now < dead.lease.ends + 2 * TIMES.lease_s
        made.run(TIMES.tick_s)
    assert made.now > dead.lease.ends
    assert made.now < dead.lease.ends + 0.1 * TIMES.lease_s + 0.05 + 4 * TIMES.heartbeat_s
    assert other.lease.runs(made.now)


def test_failover_below_a_second() -> None:
    """From the last heartbeat to the new version, with the settings that promise 0.8 s."""
    made = Cluster(Times.for_failover(0.8))
    for name in "ab":
        made.add(name)
    made.core.lay_out(1, 2)
    made.settle()
    made.run(3)
    made.nodes[0].up = False
    died = made.now
    while made.states() != [(2, "SERVING"), (1, "OFFLINE")]:
        made.run(made.times.tick_s)
    assert made.now - died < 0.8 + made.times.heartbeat_s


def test_a_node_that_restarts_is_taken_back_at_its_first_heartbeat() -> None:
    made = cluster(2)
    made.nodes[1].start()
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]
    made.run(3)
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]
    assert made.core.records.chains[1].members[1].incarnation == made.nodes[1].session


def test_what_was_long_on_its_way_is_no_word() -> None:
    made = cluster(2)
    late = [made.nodes[1].message(made.nodes[1].lease.send(made.now)) for _ in range(3)]
    for node in made.nodes:
        node.up = False
    made.now += 0.1
    made.nodes[0].start()  # missed as the process that it was
    made.nodes[0].beat()
    made.settle()
    for beat in late:
        made.core.heartbeat(beat, made.now)
        made.now += made.times.tick_s
        made.settle()
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]
    for node in made.nodes:
        node.up = True
    made.run(2)
    assert made.nodes[1].view.question == made.core.question > 0
    assert made.states() == [(2, "SERVING"), (1, "SERVING")]  # it was taken out, and back


def test_no_lease_is_given_that_would_outlive_a_place() -> None:
    made = cluster(2)
    made.nodes[0].up = False
    made.run(made.times.dead_s - 2 * made.times.heartbeat_s)
    while (change := made.core.tick(made.now)) is None:
        made.now += made.times.tick_s
        made.nodes[1].view.take(Routing(0, 0, question=made.core.question))
        made.nodes[1].beat()
    (after,) = change.entries
    assert isinstance(after, Chain)
    assert after.targets(Public.SERVING) == (2 * 256,)
    ends = made.nodes[0].lease.ends
    with pytest.raises(Unavailable, match="retry"):
        made.nodes[0].beat()
    assert made.nodes[0].lease.ends == ends
    made.nodes[1].beat()  # the other one stays
    made.core.saved()
    made.nodes[0].beat()
    assert made.nodes[0].view.chains[1].targets(Public.SERVING) == (2 * 256,)


def test_all_lose_power_and_return_one_by_one() -> None:
    """None of them may become the only last one, though they are missed at different times."""
    made = cluster(3)
    for node in made.nodes:
        node.up = False
    made.run(0.3)
    made.nodes[0].start()
    made.nodes[0].up = True
    made.run(2)
    assert [state for _, state in made.states()] == ["SERVING"] * 3  # nobody gave word yet
    made.run(3)
    assert made.states() == [(1, "LASTSRV"), (2, "LASTSRV"), (3, "LASTSRV")]
    made.nodes[1].start()
    made.nodes[1].up = True
    made.run(2)
    assert [state for _, state in made.states()] == ["LASTSRV"] * 3
    made.nodes[2].start()
    made.nodes[2].up = True
    made.run(10)
    assert [state for _, state in made.states()] == ["SERVING"] * 3


def test_the_recovery_wait_ends() -> None:
    made = cluster(2)
    for node in made.nodes:
        node.up = False
    made.run(10)
    made.nodes[1].start()
    made.nodes[1].up = True
    made.run(TIMES.recovery_wait_s - 20)
    assert made.states() == [(1, "LASTSRV"), (2, "LASTSRV")]
    made.run(30)
    assert made.states() == [(2, "SERVING"), (1, "OFFLINE")]


def test_the_operator_restarts_a_chain_from_what_is_left() -> None:
    made = cluster(2)
    made.nodes[0].up = False
    made.run(10)
    made.nodes[1].up = False
    made.run(10)
    assert made.states() == [(2, "LASTSRV"), (1, "OFFLINE")]
    made.nodes[0].start()
    made.nodes[0].up = True
    made.run(100)
    assert made.states() == [(2, "LASTSRV"), (1, "WAITING")]
    with pytest.raises(ConfigError, match="not a member"):
        made.core.restart_chain(1, 77)
    with pytest.raises(ConfigError, match="no chain 9"):
        made.core.restart_chain(9, 256)
    made.core.restart_chain(1, 256)
    made.run(2)
    assert made.states() == [(1, "SERVING"), (2, "OFFLINE")]
    with pytest.raises(ConfigError, match="serves"):
        made.core.restart_chain(1, 256)


def test_a_new_primary_calls_nobody_dead_before_a_whole_period() -> None:
    made = cluster(2)
    made.new_primary()
    made.nodes[0].up = False
    made.run(TIMES.dead_s - 0.1)
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]
    made.run(1)
    assert made.states() == [(2, "SERVING"), (1, "OFFLINE")]


def test_a_new_primary_goes_on_where_the_old_one_was() -> None:
    made = cluster(3, slots=2, replicas=2)
    before, sessions = made.core.records, {node.session for node in made.nodes}
    made.new_primary()
    made.run(10)
    assert made.core.records.chains == before.chains
    assert made.core.records.version == before.version
    assert made.core.incarnation() not in sessions
    late = made.nodes[0]
    assert late.view.chains == before.chains


def test_a_primary_that_was_held_up_reads_its_mail_first() -> None:
    made = cluster(2)
    made.now += 10 * TIMES.lease_s
    assert made.core.tick(made.now) is None
    made.run(1)
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]


def test_what_is_put_off_is_decided_anew() -> None:
    """A node that was silent then may have a lease again when there is room in the store."""
    made = cluster(2)
    silent = made.nodes[1]
    change = None
    while change is None:
        made.nodes[0].beat()
        made.now += made.times.tick_s
        change = made.core.tick(made.now)
    assert [entry.id for entry in change.entries] == [1]  # the chain, without the silent one
    made.core.defer()
    silent.beat()
    published = len(made.published)
    made.run(2)
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]
    assert len(made.published) == published


def test_what_was_asked_for_stays_wanted_when_it_is_put_off() -> None:
    made = cluster(2)
    made.core.register("c", "c:8", 1)
    first = made.core.tick(made.now)
    assert first
    made.core.defer()
    assert not made.core.settled
    made.core.register("c", "c:9", 1)
    second = made.core.tick(made.now)
    assert second
    assert [entry.address for entry in second.entries if isinstance(entry, NodeEntry)] == ["c:9"]
    made.core.saved()
    assert made.core.settled


def test_a_late_process_of_a_node_is_told_to_stop() -> None:
    made = cluster(2)
    old = Beat(made.nodes[0].id, made.nodes[0].session, 10**6, made.nodes[0].saying)
    made.nodes[0].start()
    made.core.heartbeat(old, made.now)  # the new one has not been heard yet
    made.nodes[0].beat()
    with pytest.raises(Stale, match="later process of node a"):
        made.core.heartbeat(old, made.now)
    with pytest.raises(Stale, match="unknown node 99"):
        made.core.heartbeat(Beat(99, 1, 1, {}), made.now)


def test_a_late_heartbeat_changes_nothing() -> None:
    made = cluster(2)
    node = made.nodes[0]
    old = Beat(node.id, node.session, 1, {}, 0)
    made.core.heartbeat(old, made.now)
    made.run(0.2)
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]


def test_a_node_speaks_for_its_own_targets_only() -> None:
    made = cluster(2)
    faulty = Local(made.nodes[1].session, LocalState.FAULTY)
    other = made.nodes[1].id * 256
    made.nodes[0].saying[other] = faulty
    made.run(2)
    assert made.states() == [(1, "SERVING"), (2, "SERVING")]


def test_nothing_is_published_before_it_is_saved() -> None:
    made = cluster(2)
    made.nodes[0].up = False
    version = made.core.records.version
    while (change := made.core.tick(made.now)) is None:
        made.now += TIMES.tick_s
        if made.core.alive(made.now) and round(made.now * 10) % 5 == 0:
            made.nodes[1].beat()
    assert change.version == version + 1
    assert made.core.records.version == version
    assert made.core.tick(made.now + 1) is None  # one at a time
    assert (
        made.core.heartbeat(Beat(2, made.nodes[1].session, 10**6, {}), made.now).version == version
    )
    part = made.core.saved()
    assert (part.since, part.version) == (version, version + 1)
    assert part.chains[0].targets(S) == (made.nodes[1].id * 256,)


def test_what_operators_cannot_have() -> None:
    made = Cluster()
    with pytest.raises(ConfigError, match="2 replicas need as many nodes"):
        made.core.lay_out(1, 2)
    made.add("a", 4)
    with pytest.raises(ConfigError, match="there are 1"):
        made.core.lay_out(1, 2)
    for slots in (0, 257):
        with pytest.raises(ConfigError, match="1 to 256"):
            made.core.register("b", "b:9", slots)
    with pytest.raises(ConfigError, match="had 4 targets and now has 3"):
        made.core.register("a", "a:9", 3)
    with pytest.raises(ConfigError, match="invalid address 'nowhere'"):
        made.core.register("b", "nowhere", 1)


def test_a_session_that_nobody_gave_takes_nobodys_place() -> None:
    made = cluster(2)
    real = made.nodes[0]
    with pytest.raises(NotPrimary, match="neither this primary"):
        made.core.heartbeat(Beat(real.id, 99 << 32, 1, {}), made.now)
    made.run(5)
    assert sorted(made.states()) == [(1, "SERVING"), (2, "SERVING")]


def test_one_node_may_hold_all_replicas_where_that_is_asked_for() -> None:
    made = Cluster()
    made.add("a", 4)
    made.core.lay_out(1, 2, one_node=True)
    made.settle()
    made.run(5)
    chains = made.core.records.chains.values()
    assert [len(chain.targets(S)) for chain in chains] == [2, 2]


def test_a_cluster_grows_by_a_new_version_of_its_table() -> None:
    made = cluster(3, slots=2, replicas=3)
    for name in "xyz":
        made.add(name, 2)
    table = made.core.lay_out(1, 3)
    made.settle()
    made.run(10)
    assert (table.version, len(table.chains)) == (2, 4)
    assert made.core.records.tables[1, 1].chains == table.chains[:2]
    for chain in made.core.records.chains.values():
        assert len(chain.targets(S)) == 3
    assert made.core.lay_out(1, 3, version=2) == table  # asked again: it is done once
    with pytest.raises(ConfigError, match="has version 2; 4 is not next"):
        made.core.lay_out(1, 3, version=4)
    with pytest.raises(ConfigError, match="there are 0"):
        made.core.lay_out(1, 3)


def test_two_requests_before_a_save_do_not_share_numbers() -> None:
    made = Cluster()
    one = made.core.register("a", "a:1", 1)
    two = made.core.register("b", "b:1", 1)
    again = made.core.register("a", "a:2", 1)
    assert (one.node, two.node, again.node) == (1, 2, 1)
    assert len({one.session, two.session, again.session}) == 3
    made.core.lay_out(1, 1)
    made.settle()
    assert made.core.settled
    assert made.core.records.nodes[1].address == "a:2"
    assert sorted(made.core.records.chains) == [1, 2]


def test_routing_in_parts_is_the_whole() -> None:
    made = cluster(3, slots=3, replicas=2)
    made.nodes[2].up = False
    made.run(8)
    made.nodes[2].start()
    made.nodes[2].up = True
    made.run(8)
    steps, view = made.published, View()
    assert len(steps) > 5
    for part in steps:
        assert view.take(part)
    whole = View()
    assert whole.take(made.core.records.after(0))
    assert (view.chains, view.nodes, view.tables) == (whole.chains, whole.nodes, whole.tables)
    late = View()
    for part in reversed(steps[1:]):
        assert not late.take(part)
    assert late.take(steps[0]) == steps
    assert (late.chains, late.version) == (whole.chains, whole.version)
    assert not view.take(
        steps[0]
    )  # an answer that later pushes overtook: nobody is told old chains as news
    assert view.chains == whole.chains
    assert made.core.records.after(10**9) == made.core.records.after(0)


def test_a_lease_counts_from_the_sending() -> None:
    lease = NodeLease(3.0)
    first = lease.send(100.0)
    second = lease.send(100.5)
    assert not lease.runs(100.5)
    lease.answered(second)
    assert lease.ends == 103.5
    lease.answered(first)
    lease.answered(99)
    assert lease.ends == 103.5
    assert lease.runs(103.4)
    assert not lease.runs(103.5)


@pytest.mark.parametrize("seed", draws.seeds("managers", 30))
def test_random_lives(seed: int) -> None:
    """Nodes come and go; primaries too. Whoever serves has a lease; in the end all serve."""
    chance, made = random.Random(seed), cluster(3, slots=2, replicas=3)
    for _ in range(40):
        node = chance.choice(made.nodes)
        what = chance.randrange(5)
        if what == 0:
            node.up = False
        elif what == 1:
            node.start()
            node.up = True
        elif what == 2:
            made.new_primary()
        made.run(chance.choice((0.1, 0.5, 2.0, 5.0)))
        for chain in made.core.records.chains.values():
            check(chain)
    for node in made.nodes:
        if not node.up:
            node.start()
            node.up = True
    made.run(20)
    for chain in made.core.records.chains.values():
        assert len(chain.targets(S)) == 3


def check(chain: Chain) -> None:
    assert bool(chain.targets(S)) != bool(chain.targets(Public.LASTSRV, Public.RECOVERING))
    assert len(chain.targets(Public.SYNCING)) <= 1
