"""The keeper of a task: started when a rank asks, alive over attempts, gone with the task."""

import os
import signal

import pytest
from tests.hai.engine.conftest import Stage

ASKS = """
import socket
keeper = socket.socket(socket.AF_UNIX)
folder, name = os.path.split(os.environ["FIREFLYER_KEEPER"])
os.chdir(folder)
keeper.connect(name)
import struct
pid, uid, gid = struct.unpack("3i", keeper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
from fireflyer.checkpoint.memory import messages as wire
from fireflyer.checkpoint.memory.keeper_link import KeeperLink
from fireflyer.checkpoint.memory.memfd import Memory
from fireflyer.checkpoint.memory.inventory import Stamp
join = wire.Join(wire.VERSION, "place", 0, 1 << 20, b"k" * 32, "127.0.0.1")
link, port, held = KeeperLink.local(keeper, join)
report("holds", *(entry.stamp.number for entry in held.entries))
"""


def _keepers(stage: Stage) -> set[int]:
    return {
        pid for pid, command in stage.processes().items() if "checkpoint.memory.keeper" in command
    }


KEEPS = (
    ASKS
    + """
link.put(Stamp(1, 7, 1), 1, 0, Memory.filled([b"data"]), [])
link.tell(wire.Commit(Stamp(1, 7, 1), 1), b"manifest")
report("kept")
"""
)


def test_the_keeper_outlives_attempts_and_ends_with_the_task(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine()
        await engine.launch(stage.gang("report('up')\nforever()"))
        await stage.reports(2)
        assert not _keepers(stage), "nobody has asked for one"
        await engine.stop(stage.task, 1, 0.0)
        await stage.ended(engine)

        await engine.launch(stage.gang(KEEPS + "\nforever()", attempt=2))
        assert sorted(words[1] for words in await stage.reports(4)) == 2 * ["holds"] + 2 * ["kept"]
        keepers = _keepers(stage)
        assert len(keepers) == 2
        # A newer attempt ends this one without waiting for a stop.
        await engine.launch(stage.gang(ASKS, attempt=3))
        assert [words[1:] for words in await stage.reports(2)] == 2 * [["holds", "7"]]
        await stage.ended(engine)
        await stage.ended(engine)
        assert _keepers(stage) == keepers
        await engine.release(stage.task)
        assert not stage.processes()

    stage.play(scene)


@pytest.mark.parametrize("who", ["guard", "supervisor"])
def test_the_keeper_dies_with_its_supervisor(stage: Stage, who: str) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine(nodes=1)
        await engine.launch(stage.gang(KEEPS + "\nforever()", nodes=1))
        await stage.reports(2)
        (keeper,) = _keepers(stage)
        os.kill(getattr(stage, who)("n0"), signal.SIGKILL)
        await stage.gone(keeper)
        await stage.ended(engine)

    stage.play(scene)


def test_a_lost_keeper_is_started_again_and_holds_nothing(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine(nodes=1)
        await engine.launch(stage.gang(KEEPS + "\nforever()", nodes=1))
        await stage.reports(2)
        (keeper,) = _keepers(stage)
        os.kill(keeper, signal.SIGKILL)
        await stage.gone(keeper)
        await engine.launch(stage.gang(ASKS, nodes=1, attempt=2))
        assert await stage.reports(1) == [["0", "holds"]]
        await stage.ended(engine)
        await stage.ended(engine)
        assert _keepers(stage) != {keeper}

    stage.play(scene)
