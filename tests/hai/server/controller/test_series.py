"""Use of the hardware over time: samples of ranks, chunks at falling resolution, and what is asked."""

import asyncio
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import draws
from tests.waiting import LIMIT_S

from fireflyer import heartbeat
from fireflyer.errors import ConfigError, Corrupted, NoSuchTask
from fireflyer.hai.controller.recorder import Recorder, between, network, progress
from fireflyer.hai.controller.series import select
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.lifecycle import Launch, Task
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.sampling.series import EMPTY, METRICS, Point, mean, pack, point, thin, unpack
from fireflyer.hai.sampling.usage import RankUsage, Sampler, Usage, read_usage, tree
from fireflyer.hai.scheduling.cluster import Cluster, Job, Node

NOON = 1_800_000_000.0  # begins a chunk of each level
HOUR = 3600.0


def values(points: list[Point], name: str) -> list[float | None]:
    column = [found[METRICS.index(name)] for found in points]
    return [None if math.isnan(value) else value for value in column]


# -- points ----------------------------------------------------------------------------------------


def test_a_chunk_keeps_its_points() -> None:
    draw = draws.drawn("chunks")
    names = draw.sample(METRICS, 5)
    points = [
        point(**{name: float(draw.randrange(1 << 20)) for name in names if draw.random() < 0.7})
        for _ in range(60)
    ]
    found = unpack(pack(points))
    for name in METRICS:
        assert values(found, name) == values(points, name)
    assert values(unpack(pack([point(read=1e300)])), "read")[0] == pytest.approx(3e38)
    with pytest.raises(Corrupted, match="cannot read a chunk"):
        unpack(b"no chunk")


def test_means_leave_out_what_is_not_known() -> None:
    found = mean([point(cpu=1, step=10, loss=4), EMPTY, point(cpu=2, step=30)])
    assert values([found], "cpu") == [1.5]
    assert values([found], "step") == [30], "the step is the last one"
    assert values([found], "loss") == [4]
    assert values([found], "gpu") == [None]
    short, size = thin([point(cpu=number) for number in range(10)], 4)
    assert (values(short, "cpu"), size) == ([1, 4, 7, 9], 3)


def test_higher_levels_are_means_and_old_chunks_go(database: Database) -> None:
    samples = Samples(database)
    for minute in range(181):
        samples.add(NOON + 60 * minute, {"cluster": point(cpu=minute), "node:n0": point(held=1)})
        if minute == 95:
            samples = Samples(database)  # another server goes on
    begin, points = samples.read("cluster", 600, NOON, NOON + 3 * HOUR - 1)
    assert begin == NOON
    assert values(points, "cpu") == [10 * number + 4.5 for number in range(18)]
    assert values(samples.read("cluster", 3600, NOON, NOON + 3 * HOUR - 1)[1], "cpu") == [
        29.5, 89.5, 149.5
    ]  # fmt: skip
    assert values(samples.read("cluster", 60, NOON + 60, NOON + 180)[1], "cpu") == [1, 2, 3]
    assert values(samples.read("node:n1", 60, NOON, NOON + 60)[1], "held") == [None, None]
    later = NOON + 4 * 86_400
    samples.add(later, {"cluster": point(cpu=5)})
    assert set(values(samples.read("cluster", 60, NOON, NOON + HOUR)[1], "cpu")) == {None}
    view = select(samples, "cluster", 30 * 86_400, later)
    assert view.step_s == 2 * 3600
    assert set(view.metrics) == {"cpu"}


def test_an_interval_in_which_a_server_died_is_completed(database: Database) -> None:
    for minute in range(14):
        Samples(database).add(NOON + 60 * minute, {"cluster": point(cpu=minute)})
    Samples(database).add(NOON + 60 * 75, {"cluster": point(cpu=0)})
    assert values(Samples(database).read("cluster", 600, NOON, NOON + 1199)[1], "cpu") == [
        4.5,
        11.5,
    ]


def test_a_day_of_eight_ranks_stays_small(tmp_path: Path) -> None:
    """Growth is counted in the bytes of chunks: what a page of the file holds of them varies."""
    draw = draws.drawn("growth")
    chunk = [
        point(cpu=draw.random(), memory=draw.random() * 1e10, read=draw.random() * 1e8,
              written=draw.random() * 1e6, step=float(n), speed=draw.random())
        for n in range(60)
    ]  # fmt: skip
    task = [(*p[:-1], p[-1]) for p in chunk]
    day = 8 * (24 + 2.4 + 0.4) * len(pack(chunk)) + (24 + 2.4 + 0.4) * len(pack(task))
    assert day < 0.5e6


