"""Dispatch and combine between the hosts of a lab, against one copy per token and expert on gloo.

A lab's hosts are network namespaces on this machine. Experts return their input, so only the
exchange is measured. The peer moves rows of bfloat16 with torch's `all_to_all_single` to the rank
of each expert and back. The order of the peer's rows is computed before the measurement.
"""

from dataclasses import dataclass
from functools import partial

import numpy
import torch
import torch.distributed as dist

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.ranks import Run, Timing, interleave
from fireflyer.bench.harness.report import Row
from fireflyer.haiscale.expert import Dispatcher, ExpertGroups, Pairs, rebalance_experts

OURS, GLOO = "fireflyer", "gloo"
SEEDS, DEVICES, REPLICAS = 100, 8, (72, 96)


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        rate: speed of each cable, in the lab's notation.
        tokens: number of tokens of each rank.
    """

    hosts: int = 4
    ranks_per_host: int = 2
    rate: str = "200mbit"
    tokens: int = 256
    features: int = 2048
    experts: int = 64
    top_k: int = 8
    rounds: int = 5

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


Measured = tuple[dict[str, list[Timing]], list[float]]


def run(spec: Spec) -> list[Row]:
    """Measures the exchange in a lab, and the loads after rebalancing.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed.
    """
    with Area.in_lab(spec.hosts, spec.rate, spec.ranks_per_host) as area:
        timings, sent = area.run(partial(_measure, spec))
    case = f"{spec.hosts}x{spec.ranks_per_host}, top {spec.top_k} of {spec.experts}"
    bounds = [float(_bound(spec))]
    ours, theirs = ([t.wall / 1e3 for t in timings[name]] for name in (OURS, GLOO))
    return [
        Row.of_times(
            f"{case}, sent by a host", "B", sent, "a token once a host", bounds, bounds,
            *goals.EXPERT_BYTES,
        ),
        Row.of_times(f"{case}, wall", "ms", ours, GLOO, theirs, (), *goals.EXPERT_TIME),
        *(_loads(spec.experts, replicas) for replicas in REPLICAS),
    ]  # fmt: skip


def _chosen(spec: Spec, rank: int) -> torch.Tensor:
    """Returns the experts of a rank's tokens, (tokens, top_k)."""
    scores = torch.rand(spec.tokens, spec.experts, generator=torch.Generator().manual_seed(rank))
    return scores.topk(spec.top_k).indices


def _bound(spec: Spec) -> int:
    """Returns the bytes that the busiest host sends in dispatch and combine, if each token is sent to a
    host at most once."""
    sent = [0] * spec.hosts
    for rank in range(spec.ranks):
        home = rank // spec.ranks_per_host
        hosts = _chosen(spec, rank) * spec.hosts // spec.experts
        for host in range(spec.hosts):
            if host != home:
                rows = int((hosts == host).any(1).sum()) * spec.features * 2
                sent[home] += rows
                sent[host] += rows
    return max(sent)


def _measure(spec: Spec, place: Place) -> Measured:
    session, rank = place.session, place.rank
    world = dist.group.WORLD
    assert world is not None
    slots = spec.experts // spec.ranks
    dispatcher = Dispatcher(ExpertGroups(world), slots, torch.bfloat16)
    chosen = _chosen(spec, rank).flatten()
    row = torch.arange(spec.tokens).repeat_interleave(spec.top_k)
    weights = torch.full(row.shape, 1 / spec.top_k)
    x = torch.randn(spec.tokens, spec.features).bfloat16()

    def ours() -> None:
        rows, pairs, way = dispatcher.dispatch(x, Pairs(row, chosen, weights))
        shares = torch.zeros(len(rows)).index_add(0, pairs.row, pairs.weight)
        dispatcher.combine(rows * shares.to(rows.dtype).unsqueeze(1), way)

    order = (chosen // slots).argsort(stable=True)
    to = torch.bincount(chosen // slots, minlength=spec.ranks)
    come = torch.empty_like(to)
    dist.all_to_all_single(come, to, group=session.gloo)
    there, back = to.tolist(), come.tolist()

    def theirs() -> None:
        rows = x.view(torch.uint8)[row[order]]
        got = rows.new_empty(sum(back), rows.shape[1])
        dist.all_to_all_single(got, rows, back, there, group=session.gloo)
        dist.all_to_all_single(rows, got, there, back, group=session.gloo)
        total = torch.zeros(spec.tokens, spec.features, dtype=x.dtype)
        total.index_add_(0, row[order], rows.view(torch.bfloat16) * (1 / spec.top_k))

    counted, sent = place.counted(ours)
    runs: dict[str, Run] = {OURS: counted, GLOO: partial(session.time, theirs)}
    timings = interleave(runs, spec.rounds, least=1)
    return timings, sent[-spec.rounds :]


def _loads(experts: int, replicas: int) -> Row:
    """Returns a row: the load of the busiest device after rebalancing, against its lower bound.

    The loads of the experts follow Zipf's law, in a random order for each seed. The row shows the seed
    with the worst ratio.
    """
    worst, its_bound = 0.0, 1.0
    for seed in range(SEEDS):
        loads = 1 / numpy.arange(1, experts + 1)
        numpy.random.default_rng(seed).shuffle(loads)
        weight = torch.from_numpy(loads)[None]
        placement = rebalance_experts(weight, replicas, 1, 1, DEVICES)
        shares = weight / placement.logcnt
        devices = shares.gather(1, placement.phy2log).view(DEVICES, -1).sum(1)
        bound = max(float(devices.mean()), float(shares.max()))
        if float(devices.max()) / bound > worst / its_bound:
            worst, its_bound = float(devices.max()), bound
    return Row.of_times(
        f"Zipf loads, {experts} experts, {replicas} replicas, {DEVICES} devices, worst of {SEEDS}",
        "load", [worst], "max(mean, heaviest replica)", [its_bound], [its_bound],
        *goals.EXPERT_LOAD,
    )  # fmt: skip
