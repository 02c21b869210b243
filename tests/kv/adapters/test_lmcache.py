"""LMCache's remote connector: whole and partial chunks, with and without metadata, misses, batches."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
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


class Format(Enum):
    """Of the numbers of LMCache's MemoryFormat."""

    KV_2LTD = 1


@dataclass
class Chunk:
    """Memory object of LMCache."""

    raw_data: Any
    meta: SimpleNamespace
    references: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.raw_data)

    def get_shapes(self) -> list[Any]:
        return [torch.Size(self.meta.shape)]

    def get_dtypes(self) -> list[Any]:
        return [self.meta.dtype]

    def get_memory_format(self) -> Format:
        return Format.KV_2LTD

    def ref_count_down(self) -> None:
        self.references -= 1


def chunk_of(data: bytearray, shape: Any) -> Chunk:
    return Chunk(data, SimpleNamespace(shape=tuple(shape), dtype=torch.float16))


class Memory:
    """LMCache's allocator of host memory; it may run dry."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.metadata = SimpleNamespace(
            get_shapes=lambda: [torch.Size(SHAPE)],
            get_dtypes=lambda: [torch.float16],
            get_num_groups=lambda: 1,
            use_mla=False,
            chunk_size=SHAPE[2],
        )
        self.given: list[Chunk] = []
        self.dry = False

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Chunk | None:
        if self.dry:
            return None
        self.given.append(chunk_of(bytearray(2 * torch.Size(shapes[0]).numel()), shapes[0]))
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
    return chunk_of(bytearray(values.numpy().tobytes()), shape)


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
        assert [bytes(each.byte_array) for each in found[:4]] == [bytes(c.raw_data) for c in chunks]
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