# -- samples ---------------------------------------------------------------------------------------


class FakeNVML:
    class NVMLError(Exception):
        pass

    class _Read:
        gpu, used = 50, 1 << 30

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return self._Read

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return self._Read


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "x = bytearray(50 << 20); print(1, flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.readline()
child.communicate(b"\\n")
print("alone", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def parent() -> Iterator[Any]:
    """A process with a child of 50 MiB."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_sample_counts_a_rank_with_its_children(parent: Any, tmp_path: Path) -> None:
    path = tmp_path / "n0.usage"
    sampler = Sampler(path, "n0", [0, 1, 7], FakeNVML())
    assert len(tree(parent.pid)) == 2
    sampler.sample({parent.pid: 3, 1 << 30: 4}, 100.0)
    first = read_usage(path)
    assert first is not None
    assert (first.node, first.samples, first.gpus, first.gpu_sum) == ("n0", 1, 2, 1.0)
    (rank, gone) = first.ranks
    assert (rank.rank, rank.pid, rank.samples) == (3, parent.pid, 1)
    assert rank.memory_sum > 60 << 20
    assert rank.cpu_s > 0
    assert gone.memory_sum == 0
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "alone\n"
    sampler.sample({parent.pid: 3}, 101.0)
    sampler.write()
    second = read_usage(path)
    assert second is not None
    used, ranks, load = between(second, first)
    assert ranks[3]["memory"] < 50 << 20
    assert ranks[3]["cpu"] >= 0, "the child's time is its parent's now"
    assert (load, used["gpu_memory"]) == (0.5, 2 << 30)
    path.write_text("{")
    assert read_usage(path) is None


def test_rates_come_from_two_reads_of_the_same_process() -> None:
    def at(seconds: float, pid: int, cpu_s: float) -> Usage:
        rank = RankUsage(
            rank=0, pid=pid, cpu_s=cpu_s, read=1000, memory_sum=50.0 * seconds, samples=int(seconds)
        )
        return Usage(
            node="n0",
            seconds=seconds,
            samples=int(seconds),
            ranks=[rank],
            received=int(100 * seconds),
        )

    used, ranks, load = between(at(20, 7, 15.0), at(10, 7, 10.0))
    assert ranks == {0: {"cpu": 0.5, "memory": 50.0, "read": 0.0, "written": 0.0}}
    assert (used["cpu"], load) == (0.5, None)
    assert between(at(20, 8, 4.0), at(10, 7, 10.0))[1][0]["cpu"] == 0.4, (
        "a new process counts from 0"
    )
    assert between(at(10, 7, 5.0), at(20, 7, 9.0))[1][0]["cpu"] == 0.5, "a new supervisor, too"
    assert between(at(10, 7, 5.0), at(10, 7, 5.0)) == ({}, {}, None)
    assert network(at(20, 7, 0), at(10, 7, 0)) == {"received": 100.0, "sent": 0.0}
    assert network(at(20, 7, 0), None) == {}


def test_steps_loss_and_speed_come_from_heartbeats(tmp_path: Path) -> None:
    writer = heartbeat.Writer(str(tmp_path / "0.pulse"))
    writer.step(10, None, None)
    first = heartbeat.read(tmp_path / "0.pulse")
    writer.step(16, None, 2.5)
    second = heartbeat.read(tmp_path / "0.pulse")
    assert first is not None
    assert second is not None
    assert progress(second, first, 3.0) == {"step": 16.0, "loss": 2.5, "speed": 2.0}
    assert progress(first, second, 3.0) == {"step": 10.0}, "after a restart"
    writer.step(17, None, None)
    third = heartbeat.read(tmp_path / "0.pulse")
    assert third is not None
    assert third.loss == 2.5


def test_records_of_ranks_of_before_have_no_loss() -> None:
    data = bytearray(heartbeat.SIZE - 8)
    data[:4] = b"FFP1"
    data[4:8] = data[-4:] = (7).to_bytes(4, "little")
    data[8:16] = b"\0\0\0\0\0\0\xf0\x3f"
    found = heartbeat.decode(bytes(data))
    assert found is not None
    assert (found.first, math.isnan(found.loss)) == (1.0, True)


# -- the server ------------------------------------------------------------------------------------


async def _record(recorder: Recorder, *moments: float) -> None:
    for moment in moments:
        await recorder.record(moment)


def test_a_minute_has_tasks_nodes_users_and_the_cluster(database: Database, tmp_path: Path) -> None:
    cluster = Cluster([Node(name="n0", gpus=8), Node(name="n1", gpus=8, health="down")], "fifo")
    cluster.submit(Job(id="t1", order=1, user="ada", gpus=2), 0.0)
    cluster.submit(Job(id="t2", order=2, user="bob", gpus=8), 0.0)
    cluster.apply(Launch("t1", 1, ("n0",), ((0, 1),)), 0.0)
    task = Task(
        id="t1", order=1, user="ada", nodes=1, world=1, max_restarts=0, state="running", attempt=1,
        placement=("n0",),
    )  # fmt: skip
    folder = tmp_path / "1"
    folder.mkdir()
    samples = Samples(database)
    recorder = Recorder(cluster, {"t1": task}, lambda _task, _attempt: folder, samples)
    rank = RankUsage(rank=0, pid=1, cpu_s=30.0, memory_sum=120.0, samples=60)
    sampler = Sampler(folder / "n0.usage", "n0")
    sampler._usage = Usage(node="n0", seconds=60.0, samples=60, gpus=2, gpu_sum=90.0)
    sampler._ranks = {0: rank}
    sampler.write()
    heartbeat.Writer(str(folder / "0.pulse")).step(5, None, 1.25)
    asyncio.run(_record(recorder, NOON + 60))
    latest = recorder.latest
    assert latest["cluster"]["held"] == 2
    assert latest["cluster"]["capacity"] == 8, "a node that is down does not count"
    assert latest["cluster"]["queued"] == latest["cluster"]["running"] == 1
    assert latest["cluster"]["useful"] == 0, "it has not begun to work"
    assert latest["user:ada"]["held"] == latest["node:n0"]["held"] == 2
    assert latest["user:bob"]["queued"] == 1
    for scope in ("task:t1", "node:n0", "user:ada", "cluster", "rank:t1/0"):
        assert (latest[scope]["cpu"], latest[scope]["memory"]) == (0.5, 2.0), scope
    assert latest["cluster"]["gpu"] == latest["task:t1"]["gpu"] == 0.75
    assert (latest["task:t1"]["step"], latest["task:t1"]["loss"]) == (5, 1.25)
    cluster.running("t1", 90.0)
    asyncio.run(_record(recorder, NOON + 120))
    assert recorder.latest["cluster"]["useful"] == 1
    assert "cpu" not in recorder.latest["cluster"], "nothing was sampled meanwhile"
    found = samples.read("task:t1", 60, NOON, NOON + 119)[1]
    assert values(found, "cpu") == [0.5, None]
    assert values(found, "held") == [2, 2]


MakeSpec = Callable[..., TaskSpec]


def test_users_see_their_own_series(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=1, gpus="4")
    client = server.client
    client.submit(spec("hold"))
    assert client.series("node:elsewhere").metrics == {}
    assert client.series("task:t1", 86_400).step_s == 600
    with pytest.raises(NoSuchTask):
        client.series("task:t9")
    for scope in ("", "user", "cluster:1", "what:x", "node:"):
        with pytest.raises(ConfigError, match="invalid scope"):
            client.series(scope)


def test_lists_are_filtered_by_user_state_and_label(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=1)
    client = server.client
    client.submit(spec("hold", labels={"run": "7", "lr": "1"}))
    client.submit(spec("hold", labels={"run": "8"}))
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)

    def ids(**listing: Any) -> list[str]:
        return [view.id for view in client.tasks(**listing)]

    assert ids(states=["queued"]) == ["t2", "t3"]
    assert ids(states=["queued", "running"], labels={"run": ""}) == ["t1", "t2"]
    assert ids(labels={"run": "7", "lr": ""}) == ["t1"]
    assert ids(user="nobody") == []
    whole, line = client.task("t1"), client.task_lines(live=True)[0]
    assert (line.state, line.placement, line.name) == ("running", whole.nodes, "script.py")
    assert client.task_lines()[1].reason == client.task("t2").reason != ""
    assert [line.id for line in client.task_lines(labels={"run": "8"})] == ["t2"]
    assert client.task_lines(user="nobody") == []
