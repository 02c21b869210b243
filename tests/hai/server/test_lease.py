"""The lease of an attempt as ranks ask for it: one part goes on, whatever dies and whoever asks again."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fireflyer import hai
from fireflyer.errors import ConfigError, PeerLost, TaskError
from fireflyer.hai.model import TaskSpec

MakeSpec = Callable[..., TaskSpec]
Become = Callable[[int], None]


@pytest.fixture
def running(server: Any, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Task t1 of four ranks runs, and this process is a rank of the attempt that is named last."""
    server.start()
    server.client.submit(spec("hold", nodes=2, ranks_per_node=2))
    server.client.wait("t1", {"running"}, 30)
    monkeypatch.setenv("FIREFLYER_TASK", "t1")
    monkeypatch.setenv("FIREFLYER_TASK_DIR", str(server.home / "tasks" / "t1"))

    def become(attempt: int) -> None:
        monkeypatch.setenv("FIREFLYER_ATTEMPT", str(attempt))

    become(1)
    return become


@pytest.mark.usefixtures("running")
def test_one_part_goes_on_and_may_ask_again(server: Any) -> None:
    assert hai.lease(1, {3, 0, 1})
    assert hai.lease(1, [0, 1, 3]), "its own question, repeated"
    assert not hai.lease(1, [2], token="another part")
    assert not hai.lease(3, [0, 1, 3])
    server.kill()
    server.start()
    assert hai.lease(1, [0, 1, 3])
    assert not hai.lease(1, [2], token="another part")
    assert hai.lease(2, [0, 3])
    assert not hai.lease(1, [0, 1, 3])
    view = server.client.task("t1")
    assert (view.generation, view.members) == (2, (0, 3))
    found = [event.detail for event in server.client.events("t1") if event.kind == "leased"]
    assert [(one["generation"], one["ranks"]) for one in found] == [(1, [0, 1, 3]), (2, [0, 3])]


@pytest.mark.usefixtures("running")
def test_of_parts_that_ask_at_once_one_is_granted() -> None:
    answers: list[bool] = []
    together = threading.Barrier(8)

    def ask(number: int) -> None:
        together.wait()
        answers.append(hai.lease(1, [number % 4], token=f"part {number}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]


def test_a_replaced_attempt_gets_nothing_and_the_new_one_begins_anew(
    server: Any, running: Become
) -> None:
    assert hai.lease(1, [0, 1])
    client = server.client
    client.suspend("t1")
    client.wait("t1", {"suspended"}, 30)
    assert not hai.lease(2, [0, 1])
    client.resume("t1")
    view = client.wait("t1", {"running"}, 30)
    assert (view.attempt, view.generation, view.members) == (2, 0, (0, 1, 2, 3))
    assert not hai.lease(2, [0, 1])
    running(2)
    assert hai.lease(1, [2, 3])
    client.stop("t1")
    view = client.wait("t1", {"stopped"}, 30)
    assert (view.generation, view.members) == (1, (2, 3)), "of the last attempt"
    assert not hai.lease(2, [2])


@pytest.mark.usefixtures("running")
def test_without_a_server_no_part_goes_on(server: Any) -> None:
    server.kill()
    with pytest.raises(PeerLost, match="no server serves"):
        hai.lease(1, [0, 1])
    server.start()
    assert hai.lease(1, [0, 1])


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("generation", "ranks", "token"),
    [(0, [0], None), (-1, [0], None), (1, [], None), (1, [4], None), (1, [0], "x" * 65)],
)
def test_a_question_that_makes_no_sense_is_an_error(
    generation: int, ranks: list[int], token: str | None
) -> None:
    with pytest.raises(ConfigError, match=r"the lease cannot be read|it has ranks 0 to 3"):
        hai.lease(generation, ranks, token=token)


@pytest.mark.usefixtures("running")
def test_a_minority_lets_the_others_ask_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert hai.lease(1, [1, 2, 3], token="the larger part")

    monkeypatch.setattr("fireflyer.hai.leasing.time.sleep", wait)
    assert not hai.lease(1, [0], minority=True, grace_s=7.0)
    assert waited == [7.0]


def test_outside_a_task_nobody_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_TASK", raising=False)
    assert not hai.in_task()
    with pytest.raises(TaskError, match="go by a quorum"):
        hai.lease(1, [0])
    monkeypatch.setenv("FIREFLYER_TASK", "t1")
    assert hai.in_task()
    monkeypatch.setenv("FIREFLYER_TASK_DIR", str(tmp_path / "tasks" / "t1"))
    with pytest.raises(PeerLost, match="no server serves"):
        hai.lease(1, [0])


@pytest.mark.usefixtures("running")
def test_a_task_that_the_server_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_TASK", "t9")
    with pytest.raises(TaskError, match="no task 't9'"):
        hai.lease(1, [0])
