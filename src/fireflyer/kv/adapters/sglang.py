"""SGLang's HiCache over the page cache: a dynamic storage back end (calls of version 1 and 2).

A key consists of SGLang's chained hash, the model, the shard, and the pool with its data type,
layout and page size. So pages of another layout are misses, even if they have the same size.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from fireflyer.kv.adapters import memory_of, open_cache


class FireflyerHiCache(HiCacheStorage):  # type: ignore[misc]
    """Back end of one rank; all ranks and hosts with the same URL share the pages."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        """Opens the cache.

        Args:
            storage_config: SGLang's configuration; `extra_config` has "url", "capacity" and
                optionally "salt", which separates the pages of different tenants.

        Raises:
            ConfigError: url or capacity is missing or invalid.
            Unavailable: no server answers.
        """
        options = storage_config.extra_config or {}
        self._cache = open_cache(options, "hicache-storage-backend-extra-config")
        self._salt = str(options.get("salt", "")).encode()
        of = storage_config
        tensor_rank = (0, 1) if of.is_mla_model else (of.tp_rank, of.tp_size)
        shard = (of.pp_rank, of.pp_size, of.attn_cp_rank, of.attn_cp_size)
        context = (getattr(of, "dcp_rank", 0), getattr(of, "dcp_size", 1))
        self._shared = (of.model_name, *shard, *context)
        self._rank, self._own_rank = tensor_rank, (of.tp_rank, of.tp_size)
        self.mem_pool_host: Any = None
        self.registered_pools: dict[Any, Any] = {}
        self._names: dict[str, bytes] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._names.clear()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools[host_pool_name] = host_pool
        self._names.clear()

    def _pool(self, name: str) -> Any:
        found = self.registered_pools.get(name)
        return self.mem_pool_host if found is None and name == PoolName.KV else found

    def _namespace(self, name: str) -> bytes:
        if name not in self._names:
            pool = self._pool(name)
            layout = [getattr(pool, field, None) for field in ("dtype", "layout", "page_size")]
            rank = self._rank if name == PoolName.KV else self._own_rank
            self._names[name] = repr((*self._shared, *rank, str(name), *map(str, layout))).encode()
        return self._names[name]

    def _keys(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bytes]:
        namespace = self._namespace(pool)
        return [namespace + key.encode() for key in keys]

    def _position(self, extra_info: Any) -> int:
        return len(getattr(extra_info, "prefix_keys", None) or ())

    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Reads pages into a pool."""
        pool = self._pool(name)
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        memory = [memory_of(page) for page in pages]
        done = self._cache.get_into(self._keys(keys, name), memory, salt=self._salt)
        for at, there in enumerate(done):
            if there:
                pool.set_from_flat_data_page(host_indices[at * pool.page_size], pages[at])
        return done

    def _store(self, name: str, keys: Sequence[str], host_indices: Any, first: int) -> list[bool]:
        """Stores pages of a pool."""
        pool = self._pool(name)
        indices = [host_indices[at * pool.page_size] for at in range(len(keys))]
        pages = [pool.get_data_page(index, flat=True).contiguous() for index in indices]
        return self._cache.set_from(
            self._keys(keys, name), [memory_of(page) for page in pages], first=first,
            salt=self._salt,
        )  # fmt: skip

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._store(PoolName.KV, keys, host_indices, self._position(extra_info))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._cache.exists(self._keys(keys), salt=self._salt)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Returns the longest prefix whose pages exist in all pools, by each pool's hit policy."""
        run = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: run} if run else {}
        usable = set(range(1, run + 1))
        for transfer in pool_transfers or []:
            sizes = self._cache.sizes(self._keys(keys[:run], transfer.name), salt=self._salt)
            there = [size is not None for size in sizes]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                end = next((at for at, each in enumerate(there) if not each), run)
                good = set(range(1, end + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()))
                good = {n for n in range(1, run + 1) if all(there[max(0, n - last) : n])}
            else:
                raise ValueError(f"unsupported hit policy of a pool: {transfer.hit_policy}")
            if good:
                hits[transfer.name] = max(good)
            usable &= good
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def _transfers(
        self, transfers: Sequence[Any], act: Callable[[str, list[str], Any], list[bool]]
    ) -> dict[Any, list[bool]]:
        results: dict[Any, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            pool = self._pool(transfer.name)
            fits = transfer.host_indices is not None and (
                len(transfer.host_indices) == len(keys) * pool.page_size
            )
            done = act(transfer.name, keys, transfer.host_indices) if fits else [False] * len(keys)
            results[transfer.name] = done
        return results

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        return self._transfers(transfers, self._load)

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        first = self._position(extra_info)
        return self._transfers(
            transfers, lambda name, keys, indices: self._store(name, keys, indices, first)
        )

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        memory = [memory_of(target) for target in target_locations]
        done = self._cache.get_into(self._keys(keys), memory, salt=self._salt)
        return [
            target if there else None for target, there in zip(target_locations, done, strict=True)
        ]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        pages = [value.contiguous() for value in values]
        memory = [memory_of(page) for page in pages]
        return all(self._cache.set_from(self._keys(keys), memory, salt=self._salt))

    def close(self) -> None:
        self._cache.close()
