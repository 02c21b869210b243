"""How a gang ends, its events, logs, and what is left of it: nothing."""

import os
import signal
from pathlib import Path
from typing import Literal

import pytest
from tests.hai.engine.conftest import Stage

from fireflyer.hai.model.engine import RankExited, RankStarted

Start = Literal["fork", "exec"]
both_starts = pytest.mark.parametrize("start", ["fork", "exec"])

DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            report("daemon", os.getpid())
            forever()
        os._exit(0)
    os.wait()
"""


@both_starts
def test_every_rank_returns_0(stage: Stage, start: Start) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("print('done', RANK, *sys.argv[1:])", ranks=2, args=("a", "b c"), start=start)
        await engine.launch(gang)
        await engine.launch(gang)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("finished", "every rank returned 0")
        started = [e for e in events if isinstance(e, RankStarted)]
        first, second = gang.nodes
        assert {e.rank: e.node for e in started} == {0: first, 1: first, 2: second, 3: second}
        assert s.exits(events) == dict.fromkeys(range(4), (0, None))
        for rank in range(4):
            own = [
                type(e)
                for e in events
                if isinstance(e, RankStarted | RankExited) and e.rank == rank
            ]
            assert own == [RankStarted, RankExited]
        assert [s.log(rank) for rank in range(4)] == [f"done {rank} a b c\n" for rank in range(4)]

    stage.play(scene)


def test_ranks_find_each_other_and_know_who_they_are(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            from fireflyer import hai
            me = hai.task()
            at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if RANK == 0:
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(at)
                listener.listen()
                report("listens")
                listener.accept()[0].sendall(b"hello")
            else:
                await_gate()
                assert socket.create_connection(at).recv(5) == b"hello"
            report(me.id, me.attempt, me.rank, me.world_size, me.local_rank, me.node, me.directory)
            open(me.output / str(RANK), "w").close()
        """
        gang = s.gang(script)
        await engine.launch(gang)
        assert await s.reports(1) == [["0", "listens"]]
        s.open_gate(1)
        said = {int(words[0]): words[1:] for words in await s.reports(2)}
        _, end = await s.ended(engine)
        assert end.outcome == "finished"
        folder = gang.directory.parent
        assert said == {
            rank: [s.task, "1", str(rank), "2", "0", gang.nodes[rank], str(folder)]
            for rank in (0, 1)
        }
        assert {path.name for path in (folder / "output").iterdir()} == {"0", "1"}

    stage.play(scene)


@both_starts
def test_the_first_failing_rank_ends_all_others(stage: Stage, start: Start) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = s.script("report('up')\nif RANK == 2: sys.exit(7)\nforever()")
        gang = s.gang(script, ranks=2, start=start)
        await engine.launch(gang)
        events, end = await s.ended(engine)
        pid = s.pids(events)[2]
        assert end.outcome == "failed"
        assert end.reason == f"rank 2 on {gang.nodes[1]} exited with status 7 (pid {pid})"
        exits = s.exits(events)
        assert exits.pop(2) == (7, None)
        assert set(exits.values()) == {(None, signal.SIGKILL)}
        assert not any(s.alive(pid) for pid in s.pids(events).values())

    stage.play(scene)


def test_a_killed_rank_takes_along_what_left_its_group(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = DAEMON + "    report('rank', os.getpid())\n    forever()\n"
        gang = s.gang(script)
        await engine.launch(gang)
        words = await s.reports(4)
        ranks = {int(w[0]): int(w[2]) for w in words if w[1] == "rank"}
        daemons = [int(w[2]) for w in words if w[1] == "daemon"]
        os.kill(ranks[1], signal.SIGKILL)
        _, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == f"rank 1 on {gang.nodes[1]} was killed by SIGKILL (pid {ranks[1]})"
        assert len(daemons) == 2
        assert not any(s.alive(pid) for pid in [*ranks.values(), *daemons])

    stage.play(scene)


def test_a_script_that_is_not_there(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(Path("/nonexistent/train.py")))
        events, end = await s.ended(engine)
        assert (events, end.outcome) == ([], "failed")
        assert "the script /nonexistent/train.py does not exist" in end.reason

    stage.play(scene)


def test_stop_gives_a_grace_then_kills(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            if RANK == 0:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
            else:
                signal.signal(signal.SIGTERM, lambda *_: report("term"))
            report("up")
            forever()
        """
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.stop(s.task, 1, 1000.0)
        assert await s.reports(1) == [["1", "term"]]
        events = await s.until(engine, lambda e: isinstance(e, RankExited))
        await engine.stop(s.task, 1, 0.0)
        more, end = await s.ended(engine)
        assert end.outcome == "stopped"
        assert s.exits(events + more) == {0: (3, None), 1: (None, signal.SIGKILL)}

    stage.play(scene)


def test_a_stop_that_overtakes_the_start(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("forever()"))
        await engine.stop(s.task, 1, 0.0)
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"

    stage.play(scene)


def test_release_ends_what_runs_and_leaves_no_process(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(DAEMON + "    report('up')\n    forever()\n"))
        await s.reports(4)
        await engine.release(s.task)
        assert s.processes() == {}
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"
        await engine.release(s.task)

    stage.play(scene)


def test_a_dead_supervisor_is_a_lost_gang(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("report(os.getpid())\nforever()")
        await engine.launch(gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        os.kill(s.supervisor(gang.nodes[1]), signal.SIGKILL)
        events, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert gang.nodes[1] in end.reason
        assert not any(s.alive(pid) for pid in pids.values())
        assert s.exits(events) == {0: (None, signal.SIGKILL)}
        await engine.launch(s.gang("pass", attempt=2))
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (2, "finished")

    stage.play(scene)


def test_a_newer_attempt_fences_the_older_one(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(DAEMON + "    report('up', os.getpid())\n    forever()\n"))
        old = [int(words[2]) for words in await s.reports(4)]
        await engine.launch(s.gang("report('new')\nforever()", attempt=2))
        assert {tuple(words) for words in await s.reports(2)} == {("0", "new"), ("1", "new")}
        assert not any(s.alive(pid) for pid in old)
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (1, "failed")
        assert end.reason == "replaced by a newer attempt"
        assert s.processes() != {}
        await engine.stop(s.task, 1, 0.0)  # of an attempt that is over
        await engine.stop(s.task, 2, 0.0)
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (2, "stopped")

    stage.play(scene)


def test_a_restart_on_the_same_nodes_is_forked_from_the_same_server(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        servers = []
        for attempt in (1, 2):
            gang = s.gang("report('up')\nawait_gate()", attempt=attempt)
            await engine.launch(gang)
            await s.reports(2)
            servers.append([s.fork_server(node) for node in gang.nodes])
            s.open_gate(2)
            _, end = await s.ended(engine)
            assert (end.attempt, end.outcome) == (attempt, "finished")
        assert servers[0] == servers[1]

    stage.play(scene)


def test_other_nodes_for_the_next_attempt(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(4)
        names = [node.name for node in engine.nodes()]
        for attempt, nodes in enumerate(([0, 1], [3, 1], [2]), 1):
            wanted = tuple(names[i] for i in nodes)
            gang = s.gang("report(os.environ['FIREFLYER_NODE'])", attempt=attempt, on=wanted)
            await engine.launch(gang)
            said = dict(await s.reports(len(nodes)))
            assert said == {str(rank): node for rank, node in enumerate(wanted)}
            _, end = await s.ended(engine)
            assert (end.attempt, end.outcome) == (attempt, "finished")

    stage.play(scene)
