"""LMCache's remote connector over the page cache: a remote storage plug-in.

A page has the format of LMCache's own connectors: the metadata (shapes, data types, format), and
then the chunk. If `save_chunk_meta` is off, the page has no metadata. LMCache's keys name the
model, the world, the worker and the data type.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from fireflyer.kv.adapters import open_cache

PREFIX = "remote_storage_plugin.fireflyer."
"""Prefix of the options in LMCache's extra_config: url, capacity, salt."""


def _name(key: Any) -> bytes:
    return str(key.to_string()).encode()


class FireflyerConnector(RemoteConnector):  # type: ignore[misc]
    """Connector of one worker; all workers and hosts with the same URL share the chunks."""

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        """Opens the cache.

        Raises:
            ConfigError: url or capacity is missing or invalid.
            Unavailable: no server answers.
        """
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        given = (config.extra_config if config else None) or {}
        options = {name[len(PREFIX) :]: v for name, v in given.items() if name.startswith(PREFIX)}
        self._cache = open_cache(options, f"extra_config, {PREFIX}*,")
        self._salt = str(options.get("salt", "")).encode()
        self._loop = loop
        self._memory = local_cpu_backend

    async def exists(self, key: Any) -> bool:
        return self.exists_sync(key)

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        return self._cache.exists([_name(key) for key in keys], salt=self._salt)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        return self.batched_contains(keys)

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        found: list[Any] = await self._loop.run_in_executor(None, self._get, keys)
        return found

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """Returns the leading chunks that exist; releases those after the first gap."""
        found = await self.batched_get(keys)
        run = next((at for at, each in enumerate(found) if each is None), len(found))
        for each in found[run:]:
            if each is not None:
                each.ref_count_down()
        return found[:run]

    def _get(self, keys: Sequence[Any]) -> list[Any]:
        names = [_name(key) for key in keys]
        sizes = self._cache.sizes(names, salt=self._salt)
        objects: list[Any] = [None] * len(keys)
        which = [at for at, size in enumerate(sizes) if size is not None]
        buffers: list[Any] = []
        for at in list(which):
            size = int(sizes[at] or 0)
            if self.save_chunk_meta:
                buffers.append(bytearray(size))
                continue
            objects[at] = self._allocated(size)
            if objects[at] is None:
                which.remove(at)
            else:
                buffers.append(memoryview(objects[at].byte_array).cast("B")[:size])
        done = self._cache.get_into([names[at] for at in which], buffers, salt=self._salt)
        for at, buffer, there in zip(which, buffers, done, strict=True):
            if self.save_chunk_meta:
                objects[at] = self._parsed(buffer) if there else None
            elif there:
                objects[at] = self.reshape_partial_chunk(objects[at], len(buffer))
            else:
                objects[at].ref_count_down()
                objects[at] = None
        return objects

    def _allocated(self, size: int) -> Any:
        """Returns memory for a chunk without metadata, or None."""
        if size > self.full_chunk_size_bytes:
            return None
        return self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)

    def _parsed(self, page: bytearray) -> Any:
        """Decodes the chunk of a verified page; None if there is no memory for the chunk."""
        begin = self.remote_metadata_bytes
        meta = RemoteMetadata.deserialize(memoryview(page)[:begin])
        found = self._memory.allocate(meta.shapes, meta.dtypes, meta.fmt)
        if found is not None:
            memoryview(found.byte_array).cast("B")[:] = memoryview(page)[begin:]
        return found

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        names = [_name(key) for key in keys]
        pages = [self._page(each) for each in memory_objs]
        store = partial(self._cache.set_from, names, pages, salt=self._salt)
        await self._loop.run_in_executor(None, store)

    def _page(self, memory_obj: Any) -> Any:
        data = memory_obj.byte_array
        if not self.save_chunk_meta:
            return data
        meta = RemoteMetadata(
            len(data), memory_obj.get_shapes(), memory_obj.get_dtypes(),
            memory_obj.get_memory_format(),
        )  # fmt: skip
        return b"".join((meta.serialize(), data))

    async def list(self) -> list[str]:
        """Returns []: the cache keeps digests of keys, not keys."""
        return []

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._cache.close)
