"""The whole way: `up --engine slurm`, `run`, suspend, SIGKILL of the server, resume on other nodes."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Running, Shell, end_at_once
from tests.hai.slurm.cluster import NODES, Cluster
from tests.waiting import LIMIT_S

from fireflyer.hai.model import TaskView

GPT = Path(__file__).parents[3] / "examples" / "gpt.py"
SMALL = ["--steps", "300", "--batch", "16", "--context", "64", "--shape", "64", "2", "4"]
TWO_ZONES = """\
SwitchName=leaf1 Nodes=fn1
SwitchName=leaf2 Nodes=fn2
SwitchName=leaf3 Nodes=fn3
SwitchName=leaf4 Nodes=fn4
SwitchName=pod1 Switches=leaf[1-2]
SwitchName=pod2 Switches=leaf[3-4]
SwitchName=core Switches=pod[1-2]
"""
HOLD = "import signal\nprint('holds', flush=True)\nwhile True:\n    signal.pause()\n"

Keep = Callable[[Running], Running]


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Servers given to it are ended with the test."""
    servers: list[Running] = []

    def add(server: Running) -> Running:
        servers.append(server)
        server.until("stderr", "serving")
        return server

    yield add
    for server in servers:
        if server.process.poll() is None:
            end_at_once(server.process.pid)
        server.process.communicate(timeout=LIMIT_S)


def nodes_of(view: TaskView) -> tuple[str, ...]:
    return tuple(rank.node for rank in view.ranks)


def read_until(shell: Shell, task: str, attempt: int, text: str) -> str:
    """Rank 0's output up to this text."""
    offset, seen = 0, ""
    while text not in seen:
        chunk = shell.client.read_log_chunk(task, 0, offset, attempt, wait_s=20)
        offset, seen = chunk.next_offset, seen + chunk.data.decode()
        assert not chunk.end, seen
    return seen


def test_a_task_moves_through_the_cluster_and_outlives_the_server(
    shell: Shell, keep: Keep, cluster: Cluster
) -> None:
    keep(shell.start("up", "--engine", "slurm", "--partition", "low"))
    client = shell.client
    assert [node.name for node in client.nodes()] == list(NODES)
    shell.run("run", "-d", str(GPT), *SMALL, "--", "-n", "2")
    read_until(shell, "t1", 1, "step 10 of")
    assert nodes_of(client.task("t1")) == ("fn1", "fn2")
    shell.run("suspend", "t1")
    assert client.wait("t1", {"suspended", "finished"}, 60).state == "suspended"
    shell.script(HOLD, "hold.py")
    shell.run("run", "-d", "-n", "2", "--start", "exec", "hold.py")
    read_until(shell, "t2", 1, "holds")
    assert nodes_of(client.task("t2")) == ("fn1", "fn2")

    os.kill(client.server().pid, signal.SIGKILL)
    while client.home.served():
        assert client.home.holder()
    keep(shell.start("up"))  # the home remembers what its engine is
    assert [node.name for node in client.nodes()] == list(NODES)
    assert client.task("t1").state == "suspended"
    assert client.wait("t2", {"running"}, 60).state == "running"
    shell.run("resume", "t1")
    assert client.wait("t1", {"running"}, 60).attempt == 2
    done = client.wait("t1", {"finished", "failed"}, 90)
    assert (done.state, done.reason, done.restarts) == ("finished", "every rank returned 0", 0)
    assert nodes_of(done) == ("fn3", "fn4")
    steps = {}
    for attempt in (1, 2):
        output = client.read_log("t1", 0, attempt=attempt)[0].decode()
        steps[attempt] = [int(n) for n in re.findall(r"^step (\d+) of", output, re.MULTILINE)]
    assert steps[1] + steps[2] == list(range(10, 301, 10))  # each once: it went on where it was
    assert client.task("t2").attempt == 1
    client.stop("t2")
    assert client.wait("t2", {"stopped"}, 60).state == "stopped"
    shell.run("down")
    assert not any(name.endswith(("-t1", "-t2")) for name in cluster.jobs())


@pytest.mark.parametrize("own_cluster", [TWO_ZONES], indirect=True)
def test_a_gang_stays_in_a_zone(own_cluster: Cluster, tmp_path: Path, keep: Keep) -> None:
    """Each node has a leaf of its own; without zones the gang would get fn2 and fn3."""
    shell = Shell(tmp_path)
    keep(shell.start("up", "--engine", "slurm"))
    assert [node.zone for node in shell.client.nodes()] == ["pod1", "pod1", "pod2", "pod2"]
    table = [line.split()[:3] for line in shell.run("nodes").stdout.splitlines()]
    assert table[0] == ["NODE", "ZONE", "STATE"]
    assert table[1:] == [[f"fn{n}", f"pod{(n + 1) // 2}", "ready"] for n in range(1, 5)]
    shown = json.loads(shell.run("nodes", "--json").stdout)
    assert [node["zone"] for node in shown] == ["pod1", "pod1", "pod2", "pod2"]
    shell.script(HOLD, "hold.py")
    for number, nodes in (("1", ("fn1",)), ("2", ("fn3", "fn4"))):
        shell.run("run", "-d", "--start", "exec", "-n", number, "hold.py")
        read_until(shell, f"t{number}", 1, "holds")
        assert nodes_of(shell.client.task(f"t{number}")) == nodes
    shell.client.drain("fn2", "fan")  # a node that is marked keeps its zone
    assert [node.zone for node in shell.client.nodes()] == ["pod1", "pod1", "pod2", "pod2"]
    for task in ("t1", "t2"):
        shell.client.stop(task)
        assert shell.client.wait(task, {"stopped"}, 60).state == "stopped"
    shell.run("down")


