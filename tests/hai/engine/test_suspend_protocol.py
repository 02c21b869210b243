"""The suspend protocol in every order of its steps, and its native page under several processes."""

import os
import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer._native.hai import SuspendPage
from fireflyer.errors import Corrupted
from fireflyer.hai.engines.gang import decide
from fireflyer.hai.supervisor.messages import Frozen


class ModelRank:
    """A rank and its slot: what suspend_page.hpp promises, one atomic step at a time."""

    def __init__(self) -> None:
        self.count = 0
        self.frozen = False
        self.waiting: int | None = None
        self.answers: dict[int, bool] = {}

    def step(self, decision: int) -> None:
        """Begins a call, or looks whether a waiting one can be answered; stops once told true."""
        if self.waiting is not None:
            if decision:
                self.answers[self.waiting] = self.waiting >= decision
                self.waiting = None
            return
        if True in self.answers.values():
            return
        self.count += 1
        if self.frozen:
            self.waiting = self.count
        else:
            self.answers[self.count] = False


class ModelNode:
    def __init__(self, ranks: int) -> None:
        self.ranks = [ModelRank() for _ in range(ranks)]
        self.highest: int | None = None
        self.decision = 0

    def freeze(self) -> Frozen:
        if self.highest is None:
            self.highest = max(rank.count for rank in self.ranks)
            for rank in self.ranks:
                rank.frozen = True
        return Frozen(attempt=1, highest=self.highest, decision=self.decision)

    def decide(self, number: int) -> None:
        self.decision = self.decision or number


class ModelServer:
    """Runs the two phases a message at a time; may be replaced by a new one that knows nothing."""

    def __init__(self, nodes: list[ModelNode]) -> None:
        self.nodes = nodes
        self.steps = self._run()

    def _run(self) -> "Callable[[], bool]":
        answers: list[Frozen] = []
        decided: list[ModelNode] = []

        def step() -> bool:
            if len(answers) < len(self.nodes):
                answers.append(self.nodes[len(answers)].freeze())
            elif len(decided) < len(self.nodes):
                node = self.nodes[len(decided)]
                node.decide(decide(answers))
                decided.append(node)
            return len(decided) == len(self.nodes)

        return step


