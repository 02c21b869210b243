"""A model of what SGLang and LMCache call, for machines without them.

With FIREFLYER_ENGINES=DIR, a folder with the unpacked wheels of sglang and lmcache, the engines' own
base classes are used instead, without sglang's heavy packages above them.
"""

import contextlib
import importlib
import os
import struct
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ENGINES = os.environ.get("FIREFLYER_ENGINES", "")
_SGLANG = "sglang.srt.mem_cache.hicache_storage"
_LMCACHE = "lmcache.v1.storage_backend.connector.base_connector"
_PROTOCOL = "lmcache.v1.protocol"


def _package(name: str, folder: str = "") -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [folder] if folder else []
    return module


def _own_sglang() -> dict[str, types.ModuleType]:
    """Returns the model: the names that the adapter imports."""

    class HiCacheStorage:
        pass

    class PoolName(str):
        KV = "kv"
        MAMBA = "mamba"
        DSA = "dsa"

    class PoolHitPolicy:
        ALL_PAGES = "all_pages"
        TRAILING_PAGES = "trailing_pages"

    @dataclass
    class PoolTransfer:
        name: str
        host_indices: Any = None
        keys: Any = None
        hit_policy: str = PoolHitPolicy.ALL_PAGES

    @dataclass
    class PoolTransferResult:
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]
        restorable_prefix_pages: Any = None

    module = types.ModuleType(_SGLANG)
    vars(module).update(
        HiCacheStorage=HiCacheStorage, PoolName=PoolName, PoolHitPolicy=PoolHitPolicy,
        PoolTransfer=PoolTransfer, PoolTransferResult=PoolTransferResult,
    )  # fmt: skip
    return {_SGLANG: module}


def _own_lmcache() -> dict[str, types.ModuleType]:
    class RemoteConnector:
        def __init__(self, config: Any, metadata: Any) -> None:
            self.save_chunk_meta = bool((config.extra_config or {}).get("save_chunk_meta", True))
            self.meta_shapes, self.meta_dtypes = [torch.Size((2, 2, 16, 8))], [torch.float16]
            self.meta_fmt = 1
            self.full_chunk_size_bytes = 2 * 2 * 16 * 8 * 2
            self.single_token_size = self.full_chunk_size_bytes // 16
            self.remote_metadata_bytes = 24

        def reshape_partial_chunk(self, memory_obj: Any, bytes_read: int) -> Any:
            assert bytes_read % self.single_token_size == 0
            memory_obj.raw_data = memory_obj.raw_data[:bytes_read]
            return memory_obj

    @dataclass
    class RemoteMetadata:
        length: int
        shapes: list[Any]
        dtypes: list[Any]
        fmt: Any

        def serialize(self) -> bytes:
            return struct.pack("<6i", self.length, self.fmt.value, *self.shapes[0])

        @staticmethod
        def deserialize(data: Any) -> "RemoteMetadata":
            length, fmt, *shape = struct.unpack("<6i", data)
            return RemoteMetadata(length, [torch.Size(shape)], [torch.float16], fmt)

    base, protocol = types.ModuleType(_LMCACHE), types.ModuleType(_PROTOCOL)
    vars(base).update(RemoteConnector=RemoteConnector)
    vars(protocol).update(RemoteMetadata=RemoteMetadata)
    return {_LMCACHE: base, _PROTOCOL: protocol}


def _parents(names: list[str]) -> dict[str, types.ModuleType]:
    """Returns packages above the modules: empty, or with the folders of the unpacked wheels."""
    found = {}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts)):
            above = ".".join(parts[:count])
            folder = str(Path(ENGINES, *parts[:count])) if ENGINES else ""
            found[above] = _package(above, folder)
    return found


@contextlib.contextmanager
def loaded(adapter: str) -> Iterator[types.ModuleType]:
    """Gives `fireflyer.kv.adapters.<adapter>`, imported with its engine or the model of it."""
    before = dict(sys.modules)
    if adapter == "sglang":
        names, models = [_SGLANG], _own_sglang()
    else:
        names, models = [_LMCACHE, _PROTOCOL], _own_lmcache()
    if not ENGINES or adapter == "sglang":
        sys.modules.update(_parents(names))
    if not ENGINES:
        sys.modules.update(models)
    elif ENGINES not in sys.path:
        sys.path.append(ENGINES)
    sys.modules.pop(f"fireflyer.kv.adapters.{adapter}", None)
    try:
        yield importlib.import_module(f"fireflyer.kv.adapters.{adapter}")
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("sglang", "lmcache") or "kv.adapters." in name:
                del sys.modules[name]


@dataclass
class HostPool:
    """Host memory pool of SGLang, of layout page_first: `pages` of `page_size` tokens."""

    pages: int
    page_size: int = 4
    dtype: Any = torch.float16
    layout: str = "page_first"
    width: int = 96
    buffer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = torch.zeros((self.pages, self.width), dtype=self.dtype)

    def get_data_page(self, index: Any, flat: bool = True) -> Any:
        return self.buffer[int(index) // self.page_size].flatten()

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(self.width, dtype=self.dtype)

    def set_from_flat_data_page(self, index: Any, data_page: Any) -> None:
        self.buffer[int(index) // self.page_size].copy_(data_page)

    def indices(self, *pages: int) -> Any:
        tokens = [page * self.page_size + at for page in pages for at in range(self.page_size)]
        return torch.tensor(tokens)
