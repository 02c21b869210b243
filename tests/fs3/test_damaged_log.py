"""A store's log, index or identity is damaged while its node is down: nothing is lost, nothing old served."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fs3.test_nodes import Nodes
from tests.waiting import until

from fireflyer.fs3.manager.chains import Public
from fireflyer.fs3.storage.node import FAULTY
from fireflyer.rpc.loop import LoopThread

CHUNKS = 6
STEP = 64
"""Where records of a log begin."""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("manager") as loop:
        yield loop


def content(index: int, version: int) -> bytes:
    return bytes([index + 16 * version]) * 5000


def write_twice(nodes: Nodes) -> None:
    for version in (0, 1):
        for index in range(CHUNKS):
            nodes.write(index, content(index, version))


def damage(path: Path, at: int) -> None:
    """Another byte at `at`, from the end where it is negative."""
    held = bytearray(path.read_bytes())
    held[at] ^= 4
    path.write_bytes(held)


def newest_log(folder: Path) -> Path:
    return max(folder.glob("log-*"))


def test_the_only_replica_takes_damaged_places_from_their_copies(
    loop: LoopThread, tmp_path: Path
) -> None:
    folder = tmp_path / "n0" / "target-000"
    nodes = Nodes(loop, tmp_path, 1)
    try:
        nodes.chain(1)
        write_twice(nodes)
        nodes.stop("n0")
        log = newest_log(folder)
        for at in (8, log.stat().st_size // 2 // STEP * STEP + 5, -STEP):
            damage(log, at)
        damage(folder / "identity", 20)
        nodes.start("n0")
        (target,) = nodes.chain(1).targets(Public.SERVING)
        found = [nodes.read(target, index) for index in range(CHUNKS)]
        assert found == [content(index, 1) for index in range(CHUNKS)]
        assert nodes.running["n0"].targets()[target]["mended"] >= 3
    finally:
        nodes.close()


def test_a_record_that_is_damaged_twice_comes_from_the_other_replica(
    loop: LoopThread, tmp_path: Path
) -> None:
    nodes = Nodes(loop, tmp_path, 2)
    try:
        nodes.chain(2)
        write_twice(nodes)
        nodes.stop("n0")
        nodes.chain(1)
        nodes.write(0, content(0, 2))
        log = newest_log(tmp_path / "n0" / "target-000")
        # The newest record of some chunk: well before the end, behind the first writes of all.
        at = log.stat().st_size * 3 // 4 // STEP * STEP + 5
        for path in (log, log.with_name(f"copy-{log.name}")):
            damage(path, at)
        nodes.start("n0")
        for target in nodes.chain(2).targets(Public.SERVING):
            found = [nodes.read(target, index) for index in range(CHUNKS)]
            assert found == [content(0, 2), *(content(index, 1) for index in range(1, CHUNKS))]
    finally:
        nodes.close()


def test_the_only_replica_says_that_a_record_is_lost_and_serves_nothing_old(
    loop: LoopThread, tmp_path: Path
) -> None:
    nodes = Nodes(loop, tmp_path, 1)
    try:
        (target,) = nodes.chain(1).targets(Public.SERVING)
        write_twice(nodes)
        nodes.stop("n0")
        log = newest_log(tmp_path / "n0" / "target-000")
        for path in (log, log.with_name(f"copy-{log.name}")):
            damage(path, log.stat().st_size // 2 // STEP * STEP + 5)
        nodes.start("n0")
        until(lambda: bool(nodes.running["n0"].faults))
        assert nodes.running["n0"].faults[target].startswith(FAULTY)
        chain = nodes.link.chain(1)
        assert chain is not None
        assert chain.targets(Public.SERVING) == ()
    finally:
        nodes.close()
