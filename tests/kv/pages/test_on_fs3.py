"""The page cache on fs3: one sum a byte; damage below and above fs3's own checksums is a miss."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fs3.client.conftest import CHUNK, Cluster
from tests.fs3.client.test_faults import damage

from fireflyer.fs3.client import Client, Settings
from fireflyer.fs3.client.storage import Fs3Storage
from fireflyer.kv.pages.cache import PageCache
from fireflyer.rpc.loop import LoopThread

SIZES = (5, 4096, 3 * CHUNK, 2 * CHUNK + 4097, 65_537)
KEYS = [b"page%d" % size for size in SIZES]
PAGES = [random.Random(size).randbytes(size) for size in SIZES]


@pytest.fixture(params=[True, False], ids=["same node", "tcp"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cluster, Client]]:
    with LoopThread("manager") as loop:
        cluster = Cluster(loop, tmp_path, nodes=2, replicas=2)
        with cluster.connect(Settings(local=request.param)) as client:
            yield cluster, client
        cluster.close()


def opened(client: Client) -> PageCache:
    return PageCache(client.storage("/cache"), 8 << 20, 1 << 20, 0.0)


def written(client: Client) -> None:
    with opened(client) as cache:
        assert all(cache.set_from(KEYS, PAGES))
        cache.flush()


def read(cache: PageCache) -> list[bool]:
    memory = [bytearray(size) for size in SIZES]
    done = cache.get_into(KEYS, memory)
    assert all(not there or got == page for there, got, page in zip(done, memory, PAGES))  # noqa: B905
    return done


def test_pages_and_their_sums(client: tuple[Cluster, Client]) -> None:
    written(client[1])
    with opened(client[1]) as cache:
        assert read(cache) == [True] * len(KEYS)
        assert cache.stats()["damaged"] == 0


def test_a_page_that_fs3_verifies_but_nobody_wrote_is_a_miss(
    client: tuple[Cluster, Client],
) -> None:
    written(client[1])
    (name,) = client[1].listdir("/cache/segment")
    for number, page in enumerate(PAGES):
        with opened(client[1]) as cache:
            with client[1].open(f"/cache/segment/{name}", "rb+") as file:
                whole = file.pread(file.size, 0)
                place = whole.index(page) + len(page) - 1
                file.pwrite(bytes([whole[place] ^ 16]), place)
            good = [at != number for at in range(len(KEYS))]
            assert read(cache) == good
            assert cache.stats()["damaged"] == 1
            assert read(cache) == good
            with client[1].open(f"/cache/segment/{name}", "rb+") as file:
                file.pwrite(whole, 0)


def test_damaged_blocks_are_read_elsewhere_or_the_page_is_a_miss(
    client: tuple[Cluster, Client],
) -> None:
    cluster, fs = client
    written(fs)
    block = PAGES[2][8192:12_288]
    with opened(fs) as cache:
        assert any(damage(cluster.folder(name), block) for name in cluster.running)
        for _ in range(4):  # either replica may be asked
            assert read(cache) == [True] * len(KEYS)


def test_what_no_replica_has_is_a_miss_that_is_forgotten(client: tuple[Cluster, Client]) -> None:
    cluster, fs = client
    written(fs)
    for name in cluster.running:
        assert damage(cluster.folder(name), PAGES[2][8192:12_288])
    with opened(fs) as cache:
        assert read(cache) == [True, True, False, True, True]
        assert cache.stats()["damaged"] == 1
        assert cache.exists(KEYS) == 2


def test_an_evicted_segment_is_a_miss(client: tuple[Cluster, Client]) -> None:
    written(client[1])
    with opened(client[1]) as cache:
        storage: Fs3Storage = client[1].storage("/cache")
        (name,) = storage.list("segment")
        storage.delete(f"segment/{name}")
        assert read(cache) == [False] * len(KEYS)
        assert cache.stats()["damaged"] == 0