@settings(max_examples=cases(400), deadline=None)
@given(st.data())
def test_same_answer_on_every_rank_in_every_interleaving(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    nodes = [ModelNode(size) for size in sizes]
    ranks = [(rank, node) for node in nodes for rank in node.ranks]
    server = ModelServer(nodes)
    actors = st.sampled_from(["server", "crash", *range(len(ranks))])
    for actor in data.draw(st.lists(actors, max_size=60)):
        if actor == "server":
            server.steps()
        elif actor == "crash":
            server = ModelServer(nodes)
        else:
            rank, node = ranks[int(actor)]
            rank.step(node.decision)
    while not server.steps():
        pass
    (number,) = {node.decision for node in nodes}
    for rank, node in ranks:
        # No rank needs another one to go on: each, alone, comes to its true answer.
        for _ in range(2 * (number + 1)):
            rank.step(node.decision)
        assert rank.answers == {call: call >= number for call in range(1, number + 1)}


class ModelMember(ModelRank):
    """A rank of an elastic job, whose n-th step of generation g has calls (g, n, 1), (g, n, 2), ..."""

    def __init__(self, generation: int) -> None:
        super().__init__()
        self.generation = generation
        self.begun = 0
        self.calls = 0
        self.apart = generation > 0

    def step(self, decision: int) -> None:
        """Begins the next step after two calls, asks, or waits for the answer."""
        if self.waiting is None and (self.apart or self.calls == 2):
            if self.apart and self.calls < 3:
                self.calls += 1  # answered False at once, whatever the others do
                return
            self.begun, self.calls, self.apart = self.begun + 1, 0, False
            self.count = (self.generation << 20) + (self.begun << 10)
            return
        before = self.count
        super().step(decision)
        self.calls += self.count - before

    def form(self, generation: int) -> None:
        """Wherever it is in its step. A call that waits is answered before the rank goes on."""
        self.generation, self.begun, self.calls, self.apart = generation, 0, 0, True


@settings(max_examples=cases(400), deadline=None)
@given(st.data())
def test_same_answer_on_every_member_through_losses_and_newcomers(data: st.DataObject) -> None:
    nodes = [ModelNode(0), ModelNode(0)]
    members = [ModelMember(0) for _ in range(4)]  # two on each node
    gone: list[ModelMember] = []

    def settle() -> None:
        for at, node in enumerate(nodes):
            node.ranks[:] = members[2 * at : 2 * at + 2]

    settle()
    server = ModelServer(nodes)
    generation = 0
    choices = ["server", "crash", "form", *(f"{rank}" for rank in range(4) for _ in range(3))]
    for actor in data.draw(st.lists(st.sampled_from(choices), max_size=80)):
        if actor == "server":
            server.steps()
        elif actor == "crash":
            server = ModelServer(nodes)
        elif (
            actor == "form"
        ):  # one is lost; a newcomer in its place is there when the others form anew
            if any(member.waiting is not None for member in members):
                continue
            generation += 1
            place = data.draw(st.integers(0, 3))
            newcomer = ModelMember(generation)
            newcomer.frozen, newcomer.count = members[place].frozen, members[place].count
            gone.append(members[place])
            members[place] = newcomer
            settle()
            for member in members:
                member.form(generation)
        else:
            members[int(actor)].step(nodes[int(actor) // 2].decision)
    while not server.steps():
        pass
    (number,) = {node.decision for node in nodes}
    for member in members:
        for _ in range(10_000):  # alone: each comes to its true answer
            if True in member.answers.values():
                break
            member.step(number)
    for member in gone + members:
        assert member.answers == {call: call >= number for call in member.answers}
    assert all(True in member.answers.values() for member in members)


def test_decision_is_the_first_call_that_nobody_was_answered() -> None:
    def frozen(highest: int, decision: int = 0) -> Frozen:
        return Frozen(attempt=1, highest=highest, decision=decision)

    assert decide([frozen(0)]) == 1
    assert decide([frozen(3), frozen(9), frozen(0)]) == 10
    assert decide([frozen(3, 5), frozen(9)]) == 5


def _hammer(page: SuspendPage, slot: int, go: int, result: int) -> None:
    """In a forked child: asks as fast as it can until told; reports the number of the call."""
    os.read(go, 1)
    calls = 1
    while not page.call(slot):
        calls += 1
    page.acknowledge(slot)
    os.write(result, f"{calls}\n".encode())


@pytest.mark.full
@pytest.mark.parametrize("round_", range(5))
def test_processes_that_hammer_the_page_agree(round_: int) -> None:
    pages = [SuspendPage.create(2), SuspendPage.create(2)]
    go_read, go_write = os.pipe()
    result_read, result_write = os.pipe()
    children = []
    for slot in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(60)
                _hammer(SuspendPage.map(pages[slot // 2].fd), slot % 2, go_read, result_write)
            finally:
                os._exit(0)
        children.append(pid)
    os.close(result_write)
    os.write(go_write, b"g" * 4)
    while not all(page.count(slot) > 100 * round_ for page in pages for slot in (0, 1)):
        os.sched_yield()
    answers = [
        Frozen(attempt=1, highest=max(page.freeze()), decision=page.decision) for page in pages
    ]
    number = decide(answers)
    assert [page.decide(number) for page in pages] == [number, number]
    assert pages[0].decide(number + 7) == number
    with open(result_read) as results:
        assert {int(line) for line in results} == {number}
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    for page in pages:
        assert all(page.told(slot) and page.acknowledged(slot) for slot in (0, 1))
    os.close(go_read)
    os.close(go_write)


def test_threads_of_one_rank_number_their_calls_apart() -> None:
    page = SuspendPage.create(1)
    told = []

    def ask() -> None:
        while not page.call(0):
            pass
        told.append(True)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    page.decide(1 + max(page.freeze()))
    for thread in threads:
        thread.join()
    assert len(told) == 4


def test_before_a_freeze_every_call_is_false_and_counted() -> None:
    page = SuspendPage.create(3)
    assert not any(page.call(1) for _ in range(1000))
    assert [page.count(slot) for slot in range(3)] == [0, 1000, 0]
    assert page.freeze() == [0, 1000, 0]
    assert page.freeze() == [0, 1000, 0]
    assert page.decide(1001) == 1001
    assert page.call(1)
    assert not page.call(0)
    assert (page.told(1), page.told(0)) == (True, False)


def test_a_slot_set_apart_is_answered_false_until_it_begins() -> None:
    page = SuspendPage.create(2)
    assert not page.call(0)
    page.set_apart(0)
    assert not page.call(0)
    assert page.count(0) == 1
    assert page.freeze() == [1, 0]
    assert not page.call(0)  # frozen: and yet nothing to wait for
    page.begin(0, 1 << 40)
    assert page.decide(2) == 2
    assert page.call(0)
    assert page.count(0) == (1 << 40) + 1
    page.join(0)
    assert (page.joined(0), page.joined(1)) == (True, False)
    page.acknowledge(0)
    page.renew(0)
    assert (page.joined(0), page.told(0), page.acknowledged(0)) == (False, False, False)
    assert not page.call(0)
    page.begin(0, 2 << 40)
    assert page.call(0)  # frozen still, and decided
    with pytest.raises(ValueError, match="less than 2"):
        page.begin(0, 1 << 62)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="1 to 65536"):
        SuspendPage.create(0)
    page = SuspendPage.create(1)
    with pytest.raises(ValueError, match="slot"):
        page.call(1)
    with pytest.raises(ValueError, match="expected at least 1"):
        page.decide(0)
    other = os.memfd_create("other")
    try:
        for size in (0, 64, 128):
            os.ftruncate(other, size)
            with pytest.raises(Corrupted, match="not a suspend page"):
                SuspendPage.map(other)
    finally:
        os.close(other)
