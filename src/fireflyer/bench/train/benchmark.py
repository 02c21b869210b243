"""Training steps of data parallelism: ours, torch's, and the same work without communication.

A lab's hosts are network namespaces on this machine. On these hosts every candidate has its own
model in the same processes, and the candidates take turns with blocks of steps. A block begins with
an untimed step and ends when its last step returns. So work that continues after a step counts for
the next step, as in a long run. The model is a real GPT, or a stub whose layers compute by sleeping
(models.py). docs/benchmarks/haiscale-bench.md explains the figures.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fireflyer.bench.harness.hosts import RAW_BYTES, Area, Place
from fireflyer.bench.harness.options import TRAIN_FAMILIES
from fireflyer.bench.harness.ranks import Session
from fireflyer.bench.harness.report import Row
from fireflyer.bench.train import models
from fireflyer.bench.train.candidates import (
    CANDIDATES,
    FSDP2,
    LOCAL,
    TORCH_DDP,
    Trainer,
    averaged,
    candidates,
)
from fireflyer.bench.train.memory import memory_rows
from fireflyer.bench.train.models import Payload
from fireflyer.bench.train.place import Measured, check, measure
from fireflyer.bench.train.rows import host_rows, lab_rows

LOCAL_OF_LINE = {"0.45": 0.45, "1": 1.0}
"""Compute time of the stub, relative to the time that its gradients need on a host's network link."""
VGG = {1.0: "ddp", 0.5: "ddp, bf16"}
"""Our candidates by the bytes of their wire, relative to float32. The stub computes for as long as
these bytes need on a host's network link."""
HOST = (LOCAL, TORCH_DDP, "ddp, synchronous", "ddp", FSDP2, "ZeRO-3, synchronous", "ZeRO-3")
HOST_RANKS = (2, 4)
VGG_HOSTS = 2

