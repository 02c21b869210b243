"""The scheduler's rules, as examples and as a random walk over all inputs."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.draws import cases

from fireflyer.errors import TaskError
from fireflyer.hai import lifecycle
from fireflyer.hai.controller.dispatch import Dispatch
from fireflyer.hai.database.node_marks import Mark, Marks
from fireflyer.hai.lifecycle import ACTIVE, Action, Launch, Preempt, Release, Step, Task
from fireflyer.hai.model import TERMINAL, Lease, LeaseRequest, TaskSpec
from fireflyer.hai.model.engine import (
    EngineEvent,
    GangEnded,
    Node,
    RankExited,
    RankJoined,
    RankStarted,
)
from fireflyer.hai.scheduling.cluster import Window

WHEN: dict[str, Any] = {"monotonic_ns": 0, "wall": 0.0}


def task(number: int, nodes: int = 1, **fields: Any) -> Task:
    return Task(id=f"t{number}", order=number, nodes=nodes, world=nodes, max_restarts=1, **fields)


def running(number: int, *nodes: str, **fields: Any) -> Task:
    return task(number, len(nodes), state="running", attempt=1, placement=nodes, **fields)


def ended(found: Task, outcome: Any, reason: str = "why") -> Step:
    event = GangEnded(task=found.id, attempt=found.attempt, outcome=outcome, reason=reason, **WHEN)
    return lifecycle.observe(found, event)


def kinds(step: Step) -> list[str]:
    return [note.kind for note in step.notes]


def test_newcomers_are_told_once_and_do_not_count_as_ranks() -> None:
    found = task(1, 2, state="starting", attempt=1, placement=("n0", "n1"))
    about: dict[str, Any] = {"task": "t1", "attempt": 1, "rank": 1, "node": "n1", **WHEN}
    again: dict[str, Any] = {**about, "incarnation": 1}
    ended: dict[str, Any] = {"code": None, "signal": None, "suspended": False}
    told = []
    for event in (
        RankStarted(**about, pid=1),
        RankExited(**about, **ended),
        RankStarted(**again, pid=2),
        RankJoined(**again),
        RankExited(**again, **ended),
    ):
        step = lifecycle.observe(found, event)
        found = step.task
        told += [(note.kind, note.detail.get("incarnation")) for note in step.notes]
        assert lifecycle.observe(found, event) == Step(task=found)
    assert found.state == "starting"
    assert told == [
        ("rank_started", None), ("rank_exited", None),
        ("rank_started", 1), ("rank_joined", 1), ("rank_exited", 1),
    ]  # fmt: skip
    assert (
        lifecycle.observe(found, RankStarted(**{**about, "rank": 0}, pid=3)).task.state == "running"
    )


def test_restarts_are_spent_and_then_the_task_fails() -> None:
    step = ended(running(1, "n0", restarts=1), "failed", "rank 0 on n0 returned 3")
    assert (step.task.state, step.task.reason) == ("failed", "rank 0 on n0 returned 3")
    assert step.actions == (Release("t1", 1),)


def test_a_launch_that_the_server_did_not_survive_costs_no_restart() -> None:
    step = ended(running(1, "n0", restarts=1, unsure=True), "lost")
    assert (step.task.state, step.task.restarts) == ("queued", 1)
    assert ended(running(1, "n0", restarts=1, unsure=True), "failed").task.state == "failed"


def test_running_once_every_rank_started() -> None:
    found = lifecycle.decide(task(1, 2), Launch("t1", 1, ("n0", "n1"))).task
    seen = []
    for rank in (1, 1, 0):
        event = RankStarted(task="t1", attempt=1, rank=rank, node="n", pid=5, **WHEN)
        step = lifecycle.observe(found, event)
        seen.append(kinds(step))
        found = step.task
    assert seen == [["rank_started"], [], ["rank_started", "running"]]


def test_events_of_an_older_attempt_change_nothing() -> None:
    found = msgspec.structs.replace(running(1, "n0"), attempt=2)
    event = GangEnded(task="t1", attempt=1, outcome="failed", reason="", **WHEN)
    assert lifecycle.observe(found, event) == Step(task=found)


@pytest.mark.parametrize("outcome", ["stopped", "failed", "lost", "suspended"])
def test_a_stop_ends_as_stopped_whatever_the_gang_did(outcome: str) -> None:
    step = lifecycle.request(running(1, "n0"), "stop")
    assert kinds(step) == ["stopping"]
    assert step.task.state == "running"
    assert ended(step.task, outcome).task.state == "stopped"
    assert lifecycle.request(step.task, "stop").notes == ()


def test_a_task_that_finishes_before_the_stop_reaches_it_has_finished() -> None:
    step = lifecycle.request(running(1, "n0"), "stop")
    assert ended(step.task, "finished").task.state == "finished"


def ask(generation: int, held: int, token: str = "a", attempt: int = 1) -> LeaseRequest:
    lease = Lease(generation=generation, members=(token, "b"), token=token)
    return LeaseRequest(attempt=attempt, held=held, lease=lease)


def granted(found: Task, asked: LeaseRequest) -> Task:
    step = lifecycle.grant(found, asked)
    assert step is not None
    assert kinds(step) == ["leased"]
    return step.task


def test_each_generation_is_followed_once() -> None:
    found = running(1, "n0", "n1", "n2")
    assert lifecycle.grant(found, ask(2, held=1)) is None, "nobody holds 1"
    held = granted(found, ask(1, held=0))
    assert lifecycle.grant(held, ask(1, held=0)) == Step(task=held), "asked once more"
    for asked in (ask(1, 0, "z"), ask(2, 0, "z"), ask(7, 0, "z"), ask(1, 1, "z")):
        assert lifecycle.grant(held, asked) is None
    later = granted(held, ask(4, 1, "b"))  # two formings in between came to nothing
    assert lifecycle.grant(later, ask(1, 0)) is None, "it was left behind since"
    assert lifecycle.grant(later, ask(5, 1)) is None


def test_who_asked_for_the_generation_in_force_follows_it_without_knowing() -> None:
    held = granted(running(1, "n0"), ask(1, held=0))
    assert lifecycle.grant(held, ask(2, 0, "z")) is None
    assert granted(held, ask(2, held=0)).lease == ask(2, 0).lease


def test_other_members_are_another_question() -> None:
    held = granted(running(1, "n0"), ask(1, held=0))
    fewer = msgspec.structs.replace(ask(1, 0).lease, members=("a",))
    assert lifecycle.grant(held, LeaseRequest(attempt=1, held=0, lease=fewer)) is None


@pytest.mark.parametrize("attempt", [0, 2])
def test_only_the_attempt_in_force_gets_leases(attempt: int) -> None:
    assert lifecycle.grant(running(1, "n0"), ask(1, 0, attempt=attempt)) is None


def test_a_new_attempt_begins_at_generation_0() -> None:
    over = ended(granted(running(1, "n0", "n1"), ask(1, 0)), "failed").task
    assert lifecycle.grant(over, ask(2, 1)) is None
    assert lifecycle.decide(over, Launch("t1", 2, ("n0", "n1"))).task.lease is None


@settings(max_examples=cases(100), deadline=None)
@given(st.data())
def test_of_the_parts_of_a_generation_one_goes_on(data: st.DataObject) -> None:
    """Processes form parts at random and ask, each part from the latest generation that its first member was
    told of, the answer may be lost: the members of later generations come from one chain."""
    found = running(1, "n0")
    told = dict.fromkeys("abcdef", 0)
    chain: dict[int, frozenset[str]] = {0: frozenset("abcdef")}
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        latest = max(told[name] for name in told)
        base = data.draw(st.sampled_from(sorted({0, latest, *told.values()})))
        pool = sorted(name for name in told if told[name] == base)
        if not pool:
            continue
        part = data.draw(st.sets(st.sampled_from(pool), min_size=1))
        number += data.draw(st.integers(1, 2))
        first = min(part)
        step = lifecycle.grant(found, ask(number, base, first))
        before = found.lease.generation if found.lease is not None else 0
        if step is not None:
            assert chain[before] & part, "somebody of the generation in force is among them"
            found, chain[number] = step.task, frozenset(part)
            if data.draw(st.booleans()):
                told.update(dict.fromkeys(part, number))


def test_suspend_and_resume() -> None:
    step = lifecycle.request(running(1, "n0"), "suspend")
    assert (step.task.state, kinds(step)) == ("suspending", ["suspending"])
    with pytest.raises(TaskError, match="still suspending"):
        lifecycle.request(step.task, "resume")
    step = ended(step.task, "suspended")
    assert (step.task.state, step.task.placement) == ("suspended", ())
    assert step.actions == (Release("t1", 1),)
    step = lifecycle.request(step.task, "resume")
    assert kinds(step) == ["resumed", "queued"]


def test_a_fault_while_suspending_costs_a_restart_and_still_suspends() -> None:
    suspending = lifecycle.request(running(1, "n0"), "suspend").task
    step = ended(suspending, "failed")
    assert (step.task.state, step.task.restarts) == ("suspended", 1)
    spent = msgspec.structs.replace(suspending, restarts=1)
    assert ended(spent, "failed").task.state == "failed"


def test_who_makes_room_goes_back_into_the_queue_by_itself() -> None:
    step = lifecycle.decide(running(1, "n0"), Preempt("t1", 1, "makes room for t2"))
    assert (step.task.state, step.task.reason) == ("suspending", "makes room for t2")
    assert step.actions == (lifecycle.SuspendGang("t1", 1),)
    assert lifecycle.request(step.task, "resume").notes == ()
    over = ended(step.task, "suspended")
    assert kinds(over) == ["gang_ended", "preempted", "queued"]
    assert (over.task.state, over.task.restarts, over.task.previous) == ("queued", 0, ("n0",))
    fault = ended(step.task, "failed")
    assert (fault.task.state, fault.task.restarts) == ("queued", 1)


def test_a_user_s_suspend_outlasts_a_preemption() -> None:
    room = lifecycle.decide(running(1, "n0"), Preempt("t1", 1, "makes room for t2")).task
    step = lifecycle.request(room, "suspend")
    assert (kinds(step), step.actions) == (["suspending"], ())
    assert ended(step.task, "suspended").task.state == "suspended"
    assert ended(lifecycle.request(room, "stop").task, "suspended").task.state == "stopped"


def test_stop_and_suspend_of_a_queued_task_take_effect_at_once() -> None:
    assert lifecycle.request(task(1), "stop").task.state == "stopped"
    assert lifecycle.request(task(1), "suspend").task.state == "suspended"
    suspended = lifecycle.request(task(1), "suspend").task
    assert lifecycle.request(suspended, "stop").task.state == "stopped"


@pytest.mark.parametrize("over", ["finished", "failed"])
@pytest.mark.parametrize("what", ["stop", "suspend", "resume"])
def test_what_is_over_refuses(over: Any, what: Any) -> None:
    with pytest.raises(TaskError, match=f"task t1 has already {over}"):
        lifecycle.request(task(1, state=over), what)


class Unmarked(Marks):
    """Nothing is remembered of nodes."""

    def __init__(self) -> None:
        pass

    def all(self) -> dict[str, Mark]:
        return {}

    def windows(self) -> list[Window]:
        return []


def test_a_gang_that_no_two_zones_can_hold_is_refused() -> None:
    dispatch = Dispatch("fifo", Unmarked(), lambda: 0.0)
    dispatch.set_nodes([Node(name=f"n{n}", zone=f"z{n // 2}", leaf=f"l{n}") for n in range(6)])
    assert [node.zone for node in dispatch.nodes()] == ["z0", "z0", "z1", "z1", "z2", "z2"]
    dispatch.check(TaskSpec(script="/s.py", cwd="/", nodes=4))
    large = TaskSpec(script="/s.py", cwd="/", nodes=5)
    with pytest.raises(TaskError, match="asks for 5 nodes, but a gang uses at most two zones"):
        dispatch.check(large)
    dispatch.submit(task(1, 5), large)
    why = dispatch.why("t1", "queued", "").text
    assert (
        why
        == "asks for 5 nodes; the server has 6 such nodes, but no two zones together have enough"
    )


class Platform(RuleBasedStateMachine):
    """A server in miniature: the scheduler's steps against an engine whose gangs end at random."""

    NODES = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.dispatch = Dispatch("fifo", Unmarked(), lambda: self.now)
        self.specs: dict[str, TaskSpec] = {}
        self.tasks: dict[str, Task] = {}
        self.gangs: dict[tuple[str, int], tuple[str, ...]] = {}
        self.launched: set[tuple[str, int]] = set()
        self.ended: set[tuple[str, int]] = set()
        self.asked: set[tuple[str, int, str]] = set()
        self.history: dict[str, list[str]] = {}
        self.old: list[EngineEvent] = []

    @initialize(policy=st.sampled_from(["fifo", "timeshare", "las"]))
    def choose(self, policy: str) -> None:
        self.restart_server(policy)

    def restart_server(self, policy: str) -> None:
        self.dispatch = Dispatch(policy, Unmarked(), lambda: self.now)
        self.dispatch.set_nodes([Node(name=f"n{number}") for number in range(self.NODES)])
        for name, found in self.tasks.items():
            self.dispatch.recover(found, self.specs[name], [])

    def apply(self, step: Step) -> None:
        before = self.tasks.get(step.task.id)
        self.commit(step)
        if before is not None:
            self.dispatch.follow(before, step.task)

    def commit(self, step: Step) -> None:
        name = step.task.id
        before = self.tasks.get(name)
        if before is not None and before.state in TERMINAL:
            assert step.task.state == before.state
        if before is not None and before.state != step.task.state:
            assert step.notes[-1].kind in (step.task.state, "starting")
        self.tasks[name] = step.task
        self.history.setdefault(name, []).extend(note.kind for note in step.notes)
        for action in step.actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        at = (action.task, action.attempt)
        if isinstance(action, Launch):
            assert at not in self.launched, "an attempt was launched twice"
            self.launched.add(at)
            busy = {node for nodes in self.gangs.values() for node in nodes}
            assert busy.isdisjoint(action.nodes), "two tasks on a node"
            assert len(set(action.nodes)) == self.tasks[action.task].nodes
            self.gangs[at] = action.nodes
        elif isinstance(action, Release):
            assert at not in self.gangs, "released what runs"
        else:
            assert at in self.gangs
            self.asked.add((*at, "stop" if isinstance(action, lifecycle.StopGang) else "suspend"))

    def schedule(self) -> None:
        wait_s: float | None = 0.0
        while wait_s == 0.0:
            for action in self.dispatch.plan():
                step = lifecycle.decide(self.tasks[action.task], action)
                self.commit(step)
                self.dispatch.apply(action)
            wait_s = self.dispatch.wait_s()
        assert self.dispatch.plan() == [], "a second plan finds more to do"

    @rule(elapsed=st.sampled_from([1.0, 600.0, 7200.0, 1e6]))
    def wait(self, elapsed: float) -> None:
        self.now += elapsed
        self.schedule()

    def see(self, event: EngineEvent) -> None:
        self.old.append(event)
        self.apply(lifecycle.observe(self.tasks[event.task], event))
        self.schedule()

    @rule(
        nodes=st.integers(1, 4),
        restarts=st.integers(0, 2),
        user=st.sampled_from("ab"),
        priority=st.sampled_from(["low", "normal", "high"]),
    )
    def submit(self, nodes: int, restarts: int, user: str, priority: Any) -> None:
        number = len(self.tasks) + 1
        fresh = Task(
            id=f"t{number}",
            order=number,
            user=user,
            nodes=nodes,
            world=nodes,
            max_restarts=restarts,
        )
        spec = TaskSpec(script="/s.py", cwd="/", nodes=nodes, priority=priority)
        if nodes > self.NODES:
            with pytest.raises(TaskError, match="asks for 4 nodes and this server has 3"):
                self.dispatch.check(spec)
            return
        self.dispatch.check(spec)
        self.specs[fresh.id] = spec
        self.apply(lifecycle.admit(fresh))
        self.dispatch.submit(fresh, spec)
        self.schedule()

    @rule(data=st.data(), what=st.sampled_from(["stop", "suspend", "resume"]))
    def request(self, data: st.DataObject, what: lifecycle.Request) -> None:
        if not self.tasks:
            return
        name = data.draw(st.sampled_from(sorted(self.tasks)))
        before = self.tasks[name]
        try:
            step = lifecycle.request(before, what)
        except TaskError:
            assert what != "stop" or before.state in ("finished", "failed")
            return
        self.apply(step)
        self.schedule()

    @rule(data=st.data())
    def start_rank(self, data: st.DataObject) -> None:
        if self.gangs:
            name, attempt = data.draw(st.sampled_from(sorted(self.gangs)))
            nodes = self.gangs[name, attempt]
            rank = data.draw(st.integers(0, len(nodes) - 1))
            self.see(
                RankStarted(task=name, attempt=attempt, rank=rank, node=nodes[rank], pid=9, **WHEN)
            )

    @rule(data=st.data(), code=st.sampled_from([0, 1, None]))
    def exit_rank(self, data: st.DataObject, code: int | None) -> None:
        if self.gangs:
            name, attempt = data.draw(st.sampled_from(sorted(self.gangs)))
            signal = 9 if code is None else None
            self.see(
                RankExited(
                    task=name, attempt=attempt, rank=0, node="n0", code=code, signal=signal,
                    suspended=False, **WHEN,
                )
            )  # fmt: skip

    @rule(data=st.data(), fault=st.sampled_from(["finished", "failed", "lost", "as asked"]))
    def end_gang(self, data: st.DataObject, fault: str) -> None:
        if not self.gangs:
            return
        at = data.draw(st.sampled_from(sorted(self.gangs)))
        outcome: Any = fault
        if fault == "as asked":
            if (*at, "stop") in self.asked:
                outcome = "stopped"
            elif (*at, "suspend") in self.asked:
                outcome = "suspended"
            else:
                return
        del self.gangs[at]
        self.ended.add(at)
        self.see(GangEnded(task=at[0], attempt=at[1], outcome=outcome, reason="why", **WHEN))

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """The engine tells again what it has told: nothing happens."""
        if self.old:
            event = data.draw(st.sampled_from(self.old))
            before = self.tasks[event.task]
            step = lifecycle.observe(before, event)
            assert (step.task, step.notes, step.actions) == (before, (), ())

    @rule(data=st.data())
    def server_dies(self, data: st.DataObject) -> None:
        """What the next server loads: warmth as the database has it, launches possibly in doubt."""
        for name, found in self.tasks.items():
            if found.state == "starting" and not found.started:
                doubt = data.draw(st.booleans())
                self.tasks[name] = msgspec.structs.replace(found, unsure=doubt)
        self.restart_server(self.dispatch.policy)
        self.schedule()

    @invariant()
    def the_queue_is_in_step(self) -> None:
        phases = {"suspended": "held"}
        for name, found in self.tasks.items():
            job = self.dispatch.cluster.jobs.get(name)
            assert (job is None) == (found.state in TERMINAL)
            if job is not None:
                expected = "suspending" if found.stopping else phases.get(found.state, found.state)
                assert job.phase == expected
                assert (job.attempt, job.placement) == (found.attempt, found.placement)

    @invariant()
    def nodes_are_held_by_those_who_run(self) -> None:
        held = {t.id: t.placement for t in self.tasks.values() if t.placement}
        assert held == {name: nodes for (name, _), nodes in self.gangs.items()}
        for found in self.tasks.values():
            assert (found.state in ACTIVE) == bool(found.placement)
            assert found.restarts <= found.max_restarts

    @invariant()
    def the_first_in_the_queue_does_not_wait_for_nothing(self) -> None:
        queue = self.dispatch.cluster.in_order()
        if queue:
            busy = sum(len(nodes) for nodes in self.gangs.values())
            assert queue[0].nodes > self.NODES - busy

    def teardown(self) -> None:
        """From anywhere, ending every gang and resuming what is suspended brings every task to an end."""
        for _ in range(1000):
            for found in list(self.tasks.values()):
                if found.state == "suspended":
                    self.apply(lifecycle.request(found, "resume"))
            self.schedule()
            if not self.gangs:
                break
            at = min(self.gangs)
            del self.gangs[at]
            self.ended.add(at)
            self.see(GangEnded(task=at[0], attempt=at[1], outcome="finished", reason="", **WHEN))
        assert self.launched == self.ended
        for name, found in self.tasks.items():
            assert found.state in TERMINAL
            entries = [kind for kind in self.history[name] if kind in TERMINAL]
            assert entries == [found.state]
            starts = self.history[name].count("starting")
            assert starts == self.history[name].count("gang_ended") == found.attempt


TestPlatform = Platform.TestCase
TestPlatform.settings = settings(max_examples=cases(150), stateful_step_count=40, deadline=None)
