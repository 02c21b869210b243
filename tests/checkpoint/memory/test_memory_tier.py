"""The memory tier over real keepers: virtual nodes of forked ranks, killed, replaced and starved."""

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.checkpoint.conftest import Machine
from tests.conftest import StartGang
from tests.waiting import LIMIT_S

from fireflyer._native import crc32
from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.checkpoint.memory import messages as wire
from fireflyer.checkpoint.memory.inventory import Stamp
from fireflyer.checkpoint.memory.keeper import Keeper
from fireflyer.checkpoint.memory.keeper_link import KeeperLink, connect_local
from fireflyer.checkpoint.memory.memfd import Memory
from fireflyer.checkpoint.memory.replica import ReplicaStorage
from fireflyer.checkpoint.memory.tier import MemoryTier
from fireflyer.errors import CheckpointError, Corrupted, NoSpace, PeerLost, StorageError, WireError

PLACE = "/runs/gpt"
BLOCK = 4000
DEADLINE_S = LIMIT_S
SAVES = [Generation(1, 1, 10), Generation(1, 2, 20), Generation(1, 3, 30)]


class Control:
    """An all-gather over a file store."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store = dist.FileStore(path, world)
        self._count = 0

    def blobs(self, mine: bytes) -> list[bytes]:
        self._count += 1
        self._store.set(f"{self._count}/{self.rank}", mine.hex())
        texts = [self._store.get(f"{self._count}/{rank}") for rank in range(self.world)]
        return [bytes.fromhex(text.decode()) for text in texts]


class _Nobody:
    def blobs(self, mine: bytes) -> list[bytes]:
        return [mine]


def _alone(place: str = PLACE, **options: Any) -> MemoryTier:
    return MemoryTier(_Nobody(), 0, 1, place, **options)


def _content(generation: Generation, rank: int) -> bytes:
    large = 5_000_000 if generation == SAVES[-1] else 500_000
    size = 0 if rank == 3 else large if rank == 0 else 12_345 + rank
    return random.Random(f"{generation} {rank}").randbytes(size)


def _blocks(data: bytes) -> list[wire.Block]:
    """CRC32s with a gap of 24 bytes before each block."""
    starts = range(24, len(data), BLOCK + 24)
    return [
        wire.Block(start, len(data[start : start + BLOCK]), crc32(data[start : start + BLOCK]))
        for start in starts
    ]


def _part(generation: Generation, rank: int) -> bytes:
    return f"{generation} {rank} ".encode() * 40


def _save(tier: MemoryTier, generation: Generation, rank: int) -> bool:
    data = _content(generation, rank)
    halves: list[bytes | memoryview] = [memoryview(data)[:777], data[777:]]
    chunks = iter(halves)

    def describe() -> tuple[bytes, list[wire.Block]]:
        assert not list(chunks)
        return _part(generation, rank), _blocks(data)

    return tier.replicate(generation, chunks, describe, b"".join)


def _read_blocks(storage: ReplicaStorage, name: str, blocks: Sequence[wire.Block]) -> bytes:
    """The blocks, checked, each at its own offset and zeros between."""
    end = blocks[-1].offset + blocks[-1].length
    memory = np.zeros(end, np.uint8)
    address = memory.ctypes.data
    rows = [(1, block.offset, block.length, address + block.offset) for block in blocks]
    crcs = np.array([block.crc32 for block in blocks], np.uint32)
    storage.read_checked(["other", name], np.array(rows, np.int64), crcs)
    return memory.tobytes()


def _check(tier: MemoryTier, world: int) -> Generation | None:
    """Reads the newest complete save in all its parts; fails where a byte is not as saved."""
    complete = tier.newest()
    if complete is None:
        return None
    stamp = complete.stamp
    generation = Generation(stamp.epoch, stamp.number, stamp.step)
    storage = tier.open(complete)
    try:
        assert len(complete.holders) == world
        parts = b"".join(_part(generation, rank) for rank in range(world))
        assert storage.read(generation.manifest) == parts
        for rank in range(world):
            data, name = _content(generation, rank), generation.data(rank)
            if not data:
                assert storage.size(name) is None
                continue
            assert storage.size(name) == len(data)
            assert storage.read(name) == data
            blocks = _blocks(data)
            read = _read_blocks(storage, name, blocks)
            for block in blocks:
                here = slice(block.offset, block.offset + block.length)
                assert read[here] == data[here]
            (piece,) = storage.read_many([(name, 5000, 5001)])
            assert piece == data[5000:5001]
        return generation
    finally:
        storage.close()


def _body(
    store: str, act: Callable[[MemoryTier, int], Any], **options: Any
) -> Callable[[int, int], Any]:
    def body(rank: int, world: int) -> Any:
        return act(MemoryTier(Control(store, rank, world), rank, world, PLACE, **options), rank)

    return body


def _save_and_die(generations: Sequence[Generation]) -> Callable[[MemoryTier, int], None]:
    def act(tier: MemoryTier, rank: int) -> None:
        for generation in generations:
            assert _save(tier, generation, rank)
        tier.newest()  # everybody has come so far
        os.kill(os.getpid(), signal.SIGKILL)

    return act


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (2, 1), (4, 2), (3, 3)])
def test_the_newest_save_outlives_the_gang(
    machine: Machine, start_gang: StartGang, world: int, nodes: int
) -> None:
    start_gang(_body(machine.store(), _save_and_die(SAVES)), world, nodes).results()
    assert len(machine.keepers()) == nodes
    read = _body(machine.store(), lambda tier, _: (tier.found is not None, _check(tier, world)))
    assert start_gang(read, world, nodes).results() == [(True, SAVES[-1])] * world


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", ["n0", "n1", "n2"])
def test_a_lost_node_is_read_from_its_buddy(
    machine: Machine, start_gang: StartGang, lost: str
) -> None:
    start_gang(_body(machine.store(), _save_and_die(SAVES)), 6, 3).results()
    machine.kill_keeper(lost)

    def again(tier: MemoryTier, rank: int) -> list[Generation | None]:
        first = _check(tier, 6)
        assert _save(tier, Generation(2, 1, 31), rank)
        return [first, _check(tier, 6)]

    # The same nodes, one of them empty; then other worlds on fewer and more nodes.
    found = start_gang(_body(machine.store(), again), 6, 3).results()
    assert found == [[SAVES[-1], Generation(2, 1, 31)]] * 6
    machine.kill_keeper(lost)
    read = _body(machine.store(), lambda tier, _: _check(tier, 6))
    assert start_gang(read, 4, 4).results() == [Generation(2, 1, 31)] * 4


def test_a_node_and_its_buddy_lost_leave_nothing(machine: Machine, start_gang: StartGang) -> None:
    start_gang(_body(machine.store(), _save_and_die(SAVES)), 4, 4).results()
    machine.kill_keeper("n2")
    machine.kill_keeper("n3")
    read = _body(machine.store(), lambda tier, _: (tier.found, tier.healthy))
    assert start_gang(read, 4, 4).results() == [(None, True)] * 4


def _dies_at(message: int, patch: pytest.MonkeyPatch) -> None:
    """From now on this process kills itself before its `message`-th message to a keeper."""
    count, real = 0, wire.send

    def send(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == message:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)

    patch.setattr(wire, "send", send)


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_anywhere_in_a_save(
    machine: Machine, start_gang: StartGang, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is whole, and the save that was acknowledged before or the one that was cut off."""
    seen: set[int] = set()
    for epoch, message in enumerate(range(1, 8 if victim == 0 else 5), start=1):
        kept, cut = Generation(epoch, 1, 1), Generation(epoch, 2, 2)

        def act(
            tier: MemoryTier,
            rank: int,
            kept: Generation = kept,
            cut: Generation = cut,
            message: int = message,
        ) -> None:
            assert _save(tier, kept, rank)
            tier.newest()
            tier._deadline_s = 0.5
            if rank == victim:
                _dies_at(message, monkeypatch)
            _save(tier, cut, rank)

        gang = start_gang(_body(machine.store(), act, epoch=epoch), 4, 2)
        for rank in range(4):
            assert not isinstance(gang.result(rank), BaseException)
        read = _body(machine.store(), lambda tier, _: _check(tier, 4), epoch=epoch)
        (found,) = set(start_gang(read, 4, 2).results())
        assert found in (kept, cut)
        seen.add(found.number)
    assert seen == {1, 2}  # rank 0 can die between the marks, another one while it waits for them


