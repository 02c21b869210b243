"""Request to send from the client's side: how many may send at a time, and who is not asked to wait."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.fs3.client.conftest import Cluster

from fireflyer.fs3.client import Settings
from fireflyer.rpc.loop import LoopThread

CHUNK = 256 << 10


@pytest.mark.sample(2)
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_so_many_nodes_send_at_a_time(tmp_path: Path, senders: int) -> None:
    data = random.Random(senders).randbytes(60 * CHUNK + 5)
    with LoopThread("manager") as loop:
        cluster = Cluster(loop, tmp_path, nodes=3, replicas=1, chunk=CHUNK)
        settings = Settings(senders=senders, local=False)
        with cluster.connect(settings) as fs:
            with fs.open("/a", "wb") as file:
                file.write(data)

            def read(_: int) -> bytes:
                with fs.open("/a") as file:
                    return file.pread(len(data), 0)

            with ThreadPoolExecutor(6) as pool:
                assert all(found == data for found in pool.map(read, range(12)))
            counts = fs.statistics()
        assert counts["senders"] == 0
        assert counts["most_senders"] == senders
        if senders < 3:
            assert counts["held"] > 0
        else:
            assert counts["held"] == 0  # no more nodes than may send
        cluster.close()
