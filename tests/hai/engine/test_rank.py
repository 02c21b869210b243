"""What a rank finds: its environment, its arguments, its log; and a plain meaning outside a task."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.hai.engine.conftest import SECRET

from fireflyer import allocator
from fireflyer.heartbeat import STACKS_DESCRIPTOR

Stage = Any
Start = Literal["fork", "exec"]
both_starts = pytest.mark.parametrize("start", ["fork", "exec"])

SHOW = """
    import json
    from dataclasses import dataclass
    print(json.dumps({
        "env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0],
        "main": __name__, "file": __file__, "same": sys.modules["__main__"].__dict__ is globals(),
        "stdin": os.readlink("/proc/self/fd/0"), "group": os.getpgid(0) == os.getpid(),
        "fds": sorted(map(int, os.listdir("/proc/self/fd"))),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigchld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }))
"""


@both_starts
def test_environment_and_arguments(stage: Stage, start: Start) -> None:
    import json

    async def scene(s: Stage) -> None:
        engine = s.engine()
        folder = s.folder / "elsewhere"
        folder.mkdir()
        gang = s.gang(
            SHOW, ranks=2, start=start, args=("--x", "a b", ""), cwd=str(folder), attempt=3
        )
        await engine.launch(gang)
        _, end = await s.ended(engine)
        assert end.outcome == "finished", s.log(3, 3)
        ports, controls = set(), set()
        for rank in range(4):
            seen = json.loads(s.log(rank, 3))
            env = seen["env"]
            ports.add(env.pop("MASTER_PORT"))
            controls.add(env.pop("FIREFLYER_CONTROL"))
            env.pop("LC_CTYPE", None)  # set by an interpreter in the C locale
            expected = {
                **s.env,
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "FIREFLYER_NODE": f"n{rank // 2}",
                "FIREFLYER_TASK": s.task,
                "FIREFLYER_ATTEMPT": "3",
                "FIREFLYER_SECRET": SECRET,
                "FIREFLYER_TASK_DIR": str(s.folder / s.task),
                "FIREFLYER_KEEPER": str(s.folder / s.task / f"n{rank // 2}.keeper.sock"),
                "FIREFLYER_PULSE": str(gang.directory / f"{rank}.pulse"),
                "FIREFLYER_STACKS": str(gang.directory / f"{rank}.stacks"),
                **allocator.KEEP,
                "OMP_NUM_THREADS": s.env.get("OMP_NUM_THREADS", "1"),
                "PYTHONUNBUFFERED": "1",
            }
            expected.pop("LC_CTYPE", None)
            assert env == expected
            assert seen["argv"] == [gang.script, "--x", "a b", ""]
            assert (seen["cwd"], seen["path"]) == (str(folder), str(s.folder))
            assert (seen["main"], seen["file"], seen["same"]) == ("__main__", gang.script, True)
            assert seen["stdin"] == "/dev/null"
            assert seen["group"]
            assert seen["sigint"]
            assert seen["sigchld"]
            assert seen["mask"] == []
            own = [STACKS_DESCRIPTOR] if start == "fork" else []
            assert seen["fds"] == [0, 1, 2, 3, *own]  # 3: the listing of this folder
        assert len(ports) == 1
        assert len(controls) == 4
        assert (s.folder / s.task / "output").is_dir()

    stage.play(scene)


def test_each_attempt_has_a_port_that_stays_reserved(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        script = """
            port = int(os.environ["MASTER_PORT"])
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("0.0.0.0", port))
                listener.listen()
                report(port)
        """
        ports = []
        for attempt in (1, 2, 3):
            await engine.launch(s.gang(script, nodes=1, attempt=attempt))
            _, end = await s.ended(engine)
            assert end.outcome == "finished"
            ((_, port),) = await s.reports(1)
            ports.append(port)
        assert "0" not in ports

    stage.play(scene)


@both_starts
@pytest.mark.parametrize(("env", "mapped"), [({}, 0), ({"MALLOC_MMAP_MAX_": "65536"}, 1)])
def test_memory_that_is_freed_stays_unless_the_user_says_otherwise(
    stage: Stage, start: Start, env: dict[str, str], mapped: int
) -> None:
    script = """
        from tests.support.test_allocator import mapped_by_a_large_block
        print(mapped_by_a_large_block())
    """

    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        path = {"PYTHONPATH": str(Path(__file__).parents[3])}
        await engine.launch(s.gang(script, nodes=1, env=path | env, start=start))
        _, end = await s.ended(engine)
        assert end.outcome == "finished", s.log(0)
        assert s.log(0) == f"{mapped}\n"

    stage.play(scene)


@both_starts
def test_user_settings_of_the_interpreter(stage: Stage, start: Start) -> None:
    async def scene(s: Stage) -> None:
        library = s.folder / "library"
        library.mkdir()
        library.joinpath("mine.py").write_text("value = 42")
        s.folder.joinpath("beside.py").write_text("value = 43")
        engine = s.engine(1)
        script = (
            "import mine, beside\nprint(mine.value, beside.value, os.environ['OMP_NUM_THREADS'])"
        )
        env = {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "3"}
        await engine.launch(s.gang(script, nodes=1, env=env, start=start))
        await s.ended(engine)
        assert s.log(0) == "42 43 3\n"

    stage.play(scene)


@both_starts
def test_exit_handlers_and_threads_outlive_the_script(stage: Stage, start: Start) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        script = """
            import atexit, pickle, threading
            class Mine:
                pass
            atexit.register(lambda: print("handler", len(pickle.dumps(Mine())) > 0))
            def late():
                threading.main_thread().join()
                pickle.dumps(Mine())
                print("thread")
            threading.Thread(target=late).start()
            print("no newline", end="")
            sys.exit("the reason")
        """
        await engine.launch(s.gang(script, nodes=1, start=start))
        events, _ = await s.ended(engine)
        assert s.exits(events) == {0: (1, None)}
        assert "no newline" in s.log(0)
        assert "thread\n" in s.log(0)
        assert "handler True\n" in s.log(0)
        assert "the reason\n" in s.log(0)

    stage.play(scene)


def test_ranks_of_one_fork_server_have_their_own_random_numbers(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        script = (
            "import random\nimport numpy\nprint(random.random(), numpy.random.random(), hash('x'))"
        )
        await engine.launch(s.gang(script, nodes=1, ranks=2, env={"OMP_NUM_THREADS": "1"}))
        await s.ended(engine)
        one, two = s.log(0).split(), s.log(1).split()
        assert one[0] != two[0]
        assert one[1] != two[1]

    stage.play(scene)


def test_a_log_is_appended_to(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        gang = s.gang("print('new')", nodes=1)
        gang.directory.mkdir(parents=True)
        gang.directory.joinpath("0.log").write_text("old\n")
        await engine.launch(gang)
        await s.ended(engine)
        assert s.log(0) == "old\nnew\n"

    stage.play(scene)


def python(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    clean = {k: v for k, v in os.environ.items() if k not in names and "FIREFLYER" not in k}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_outside_a_task(tmp_path: Path) -> None:
    code = """
