"""Processes that die, memory that is full and bytes that arrive wrong never make a wrong expert."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.draws import cases, drawn
from tests.experts.conftest import OpenStore, state, value_of
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError, DamagedExpert, ExpertError, NoSpace, StorageError
from fireflyer.experts import Store, folder
from fireflyer.experts.warm import LOADING
from fireflyer.fs3.client.discovery import VARIABLE, announce
from fireflyer.fs3.config import embed
from fireflyer.fs3.process import ALL, Process
from fireflyer.storage import open_storage

Body = Callable[[int], None]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[Body], tuple[int, int]]]:
    """Runs a body in a forked child with a pipe to write to; returns its id and the pipe's end."""
    pids, ends = [], []

    def start(body: Body) -> tuple[int, int]:
        end, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                body(into)
                os._exit(0)
            except BaseException:  # noqa: BLE001  # the parent sees the exit code
                os._exit(1)
        os.close(into)
        pids.append(pid)
        ends.append(end)
        return pid, end

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for end in ends:
        os.close(end)


def fill(tmp_path: Path, count: int = 3) -> None:
    for number in range(count):
        folder.add(open_storage(tmp_path / "experts"), f"e{number}", state(float(number)))


def stuck_while_loading(store: Callable[[], Store]) -> Body:
    """Loads e0 and stops for good when half of its bytes are in place."""

    def body(into: int) -> None:
        whole = folder.read_into

        def half(storage: Any, name: str, known: Any, memory: memoryview) -> None:
            whole(storage, name, known, memory)
            memory[len(memory) // 2 :] = bytes(len(memory) - len(memory) // 2)
            os.write(into, b"x")
            threading.Event().wait()

        vars(folder)["read_into"] = half
        value_of(store(), "e0")

    return body


def loading(warm: Path) -> list[str]:
    return [name for name in os.listdir(warm) if name.endswith(LOADING)]


def test_a_loader_that_is_killed_leaves_nothing_that_is_served(
    tmp_path: Path, warm: Path, child: Any, open_store: OpenStore
) -> None:
    fill(tmp_path)
    pid, end = child(stuck_while_loading(open_store))
    assert os.read(end, 1) == b"x"
    assert len(loading(warm)) == 1
    store = open_store()
    assert value_of(store, "e1") == 1
    assert len(loading(warm)) == 1  # it lives, and its bytes count
    os.kill(pid, signal.SIGKILL)
    assert value_of(store, "e0") == 0
    assert loading(warm) == []
    assert value_of(store, "e2") == 2
    assert store.stats().warm_bytes <= 3 << 20


def test_a_store_waits_for_the_process_that_loads_the_same_expert(
    tmp_path: Path, warm: Path, child: Any, open_store: OpenStore
) -> None:
    fill(tmp_path)

    def body(into: int) -> None:
        whole = folder.read_into

        def slow(*arguments: Any) -> None:
            whole(*arguments)
            os.write(into, b"x")
            assert os.read(go, 1) == b"y"

        vars(folder)["read_into"] = slow
        store = open_store()
        value_of(store, "e0")
        os.write(into, b"z")
        threading.Event().wait()

    go, told = os.pipe()
    _, end = child(body)
    assert os.read(end, 1) == b"x"
    store = open_store()
    found: list[float] = []
    caller = threading.Thread(target=lambda: found.append(value_of(store, "e0")))
    caller.start()
    os.write(told, b"y")
    caller.join(LIMIT_S)
    assert os.read(end, 1) == b"z"
    assert found == [0]
    assert store.stats().read_bytes == 0
    assert len(os.listdir(warm)) == 3
    os.close(go)
    os.close(told)


def test_two_processes_share_what_one_of_them_loaded(
    tmp_path: Path, child: Any, open_store: OpenStore
) -> None:
    fill(tmp_path)

    def body(into: int) -> None:
        store = open_store()
        with store.get("e0") as expert:
            os.write(into, bytes([int(expert.tensors["w"][0, 0])]))
            threading.Event().wait()

    pid, end = child(body)
    assert os.read(end, 1) == b"\0"
    store = open_store()
    assert value_of(store, "e0") == 0
    assert (store.stats().loads, store.stats().warm_hits) == (0, 1)
    assert [value_of(store, name) for name in ("e1", "e2", "e1", "e2")] == [1, 2, 1, 2]
    assert store.stats().evictions == 3  # of e1 and e2: the child holds e0
    os.kill(pid, signal.SIGKILL)
    assert value_of(store, "e0") == 0  # what the killed process held can still be served
    assert store.stats().loads == 4


@pytest.mark.full
def test_processes_killed_at_any_time_leave_no_wrong_bytes(
    tmp_path: Path, child: Any, open_store: OpenStore
) -> None:
    fill(tmp_path, 4)
    random = drawn("killed experts")

    def body(into: int) -> None:
        store = open_store()
        number = 0
        while True:
            assert value_of(store, f"e{number % 4}") == number % 4
            os.write(into, b"x")
            number += 1

    for _ in range(cases(30)):
        pids = [child(body) for _ in range(2)]
        for pid, end in pids:
            os.read(end, random.randrange(1, 6))
            os.kill(pid, signal.SIGKILL)
        store = open_store()
        for number in random.sample(range(4), 4):
            assert value_of(store, f"e{number}") == number
        store.close()


def test_full_shared_memory_is_an_error_and_room_is_used_again(
    tmp_path: Path, warm: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    store = open_store()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(NoSpace, match="warm memory"), store.get("e0"):
                pass
    assert loading(warm) == []
    assert value_of(store, "e0") == 0


def test_an_unexpected_error_of_the_loader_reaches_the_caller(
    tmp_path: Path, warm: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    store = open_store()

    def fails(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "read_into", fails)
        with pytest.raises(ZeroDivisionError, match="a fault"), store.get("e0"):
            pass
    assert value_of(store, "e0") == 0
    monkeypatch.setattr(store._warm, "publish", fails)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a fault"), store.get("e1"):
            pass
    assert loading(warm) == []
    store.hint(["e1"])  # by the loader
    with pytest.raises(ExpertError, match=r"loader ended.*a fault"):
        store.wait_idle(LIMIT_S)
    for _ in range(2):
        with pytest.raises(ExpertError, match=r"loader ended.*a fault"), store.get("e1"):
            pass


def test_bytes_that_arrive_wrong_are_not_served(warm: Path) -> None:
    """A store on another kind of storage, which reads into buffers of its own."""
    url = "memory://experts-of-a-test"
    storage = open_storage(url)
    folder.add(storage, "e0", state(1.0))
    with Store(url, warm_bytes="2M", warm_folder=warm) as store:
        assert value_of(store, "e0") == 1
        folder.remove(storage, "e0")
        folder.add(storage, "e1", state(2.0))
        data = bytearray(storage.read("e1.safetensors"))
        data[-9] ^= 1
        storage.write("e1.safetensors", [bytes(data)])
        with pytest.raises(DamagedExpert, match="e1"), store.get("e1"):
            pass
    folder.remove(storage, "e1")


@pytest.mark.parametrize("kind", ["file", "link", "open"])
def test_a_folder_that_others_control_is_no_warm_memory(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "warm"
    if kind == "file":
        place.write_text("a file")
    elif kind == "link":
        (tmp_path / "other").mkdir()
        place.symlink_to(tmp_path / "other")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises((ConfigError, StorageError), match="warm memory"):
        Store(tmp_path / "experts", warm_bytes="2M", warm_folder=place)


@pytest.mark.full
def test_a_store_on_fs3(tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "fs"
    place.mkdir()
    config = embed(place, None, None)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(place, process.manager)
        monkeypatch.setenv(VARIABLE, str(place))
        with Store("fs3:///experts", warm_bytes="14M", warm_folder=warm) as store:
            for number in range(3):
                store.add(f"e{number}", state(float(number), mib=6.3))
            for number in (0, 1, 2, 0):
                assert value_of(store, f"e{number}") == number
            assert store.stats().loads == 4
            store.remove("e1")
            assert store.names() == ["e0", "e2"]
