"""A real server: who makes room goes on by itself; nodes that are drained, windows, and what `why` says."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.waiting import LIMIT_S, until

from fireflyer.errors import ConfigError, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import TaskSpec, WindowView

MakeSpec = Callable[..., TaskSpec]


def kinds(client: Client, task: str) -> list[str]:
    return [e.kind for e in client.events(task) if not e.kind.startswith("rank_")]


def placed(client: Client, task: str) -> list[str]:
    return [rank.node for rank in client.task(task).ranks]


def test_higher_priority_makes_a_task_save_leave_and_go_on_later(
    server: Any, spec: MakeSpec
) -> None:
    server.start(nodes=1)
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    client.submit(spec("hold", priority="high"))
    client.wait("t2", {"running"}, LIMIT_S)
    view = client.task("t1")
    assert (view.state, view.reason, view.restarts) == ("queued", "makes room for t2", 0)
    (asked,) = [e for e in client.events("t1") if e.kind == "suspending"]
    assert asked.detail == {"reason": "makes room for t2", "preempted": True}
    client.stop("t2")
    client.wait("t1", {"running"}, LIMIT_S)
    assert kinds(client, "t1") == [
        "submitted", "queued", "starting", "running",
        "suspending", "gang_ended", "preempted", "queued", "starting", "running",
    ]  # fmt: skip


def test_who_makes_room_while_the_server_dies_still_goes_on(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=1)
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    client.submit(spec("hold", priority="high"))
    server.kill()
    server.start(nodes=1)
    client.wait("t2", {"running"}, LIMIT_S)
    client.stop("t2")
    assert client.wait("t1", {"running"}, LIMIT_S).attempt == 2


def test_the_same_user_and_priority_waits(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=1)
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    assert client.submit(spec("hold")).state == "queued"
    found = client.why("t2")
    assert (found.state, found.policy, found.earliest) == ("queued", "timeshare", None)
    assert found.text == "waits for 1 node; 0 free"
    assert kinds(client, "t1")[-1] == "running"
    assert client.why("t1").text == "running"


def test_a_drained_node_gets_nothing_new_also_from_the_next_server(
    server: Any, spec: MakeSpec
) -> None:
    server.start(nodes=2)
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    client.drain("n0", "fan 2")
    client.drain("n1", "disk", until=time.time() + 3600)
    assert client.task("t1").state == "running"
    drained = server.home / "engine" / "drained"
    until(lambda: drained.exists() and "\n" in drained.read_text())
    assert drained.read_text() == "n0: fan 2\n", "a drain with an end is the server's alone"
    server.kill()
    server.start(nodes=2)
    view = client.submit(spec("hold"))
    assert (view.state, view.reason) == (
        "queued", "asks for 1 node; of 2 such nodes 2 are drained",
    )  # fmt: skip
    found = {node.name: node for node in client.nodes()}
    assert (found["n0"].state, found["n0"].reason, found["n0"].tasks) == (
        "drained",
        "fan 2",
        ("t1",),
    )
    assert found["n1"].until is not None
    assert client.why("t2").earliest == found["n1"].until
    client.undrain("n1")
    client.wait("t2", {"running"}, LIMIT_S)
    assert placed(client, "t2") == ["n1"]
    with pytest.raises(TaskError, match="unknown node 'n7'"):
        client.drain("n7", "gone")


def test_an_evicting_drain_moves_the_tasks_of_a_node(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=3)
    client = server.client
    client.submit(spec("hold", nodes=2))
    client.wait("t1", {"running"}, LIMIT_S)
    after = client.events("t1")[-1].seq
    client.drain("n0", "new fan", evict=True)
    while client.task("t1").attempt == 1:
        after = client.events("t1", after, wait_s=LIMIT_S)[-1].seq
    view = client.wait("t1", {"running"}, LIMIT_S)
    assert (placed(client, "t1"), view.attempt, view.restarts) == (["n1", "n2"], 2, 0)
    (asked,) = [e for e in client.events("t1") if e.kind == "suspending"]
    assert asked.detail == {"reason": "n0 is drained: new fan", "preempted": True}
    client.drain("n1", "and this one")
    assert client.task("t1").state == "running", "without evict it stays"


def test_a_window_empties_its_nodes(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=2)
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    now = time.time()
    made = client.add_window(WindowView(nodes=("n0",), begin=now - 1, end=now + 3600, reason="fan"))
    assert made.id == "w1"
    while placed(client, "t1") != ["n1"]:
        client.events("t1", client.events("t1")[-1].seq, 20)
    assert client.task("t1").restarts == 0
    server.kill()
    server.start(nodes=2)
    assert [window.id for window in client.windows()] == ["w1"]
    client.submit(spec("finish"))
    assert "window w1 (fan) closes 1 node" not in client.task("t2").reason
    client.submit(spec("finish", nodes=2))
    assert client.why("t3").text == "window w1 (fan) closes 1 node"
    client.remove_window("w1")
    client.stop("t1")
    client.wait("t3", {"finished"}, LIMIT_S)
    with pytest.raises(ConfigError, match="unknown node n9"):
        client.add_window(WindowView(nodes=("n9",), begin=now, end=now + 3600))
    with pytest.raises(TaskError, match="no window 'w1'"):
        client.remove_window("w1")


def test_what_the_nodes_can_never_hold_is_refused(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=2)
    with pytest.raises(TaskError, match="asks for 1 node with 4 GPUs each; this server has 0"):
        server.client.submit(spec("hold", gpus=4))
    with pytest.raises(TaskError, match="asks for 3 nodes and this server has 2"):
        server.client.submit(spec("hold", nodes=3))