from fireflyer.hai import suspend_requested, suspended, task
print(suspend_requested(), suspend_requested())
me = task()
print(repr(me.id), me.attempt, me.rank, me.world_size, repr(me.node), me.directory, me.output)
suspended()
print("not reached")
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"False False\n'' 0 0 1 '' {tmp_path} {tmp_path}\n"
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = python(code, tmp_path, **torchrun)
    assert done.stdout == f"False False\n'' 0 3 8 '' {tmp_path} {tmp_path}\n"


def test_a_stale_environment_is_an_error_not_silence(tmp_path: Path) -> None:
    code = "from fireflyer.hai import suspend_requested; suspend_requested()"
    for control in ("0:/proc/1/fd/99999", "0:/dev/null"):
        done = python(code, tmp_path, FIREFLYER_CONTROL=control)
        assert done.returncode == 1
        assert "fireflyer.errors.TaskError: the suspend page" in done.stderr


def test_suspended_belongs_to_the_main_thread(tmp_path: Path) -> None:
    code = """
import threading
from fireflyer.errors import TaskError
from fireflyer.hai import suspended
def run():
    try:
        suspended()
    except TaskError as error:
        print(error)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    done = python(code, tmp_path)
    assert "call it in the main thread" in done.stdout


def test_the_package_imports_nothing_until_asked(tmp_path: Path) -> None:
    code = """
import sys
import fireflyer.hai
print([m for m in ("msgspec", "fireflyer._native", "torch", "asyncio") if m in sys.modules])
import fireflyer.hai.engines.local, fireflyer.hai.supervisor.supervise
print([m for m in ("torch", "numpy", "sqlalchemy", "fastapi") if m in sys.modules])
try:
    fireflyer.hai.nothing
except AttributeError as error:
    print(error)
"""
    done = python(code, tmp_path)
    assert done.stdout == "[]\n[]\nmodule 'fireflyer.hai' has no attribute 'nothing'\n"
