"""Price of a layout: step time, memory of a rank and bytes on a card. Pure."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import schedules
from fireflyer.haiscale.pipeline.placement import grid
from fireflyer.haiscale.planner.presets import CLUSTERS, MODELS, PAPER, Cluster, Layout, Model

WEIGHT_BYTES = 2  # parameters, gradients and activations are of 16 bits
OPTIMIZER_BYTES = 12  # an fp32 copy and two moments, divided over the replicas (ZeRO-1)
BACKWARD = 2  # a backward costs as much as two forwards


@dataclass(frozen=True)
class Plan:
    """Predictions for one layout.

    Attributes:
        step_s: seconds a step.
        bubble: share of the step that a rank idles in the pipeline's ramps.
        memory_bytes: bytes of the fullest rank, by kind.
        bytes_per_nic: bytes that the busiest card sends in a step.
        compute_s, allreduce_s: parts of the step: computation of a rank, sum over replicas.
    """

    layout: Layout
    step_s: float
    bubble: float
    memory_bytes: dict[str, float]
    bytes_per_nic: float
    compute_s: float
    allreduce_s: float

    @property
    def memory(self) -> float:
        return sum(self.memory_bytes.values())


def plan(model: Model, cluster: Cluster, layout: Layout) -> Plan:
    """Prices a layout.

    The last micro-batch's gradients hide no allreduce. Messages of the pipeline hide behind
    computation but in the ramps, unless the card is busy for longer than the ranks compute.

    Raises:
        ConfigError: the layout does not divide the model's batch or layers, or its schedule's
            conditions do not hold.
    """
    batches = _microbatches(model, layout)
    shape = schedules.outline(layout.schedule, layout.pp, batches, layout.chunks)
    stages = layout.pp * layout.chunks
    if stages > model.layers:
        raise ConfigError(f"invalid layout: {stages} stages for {model.layers} layers")
    share = -(-model.layers // stages) / model.layers  # of the largest stage
    forward = _forward_flops(model) * layout.micro * share / (cluster.flops * model.efficiency)
    compute = batches * layout.chunks * (1 + BACKWARD) * forward
    idle = schedules.published_bubble(shape, forward, forward, forward)
    message = layout.micro * model.sequence * model.hidden * WEIGHT_BYTES
    ramp = 2 * (layout.pp - 1) * message / cluster.card
    gradients = model.parameters / layout.pp * WEIGHT_BYTES
    sent, crosses = _card_bytes(layout, cluster, message * batches * layout.chunks, gradients)
    summed = gradients / cluster.allreduce if crosses else 0.0
    busy = max(compute + idle + ramp, sent / cluster.card)
    held = model.parameters / layout.pp
    return Plan(
        layout=layout,
        step_s=busy + summed,
        bubble=idle / (busy + summed),
        memory_bytes={
            "parameters": held * WEIGHT_BYTES,
            "gradients": held * WEIGHT_BYTES,
            "optimizer": held * OPTIMIZER_BYTES / layout.dp,
            "activations": _activations(model, layout, shape, message),
        },
        bytes_per_nic=sent,
        compute_s=compute,
        allreduce_s=summed,
    )


def _microbatches(model: Model, layout: Layout) -> int:
    rows = layout.dp * layout.micro
    if rows < 1 or model.batch % rows:
        raise ConfigError(
            f"invalid layout: dp {layout.dp} times micro {layout.micro} does not divide the batch "
            f"of {model.batch}"
        )
    return model.batch // rows


def _forward_flops(model: Model) -> float:
    """Returns the operations of a forward of one sequence: products with weights, and attention."""
    weights = 2 * model.active * model.sequence
    return weights + 2 * model.layers * model.hidden * model.sequence**2


def _activations(model: Model, layout: Layout, shape: schedules.Schedule, message: float) -> float:
    """Returns the bytes of kept stage inputs, and of all activations of one recomputed layer."""
    live = max(schedules.published_activations(shape))
    layer = 17 * message + 5 * model.heads * model.sequence**2 * layout.micro
    inputs = -(-model.layers // (layout.pp * layout.chunks))
    return live * inputs * message + layer


def _card_bytes(
    layout: Layout, cluster: Cluster, activations: float, gradients: float
) -> tuple[float, bool]:
    """Returns the bytes that the busiest card sends, and whether gradients cross a card.

    Args:
        activations: bytes that a rank sends to the next one in a step; as many come back.
    """
    rows = grid(layout.pp * layout.dp, layout.pp, placement=layout.placement)
    sent: dict[int, float] = defaultdict(float)
    for ranks in rows["pp"]:
        hosts = [rank // cluster.gpus_per_node for rank in ranks]
        wrap = activations * (layout.chunks - 1) / layout.chunks
        pairs = [(*pair, activations) for pair in itertools.pairwise(hosts)]
        for one, other, moved in [*pairs, (hosts[-1], hosts[0], wrap)]:
            if one != other:
                sent[one] += moved
                sent[other] += moved
    crosses = False
    for ranks in rows["dp"]:
        members = {rank // cluster.gpus_per_node for rank in ranks}
        for host in members if len(members) > 1 else ():
            sent[host] += 2 * gradients * (len(members) - 1) / len(members)
            crosses = True
    return max(sent.values(), default=0.0), crosses


def calibrated(name: str, cluster: Cluster = CLUSTERS["fire-flyer"]) -> Model:
    """Returns a preset whose efficiency makes the plan of its first measured point exact."""
    model = MODELS[name]
    if model.efficiency:
        return model
    gpus, measured = PAPER[name][0]
    layout = Layout(pp=model.pp, dp=gpus // model.pp)
    low, high = 0.01, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        found = plan(_with(model, middle), cluster, layout).step_s
        low, high = (middle, high) if found > measured else (low, middle)
    return _with(model, high)


def _with(model: Model, efficiency: float) -> Model:
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    return Model(**{**fields, "efficiency": efficiency})
