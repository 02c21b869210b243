"""SGLang's HiCache back end: the calls that its controller makes, over two pools and two ranks."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kv.adapters.engines import HostPool, loaded

from fireflyer.errors import ConfigError


@pytest.fixture
def adapter() -> Iterator[ModuleType]:
    with loaded("sglang") as module:
        yield module


def config(folder: Path, **changes: Any) -> Any:
    extra = {"url": str(folder), "capacity": "4MiB", **changes.pop("extra", {})}
    fields = {
        "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "model_name": "org/model", "extra_config": extra, **changes,
    }  # fmt: skip
    return SimpleNamespace(**fields)


def backend(adapter: ModuleType, folder: Path, pool: HostPool, **changes: Any) -> Any:
    made = adapter.FireflyerHiCache(config(folder, **changes), {})
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered() if hasattr(made, "on_host_pools_registered") else None
    return made


def filled(pages: int, seed: int, **options: Any) -> HostPool:
    pool = HostPool(pages, **options)
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def test_pages_go_out_and_come_back_by_the_zero_copy_calls(
    adapter: ModuleType, tmp_path: Path
) -> None:
    source, target = filled(6, 1), HostPool(6)
    keys = [f"{number:064x}" for number in range(6)]
    out = backend(adapter, tmp_path, source)
    assert out.batch_set_v1(keys, source.indices(*range(6))) == [True] * 6
    assert out.batch_exists([*keys, "none"]) == 6
    assert out.exists(keys[3])
    out.close()
    back = backend(adapter, tmp_path, target)
    done = back.batch_get_v1([*keys[:5], "none"], target.indices(5, 4, 3, 2, 1, 0))
    assert done == [True] * 5 + [False]
    for at in range(5):
        assert torch.equal(target.buffer[5 - at], source.buffer[at])
    assert not target.buffer[0].any(), "a miss leaves the pool as it is"
    back.close()


def test_the_generic_calls_and_the_position_of_a_suffix(
    adapter: ModuleType, tmp_path: Path
) -> None:
    source = filled(3, 2)
    made = backend(adapter, tmp_path, source)
    pages = [source.get_data_page(index * 4) for index in range(3)]
    assert made.batch_set(["a", "b", "c"], pages)
    targets = [source.get_dummy_flat_data_page() for _ in range(3)]
    found = made.batch_get(["a", "none", "c"], targets)
    assert torch.equal(found[0], pages[0])
    assert found[1] is None
    assert torch.equal(made.get("c", source.get_dummy_flat_data_page()), pages[2])
    assert made.set("d", pages[0])
    info = SimpleNamespace(prefix_keys=["a", "b"], extra_info=None)
    assert made.batch_set_v1(["e"], source.indices(0), info) == [True]
    made.close()


def test_ranks_models_layouts_and_salts_do_not_meet(adapter: ModuleType, tmp_path: Path) -> None:
    pool = filled(1, 3)
    first = backend(adapter, tmp_path, pool)
    first.batch_set_v1(["k"], pool.indices(0))
    first.close()
    others: list[tuple[HostPool, dict[str, Any]]] = [
        (pool, {"tp_rank": 1}),
        (pool, {"model_name": "org/other"}),
        (pool, {"extra": {"salt": "tenant"}}),
        (HostPool(1, layout="page_head"), {}),
        (HostPool(1, dtype=torch.bfloat16), {}),
    ]
    for other, changes in others:
        made = backend(adapter, tmp_path, other, **changes)
        assert made.batch_exists(["k"]) == 0
        made.close()
    for rank in (0, 1):
        made = backend(adapter, tmp_path, pool, is_mla_model=True, tp_rank=rank)
        assert made.batch_exists(["m"]) == rank, "ranks of an MLA model share pages"
        made.batch_set_v1(["m"], pool.indices(0))
        made.close()


def test_the_usable_prefix_is_that_of_all_pools(adapter: ModuleType, tmp_path: Path) -> None:
    from sglang.srt.mem_cache import hicache_storage as sglang  # the engine's or the model

    names = sglang.PoolName
    kv_pool, state, index = filled(6, 4), filled(6, 5, width=32), filled(6, 6, width=16)
    made = backend(adapter, tmp_path, kv_pool)
    for pool, name in ((kv_pool, names.KV), (state, names.MAMBA), (index, "index")):
        made.register_mem_host_pool_v2(pool, name)
    keys = [f"{number:064x}" for number in range(6)]

    def transfer(name: str, pool: HostPool, which: list[int], **options: Any) -> Any:
        return sglang.PoolTransfer(
            name=name, keys=[keys[at] for at in which], host_indices=pool.indices(*which), **options
        )

    done = made.batch_set_v2(
        [
            transfer(names.KV, kv_pool, list(range(6))),
            transfer(names.MAMBA, state, [1, 3]),
            transfer("index", index, [0, 1, 2]),
        ]
    )
    assert done == {names.KV: [True] * 6, names.MAMBA: [True] * 2, "index": [True] * 3}
    trailing = transfer(names.MAMBA, state, [5], hit_policy=sglang.PoolHitPolicy.TRAILING_PAGES)
    every = transfer("index", index, [0], hit_policy=sglang.PoolHitPolicy.ALL_PAGES)
    found = made.batch_exists_v2(keys, [trailing])
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [2, 4]
    found = made.batch_exists_v2(keys, [trailing, every])
    assert found.kv_hit_pages == 2
    assert found.extra_pool_hit_pages == {names.KV: 6, names.MAMBA: 4, "index": 3}
    assert made.batch_exists_v2(["none"], [every]).kv_hit_pages == 0
    empty = HostPool(6, width=32)
    made.register_mem_host_pool_v2(empty, names.MAMBA)
    got = made.batch_get_v2([transfer(names.MAMBA, empty, [1, 2, 3])])
    assert got == {names.MAMBA: [True, False, True]}
    assert torch.equal(empty.buffer[3], state.buffer[3])
    short = sglang.PoolTransfer(name=names.MAMBA, keys=keys, host_indices=state.indices(0))
    assert made.batch_get_v2([short]) == {names.MAMBA: [False] * 6}
    made.close()


def test_missing_options_are_named(adapter: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='must name "url" and "capacity"'):
        adapter.FireflyerHiCache(config(tmp_path, extra_config=None), {})
    with pytest.raises(ConfigError, match="invalid size"):
        adapter.FireflyerHiCache(config(tmp_path, extra={"capacity": "much"}), {})
