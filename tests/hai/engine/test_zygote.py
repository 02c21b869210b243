"""Fork servers forked from the zygote that an engine keeps beside it."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fireflyer.hai.supervisor.imports import MARK

Stage = Any

MODULE = "costly"
SAY = "    import costly\n    report(costly.VALUE, os.getpid(), costly.PID)\n"


@pytest.fixture
def costly(stage: Stage) -> Path:
    """A module that every fork server imports first, and that knows the process that did."""
    path: Path = stage.folder / "modules" / f"{MODULE}.py"
    path.parent.mkdir()
    path.write_text("import os\nVALUE, PID = 1, os.getpid()\n")
    stage.env["PYTHONPATH"] = str(path.parent)
    return path


async def _launch(engine: Any, gang: Any) -> None:
    await engine.prepare(gang)
    await engine.launch(gang)


def _engine(stage: Stage, nodes: int = 2) -> Any:
    return stage.engine(nodes, preload=(MODULE,))


def test_all_tasks_and_nodes_of_an_environment_share_what_was_imported_once(
    stage: Stage, costly: Path
) -> None:
    async def scene(s: Stage) -> None:
        engine = _engine(s)
        first = s.task
        importers = set()
        for task in (first, f"{first}b"):
            s.task = task
            await _launch(engine, s.gang(SAY))
            importers |= {words[3] for words in await s.reports(2)}
            _, end = await s.ended(engine)
            assert end.outcome == "finished", s.log(0)
        assert len(importers) == 1
        await _launch(engine, s.gang(SAY, attempt=2, env={"OTHER": "1"}))
        assert {
            words[3] for words in await s.reports(2)
        } == importers  # kept from the first attempt
        await s.ended(engine)
        for task in (f"{first}b", first):
            s.task = task
            await engine.release(task)
            assert s.processes() == {}

    stage.play(scene)


def test_another_environment_has_another_zygote(stage: Stage, costly: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        first = s.task
        importers = []
        for number, color in enumerate(("red", "blue", "red")):
            s.task = f"{first}{number}"
            await _launch(engine, s.gang(SAY, nodes=1, env={"COLOR": color}))
            ((_, _, _, importer),) = await s.reports(1)
            importers.append(importer)
            await s.ended(engine)
            await engine.release(s.task)
        assert importers[0] == importers[2] != importers[1]
        s.task = first

    stage.play(scene)


def test_a_module_that_has_changed_is_imported_anew(stage: Stage, costly: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        first = s.task
        for value in ("1", "20"):
            costly.write_text(costly.read_text().replace("= 1,", f"= {value},"))
            s.task = f"{first}{value}"
            await _launch(engine, s.gang(SAY, nodes=1))
            ((_, seen, _, _),) = await s.reports(1)
            assert seen == value
            await s.ended(engine)
            await engine.release(s.task)
        s.task = first

    stage.play(scene)


def test_a_rank_finds_nothing_of_the_way_it_came(stage: Stage, costly: Path) -> None:
    """Descriptors, dispositions, session and name are those of a rank of a fork server of its own."""
    looks = """
        import json
        import signal as s
        own = "/proc/self/fd/"
        look = {
            "fds": sorted(os.path.basename(os.path.realpath(own + f)) for f in os.listdir(own)),
            "pgid": os.getpgrp() == os.getpid(),
            "chld": s.getsignal(s.SIGCHLD) == s.SIG_DFL,
            "mask": list(s.pthread_sigmask(s.SIG_BLOCK, [])),
            "argv": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
            "mark": os.environ["FIREFLYER_TASK"] in open("/proc/self/environ").read(),
            "home": os.environ["HOME"],
            "child": subprocess.check_output(["sh", "-c", "echo $FIREFLYER_NODE"], text=True),
        }
        print(json.dumps(look))
    """

    async def scene(s: Stage) -> None:
        own, shared = s.engine(1), _engine(s, 1)
        script = s.script(looks)
        seen = []
        for attempt, engine in ((1, own), (2, shared)):
            await _launch(engine, s.gang(script, nodes=1, attempt=attempt, args=("--lr", "0.1")))
            _, end = await s.ended(engine)
            assert end.outcome == "finished", s.log(0, attempt)
            seen.append(s.log(0, attempt))
            await engine.release(s.task)
        assert seen[0] == seen[1]
        assert f'"-u", "{script}", "--lr", "0.1"]' in seen[0]

    stage.play(scene)


@pytest.mark.parametrize("victim", ["guard", "supervisor", "fork_server"])
def test_when_one_of_the_tree_dies_the_task_is_told_and_nothing_is_left(
    stage: Stage, costly: Path, victim: str
) -> None:
    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        script = """
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            report("up")
            forever()
        """
        await _launch(engine, s.gang(script, nodes=1))
        await s.reports(1)
        os.kill(getattr(s, victim)("n0"), signal.SIGKILL)
        if victim == "fork_server":  # ranks are the supervisor's
            await engine.stop(s.task, 1, 0.0)
        _, end = await s.ended(engine)
        assert end.outcome == ("stopped" if victim == "fork_server" else "lost")
        await engine.release(s.task)
        assert s.processes() == {}

    stage.play(scene)


def test_the_zygote_leaves_with_its_engine_and_the_task_goes_on(stage: Stage, costly: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        gang = s.gang(SAY + "    await_gate()\n", nodes=1)
        await _launch(engine, gang)
        ((_, _, _, importer),) = await s.reports(1)
        await s.close(engine)
        await s.gone(int(importer))
        after = _engine(s, 1)
        await after.recover(gang)
        s.open_gate(1)
        _, end = await s.ended(after)
        assert end.outcome == "finished"

    stage.play(scene)


def test_a_zygote_that_dies_is_replaced_and_one_that_cannot_live_is_done_without(
    stage: Stage, costly: Path
) -> None:
    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        first = s.task
        await _launch(engine, s.gang(SAY, nodes=1))
        ((_, _, _, importer),) = await s.reports(1)
        await s.ended(engine)
        await engine.release(s.task)
        os.kill(int(importer), signal.SIGKILL)
        s.task = f"{first}b"
        await _launch(engine, s.gang(SAY, nodes=1))
        ((_, _, _, other),) = await s.reports(1)
        assert other != importer
        await s.ended(engine)
        await engine.release(s.task)
        costly.write_text("raise SystemExit('broken')")
        s.task = f"{first}c"
        await _launch(engine, s.gang("pass", nodes=1))
        _, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert "the fork server on n0 exited with status 1" in end.reason
        await engine.release(s.task)
        s.task = first

    stage.play(scene)


def test_to_prepare_may_be_given_up_while_modules_are_imported(stage: Stage, costly: Path) -> None:
    os.mkfifo(stage.folder / "forever")
    costly.write_text(f"open({str(stage.folder / 'forever')!r}).read()")

    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        gang = s.gang("pass", nodes=1)
        preparing = asyncio.create_task(engine.prepare(gang))
        await asyncio.sleep(0)
        preparing.cancel()
        await engine.launch(gang)  # with a fork server of its own, which hangs, too
        await engine.stop(s.task, 1, 1000.0)
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"

    stage.play(scene)


def test_auto_forks_what_imports_torch_and_executes_the_rest(stage: Stage, costly: Path) -> None:
    """Nothing of torch is imported: the script only says so, where it does not come by."""

    async def scene(s: Stage) -> None:
        engine = _engine(s, 1)
        for attempt, (text, warm) in enumerate(
            (
                ("report(MODULE in sys.modules)", "False"),
                ("report(MODULE in sys.modules)\n    if 0: import torch", "True"),
                ("report(MODULE in sys.modules)", "False"),
                ("report(MODULE in sys.modules)", "True"),
            ),
            1,
        ):
            if attempt == 4:
                (s.folder / s.task / MARK).touch()
            script = f"    MODULE = {MODULE!r}\n    {text}\n"
            await _launch(engine, s.gang(script, nodes=1, attempt=attempt, start="auto"))
            assert await s.reports(1) == [["0", warm]]
            await s.ended(engine)

    stage.play(scene)


def test_a_suspend_notes_that_a_rank_has_torch(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        (s.folder / "libtorch.so").write_bytes(bytes(4096))
        script = """
            import mmap
            file = open("libtorch.so")
            held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            report("up")
            forever()
        """
        await _launch(engine, s.gang(script, nodes=1, start="exec"))
        await s.reports(1)
        assert not (s.folder / s.task / MARK).exists()
        await engine.suspend(s.task, 1, 0.0)
        await s.ended(engine)
        assert (s.folder / s.task / MARK).exists()

    stage.play(scene)