@pytest.mark.deadline(400)
def test_tasks_that_ask_for_parts_of_nodes_share_them(
    shell: Shell, keep: Keep, cluster: Cluster
) -> None:
    if not cluster.gpus:
        pytest.skip("device files cannot be made here, so there are no GPUs to pretend")
    keep(shell.start("up", "--engine", "slurm"))
    shell.script("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], 'seen')\n" + HOLD, "hold.py")
    seen = {}
    for words in ("-n 2 -r 2 --gpus 4", "--gpus a100:4", "--gpus 2", "--gpus A100:1"):
        task = shell.run("run", "-d", *words.split(), "hold.py").stdout.strip()
        output = read_until(shell, task, 1, "holds")
        seen[task] = nodes_of(shell.client.task(task)), output.split(" seen")[0]
    assert seen == {
        "t1": (("fn1", "fn1", "fn2", "fn2"), "0,1,2,3"),
        "t2": (("fn1",), "4,5,6,7"),
        "t3": (("fn2",), "4,5"),
        "t4": (("fn2",), "6"),
    }
    nodes = {node.name: node for node in shell.client.nodes()}
    assert [nodes[name].free for name in NODES] == [0, 1, 8, 8]
    assert {node.gpu_type for node in nodes.values()} == {"a100"}
    for gpus in ("3", "a100:5", "7", "1"):  # none waits, whatever is left
        task = shell.run("run", "-d", "--gpus", gpus, "hold.py").stdout.strip()
        output = read_until(shell, task, 1, "holds")
        seen[task] = nodes_of(shell.client.task(task)), output.split(" seen")[0]
    assert [seen[f"t{n}"] for n in range(5, 9)] == [
        (("fn3",), "0,1,2"), (("fn3",), "3,4,5,6,7"), (("fn4",), "0,1,2,3,4,5,6"), (("fn2",), "7")
    ]  # fmt: skip
    shell.run("run", "-d", "--gpus", "a100:2", "hold.py")
    waits = shell.client.why("t9")
    text = "waits for 1 node with 2 a100 GPUs; 0 free (at most 1 GPU on one)"
    assert (waits.rule, waits.text) == ("busy", text)
    refused = shell.run("run", "-d", "--gpus", "v100:1", "hold.py", code=1)
    assert "Its GPUs: a100" in refused.stderr
    shell.client.stop("t9")
    for task in seen:
        shell.client.stop(task)
        assert shell.client.wait(task, {"stopped"}, 60).attempt == 1
    shell.run("down")


def test_options_that_do_not_go_together(shell: Shell, cluster: Cluster) -> None:
    for words, text in (
        (["--engine", "slurm", "--nodes", "3"], "--nodes requires --engine local"),
        (["--partition", "low"], "--partition requires --engine slurm"),
        (["--engine", "ray"], "invalid --engine 'ray': expected local or slurm"),
        (["--engine", "slurm", "--partition", "nowhere"], "cannot use Slurm"),
    ):
        assert text in shell.run("up", *words, code=1).stderr


def test_a_node_that_the_operators_drain_gets_no_task(
    shell: Shell, keep: Keep, cluster: Cluster
) -> None:
    cluster.command("scontrol", "update", "nodename=fn1", "state=drain", "reason=fan")
    try:
        keep(shell.start("up", "--engine", "slurm"))
        shell.script("print('here', flush=True)")
        shell.run("run", "--start", "exec", "script.py")
        assert nodes_of(shell.client.task("t1")) == ("fn2",)
        shell.run("run", "-d", "--start", "exec", "-n", "4", "script.py")
        assert shell.client.task("t2").state == "queued"
    finally:
        cluster.command("scontrol", "update", "nodename=fn1", "state=resume")
    done = shell.client.wait("t2", {"finished", "failed"}, 60)
    assert (done.state, nodes_of(done)) == ("finished", NODES)


def test_the_engine_is_not_changed_under_a_task_that_runs(
    shell: Shell, keep: Keep, cluster: Cluster
) -> None:
    keep(shell.start("up", "--engine", "slurm"))
    shell.script(HOLD, "hold.py")
    shell.run("run", "-d", "--start", "exec", "hold.py")
    read_until(shell, "t1", 1, "holds")
    shell.run("down", "--keep")
    refused = shell.run("up", "--engine", "local", code=1)
    assert "t1 was started on the engine 'slurm' and may still be running" in refused.stderr
    shell.run(
        "run", "-d", "--start", "exec", "hold.py"
    )  # starts a server: on what the home remembers
    assert [node.name for node in shell.client.nodes()] == list(NODES)
    read_until(shell, "t2", 1, "holds")
    for task in ("t1", "t2"):
        shell.client.stop(task)
        assert shell.client.wait(task, {"stopped"}, 60).attempt == 1
    shell.run("down")
    keep(shell.start("up", "--engine", "local"))
    assert [node.name for node in shell.client.nodes()] == ["n0", "n1"]
