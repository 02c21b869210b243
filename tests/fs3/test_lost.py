"""What somebody removes of a storage node: its metadata, folders of targets, files of stores. It is said."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fs3.test_nodes import Nodes
from tests.waiting import LIMIT_S, until

from fireflyer.fs3.manager.chains import Chain, Member, Public
from fireflyer.fs3.storage.lost import Files, missing_folder_fault, replaced_store_fault
from fireflyer.log import get_logger
from fireflyer.rpc.loop import LoopThread

FOLDER = Path("/d/target-000")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(get_logger("fs3"), "propagate", True)
    caplog.set_level(logging.INFO, "fireflyer")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Nodes]:
    """One node, one target, one replica."""
    with LoopThread("manager") as loop:
        nodes = Nodes(loop, tmp_path, 1)
        yield nodes
        nodes.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Nodes]:
    with LoopThread("manager") as loop:
        nodes = Nodes(loop, tmp_path, 3)
        yield nodes
        nodes.close()


def chain(*members: tuple[int, Public, int]) -> Chain:
    return Chain(7, 3, tuple(Member(target, state, 1, store) for target, state, store in members))


@pytest.mark.parametrize("state", [Public.SERVING, Public.LASTSRV, Public.RECOVERING])
def test_only_the_last_holder_gets_no_empty_folder(state: Public) -> None:
    why = missing_folder_fault(chain((1, state, 5), (2, Public.OFFLINE, 0)), 1, FOLDER)
    assert why.startswith("its folder is missing: /d/target-000, and no other target of chain 7 ")
    assert missing_folder_fault(chain((1, state, 5), (2, Public.LASTSRV, 6)), 1, FOLDER) == ""
    assert missing_folder_fault(chain((2, state, 5), (1, Public.OFFLINE, 0)), 1, FOLDER) == ""
    assert (
        missing_folder_fault(chain((1, state, 0)), 1, FOLDER) == ""
    )  # of a new chain, or the operator's word


def test_another_store_than_the_last_one_is_told() -> None:
    last = chain((1, Public.LASTSRV, 5), (2, Public.LASTSRV, 6))
    assert replaced_store_fault(last, 1, 5, FOLDER) == ""
    assert replaced_store_fault(last, 1, 9, FOLDER).startswith(
        "its store is new: /d/target-000 was lost"
    )
    assert replaced_store_fault(chain((1, Public.LASTSRV, 0)), 1, 9, FOLDER) == ""
    assert (
        replaced_store_fault(chain((2, Public.SERVING, 6), (1, Public.WAITING, 0)), 1, 9, FOLDER)
        == ""
    )


def test_a_lost_folder_of_the_last_target_is_not_made_anew(
    alone: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "n0" / "target-000"
    alone.chain(1)
    alone.write(0, b"kept" * 100)
    alone.stop("n0")
    folder.rename(tmp_path / "aside")
    alone.start("n0")
    node = alone.running["n0"]
    until(lambda: bool(node.faults))
    ((target, why),) = node.faults.items()
    assert why.startswith(
        f"its folder is missing: {folder}, and no other target of chain 1 has its data"
    )
    assert not folder.exists()
    assert caplog.messages.count(f"target {target}: {why}") == 1
    (tmp_path / "aside").rename(folder)
    assert alone.chain(1).targets(Public.SERVING) == (target,)
    assert alone.read(target, 0) == b"kept" * 100
    assert node.faults == {}


def test_an_emptied_folder_of_the_last_target_is_told(
    alone: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "n0" / "target-000"
    alone.chain(1)
    alone.write(0, b"kept" * 100)
    alone.stop("n0")
    folder.rename(tmp_path / "aside")
    folder.mkdir()
    alone.start("n0")
    node = alone.running["n0"]
    until(lambda: bool(node.faults))
    ((target, why),) = node.faults.items()
    assert why.startswith(f"faulty: its store is new: {folder} was lost, emptied or not mounted")
    assert caplog.messages.count(f"target {target} is {why}") == 1
    folder.rename(tmp_path / "empty")
    (tmp_path / "aside").rename(folder)
    assert alone.chain(1).targets(Public.SERVING) == (target,)
    assert alone.read(target, 0) == b"kept" * 100
    until(lambda: node.faults == {})


def test_a_lost_folder_is_filled_anew_where_others_serve(three: Nodes, tmp_path: Path) -> None:
    three.chain(3)
    three.write(0, b"kept" * 100)
    three.stop("n1")
    three.chain(2)
    shutil.rmtree(tmp_path / "n1" / "target-000")
    three.start("n1")
    for target in three.chain(3).targets(Public.SERVING):
        assert three.read(target, 0) == b"kept" * 100


def test_all_stop_and_one_folder_is_lost(three: Nodes, tmp_path: Path) -> None:
    three.chain(3)
    three.write(0, b"kept" * 100)
    for name in ("n0", "n1", "n2"):
        three.stop(name)
    shutil.rmtree(tmp_path / "n1" / "target-000")
    for name in ("n1", "n0", "n2"):
        three.start(name)
    for target in three.chain(3).targets(Public.SERVING):
        assert three.read(target, 0) == b"kept" * 100


def test_removed_files_of_an_open_store_are_told(
    alone: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "n0" / "target-000"
    alone.chain(1)
    alone.write(0, b"kept" * 10_000)
    node = alone.running["n0"]
    (target,) = node.targets()
    files = node._files[target]
    until(lambda: bool(files._data))
    (gone, *_) = (file for file in folder.iterdir() if file.name.startswith("data-"))
    gone.unlink()
    until(lambda: bool(node.faults))
    why = node.faults[target]
    assert why.startswith(f"files of its store were removed while it was open: {gone.name} in ")
    assert caplog.messages.count(f"target {target}: {why}") == 1
    assert alone.read(target, 0) == b"kept" * 10_000  # while it lasts


def test_files_come_and_logs_go(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for name in ("data-0-0", "log-000000000007", "index-000000000007", "identity"):
        (tmp_path / name).touch()
    assert files.missing() == ""
    (tmp_path / "log-000000000008").touch()
    (tmp_path / "log-000000000007").unlink()
    (tmp_path / "index-000000000007").unlink()
    (tmp_path / "data-0-1").touch()
    assert files.missing() == ""
    (tmp_path / "log-000000000008").unlink()
    assert "log-000000000008 in" in files.missing()
    for number in range(6):
        (tmp_path / f"data-1-{number}").touch()
    assert files.missing() == ""
    for file in tmp_path.glob("data-*"):
        file.unlink()
    assert "data-0-0, data-0-1, data-1-0 and 5 more in" in files.missing()


def test_a_node_whose_manager_lost_everything_ends_and_says_why(
    three: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    three.chain(3)
    three.forget()
    nodes = three.running.values()
    for node in nodes:
        assert node.ended.wait(LIMIT_S)
    until(lambda: len(three.link.status().troubles) == 3)
    own = next(iter(nodes))._me
    assert own
    for name, node in three.running.items():
        why = (
            rf"the folder of node {name} belongs to file system {own.cluster[:8]}, and this manager"
        )
        assert str(node.why_ended).startswith(why)
        assert node.trouble() == str(node.why_ended)
        assert caplog.messages.count(f"node {name} stops: {node.why_ended}") == 1
        assert caplog.messages.count(f"refused a process: {node.why_ended}") == 1
        assert f"node {name} is refused: {node.why_ended}" in three.link.status().troubles
