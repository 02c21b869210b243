"""`fireflyer run --elastic`: a task whose ranks are killed trains on, and is complete again soon."""

import os
import pickle
import re
import select
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.haiscale.elastic.elastic_job import check
from tests.waiting import LIMIT_S

from fireflyer.hai.client import Client
from fireflyer.hai.model import Event, TaskView

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
GPT = [
    str(ROOT / "examples" / "elastic_gpt.py"),
    *("--steps", "100000", "--batch", "16", "--context", "64", "--shape", "64", "2", "4"),
    *("--lr", "0.5"),
]

JOB = """
import os, pickle
import torch
import torch.distributed as dist
from fireflyer import hai
from tests.haiscale.elastic.elastic_job import Job

dist.init_process_group("hfreduce")
me = hai.task()
job = Job(me.rank, dist.get_rank(), dist.get_world_size())
elastic = job.wrap()
hai.elastic(elastic)
batches = job.batches()
enough = torch.zeros(1)
while not enough:
    with elastic.step() as step:
        enough.fill_((me.output / "enough").exists())
        dist.all_reduce(enough)  # alike on all, as is the step that it belongs to
        mine = next(batches)
        step.weight = len(mine)
        job.update(mine)
    print("step", elastic.steps)
with open(me.output / f"{me.rank}.pickle", "wb") as file:
    pickle.dump(job.result(), file)
dist.destroy_process_group()
"""


def submit(shell: Any, *arguments: str) -> TaskView:
    """On two nodes of two ranks; followed by nobody."""
    flags = ["--nodes", "2", "--ranks", "2", "--elastic", "--detach"]
    view: TaskView = shell.client.task(shell.run("run", *flags, *arguments).stdout.strip())
    return view


def until_printed(client: Client, task: str, rank: int, text: str) -> None:
    offset, printed = 0, b""
    while text.encode() not in printed:
        piece = client.read_log_chunk(task, rank, offset, 1, 20.0)
        assert piece.data or not piece.end, printed
        offset, printed = piece.next_offset, printed + piece.data


def until_joined(client: Client, task: str, ranks: set[int], after: int = 0) -> int:
    """Waits for newcomers in these places; seq of the last one's event."""
    missing = set(ranks)
    while missing:
        found = client.events(task=task, after=after, wait_s=20.0)
        for event in found:
            assert event.kind not in ("gang_ended", "finished"), found
            after = event.seq
            if event.kind == "rank_joined":
                missing.discard(event.detail["rank"])
    return after


def supervisor_of(view: TaskView, node: str) -> int:
    pid = next(rank.pid for rank in view.ranks if rank.node == node)
    assert pid is not None
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^PPid:\s+(\d+)$", status, re.MULTILINE)[0])


def kill_rank(view: TaskView, rank: int) -> None:
    pid = view.ranks[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_gpt_loses_a_rank_and_a_node_and_is_suspended_when_complete(shell: Any) -> None:
    view = submit(shell, "--start", "fork", *GPT)
    client, task = shell.client, view.id
    until_printed(client, task, 0, "step 20 ")
    kill_rank(client.task(task), 0)
    seen = until_joined(client, task, {0})
    until_printed(client, task, 1, ", 4 ranks\n")  # the first of the ranks now
    os.kill(supervisor_of(client.task(task), "n1"), signal.SIGKILL)
    until_joined(client, task, {2, 3}, seen)
    shown = client.task(task)
    assert [(rank.incarnation, rank.member) for rank in shown.ranks] == [
        (1, True), (0, True), (1, True), (1, True),
    ]  # fmt: skip
    assert "running, newcomer 1" in shell.run("show", task).stdout
    shell.run("suspend", "--wait", task)

    ends = [Path(rank.log).read_text().splitlines()[-1] for rank in client.task(task).ranks]
    (end,) = set(ends)  # parameters, too
    (told,) = re.findall(r"^(\d+) steps, sample (\d+) of (\d+), parameters \w+$", end)
    steps, sample, of = map(int, told)
    assert sample == steps * 16 % (of // 16 * 16), "each sample counts once"
    printed = "".join(Path(rank.log).read_text() for rank in shown.ranks)
    losses = {
        int(s): float(x) for s, x in re.findall(r"^step (\d+) of .*loss ([\d.]+),", printed, re.M)
    }
    assert losses[max(losses)] < losses[10] - 0.05
    history: list[Event] = client.events(task=task, after=0)
    lost = [
        e.detail["rank"] for e in history if e.kind == "rank_exited" and e.detail["code"] is None
    ]
    assert lost == [0, 2, 3]
    assert [e.kind for e in history][-1] == "suspended"
    assert client.task(task).attempt == 1


def kill_server(client: Client) -> None:
    server = os.pidfd_open(client.server().pid)
    signal.pidfd_send_signal(server, signal.SIGKILL)
    assert select.select([server], [], [], LIMIT_S)[0]
    os.close(server)


@pytest.mark.parametrize("victims", [(2,), (0, 3), ("server", 2)])
def test_each_sample_counts_once_and_all_end_alike(
    shell: Any, victims: tuple[int | str, ...]
) -> None:
    shell.env["PYTHONPATH"] = str(ROOT)
    view = submit(shell, "--env", "PYTHONPATH", shell.script(JOB))
    client, task = shell.client, view.id
    until_printed(client, task, 1, "step 3\n")
    running = client.task(task)
    for victim in victims:
        if isinstance(victim, int):
            kill_rank(running, victim)
        else:
            kill_server(client)
    Client.connect(shell.home, nodes=2)  # another server, where the first one is dead
    until_joined(client, task, {victim for victim in victims if isinstance(victim, int)})
    Path(view.directory, "output", "enough").touch()
    assert client.wait(task, {"finished"}).reason == "every rank returned 0"
    output = Path(view.directory, "output")
    results = [pickle.loads((output / f"{rank}.pickle").read_bytes()) for rank in range(4)]
    check(results, 4, results[0]["steps"])
