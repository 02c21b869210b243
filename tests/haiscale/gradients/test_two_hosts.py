"""Training over a real network of hosts: the same parameters, the bytes of a ring, and a cut cable."""

import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fireflyer.errors import LabError, RankFailed
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.lab.hosts import Lab

STEPS = 5
WIDTH = 512


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(hosts=2, rate="1gbit") as lab:
            yield lab
    except LabError as error:
        pytest.skip(f"needs network namespaces: {error}")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def train(model: nn.Module, core: nn.Module, share: slice) -> None:
    optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(
            8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        optimizer.zero_grad()
        model(x[share]).square().mean().backward()
        optimizer.step()


def enter(lab: Lab, rank: int, world: int, store_path: str) -> None:
    host = lab.hosts[rank * len(lab.hosts) // world]
    host.enter()
    os.environ["FIREFLYER_IFNAME"] = host.interface
    os.environ["FIREFLYER_NODE"] = ""  # the namespace alone tells the hosts apart
    store = dist.FileStore(store_path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(100_000))


@pytest.mark.netns
def test_two_hosts_of_two_ranks(start_gang: Callable[..., Any], store_path: str, lab: Lab) -> None:
    reference = build()
    train(reference, reference, slice(None))

    def body(rank: int, world: int) -> list[Any]:
        enter(lab, rank, world, store_path)
        core = build()
        train(DistributedDataParallel(core), core, slice(rank * 2, rank * 2 + 2))
        return [p.detach().numpy() for p in core.parameters()]

    before = [host.tx_bytes for host in lab.hosts]
    for result in start_gang(body, 4).results():
        for got, expected in zip(result, reference.parameters(), strict=True):
            wanted = expected.detach()
            error = (torch.from_numpy(got) - wanted).abs().max() / wanted.abs().max()
            assert float(error) <= 1e-10
    sent = [host.tx_bytes - b for host, b in zip(lab.hosts, before, strict=True)]
    elements = sum(p.numel() for p in reference.parameters()) + len(list(reference.parameters()))
    gradients = STEPS * elements * 8  # two hosts: each sends 2 (H-1)/H = 1 times the gradients
    first_copy = sum(p.numel() for p in reference.parameters()) * 8  # once, from the first host
    for host_sent, bound in zip(sent, (gradients + first_copy, gradients), strict=True):
        assert bound <= host_sent <= bound * 1.06, "payload, headers and acknowledgements"


@pytest.mark.netns
def test_a_cut_cable_ends_training_with_a_typed_error(
    start_gang: Callable[..., Any], store_path: str, lab: Lab
) -> None:
    read, write = os.pipe()

    def body(rank: int, world: int) -> str:
        enter(lab, rank, world, store_path)
        group: Any = dist.group.WORLD
        group.set_timeout(datetime.timedelta(seconds=3))
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            os.write(write, b"x")
        with pytest.raises(RankFailed) as caught:
            reduce_for_ever()
        return str(caught.value)

    gang = start_gang(body, 2)
    assert os.read(read, 1) == b"x"
    lab.cut(1)
    messages = gang.results()
    assert all("rank" in message for message in messages), messages
    os.close(read)
    os.close(write)
