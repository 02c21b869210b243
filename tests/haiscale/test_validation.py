"""What the wrappers cannot train rightly is refused at wrapping, with the name of what is wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer import haiscale
from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

SGD = partial(torch.optim.SGD, lr=0.1)


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def said(call: Callable[..., object], *arguments: object, **options: Any) -> str:
    with pytest.raises((ConfigError, ValueError)) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_modules(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        sharded = nn.Sequential(nn.Linear(4, 4))
        model = FullyShardedDataParallel(sharded)
        for wrap in (DistributedDataParallel, FullyShardedDataParallel):
            name = wrap.__name__
            assert f"invalid module None for {name}: expected a torch.nn.Module" in said(wrap, None)
            assert f"{name}: 0.weight is already sharded (DTensor)" in said(wrap, sharded)
            rows = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
            assert "0 has max_norm=1.0" in said(wrap, rows)
            bags = nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True))
            assert "0 makes sparse gradients" in said(wrap, bags)
        with torch.no_grad():
            model(torch.ones(1, 4))  # parameters are gathered, and plain
        assert "is already sharded (fully_shard)" in said(FullyShardedDataParallel, sharded)
        away = nn.Linear(2, 2, device="meta")
        assert "weight is on the meta device" in said(DistributedDataParallel, away)
        for buffer in (
            torch.arange(3).expand(2, 3),
            torch.eye(2).to_sparse(),
            torch.ones(2, dtype=torch.complex64).conj(),
        ):
            odd = nn.Linear(2, 2)
            odd.register_buffer("odd", buffer)
            assert "the buffer odd is sparse, quantized" in said(DistributedDataParallel, odd)
        idle: Any = {"param_init_fn": lambda module: None}
        bare = said(FullyShardedDataParallel, away, **idle)
        assert "weight, bias: on the meta device, and still without values" in bare
        for hook in ("register_hook", "register_post_accumulate_grad_hook"):
            layer = nn.Linear(2, 2)
            getattr(layer.bias, hook)(lambda grad: None)
            assert "bias has hooks" in said(FullyShardedDataParallel, layer)

    start_gang(body, 2).results()


def test_arguments(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        ddp: Any = DistributedDataParallel
        fsdp: Any = FullyShardedDataParallel
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = SGD(net.parameters())
        refused: list[tuple[str, Any, dict[str, Any]]] = [
            ("(partial): expected a torch optimizer", ddp, {"optimizer": SGD}),
            ("pass optimizer=...", ddp, {"process_group": optimizer}),
            ("invalid bucket_bytes '2M'", ddp, {"bucket_bytes": "2M"}),
            ("invalid bucket_bytes 0", ddp, {"bucket_bytes": 0}),
            ("invalid mesh 3 (int)", fsdp, {"mesh": 3}),
            ("invalid mesh 3 (int)", fsdp, {"mesh": lambda: 3}),
            ("invalid auto_wrap_policy 3 (int)", fsdp, {"auto_wrap_policy": 3}),
            ("(type): expected a policy of torch", fsdp, {"auto_wrap_policy": nn.Linear}),
            (
                "expected a torch.distributed.fsdp.MixedPrecisionPolicy",
                fsdp,
                {"mixed_precision": MixedPrecision()},
            ),
            ("divides the 2 shards", fsdp, {"reshard_after_forward": 3}),
            ("invalid reshard_after_forward None", fsdp, {"reshard_after_forward": None}),
            ("invalid backward_prefetch 'pre' (str)", fsdp, {"backward_prefetch": "pre"}),
            ("invalid forward_prefetch -1", fsdp, {"forward_prefetch": -1}),
            ("invalid backlog 0", fsdp, {"backlog": 0}),
            ("invalid cpu_offload 'cpu' (str)", fsdp, {"cpu_offload": "cpu"}),
        ]
        for words, wrap, options in refused:
            assert words in said(wrap, net, **options)
        for policy in ({nn.Linear}, [nn.Linear], ModuleWrapPolicy({nn.Linear})):
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                auto_wrap_policy=policy,
                cpu_offload=CPUOffload(False),
                forward_prefetch=True,
            )
            assert model.facts().reductions == 2
        model(torch.ones(1, 4)).sum().backward()
        for limit, kind in ((-1.0, 2.0), (1.0, 0.0), (float("nan"), 2.0)):
            words = said(model.clip_grad_norm_, limit, kind)
            assert f"max_norm={limit}, norm_type={kind}" in words
        haiscale.record(model)
        for figure in ("tokens", "flops", "peak"):
            words = said(haiscale.report, model, **{figure: 0})
            assert f"{figure}=0 must be more than 0" in words

    start_gang(body, 2).results()


def test_a_mesh_without_names(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        rows = DeviceMesh("cpu", [[0, 1], [2, 3]])
        torch.manual_seed(rank)
        model = FullyShardedDataParallel(nn.Linear(4, 4), optimizer=SGD, mesh=rows)
        model(torch.full((1, 4), float(rank))).sum().backward()
        model.optimizer.step()  # type: ignore[union-attr]
        return [t.tolist() for t in model.state_dict(full=True).values()]

    ranks = start_gang(body, 4).results()
    assert all(one == ranks[0] for one in ranks)
