"""Workspaces through a real server: what was shipped outlives it, and odd requests are refused by type."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests.waiting import LIMIT_S, until

from fireflyer.errors import ConfigError, FireflyerError, WorkspaceError
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.processes import orphans
from fireflyer.hai.workspaces import client
from fireflyer.hai.workspaces.blob_store import Offer
from fireflyer.hai.workspaces.manifest import encode
from fireflyer.hai.workspaces.snapshot import take
from fireflyer.hai.workspaces.stream import head
from fireflyer.hai.workspaces.venv_builder import END_LIMIT_S, MARK
from fireflyer.hai.workspaces.venvs import key

MakeSpec = Callable[..., TaskSpec]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "lib/a.py").write_text("a")
    return folder


def test_a_task_gets_its_copy_after_the_server_was_killed(
    server: Any, spec: MakeSpec, source: Path
) -> None:
    server.start(nodes=1)
    shipped = client.ship(server.client, source)
    assert (shipped.files, shipped.sent_files) == (2, 2)
    server.client.submit(spec("hold"))
    task = spec("finish", script="train.py", cwd="lib", workspace=shipped.id)
    view = server.client.submit(task)
    assert (view.state, view.spec.workspace) == ("queued", shipped.id)
    (source / "train.py").write_text("print(2)")
    server.kill()
    server.start(nodes=1)
    assert client.prune(server.client, 0.0).workspaces == 0
    server.client.stop("t1")
    server.client.wait("t2", {"finished"}, LIMIT_S)
    copy = Path(view.directory) / "workspace"
    assert (copy / "train.py").read_text() == "print(1)"
    assert (copy / "lib/a.py").read_text() == "a"
    assert client.ship(server.client, source).sent_files == 1


def test_tasks_whose_workspace_is_not_as_they_say(
    server: Any, spec: MakeSpec, source: Path
) -> None:
    server.start()
    name = client.ship(server.client, source).id
    good = {"script": "train.py", "cwd": ".", "workspace": name}
    for change, kind, message in (
        ({"script": "../x.py"}, ConfigError, "has no script '../x.py'"),
        ({"script": "/etc/passwd"}, ConfigError, "has no script"),
        ({"script": "lib"}, ConfigError, "has no script 'lib'"),
        ({"cwd": ".."}, ConfigError, "has no directory '..'"),
        ({"cwd": "train.py"}, ConfigError, "has no directory"),
        ({"workspace": "0" * 64}, WorkspaceError, "no workspace 000000000000 here"),
        ({"workspace": "../../x"}, WorkspaceError, "unknown workspace"),
        ({"venv": "0" * 64}, WorkspaceError, "no lock file"),
        ({"venv": "../x"}, WorkspaceError, "unknown environment"),
    ):
        with pytest.raises(kind, match=message):
            server.client.submit(spec("finish", **{**good, **change}))
    assert server.client.tasks() == []
    server.client.submit(spec("finish", **good))


def test_a_copy_that_cannot_be_made_fails_the_attempt(
    server: Any, spec: MakeSpec, source: Path
) -> None:
    server.start()
    name = client.ship(server.client, source).id
    for blob in (server.home / "workspaces/blobs").iterdir():
        blob.write_bytes(bytes(blob.stat().st_size))
    task = spec("finish", script="train.py", cwd=".", workspace=name, max_restarts=0)
    view = server.client.submit(task)
    view = server.client.wait(view.id, {"failed"}, LIMIT_S)
    assert "ship the folder again" in view.reason
    assert client.ship(server.client, source).sent_files == 1
    assert not (Path(view.directory) / "workspace").exists()


def test_damaged_requests_are_refused_by_type(server: Any, source: Path) -> None:
    server.start()
    chance = Random(5)
    good = encode(take(source).manifest)
    upload = head("0" * 64, 3) + b"abc"
    for _ in range(300):
        path, body = chance.choice((("/workspaces", good), ("/workspaces/blobs", upload)))
        bad = bytearray(body)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(bad))
            bad[at : at + chance.randrange(2)] = chance.randbytes(chance.randrange(3))
        try:
            answer = server.client.call("POST", path, body=bytes(bad))
        except WorkspaceError:
            continue
        except FireflyerError as error:
            raise AssertionError((path, bytes(bad))) from error
        if path == "/workspaces":
            msgspec.json.decode(answer, type=Offer)
    assert client.views(server.client) == []


@pytest.mark.parametrize(
    "path",
    [
        "/workspaces/..",
        "/workspaces/%2e%2e%2fx",
        "/workspaces/" + "0" * 64,
        "/workspaces/x/blobs/../y",
    ],
)
def test_odd_names(server: Any, path: str) -> None:
    server.start()
    with pytest.raises((WorkspaceError, ConfigError)):
        server.client.call("GET", path)


@pytest.mark.full
def test_two_tasks_make_an_environment_once_though_the_server_is_killed_meanwhile(
    server: Any, spec: MakeSpec
) -> None:
    server.start(nodes=2)
    lock = msgspec.json.decode(server.client.call("POST", "/venvs", body=b"# nothing\n"))
    tasks = [server.client.submit(spec("finish", venv=lock["id"])).id for _ in range(2)]
    place = server.home / "venvs" / key(lock["id"])
    until((place / "bin" / "python").exists)
    server.kill()
    assert not place.with_name(f"{place.name}.ready").exists()
    server.start(nodes=2)
    views = [server.client.wait(task, {"finished"}, LIMIT_S) for task in tasks]
    said = [(Path(view.directory) / str(view.attempt) / "0.log").read_text() for view in views]
    assert "".join(said).count("making the environment of") == 1
    assert [view.restarts for view in views] == [0, 0]
    assert orphans.end({MARK: str(place)}, END_LIMIT_S) == []
