"""What is Slurm's own: pending jobs, foreign jobs, its controller's death, dead nodes, secrets."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.hai.conformance.conftest import SlurmStage
from tests.hai.engine.conftest import SECRET
from tests.hai.slurm.cluster import NODES, Cluster

from fireflyer.errors import ConfigError
from fireflyer.hai.engines.slurm.engine import SlurmEngine
from fireflyer.hai.model.engine import GangEnded, NodesChanged, RankExited, RankStarted
from fireflyer.hai.supervisor.messages import Launch
from fireflyer.hai.supervisor.parts import ROLE, Announcement, read_part
from fireflyer.rpc import frame
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.proof import Secret


@pytest.fixture
def stage(cluster: Cluster, tmp_path: Path) -> Iterator[SlurmStage]:
    yield from played(cluster, tmp_path)


@pytest.fixture
def own_stage(own_cluster: Cluster, tmp_path: Path) -> Iterator[SlurmStage]:
    yield from played(own_cluster, tmp_path)


def played(cluster: Cluster, folder: Path) -> Iterator[SlurmStage]:
    found = SlurmStage(folder, cluster)
    yield found
    left = found.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found.clear()
    assert not left


@contextlib.contextmanager
def foreign_job(cluster: Cluster, nodes: str) -> Iterator[str]:
    """Somebody else's job, on these nodes alone."""
    script = "#!/bin/sh\nexec sleep 600\n"
    path = cluster.root / "foreign.sh"
    path.write_text(script)
    options = ["--parsable", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null"]
    job = cluster.command("sbatch", *options, str(path)).strip()
    yield job
    cluster.command("scancel", job)


def test_nodes_are_what_slurm_has(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        nodes = s.engine().nodes()
        assert [node.name for node in nodes] == list(NODES)
        assert [node.leaf for node in nodes] == ["leaf1", "leaf1", "leaf2", "leaf2"]
        gpus = s.cluster.gpus
        assert {(n.gpus, n.cpus, n.memory_mib, n.state) for n in nodes} == {(gpus, 8, 16000, "up")}

    stage.play(scene)


def test_a_partition_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot use Slurm"):
        SlurmEngine(tmp_path, "nowhere")
    assert SlurmEngine(tmp_path).partition == "low"


def test_ranks_see_the_gpus_of_the_node(stage: SlurmStage) -> None:
    if not stage.cluster.gpus:
        pytest.skip("device files cannot be made here, so there are no GPUs to pretend")

    async def scene(s: Any) -> None:
        engine = s.engine()
        script = "report(os.environ['CUDA_VISIBLE_DEVICES'], *[k for k in os.environ if k[:6] == 'SLURM_'])"
        await engine.launch(s.gang(script, nodes=1))
        assert await s.reports(1) == [["0", "0,1,2,3,4,5,6,7", "SLURM_CONF"]]
        await s.ended(engine)
        own = {"CUDA_VISIBLE_DEVICES": "3"}
        await engine.launch(s.gang(script, nodes=1, attempt=2, env=own))
        assert await s.reports(1) == [["0", "3", "SLURM_CONF"]]
        await s.ended(engine)

    stage.play(scene)


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_job_has_the_limits_of_its_task(stage: SlurmStage, gpus: int) -> None:
    if gpus and not stage.cluster.gpus:
        pytest.skip("device files cannot be made here, so there are no GPUs to pretend")

    async def scene(s: Any) -> None:
        engine = s.engine()
        gang = s.gang("report('runs')\nawait_gate()", nodes=1, memory_mib=900, cpus=3)
        await engine.launch(replace(gang, gpus=gpus))
        assert await s.reports(1) == [["0", "runs"]]
        jobs = s.cluster.command("scontrol", "show", "job").split("\n\n")
        (job,) = (job for job in jobs if s.task in job)
        assert "MinMemoryNode=900M" in job
        assert "CPUs/Task=3" in job
        s.open_gate(1)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"

    stage.play(scene)


@pytest.mark.parametrize("what", ["stopped", "suspended"])
def test_a_pending_job_is_withdrawn(stage: SlurmStage, what: str) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        with foreign_job(s.cluster, "fn1"):
            await engine.launch(s.gang("report('never')"))
            if what == "stopped":
                await engine.stop(s.task, 1, 1000.0)
            else:
                await engine.suspend(s.task, 1, 1000.0)
            events, end = await s.ended(engine)
        assert (events, end.outcome) == ([], what)
        assert end.reason == "before Slurm had started the job"
        assert not any(name.endswith(s.task) for name in s.cluster.jobs())

    stage.play(scene)


def test_a_pending_job_is_taken_up_by_the_next_engine(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        gang = s.gang("report('up')")
        with foreign_job(s.cluster, "fn1"):
            first = s.engine()
            await first.launch(gang)
            while not any(name.endswith(s.task) for name in s.cluster.jobs()):
                await s.breathe()
            await s.close(first)
            second = s.engine()
            await second.recover(gang)
        assert len(await s.reports(2)) == 2
        _, end = await s.ended(second)
        assert end.outcome == "finished"

    stage.play(scene)


def test_a_gang_on_a_drained_node_is_lost_and_its_job_is_gone(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        await engine.drain("fn2", "two bits flipped")
        try:
            await engine.launch(s.gang("report('never')"))
            events, end = await s.ended(engine)
            assert (events, end.outcome) == ([], "lost")
            assert end.reason == "fn2 is drained: two bits flipped"
            assert not any(name.endswith(s.task) for name in s.cluster.jobs())
        finally:
            await engine.undrain("fn2")
        while {node.state for node in engine.nodes()} != {"up"}:
            async for event in engine.events():
                if isinstance(event, NodesChanged):
                    break

    stage.play(scene)


def test_a_job_that_somebody_cancels_is_lost(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        await engine.launch(s.gang("report(os.getpid())\nforever()"))
        pids = [int(words[1]) for words in await s.reports(2)]
        (name,) = (name for name in s.cluster.jobs() if name.endswith(s.task))
        s.cluster.command("scancel", f"--name={name}")
        _, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert "died with Slurm job" in end.reason
        assert end.lost == ()  # no node is to be avoided for it
        assert not any(s.alive(pid) for pid in pids)

    stage.play(scene)


def test_a_node_that_slurm_calls_down_is_no_fault_of_the_others(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        await engine.launch(s.gang("report(os.getpid())\nforever()"))
        await s.reports(2)
        s.cluster.command("scontrol", "update", "nodename=fn2", "state=down", "reason=pdu")
        try:
            _, end = await s.ended(engine)
            assert end.outcome == "lost"
            assert "fn1" not in end.lost  # nor is fn2, where Slurm has it back already
        finally:
            if "down" in s.cluster.command("sinfo", "-h", "-n", "fn2", "-o", "%T"):
                s.cluster.command("scontrol", "update", "nodename=fn2", "state=resume")
        while {node.state for node in engine.nodes()} != {"up"}:
            async for event in engine.events():
                if isinstance(event, NodesChanged):
                    break

    stage.play(scene)


def test_no_secret_can_be_seen(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        token = "t0ken" * 8
        gang = s.gang("report('up')\nforever()", env={"API_TOKEN": token})
        await engine.launch(gang)
        await s.reports(2)
        (name,) = (name for name in s.cluster.jobs() if name.endswith(s.task))
        job = s.cluster.command("squeue", "-h", f"--name={name}", "-o", "%A").strip()
        shown = s.cluster.command("scontrol", "-dd", "show", "job", job)
        shown += s.cluster.command("scontrol", "write", "batch_script", job, "-")
        assert f"JobName={name}" in shown
        shown += "".join(s.commands_of_everybody())
        ranks = {pid for pid, line in s.processes().items() if "supervisor" not in line}
        for pid in set(s.processes()) - ranks:
            shown += Path(f"/proc/{pid}/environ").read_text()
        state = "".join(_texts(s.cluster.root))
        for secret in (SECRET, token):
            assert secret not in shown
            assert secret not in state
        parts = [gang.directory / f"{node}.part" for node in gang.nodes]
        assert [path.stat().st_mode & 0o777 for path in parts] == [0o600, 0o600]
        await engine.stop(s.task, 1, 0.0)
        await s.ended(engine)
        assert not any(path.exists() for path in parts)

    stage.play(scene)


def _texts(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                yield path.read_bytes().decode("latin-1")


def test_who_does_not_know_the_secret_is_not_heard(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        await engine.launch(s.gang("report('up')\nawait_gate()", nodes=1))
        await s.reports(1)
        text = (s.folder / s.task / "fn1.address").read_bytes()
        where = msgspec.json.decode(text, type=Announcement)
        strangers = [socket.create_connection((where.host, where.port), 20) for _ in range(100)]
        for stranger, words in zip(strangers, (b"", b"GET / HTTP/1.1\r\n\r\n"), strict=False):
            stranger.sendall(words)
        handshake = Handshake("client", Secret(b"another secret of mine"), ROLE)
        with strangers[2] as stranger:
            stranger.sendall(handshake.opening)
            data = stranger.recv(4096)  # empty where the newer strangers have pushed it out
            if data:
                stranger.sendall(handshake.feed(data))
                assert stranger.recv(4096) == b""
        s.open_gate(1)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"
        for stranger in strangers:
            stranger.close()

    stage.play(scene)


def test_nothing_that_comes_over_the_network_is_executed(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        gang = s.gang("report('up')\nawait_gate()", nodes=1)
        await engine.launch(gang)
        await s.reports(1)
        part = read_part(gang.directory, "fn1")
        for attempt in (1, 2):
            launch = Launch(part=msgspec.structs.replace(part, attempt=attempt, script="/bin/evil"))
            with s.connect("fn1") as stream:
                stream.sendall(frame(msgspec.msgpack.encode(launch)))
                assert stream.recv(4096) == b""
        s.open_gate(1)
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (1, "finished")

    stage.play(scene)


def test_the_address_of_an_older_job_is_none(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        with socket.create_server(("127.0.0.1", 0)) as somebody:
            old = Announcement(job=1, host="127.0.0.1", port=somebody.getsockname()[1])
            folder = s.folder / s.task
            folder.mkdir()
            for node in NODES[:2]:
                (folder / f"{node}.address").write_bytes(msgspec.json.encode(old) + b"\n")
            await engine.launch(s.gang("pass"))
            _, end = await s.ended(engine)
            assert end.outcome == "finished"
            somebody.setblocking(False)
            with pytest.raises(BlockingIOError):
                somebody.accept()

    stage.play(scene)


def test_the_controller_dies_and_returns(own_stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        script = "report(os.getpid())\nawait_gate()"
        await engine.launch(s.gang(script))
        first = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        (name,) = (name for name in s.cluster.jobs() if name.endswith(s.task))
        job = s.cluster.command("squeue", "-h", f"--name={name}", "-o", "%A").strip()
        s.cluster.command("scontrol", "update", f"jobid={job}", "comment=runs-and-is-known")
        while not s.cluster.saved("runs-and-is-known"):  # else Slurm would start it once more
            await s.breathe()
        s.cluster.kill_controller()
        os.kill(first[1], signal.SIGKILL)  # seen without Slurm
        _, end = await s.ended(engine)
        assert (end.outcome, end.reason[:16]) == ("failed", "rank 1 on fn2 wa")
        await engine.launch(s.gang(script, attempt=2))  # in the job that it has
        await s.reports(2)
        s.cluster.start_controller()
        s.open_gate(2)
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (2, "finished")
        await engine.release(s.task)
        assert s.processes() == {}
        await engine.launch(s.gang("pass", attempt=3))
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (3, "finished")

    own_stage.play(scene)


def test_a_frozen_node_is_lost_when_slurm_says_so(own_stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        await engine.launch(s.gang("report(os.getpid())\nforever()"))
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        s.cluster.signal_node("fn2", signal.SIGSTOP)
        try:
            events, end = await s.ended(engine)
            assert end.outcome == "lost"
            assert "fn2 is down*: Not responding" in end.reason
            assert end.lost == ("fn2",)
            assert not s.alive(pids[0])
            assert not any(e.rank == 1 for e in events if isinstance(e, RankExited))
            gang = s.gang("report('up')", attempt=2, on=("fn1", "fn3"))
            await engine.launch(gang)
            await s.reports(2)
            _, end = await s.ended(engine)
            assert (end.attempt, end.outcome) == (2, "finished")
        finally:
            s.cluster.signal_node("fn2", signal.SIGCONT)
        await s.gone(pids[1])  # slurmd ends what the controller has given up

    own_stage.deadline_s = 100.0
    own_stage.play(scene)


def test_events_come_in_order(stage: SlurmStage) -> None:
    async def scene(s: Any) -> None:
        engine = s.engine()
        await engine.launch(s.gang("pass", ranks=2))
        events, end = await s.ended(engine)
        assert [type(e) for e in events].count(RankStarted) == 4
        assert isinstance(end, GangEnded)
        assert end.monotonic_ns >= max(e.monotonic_ns for e in events)

    stage.play(scene)
