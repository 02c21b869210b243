"""The asyncio face."""

import asyncio

from tests.fs3.client.conftest import Cluster

from fireflyer.fs3.client import Client
from fireflyer.fs3.client.aio import connect


def test_files_by_asyncio(fs: Client, calm: Cluster) -> None:
    async def main() -> None:
        async with await connect(calm.address, secret_file=calm.secret_file) as client:
            async with await client.open("/a", "wb+") as file:
                await file.write(b"hello")
                await file.fsync()
                await asyncio.gather(
                    *(file.pwrite(bytes([number]) * 1000, 1000 * number) for number in range(8))
                )
                parts = await asyncio.gather(*(file.pread(1000, 1000 * n) for n in range(8)))
                assert parts == [bytes([number]) * 1000 for number in range(8)]
                await file.truncate(4000)
                memory = bytearray(10)
                assert await client.read_many([(file, 3995, memory)]) == [5]
                assert await client.write_many([(file, 0, b"abc")]) == 3
            async with await client.open("/a") as file:
                assert (await file.read(4)) == b"abc\0"
            assert (await client.call(client.client.stat, "/a")).st_size == 4000

    asyncio.run(main())
