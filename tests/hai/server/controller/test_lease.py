"""The lease of an attempt as ranks ask for it: one part goes on, whatever dies and whoever asks again."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import fork_child
from tests.waiting import LIMIT_S

from fireflyer import hai
from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost, TaskError
from fireflyer.hai.model import Lease, LeaseRequest, TaskSpec
from fireflyer.hai.rank import lease as rank_lease

MakeSpec = Callable[..., TaskSpec]
Become = Callable[[int], None]


@pytest.fixture
def running(server: Any, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Task t1 of four ranks runs, and this process is a rank of the attempt that is named last."""
    server.start()
    server.client.submit(spec("hold", nodes=2, ranks_per_node=2))
    server.client.wait("t1", {"running"}, LIMIT_S)
    monkeypatch.setenv("FIREFLYER_TASK", "t1")
    monkeypatch.setenv("FIREFLYER_TASK_DIR", str(server.home / "tasks" / "t1"))

    def become(attempt: int) -> None:
        monkeypatch.setenv("FIREFLYER_ATTEMPT", str(attempt))

    become(1)
    return become


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has asked for nothing and holds generation 0."""
    monkeypatch.setattr(rank_lease, "_askers", {})


def other(server: Any, generation: int, held: int = 0, token: str = "other") -> bool:
    """Another process asks."""
    lease = Lease(generation=generation, members=(token,), token=token)
    return bool(server.client.lease("t1", LeaseRequest(attempt=1, held=held, lease=lease)))


@pytest.mark.usefixtures("running")
def test_one_part_goes_on_and_may_ask_again(server: Any) -> None:
    assert hai.lease(1, ["a:1", "b:1"])
    assert hai.lease(1, ["a:1", "b:1"]), "its own question, repeated"
    assert not other(server, 1)
    assert not other(server, 2)
    server.kill()
    server.start()
    assert hai.lease(1, ["a:1", "b:1"])
    assert not other(server, 2)
    hai.hold(1)
    assert hai.lease(3, ["a:1"])
    assert not hai.lease(1, ["a:1", "b:1"])
    assert not other(server, 4, held=1)
    assert other(server, 4, held=3)
    assert not hai.lease(5, ["a:1"])
    hai.hold(4)
    assert hai.lease(5, ["a:1"])
    view = server.client.task("t1")
    assert (view.generation, view.members) == (5, ("a:1",))
    found = [event.detail for event in server.client.events("t1") if event.kind == "leased"]
    expected = [(1, ["a:1", "b:1"]), (3, ["a:1"]), (4, ["other"]), (5, ["a:1"])]
    assert [(one["generation"], one["members"]) for one in found] == expected


@pytest.mark.usefixtures("running")
def test_a_grant_whose_answer_was_lost_is_followed_by_who_asked(server: Any) -> None:
    assert hai.lease(1, ["a:1", "b:1"])
    assert hai.lease(2, ["a:1"]), "not told to hold 1: b:1 ended before all knew"
    assert not other(server, 3, held=1)


@pytest.mark.usefixtures("running")
def test_of_parts_that_ask_at_once_one_is_granted(server: Any) -> None:
    answers: list[bool] = []
    together = threading.Barrier(8)

    def ask(number: int) -> None:
        together.wait()
        answers.append(other(server, 1 + number % 3, token=f"part {number}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]


def test_a_forked_child_is_another_asker(server: Any, running: Become) -> None:
    assert hai.lease(1, ["a:1"])

    def child() -> None:
        assert not hai.lease(2, ["a:1"])

    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(child), 0)[1]) == 0


def test_a_replaced_attempt_gets_nothing_and_the_new_one_begins_anew(
    server: Any, running: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hai.lease(1, ["a:1"])
    client = server.client
    client.suspend("t1")
    client.wait("t1", {"suspended"}, LIMIT_S)
    assert not hai.lease(2, ["a:1"])
    client.resume("t1")
    view = client.wait("t1", {"running"}, LIMIT_S)
    assert (view.attempt, view.generation, view.members) == (2, 0, ())
    assert not hai.lease(2, ["a:1"])
    monkeypatch.setattr(rank_lease, "_askers", {})  # its ranks are other processes
    running(2)
    assert hai.lease(1, ["c:1"])
    client.stop("t1")
    view = client.wait("t1", {"stopped"}, LIMIT_S)
    assert (view.generation, view.members) == (1, ("c:1",)), "of the last attempt"
    assert not hai.lease(2, ["c:1"])


@pytest.mark.usefixtures("running")
def test_without_a_server_no_part_goes_on(server: Any) -> None:
    server.kill()
    with pytest.raises(PeerLost, match="no server serves"):
        hai.lease(1, ["a:1"])
    server.start()
    assert hai.lease(1, ["a:1"])


class Steps:
    """What `hai.elastic` is given."""

    def __init__(self) -> None:
        self.permit: Callable[[int, tuple[str, ...], bool], bool] | None = None
        self.fenced: list[Callable[[int], None]] = []
        self.begun: list[Callable[[int, int], None]] = []


@pytest.mark.usefixtures("running")
def test_an_elastic_job_waits_for_the_next_server(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, lease = threading.Event(), rank_lease.lease

    def ask(*question: Any) -> bool:
        try:
            return lease(*question)
        finally:
            asked.set()

    monkeypatch.setattr(rank_lease, "lease", ask)
    steps, hasty = Steps(), Steps()
    hai.elastic(steps)
    hai.elastic(hasty, patience_s=0.0)
    server.kill()
    assert hasty.permit is not None
    assert steps.permit is not None
    with pytest.raises(PeerLost):
        hasty.permit(1, ("a:1",), False)
    asked.clear()
    answers: list[bool] = []
    permit = steps.permit
    thread = threading.Thread(target=lambda: answers.append(permit(1, ("a:1",), False)))
    thread.start()
    assert asked.wait(LIMIT_S)
    server.start()
    thread.join()
    assert answers == [True]
    for fenced in steps.fenced:
        fenced(1)
    assert lease(2, ["a:1"])


@pytest.mark.usefixtures("running")
def test_an_elastic_job_waits_for_a_server_that_starts(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, file = Steps(), server.home / "server.json"
    said, lease = file.read_bytes(), rank_lease.lease
    tries = 0

    def ask(*question: Any) -> bool:
        nonlocal tries
        tries += 1
        if tries == 2:
            file.write_bytes(said)
        return lease(*question)

    monkeypatch.setattr(rank_lease, "lease", ask)
    hai.elastic(steps)
    assert steps.permit is not None
    file.unlink()
    assert steps.permit(1, ("a:1",), False)
    assert tries == 2


def test_outside_a_task_an_elastic_job_is_left_alone() -> None:
    steps = Steps()
    hai.elastic(steps)
    assert (steps.permit, steps.fenced, steps.begun) == (None, [], [])


@pytest.mark.usefixtures("running")
def test_a_server_that_does_not_answer(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.hai.client.CALL_DEADLINE_S", 0.05)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            hai.lease(1, ["a:1"])
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.usefixtures("running")
def test_a_question_that_makes_no_sense_is_an_error() -> None:
    for generation, members in ((0, ["a"]), (-1, ["a"]), (1, [])):
        with pytest.raises(ConfigError, match="the lease cannot be read"):
            hai.lease(generation, members)


@pytest.mark.usefixtures("running")
def test_a_minority_lets_the_others_ask_first(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert other(server, 1)

    monkeypatch.setattr("fireflyer.hai.rank.lease.time.sleep", wait)
    assert not hai.lease(1, ["a:1"], True, grace_s=7.0)
    assert waited == [7.0]


def test_outside_a_task_nobody_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_TASK", raising=False)
    assert not hai.in_task()
    with pytest.raises(TaskError, match="use a quorum instead"):
        hai.lease(1, ["a:1"])
    monkeypatch.setenv("FIREFLYER_TASK", "t1")
    assert hai.in_task()
    monkeypatch.setenv("FIREFLYER_TASK_DIR", str(tmp_path / "tasks" / "t1"))
    with pytest.raises(PeerLost, match="no server serves"):
        hai.lease(1, ["a:1"])


@pytest.mark.usefixtures("running")
def test_a_task_that_the_server_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_TASK", "t9")
    with pytest.raises(TaskError, match="no task 't9'"):
        hai.lease(1, ["a:1"])