Say = Callable[[str], None]
Layers = Sequence[models.Layer]


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        cases: names from `options.TRAIN`.
        layouts: numbers of hosts and ranks per host in the cases stub and gpt.
        families: names from `options.TRAIN_FAMILIES`: the candidates of the cases stub, gpt and
            host.
        shape: layers of the stub, from `options.TRAIN_SHAPES`.
        steps: minimum number of timed steps per block.
        vgg_ranks_per_host: number of ranks per host in the case vgg, which has two hosts.
    """

    cases: tuple[str, ...]
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)
    families: tuple[str, ...] = TRAIN_FAMILIES
    rate: str = "1gbit"
    rounds: int = 5
    steps: int = 3
    shape: str = "even"
    sizes: models.Sizes = field(default_factory=models.Sizes)
    vgg_ranks_per_host: int = 4

    def goals_of(self, case: str) -> str:
        """Returns the case if it has goals with these options, else ""."""
        unshaped = case in ("host", "memory")
        whole = self.sizes == models.Sizes() and (unshaped or self.rate == "1gbit")
        return case if whole else ""


def line_bytes(payload: Payload, hosts: int) -> float:
    """Returns the bytes that each host must send to average the gradients in float32."""
    return averaged(payload) * (hosts - 1) / hosts


def run(spec: Spec, say: Say) -> list[Row]:
    """Runs all cases and returns their rows.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed, or the ranks' parameters differ after training.
    """
    cases = {"stub": _stub, "gpt": _gpt, "vgg": _vgg, "host": _host, "memory": _memory}
    rows = []
    for name in spec.cases:
        say(name)
        rows += cases[name](spec, say)
    return rows


def _builds(session: Session, works: dict[str, models.Workload]) -> dict[str, Trainer]:
    return {name: CANDIDATES[name].build(session, work) for name, work in works.items()}


def _stub(spec: Spec, say: Say) -> list[Row]:
    return [row for layout in spec.layouts for row in _stub_on(spec, say, *layout)]


def _stub_on(spec: Spec, say: Say, hosts: int, ranks_per_host: int) -> list[Row]:
    layers = (models.gpt_layers if spec.shape == "gpt" else models.even_layers)(spec.sizes)
    payload = models.payload(layers)
    raw_bytes = min(payload.whole, RAW_BYTES)
    layout = f"{hosts}x{ranks_per_host}"
    with Area.in_lab(hosts, spec.rate, ranks_per_host) as area:
        pool = models.pool_for(layers, area.ranks)

        def body(place: Place) -> dict[str, Measured]:
            line_s = line_bytes(payload, hosts) / place.line(raw_bytes)
            names = candidates(spec.families, ranks_per_host)
            works = {name: models.stub(layers, pool, place.rank) for name in names}
            trainers = _builds(place.session, works)
            found = {}
            for name, factor in LOCAL_OF_LINE.items():
                if place.rank == 0:
                    say(f"stub {layout}: local {name} of line")
                for work in works.values():
                    models.pace(work, line_s * factor)
                found[name] = measure(place, trainers, spec.rounds, spec.steps, raw_bytes)
            check(place, trainers)
            return found

        found = area.run(body)
    rows = []
    for name, measured in found.items():
        case = f"stub {spec.shape} {layout}, local {name} of line"
        rows += lab_rows(case, measured, payload, hosts, spec.goals_of(name))
    return rows


def _gpt(spec: Spec, say: Say) -> list[Row]:
    return [row for layout in spec.layouts for row in _gpt_on(spec, say, *layout)]


def _gpt_on(spec: Spec, say: Say, hosts: int, ranks_per_host: int) -> list[Row]:
    layout = f"{hosts}x{ranks_per_host}"
    say(f"gpt {layout}")
    payload = models.payload(models.gpt_layers(spec.sizes))

    def body(place: Place) -> Measured:
        names = candidates(spec.families, ranks_per_host)
        works = {name: models.gpt(spec.sizes, place.rank) for name in names}
        trainers = _builds(place.session, works)
        measured = measure(place, trainers, spec.rounds, spec.steps, min(payload.whole, RAW_BYTES))
        check(place, trainers)
        return measured

    with Area.in_lab(hosts, spec.rate, ranks_per_host) as area:
        measured = area.run(body)
    return lab_rows(f"gpt {layout}", measured, payload, hosts, spec.goals_of("gpt"))


def _vgg(spec: Spec, say: Say) -> list[Row]:
    """Measures each candidate in separate processes, because their memory would not fit
    together."""
    layers = models.vgg_layers(spec.sizes)
    payload = models.payload(layers)
    raw_bytes = min(payload.whole, RAW_BYTES)
    rows = []
    with Area.in_lab(VGG_HOSTS, spec.rate, spec.vgg_ranks_per_host) as area:
        pool = models.pool_for(layers, area.ranks)
        line_s = line_bytes(payload, VGG_HOSTS) / area.run(lambda place: place.line(raw_bytes))

        def body(place: Place, name: str, local_s: float) -> Measured:
            work = models.stub(layers, pool, place.rank)
            models.pace(work, local_s)
            trainers = _builds(place.session, {name: work})
            measured = measure(place, trainers, 1, spec.steps, raw_bytes if name == LOCAL else 0)
            check(place, trainers)
            return measured

        for share, ours in VGG.items():
            whole = Measured({}, {})
            for number in range(spec.rounds):
                for name in (LOCAL, TORCH_DDP, ours):
                    say(f"vgg: {ours}: round {number + 1}, {name}")
                    whole.add(area.run(partial(body, name=name, local_s=line_s * share)))
            case = f"vgg {VGG_HOSTS}x{spec.vgg_ranks_per_host}"
            rows += lab_rows(case, whole, payload, VGG_HOSTS, spec.goals_of("vgg"))
    return rows


def _host(spec: Spec, say: Say) -> list[Row]:
    rows = []
    chosen = [name for name in HOST if CANDIDATES[name].family in ("", *spec.families)]
    for ranks in HOST_RANKS:
        say(f"host: {ranks} ranks")

        def body(place: Place) -> Measured:
            trainers = _builds(
                place.session, {name: models.gpt(spec.sizes, place.rank) for name in chosen}
            )
            measured = measure(place, trainers, spec.rounds, spec.steps, 0)
            check(place, trainers)
            return measured

        with tempfile.TemporaryDirectory() as folder:
            measured = Area(None, ranks, folder).run(body)
        rows += host_rows(f"gpt on one host, {ranks} ranks", measured, spec.goals_of("host"))
    return rows


def _memory(spec: Spec, say: Say) -> list[Row]:
    rows = []
    for ranks in HOST_RANKS:
        say(f"memory: {ranks} ranks")
        with tempfile.TemporaryDirectory() as folder:
            area = Area(None, ranks, folder)
            rows += memory_rows(f"gpt on {ranks} ranks", area, spec.sizes, spec.goals_of("memory"))
    return rows
