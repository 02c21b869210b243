"""Dispatch and combine: bytes between hosts, bad input, and a rank that dies."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.expert.models import init

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.expert import Dispatcher, ExpertGroups, MoE, Pairs

FEATURES, TOKENS, TOP, SLOTS = 1024, 96, 8, 8
HEADER = 128
"""At least the bytes of the sizes that two ranks exchange, and of the headers around them."""


def choose(rank: int, slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.stack([torch.randperm(slots, generator=generator)[:TOP] for _ in range(TOKENS)])


def test_a_token_crosses_the_network_once_for_each_host(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        groups = ExpertGroups(dist.group.WORLD)  # type: ignore[arg-type]
        dispatcher = Dispatcher(groups, SLOTS, torch.bfloat16)
        chosen = choose(rank, SLOTS * world)
        x = torch.randn(TOKENS, FEATURES).bfloat16().float()
        weights = torch.full((TOKENS * TOP,), 0.5)
        pairs = Pairs(torch.arange(TOKENS).repeat_interleave(TOP), chosen.flatten(), weights)
        rows, mine, way = dispatcher.dispatch(x, pairs)
        dispatcher.combine(rows, way)  # the first calls also connect the ranks
        before = groups.rail.network_bytes_sent
        rows, mine, way = dispatcher.dispatch(x, pairs)
        between = groups.rail.network_bytes_sent
        results = torch.zeros_like(rows).index_add(
            0, mine.row, rows[mine.row] * mine.weight.unsqueeze(1)
        )
        found = dispatcher.combine(results, way)
        after = groups.rail.network_bytes_sent
        assert torch.allclose(found, TOP * 0.5 * x, rtol=0.02)
        assert groups.node.network_bytes_sent == 0
        assert len(rows) == len(set(mine.row.tolist()))
        return between - before, after - between, groups.host_of.tolist()

    found = start_gang(body, 4, 2).results()
    hosts = found[0][2]
    for rank, (sent, _, _) in enumerate(found):
        crossing = choose(rank, SLOTS * 4) // SLOTS
        away = torch.tensor(hosts)[crossing] != hosts[rank]
        tokens, pairs = int(away.any(1).sum()), int(away.sum())
        payload = tokens * FEATURES * 2
        extra = sent - payload - tokens - 6 * pairs
        assert 0 <= extra <= 5 * HEADER, "rows, a count a row, slot and weight a pair"
    one, other = (sum(f[0] for r, f in enumerate(found) if hosts[r] == host) for host in set(hosts))
    back = [sum(f[1] for r, f in enumerate(found) if hosts[r] == host) for host in set(hosts)]
    bound = [_bound(hosts, host) for host in sorted(set(hosts))]
    for dispatched, combined, out, come in zip((one, other), back, bound, bound[::-1], strict=True):
        assert out + come <= dispatched + combined <= 1.02 * (out + come)


def _bound(hosts: list[int], host: int) -> int:
    """Bytes of the tokens that the ranks of a host send away, each once for each other host."""
    total = 0
    for rank in (r for r, h in enumerate(hosts) if h == host):
        away = torch.tensor(hosts)[choose(rank, SLOTS * 4) // SLOTS] != host
        total += int(away.any(1).sum()) * FEATURES * 2
    return total


def test_layers_that_cannot_be_made(start_gang: Callable[..., Any], store_path: str) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            MoE(4, 4, **{"experts": 4, "top_k": 2, **options})
        return str(caught.value)

    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        layer = MoE(4, 4, experts=4, top_k=2)
        with pytest.raises(ConfigError, match="a slot for each of 4 experts"):
            layer.place(torch.tensor([0, 0, 1, 2]))
        with pytest.raises(ConfigError, match=r"invalid x \(3, 5\): expected \(..., 4\)"):
            layer(torch.ones(3, 5))
        return [
            refusal(experts=5),
            refusal(top_k=5),
            refusal(replicas=5),
            refusal(replicas=2),
            refusal(shared=-1),
            refusal(wire="bf16"),
        ]

    expected = [
        *("2 ranks do not divide 5 experts", "top_k 5", "replicas 5", "replicas 2", "shared"),
        "invalid wire 'bf16' (str): expected a dtype",
    ]
    for said in start_gang(body, 2).results():
        assert all(part in text for part, text in zip(expected, said, strict=True))


def test_logits_that_are_nan_on_one_rank(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        layer = MoE(4, 4, experts=4, top_k=2)
        x = torch.ones(3, 4)
        if rank == 1:
            x[1, 2] = float("nan")
        with pytest.raises(ConfigError, match="NaN or infinite on 1 of 2 ranks"):
            layer(x)
        assert layer(torch.ones(2 * rank, 4)).shape == (2 * rank, 4), "the layer works on"
        assert layer(torch.ones(0, 4)).isfinite().all()
        assert layer.aux_loss == 0

    start_gang(body, 2).results()


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_dies(start_gang: Callable[..., Any], store_path: str, backward: bool) -> None:
    """Ranks 0 and 3 share no group of dispatch: rank 0 learns from ranks 1 and 2."""

    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        layer = MoE(4, 4, experts=4, top_k=4)
        x = torch.ones(3, 4, requires_grad=True)
        layer(x).sum().backward()
        if rank == 3 and not backward:
            layer.dispatcher.dispatch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]

        def step() -> None:
            loss = layer(x).sum()
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()

        with pytest.raises(CollectiveError) as caught:
            step()
        return type(caught.value).__name__

    gang = start_gang(body, 4, 2)
    found = {gang.result(rank) for rank in range(3)}
    assert "RankFailed" in found
    assert found <= {"RankFailed", "CollectiveError"}
