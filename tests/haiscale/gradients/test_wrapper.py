"""What programs written for torch's wrappers use of ours: names of state, settings, arguments."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.hfreduce.conftest import init
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import ShardingStrategy

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

StartGang = Callable[..., Any]
WRAPPERS: tuple[Any, ...] = (DistributedDataParallel, FullyShardedDataParallel)
by_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS, ids=["ddp", "fsdp"])


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x * self.scale)))
        return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 7) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return list(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip("mo", get_state_dict(model, optimizer), strict=True))


def flat(state: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {name: state}
    return {
        key: leaf for k, part in state.items() for key, leaf in flat(part, f"{name}/{k}").items()
    }


def agree(one: Any, other: Any) -> None:
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, other[name])


@by_wrapper
def test_state_has_the_names_of_the_module_and_dcp_goes_both_ways(
    start_gang: StartGang, store_path: str, tmp_path: Path, wrapper: Any
) -> None:
    names = set(Net(0).state_dict())

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = wrapper(Net(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        assert set(model.state_dict()) == set(get_model_state_dict(model)) == names
        assert {name for name, _ in model.named_parameters()} <= names
        ours = whole_state(model, optimizer)
        dcp.save(
            states(model, optimizer),
            checkpoint_id=tmp_path / "a",
        )

        plain = nn.parallel.DistributedDataParallel(Net(2))
        adam = torch.optim.Adam(plain.parameters(), lr=0.1)
        state = states(plain, adam)
        dcp.load(state, checkpoint_id=tmp_path / "a")
        set_state_dict(plain, adam, model_state_dict=state["m"], optim_state_dict=state["o"])
        agree(whole_state(plain, adam), ours)

        step(plain, adam, 8)
        dcp.save(states(plain, adam), checkpoint_id=tmp_path / "b")
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path / "b")
        set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
        agree(whole_state(model, optimizer), whole_state(plain, adam))
        dist.barrier()

    start_gang(body, 2).results()


def test_ddp_takes_the_state_of_torchs_wrapper(start_gang: StartGang, store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = DistributedDataParallel(Net(1))
        model.load_state_dict({f"module.{k}": v for k, v in Net(5).state_dict().items()})
        agree(model.state_dict(), Net(5).state_dict())
        with pytest.raises(RuntimeError, match=r"Missing key.*scale"):
            model.load_state_dict({"module.norm.weight": torch.ones(8)})
        around = nn.Sequential(model)
        assert "0.module.scale" in around.state_dict()
        model.reducer.stop()

    start_gang(body, 1).results()


@by_wrapper
def test_gradients_may_be_kept_local_by_torchs_switch(
    start_gang: StartGang, store_path: str, wrapper: Any
) -> None:
    """As `no_sync`: Accelerate sets it between accumulated batches."""

    def body(rank: int, world: int) -> list[torch.Tensor]:
        init(store_path, rank, world)
        results = []
        for switch in (True, False):
            model = wrapper(nn.Linear(3, 1))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            assert model.require_backward_grad_sync
            if switch:
                model.require_backward_grad_sync = False
                model(torch.full((1, 3), rank + 1.0)).sum().backward()
                model.require_backward_grad_sync = True
            else:
                with model.no_sync():
                    assert not model.require_backward_grad_sync
                    model(torch.full((1, 3), rank + 1.0)).sum().backward()
            model(torch.full((1, 3), rank + 3.0)).sum().backward()
            model.settle()
            results.append(torch.cat([_whole(p.grad).flatten() for p in model.parameters()]))
        return results

    for switched, within in start_gang(body, 2).results():
        assert switched.tolist() == within.tolist() == [5.0, 5.0, 5.0, 2.0]


def _whole(grad: Any) -> torch.Tensor:
    whole: torch.Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole


def test_whole_parameters_are_summoned_by_the_model_itself(
    start_gang: StartGang, store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(Net(3))
        whole = Net(3)
        for summoned in (
            model.summon_full_params,
            partial(model.summon_full_params, model),
            partial(FullyShardedDataParallel.summon_full_params, nn.Sequential(model)),
        ):
            with summoned(writeback=False):
                for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                    assert mine.tolist() == theirs.tolist()

    start_gang(body, 2).results()


def test_arguments_of_torchs_wrappers(start_gang: StartGang, store_path: str) -> None:
    harmless: dict[type, dict[str, Any]] = {
        DistributedDataParallel: {
            "device_ids": None,
            "output_device": None,
            "find_unused_parameters": True,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": 25,
        },
        FullyShardedDataParallel: {
            "device_id": None,
            "use_orig_params": True,
            "sync_module_states": True,
        },
    }
    refused: list[tuple[Any, str, Any, str]] = [
        (DistributedDataParallel, "device_ids", [0, 1], "start a rank for each device"),
        (DistributedDataParallel, "init_sync", False, "first rank's values"),
        (
            FullyShardedDataParallel,
            "sharding_strategy",
            ShardingStrategy.SHARD_GRAD_OP,
            "reshard_after",
        ),
        (FullyShardedDataParallel, "ignored_modules", [nn.Linear(1, 1)], "wrap the other"),
    ]

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        for wrapper, arguments in harmless.items():
            wrapper(nn.Linear(2, 2), **arguments)
        for wrapper, name, value, instead in refused:
            with pytest.raises(ConfigError, match=instead) as caught:
                wrapper(nn.Linear(2, 2), **{name: value})
            assert f"{name}=" in str(caught.value)
        for wrapper in WRAPPERS:
            with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_size'"):
                wrapper(nn.Linear(2, 2), bucket_size=3)
            with pytest.raises(ConfigError, match="wire="):
                wrapper(nn.Linear(2, 2)).register_comm_hook(None, print)
        with pytest.raises(ConfigError, match="second argument"):
            DistributedDataParallel(nn.Linear(2, 2), [0])  # type: ignore[arg-type]

    start_gang(body, 1).results()
