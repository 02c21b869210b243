"""The disk of the metadata store is full: what goes on, what is refused, and who says so."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.waiting import until

from fireflyer.cli.app import run_line
from fireflyer.errors import DeadlineExceeded, NoSpace
from fireflyer.fs3 import survey
from fireflyer.fs3.client.discovery import announce, attach, find
from fireflyer.fs3.config import STORE, ClusterConfig, embed
from fireflyer.fs3.kv import SqliteEngine, run
from fireflyer.fs3.process import ALL, Process

FULL = "the disk of the metadata store is full: "


def fill(disk: Path) -> Path:
    """By something else: a file that takes all there is."""
    file = disk / "something else"
    with open(file, "ab", buffering=0) as out:
        for piece in (1 << 16, 1):
            try:
                while out.write(bytes(piece)):
                    pass
            except OSError:
                continue
    assert os.statvfs(disk).f_bavail == 0
    return file


def refusal(call: Callable[[], object]) -> str:
    """Why it cannot be done for want of space; an attempt cut short by the deadline does not tell."""
    while True:
        try:
            call()
        except NoSpace as error:
            return str(error)
        except DeadlineExceeded:
            continue


@pytest.fixture
def config(tmp_path: Path, small_disk: Path) -> ClusterConfig:
    """Of a file system whose metadata are on a small disk of their own."""
    made = embed(tmp_path / "fs", 1, 1)
    return msgspec.structs.replace(made, metadata=str(small_disk), failover_s=0.8)


@pytest.fixture
def running(config: ClusterConfig, tmp_path: Path) -> Iterator[Process]:
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(tmp_path / "fs", process.manager)
        yield process


def test_a_running_server_goes_on_reading(
    running: Process,
    config: ClusterConfig,
    tmp_path: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = str(tmp_path / "fs")
    with attach(place) as client, client.open("/kept", "wb") as file:
        file.write(b"kept")
    caplog.set_level(logging.INFO, "fireflyer")
    epoch = survey.health(find(place)).epoch
    filler = fill(small_disk)
    until(lambda: any(FULL in one for one in survey.problems(survey.health(find(place)))))
    node = running.nodes["s1"]
    ends = node.lease_ends
    until(lambda: node.lease_ends > ends + 2 * config.times.dead_s)
    with attach(place) as client:
        with client.open("/kept") as file:
            assert file.read() == b"kept"
        assert client.listdir("/") == ["kept"]
        with pytest.raises(OSError, match="No space left") as local:
            (small_disk / "more").write_bytes(b"x")
        with pytest.raises(OSError, match=f"{small_disk}/{STORE}: no space for") as caught:
            client.mkdir("/more")
        assert isinstance(caught.value, NoSpace)
        assert caught.value.errno == local.value.errno
    assert run_line(["fs", "cat", "--dir", place, "/kept"]) == 0
    assert survey.health(find(place)).epoch == epoch
    assert [line for line in caplog.messages if "metadata store" in line] == [
        next(one for one in survey.problems(survey.health(find(place))) if FULL in one)
    ]
    filler.unlink()
    with attach(place) as client:
        client.mkdir("/more")
    until(lambda: survey.problems(survey.health(find(place))) == [])
    assert caplog.messages.count("the metadata store works again") == 1


def test_the_routing_is_saved_when_there_is_room_again(
    running: Process, config: ClusterConfig, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control = running._control
    assert control
    caplog.set_level(logging.INFO, "fireflyer")
    epoch = control._link.status().epoch
    filler = fill(small_disk)
    call = control._link._client.call
    why = refusal(lambda: call("register", ["s2", "s2:1", 1], msgspec.Raw, deadline_s=1.0))
    assert why.startswith(f"{small_disk}/{STORE}: no space for the metadata")
    status = control._link.status()
    assert (status.epoch, status.nodes) == (epoch, 1)
    assert any("the routing could not be saved: " in why for why in status.troubles)
    filler.unlink()
    until(lambda: control._link.status().nodes == 2)
    assert control._link.status().epoch == epoch
    told = [line for line in caplog.messages if "the routing" in line]
    assert len(told) == 2
    assert "no space for the metadata" in told[0]
    assert told[1] == "the routing is saved again"


def test_a_store_that_finds_no_room_to_open_says_so(small_disk: Path) -> None:
    SqliteEngine(small_disk / STORE).close()
    filler = fill(small_disk)
    with pytest.raises(NoSpace, match=f"{small_disk}/{STORE}: no space to open the metadata"):
        SqliteEngine(small_disk / STORE)
    filler.unlink()
    engine = SqliteEngine(small_disk / STORE)
    run(engine, lambda t: t.set(b"a", b""))
    assert engine.trouble == ""
    engine.close()
