"""A server owns its home by the inode of its lock: it leaves a home that is no longer its own."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from fireflyer.errors import PeerLost
from fireflyer.hai.client import Client
from fireflyer.hai.home import Home, ServerFile
from fireflyer.hai.model import TaskSpec

MakeSpec = Callable[..., TaskSpec]


def removed(home: Path) -> None:
    shutil.rmtree(home)


def emptied(home: Path) -> None:
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def moved(home: Path) -> None:
    home.rename(home.with_name("elsewhere"))


def lock_removed(home: Path) -> None:
    (home / "server.lock").unlink()


@pytest.mark.parametrize("lose", [removed, emptied, moved, lock_removed])
def test_a_server_whose_home_is_gone_ends_and_leaves_the_next_server_alone(
    server: Any, forks: Any, spec: MakeSpec, lose: Callable[[Path], None]
) -> None:
    server.start()
    server.client.submit(spec("hold"))
    server.client.wait("t1", {"running"})
    lose(server.home)
    following = type(server)(server.home, forks)
    following.start()
    try:
        assert server.wait() == 1
        assert "was removed or replaced while this server" in server.output()
        assert following.client.server().pid == following.pid
        assert following.client.nodes()
    finally:
        following.kill()


def test_server_json_comes_back_if_only_it_was_removed(server: Any) -> None:
    server.start()
    before = server.client.server()
    for name in ("server.json", "token"):
        (server.home / name).unlink()
    until((server.home / "server.json").exists)
    assert server.client.server() == before
    assert server.client.nodes()


def test_the_ranks_of_a_home_that_is_gone_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "hold.py"
    script.write_text("import os, signal, sys\nopen(sys.argv[1], 'w').close()\nsignal.pause()\n")
    client = Client.connect(tmp_path / "home")
    process = os.pidfd_open(client.server().pid)
    ready = tmp_path / "ready"
    client.submit(TaskSpec(script=str(script), args=(str(ready),), cwd=str(tmp_path)))
    until(ready.exists)
    rank = client.task("t1").ranks[0].pid
    assert rank is not None
    shutil.rmtree(tmp_path / "home")
    until(lambda: not Path(f"/proc/{rank}").exists())
    os.waitid(os.P_PIDFD, process, os.WEXITED)
    os.close(process)
    with pytest.raises(PeerLost, match="no server serves"):
        client.nodes()


def test_a_lock_of_a_replaced_home_is_not_ownership(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    first = home.take()
    assert first is not None
    assert home.owned_by(first)
    assert home.take() is None
    shutil.rmtree(home.path)
    assert not home.owned_by(first)
    home.create()
    second = home.take()
    assert second is not None
    home.write_server(ServerFile(pid=1, port=2, token_file="x"))
    home.leave(first)
    assert home.read_server().port == 2
    home.leave(second)
    assert not home.server.exists()
    os.close(first)
    os.close(second)
