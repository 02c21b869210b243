"""LMCache's remote connector: whole and partial chunks, with and without metadata, misses, batches."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kv.adapters.engines import loaded

SHAPE = (2, 2, 16, 8)


@pytest.fixture
def adapter() -> Iterator[ModuleType]:
    with loaded("lmcache") as module:
        yield module


@dataclass
class Chunk:
    """Memory object of LMCache."""

    data: Any
    shape: tuple[int, ...]
    references: int = 1

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)

    def get_shapes(self) -> list[Any]:
        return [torch.Size(self.shape)]

    def get_dtypes(self) -> list[Any]:
        return [torch.float16]

    def get_memory_format(self) -> int:
        return 1

    def ref_count_down(self) -> None:
        self.references -= 1


class Memory:
    """LMCache's allocator of host memory; it may run dry."""

    def __init__(self, config: Any) -> None:
        self.config, self.metadata = config, SimpleNamespace()
        self.given: list[Chunk] = []
        self.dry = False

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Chunk | None:
        if self.dry:
            return None
        self.given.append(Chunk(bytearray(2 * torch.Size(shapes[0]).numel()), tuple(shapes[0])))
        return self.given[-1]


@dataclass
class Key:
    """LMCache's key."""

    name: str

    def to_string(self) -> str:
        return f"model@2@0@{self.name}@half"


def chunk(seed: int, tokens: int = 16) -> Chunk:
    shape = (*SHAPE[:2], tokens, SHAPE[3])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()
    return Chunk(bytearray(values.numpy().tobytes()), shape)


def run(adapter: ModuleType, folder: Path, meta: bool, body: Any) -> None:
    async def main() -> None:
        prefix = "remote_storage_plugin.fireflyer."
        extra = {f"{prefix}url": str(folder), f"{prefix}capacity": 4 << 20, "save_chunk_meta": meta}
        config = SimpleNamespace(extra_config=extra, use_layerwise=False)
        memory = Memory(config)
        made = adapter.FireflyerConnector(
            loop=asyncio.get_running_loop(), local_cpu_backend=memory, config=config
        )
        await body(made, memory)
        await made.close()

    asyncio.run(main())


@pytest.mark.parametrize("meta", [True, False])
def test_chunks_go_out_and_come_back(adapter: ModuleType, tmp_path: Path, meta: bool) -> None:
    keys = [Key(str(number)) for number in range(4)]
    chunks = [chunk(0), chunk(1), chunk(2), chunk(3, tokens=5)]

    async def out(made: Any, memory: Memory) -> None:
        await made.put(keys[0], chunks[0])
        await made.batched_put(keys[1:], chunks[1:])
        assert await made.exists(keys[0])
        assert not made.exists_sync(Key("none"))
        assert made.batched_contains([*keys, Key("none"), keys[0]]) == 4
        assert await made.batched_async_contains("id", keys) == 4

    async def back(made: Any, memory: Memory) -> None:
        found = await made.batched_get([*keys, Key("none")])
        assert [bytes(each.byte_array) for each in found[:4]] == [bytes(c.data) for c in chunks]
        assert found[4] is None
        if meta:
            assert found[3].shape == (2, 2, 5, 8)
        assert await made.get(Key("none")) is None
        run_ = await made.batched_get_non_blocking("id", [keys[0], Key("none"), keys[1]])
        assert len(run_) == 1
        assert sorted(each.references for each in memory.given[-2:]) == [0, 1], (
            "the rest is released"
        )
        memory.dry = True
        assert await made.batched_get(keys) == [None] * 4
        assert await made.list() == []

    run(adapter, tmp_path, meta, out)
    run(adapter, tmp_path, meta, back)


@pytest.mark.parametrize("meta", [True, False])
def test_a_damaged_chunk_is_a_miss(adapter: ModuleType, tmp_path: Path, meta: bool) -> None:
    async def out(made: Any, memory: Memory) -> None:
        await made.put(Key("a"), chunk(0))

    async def back(made: Any, memory: Memory) -> None:
        assert made.exists_sync(Key("a")), "only a read can tell"
        assert await made.get(Key("a")) is None
        assert all(each.references == 0 for each in memory.given), "its memory is released"
        assert not made.exists_sync(Key("a"))

    run(adapter, tmp_path, meta, out)
    (path,) = (tmp_path / "segment").iterdir()
    data = bytearray(path.read_bytes())
    data[4096 + 100] ^= 1
    path.write_bytes(data)
    run(adapter, tmp_path, meta, back)