def test_a_lost_keeper_is_replaced_by_the_next_join(
    machine: Machine, start_gang: StartGang
) -> None:
    def act(tier: MemoryTier, rank: int) -> list[Any]:
        seen: list[Any] = [_save(tier, SAVES[0], rank)]
        tier.newest()
        if rank == 0:
            machine.kill_keeper("n1")
        tier._exchange("", str)
        patience, tier._deadline_s = tier._deadline_s, 1.0
        seen += [_save(tier, SAVES[1], rank), tier.healthy]
        tier._deadline_s = patience
        tier.join()
        seen += [_check(tier, 2), _save(tier, SAVES[2], rank), tier.healthy, _check(tier, 2)]
        return seen

    for seen in start_gang(_body(machine.store(), act), 2, 2).results():
        assert seen == [True, False, False, SAVES[0], True, True, SAVES[2]]


def test_without_room_the_tier_is_skipped_with_one_warning(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _alone(limit_bytes=500_000)
    assert _save(tier, SAVES[0], 0)
    assert not _save(tier, SAVES[1], 0)
    assert not _save(tier, SAVES[2], 0)
    assert _check(tier, 1) == SAVES[0]
    assert tier.healthy
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "saves to storage continue" in warning
    assert "limit of 500000 bytes" in warning
    tier.close()


def test_a_rank_without_room_fails_the_save_on_all(
    machine: Machine, start_gang: StartGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(tier: MemoryTier, rank: int) -> tuple[bool, Generation | None]:
        assert _save(tier, SAVES[0], rank)
        tier.newest()
        if rank == 1:

            def no_memory(_: object) -> Memory:
                raise NoSpace("no memory for a replica")

            monkeypatch.setattr(Memory, "filled", no_memory)
        went_well = _save(tier, SAVES[1], rank)
        return went_well, _check(tier, 3)

    results = start_gang(_body(machine.store(), act), 3, 3).results()
    assert results == [(False, SAVES[0])] * 3


def test_what_the_manifest_refuses_is_not_kept(machine: Machine) -> None:
    tier = _alone()
    assert _save(tier, SAVES[0], 0)

    def fenced(_: list[bytes]) -> bytes:
        raise CheckpointError("a later run owns the directory")

    assert not tier.replicate(SAVES[1], [], lambda: (b"", []), fenced)
    assert _check(tier, 1) == SAVES[0]
    tier.close()


def test_a_replaced_run_can_neither_save_nor_come_back(machine: Machine) -> None:
    zombie = _alone(epoch=1)
    assert _save(zombie, SAVES[0], 0)
    tier = _alone()
    assert _check(tier, 1) == SAVES[0]
    assert _save(zombie, SAVES[1], 0)  # nobody has claimed yet
    tier.fence(2)
    assert not _save(zombie, SAVES[2], 0)
    zombie.join()
    assert not zombie.healthy
    assert not _save(zombie, SAVES[2], 0)
    assert _check(tier, 1) == SAVES[1]
    assert _save(tier, Generation(2, 1, 1), 0)
    zombie.close()
    tier.close()


def test_two_places_share_nothing(machine: Machine) -> None:
    one, two = _alone("/runs/a"), _alone("/runs/b")
    assert _save(one, SAVES[0], 0)
    assert two.newest() is None
    one.close()
    two.close()


def test_a_keeper_ends_when_nobody_has_come_for_a_while(machine: Machine) -> None:
    os.environ["FIREFLYER_NODE"] = "n7"
    try:
        tier = _alone(linger_s=0.3)
        pid = machine.keepers()["n7"]
        pidfd = os.pidfd_open(pid)
        assert not select.select([pidfd], [], [], 1.0)[0], "it left while a rank was connected"
        assert _save(tier, SAVES[0], 0)
        tier.close()
        assert select.select([pidfd], [], [], DEADLINE_S)[0]
        os.close(pidfd)
        assert [path.name for path in (machine.folder / "fireflyer").iterdir()] == ["lock"]
        again = _alone(linger_s=0.3)
        assert again.found is None
        assert again.healthy
        again.close()
    finally:
        del os.environ["FIREFLYER_NODE"]


def test_what_a_killed_keeper_leaves_goes_with_the_next_start(machine: Machine) -> None:
    for place in ("/runs/a", "/runs/b", "/runs/c"):
        _alone(place).close()
        names = {path.suffix for path in (machine.folder / "fireflyer").glob("*.*")}
        assert names == {".sock", ".log"}
        assert len(list((machine.folder / "fireflyer").iterdir())) == 3
        machine.kill_keeper("")
    alive = _alone("/runs/d")
    _alone("/runs/e").close()
    assert len(list((machine.folder / "fireflyer").glob("*.sock"))) == 2
    assert _save(alive, SAVES[0], 0)
    alive.close()


def test_a_keeper_never_imports_torch() -> None:
    check = (
        "import sys, fireflyer.checkpoint.memory.keeper, fireflyer.checkpoint.memory.keeper_link\n"
        "assert not {'torch', 'numpy', 'asyncio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


# -- a keeper in this process, to look into ------------------------------------------------------------


class _Served:
    def __init__(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(8)
        self.keeper = Keeper(listener)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.keeper.run, args=(0.0, self._leaves))
        self._thread.start()

    def _leaves(self) -> bool:
        return self._over.wait(0.05)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    path = tmp_path / "k.sock"
    monkeypatch.setenv("FIREFLYER_KEEPER", str(path))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    served = _Served(path)
    yield served.keeper
    served.close()


def _flip(keeper: Keeper, generation: Generation, byte: int) -> None:
    place = keeper._places[PLACE]
    key = (Stamp(generation.epoch, generation.number, generation.step), 0)
    old = place.replicas[key]
    data = bytearray(old.memory.view(old.size))
    data[byte] ^= 1
    flipped = Memory.filled([memoryview(data)])
    place.replicas[key] = type(old)(flipped, old.size)


def test_a_flipped_byte_is_found(served: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    tier = _alone()
    assert _save(tier, SAVES[0], 0)
    name = SAVES[0].data(0)
    for byte in (24, 499_999, 200_000):
        _flip(served, SAVES[0], byte)
        complete = tier.newest()
        assert complete is not None
        storage = tier.open(complete)
        with pytest.raises(Corrupted, match="no intact replica"):
            _read_blocks(storage, name, _blocks(_content(SAVES[0], 0)))
        assert any("does not match" in record.getMessage() for record in caplog.records)
        storage.close()
        _flip(served, SAVES[0], byte)
    assert _check(tier, 1) == SAVES[0]
    assert tier.newest() is not None
    tier.discard(SAVES[0])
    assert tier.newest() is None
    tier.close()


def test_bytes_are_checked_when_they_arrive(served: Keeper) -> None:
    tier = _alone()
    data = bytearray(_content(SAVES[0], 0))
    blocks = _blocks(bytes(data))
    data[200_000] ^= 1
    assert not tier.replicate(SAVES[0], [memoryview(data)], lambda: (b"", blocks), b"".join)
    assert tier.healthy
    assert tier.newest() is None
    overlap = [wire.Block(0, 10, 0), wire.Block(9, 10, 0)]
    assert not tier.replicate(SAVES[0], [memoryview(data)], lambda: (b"", overlap), b"".join)
    assert _save(tier, SAVES[1], 0)  # the connection goes on
    tier.close()


def test_what_is_held_does_not_shrink_the_limit_of_the_next_run(
    served: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2_000_000
    monkeypatch.setattr("fireflyer.checkpoint.memory.keeper._available_bytes", lambda: free)
    tier = _alone()
    assert _save(tier, SAVES[0], 0)
    free -= 500_000
    tier.join()
    assert _save(tier, SAVES[1], 0), "two saves fit as before"
    assert served._places[PLACE].table.limit_bytes == 1_000_000
    tier.close()


def _join(key: bytes) -> tuple[KeeperLink, int]:
    join = wire.Join(wire.VERSION, PLACE, 1, 1 << 30, key, "127.0.0.1")
    link, port, _ = KeeperLink.local(connect_local(PLACE, "", 1.0), join)
    return link, port


def test_only_who_has_the_key_is_served(served: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    link, port = _join(b"k" * 32)
    stamp = Stamp(1, 1, 1)
    link.put(stamp, 1, 0, Memory.filled([b"secret bytes"]), [])
    with pytest.raises(PeerLost, match="has not joined"):
        KeeperLink.remote("127.0.0.1", port, b"x" * 32)
    name = wire.key_name(b"k" * 32)
    with monkeypatch.context() as patch:
        patch.setattr(wire, "key_name", lambda _: name)
        with pytest.raises(WireError, match="did not prove"):
            KeeperLink.remote("127.0.0.1", port, b"x" * 32)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"\xff" * 200, b""):
        stranger = socket.create_connection(("127.0.0.1", port), 5)
        with stranger, contextlib.suppress(OSError):  # it may be cut off before it has said all
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) in (b"", b"?")
    friend = KeeperLink.remote("127.0.0.1", port, b"k" * 32)
    data = bytearray(12)
    friend.read(stamp, 0, [(7, memoryview(data)[:5]), (0, memoryview(data)[5:])])
    assert data == b"bytessecret "
    with pytest.raises(CheckpointError, match="has no 12 bytes at byte 5"):
        friend.read(stamp, 0, [(5, memoryview(data))])
    with pytest.raises(StorageError, match="no replica of rank 9"):
        friend.find(stamp, 9)
    friend.read(
        stamp, 0, [(7, memoryview(data)[:5]), (0, memoryview(data)[5:])]
    )  # the connection goes on after a refusal
    friend.close()
    link.close()


def test_memory_that_could_still_change_is_refused(served: Keeper) -> None:
    link, _ = _join(b"k" * 32)
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(fd, b"1234")
    with pytest.raises(CheckpointError, match="not sealed"):
        link.put(Stamp(1, 1, 1), 1, 0, Memory(fd), [])
    assert link.look().entries == ()
    link.close()


def test_rank_0_hears_who_did_not_come(served: Keeper) -> None:
    link, _ = _join(b"k" * 32)
    link.tell(wire.Place(Stamp(1, 1, 1), 3, 1, ""), b"part")
    start = time.monotonic()
    with pytest.raises(WireError, match=r"no replica from rank\(s\) 0, 2"):
        link.gather(Stamp(1, 1, 1), 3, 0.05)
    assert time.monotonic() - start >= 0.05
    link.close()


def test_a_directory_that_others_can_reach_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("FIREFLYER_KEEPER", raising=False)
    (tmp_path / "fireflyer").mkdir()
    os.chmod(tmp_path / "fireflyer", 0o755)
    tier = _alone()
    assert not tier.healthy
    assert not _save(tier, SAVES[0], 0)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "of this user alone" in warning
