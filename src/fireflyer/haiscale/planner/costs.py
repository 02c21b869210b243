"""Price of a layout: step time, memory of a rank and bytes sent by a network card. Pure."""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import schedules
from fireflyer.haiscale.pipeline.placement import grid
from fireflyer.haiscale.planner import data_parallel
from fireflyer.haiscale.planner.presets import CLUSTERS, MODELS, PAPER, Cluster, Layout, Model

WEIGHT_BYTES = 2  # parameters, gradients and activations have 16 bits
OPTIMIZER_BYTES = 12  # an fp32 copy and two moments, divided over the replicas (ZeRO-1)
BACKWARD = 2  # a backward costs as much as two forwards
DRAWN = 2  # number of micro-batches per stage in a drawn timeline


@dataclass(frozen=True)
class Plan:
    """Predictions for one layout.

    Attributes:
        step_s: seconds per step.
        bubble: share of the step in which a rank idles while the pipeline fills and drains (its
            ramps).
        memory_bytes: bytes of the rank that needs the most memory, by kind.
        bytes_per_nic: bytes that the busiest card sends in a step.
        compute_s, allreduce_s: parts of the step: the computation of a rank, and the exposed time
            of the sum over replicas.
        exchange_s: part of the step for the sums of tensor parallelism and the exchange of tokens
            with experts.
    """

    layout: Layout
    step_s: float
    bubble: float
    memory_bytes: dict[str, float]
    bytes_per_nic: float
    compute_s: float
    allreduce_s: float
    exchange_s: float

    @property
    def memory(self) -> float:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class _Stage:
    """Costs of one micro-batch on the largest stage; times in seconds.

    Attributes:
        forward, inputs, weights: times of the forward, the input gradient and the weight gradient.
        compute: time of the computation in `forward`, `inputs` and `weights` together, without
            exchanges.
        message: bytes of the activations between two stages.
        routed: bytes that a rank sends to other hosts for experts, in forward and backward
            together.
    """

    forward: float
    inputs: float
    weights: float
    compute: float
    message: float
    routed: float


def plan(model: Model, cluster: Cluster, layout: Layout) -> Plan:
    """Prices a layout.

    With one stage, the allreduce hides behind the last micro-batch's backward. A pipeline begins
    the allreduce after its last backward. The pipeline's messages hide behind computation except in
    the ramps, unless the card is busy for longer than the ranks compute. Exchanges of tensor and
    expert parallelism never hide.

    Raises:
        ConfigError: the layout does not divide the model or its batch, or a condition of its
            schedule does not hold.
    """
    batches = _checked(model, cluster, layout)
    shape = schedules.outline(layout.schedule, layout.pp, batches, layout.chunks)
    rows = _grid(layout)
    one = _stage(model, cluster, layout, rows)
    count = batches * layout.chunks
    compute = count * one.compute
    each = one.forward, one.inputs, one.weights
    idle = schedules.published_bubble(shape, *each)
    ramp = 2 * (layout.pp - 1) * one.message / cluster.card
    held = _held(model, layout)
    sent, summed = card_bytes(
        layout,
        cluster.gpus_per_node,
        one.message * count,
        *(kind * WEIGHT_BYTES for kind in held),
        routed=one.routed * count,
    )
    everything = sum(held)
    dense, experts = held
    reduce_s = summed / cluster.allreduce
    if layout.pp == 1:
        reduce_s = _exposed_s(model, everything, reduce_s, batches, layout.chunks * sum(each))
    busy = max(count * sum(each) + idle + ramp, sent / cluster.card)
    return Plan(
        layout=layout,
        step_s=busy + reduce_s,
        bubble=idle / (busy + reduce_s),
        memory_bytes={
            "parameters": everything * WEIGHT_BYTES,
            "gradients": everything * WEIGHT_BYTES,
            "optimizer": (dense + experts * layout.ep) * OPTIMIZER_BYTES / layout.dp,
            "activations": _activations(model, layout, shape, one.message),
        },
        bytes_per_nic=sent,
        compute_s=compute,
        allreduce_s=reduce_s,
        exchange_s=count * sum(each) - compute,
    )


@dataclass(frozen=True)
class _Block:
    """One of a model's layers, which are all equal."""

    sizes: tuple[int, ...]
    flops: float = 1.0
    unit: int = 0


def _exposed_s(
    model: Model, parameters: float, reduce_s: float, batches: int, batch_s: float
) -> float:
    """Returns the seconds by which the sum over replicas outlasts backward, with one stage.

    Args:
        parameters: number of a rank's parameters.
        reduce_s: seconds of the sum alone.
        batch_s: seconds of a micro-batch.
    """
    size = max(1, round(parameters * WEIGHT_BYTES / model.layers))
    byte_s = reduce_s / (size * model.layers)
    prices = data_parallel.Prices(lambda count: count * byte_s, lambda count: count * byte_s / 2)
    training = data_parallel.Training([_Block((size,))] * model.layers, batch_s, 1)
    before_s = (batches - 1) * batch_s
    program = data_parallel.ddp(training, prices, deferred=False, before_s=before_s)
    return max(data_parallel.steady_s(program) - before_s - batch_s, 0.0)


def drawing(
    model: Model, cluster: Cluster, layout: Layout
) -> tuple[list[schedules.Span], int, int]:
    """Returns a timeline of few micro-batches, their number, and the total number of
    micro-batches."""
    batches = _checked(model, cluster, layout)
    drawn = min(batches, DRAWN * layout.pp)
    one = _stage(model, cluster, layout, _grid(layout))
    shape = schedules.schedule(layout.schedule, layout.pp, drawn, layout.chunks)
    each = schedules.costs(one.forward, one.inputs, one.weights)
    spans = schedules.timeline(shape, each, lambda _: one.message / cluster.card)
    return spans, drawn, batches


def _checked(model: Model, cluster: Cluster, layout: Layout) -> int:
    """Returns the number of micro-batches."""
    rows = layout.dp * layout.micro
    if rows < 1 or model.batch % rows:
        raise ConfigError(
            f"invalid layout: dp {layout.dp} times micro {layout.micro} does not divide the batch "
            f"of {model.batch}"
        )
    stages = layout.pp * layout.chunks
    if stages > model.layers:
        raise ConfigError(f"invalid layout: {stages} stages for {model.layers} layers")
    if layout.tp < 1 or model.heads % layout.tp or cluster.gpus_per_node % layout.tp:
        raise ConfigError(
            f"invalid layout: tp {layout.tp} does not divide {model.heads} heads and "
            f"{cluster.gpus_per_node} GPUs of a node"
        )
    if layout.ep < 1 or layout.dp % layout.ep or (layout.ep > 1 and not model.experts):
        raise ConfigError(
            f"invalid layout: ep {layout.ep} does not divide dp {layout.dp}, or the model has no "
            "experts"
        )
    if model.experts % layout.ep:
        raise ConfigError(f"invalid layout: ep {layout.ep} does not divide {model.experts} experts")
    return model.batch // rows


def _grid(layout: Layout) -> dict[str, list[list[int]]]:
    world = layout.pp * layout.dp * layout.tp
    return grid(world, layout.pp, layout.tp, layout.ep, layout.placement)


def _held(model: Model, layout: Layout) -> tuple[float, float]:
    """Returns a rank's numbers of parameters: those that tp divides, and those of its experts."""
    dense = model.parameters - model.expert_parameters
    return dense / (layout.pp * layout.tp), model.expert_parameters / (layout.pp * layout.ep)


def _stage(
    model: Model, cluster: Cluster, layout: Layout, rows: dict[str, list[list[int]]]
) -> _Stage:
    stages = layout.pp * layout.chunks
    layers = -(-model.layers // stages)  # number of layers of the largest stage
    dense, experts = _forward_flops(model)
    flops = (dense / layout.tp + experts) * layout.micro * layers / model.layers
    forward = flops / (cluster.flops * model.efficiency)
    message = layout.micro * model.sequence * model.hidden * WEIGHT_BYTES
    link = cluster.pair if layout.tp == 2 else cluster.bus
    # Two sums per layer in forward, and two in the input gradient.
    sums = 2 * 2 * (layout.tp - 1) / layout.tp * message * layers / link
    tokens = 2 * message * layers  # to experts and back, if each token goes to one other rank
    hosts, ranks = _others(model, cluster, rows)
    routed = tokens * hosts
    on_card = routed * _sharers(cluster, rows) / cluster.card
    passed = forward + sums + on_card + tokens * (ranks - hosts) / cluster.bus
    return _Stage(passed, passed, forward, (1 + BACKWARD) * forward, message, 2 * routed)


def _forward_flops(model: Model) -> tuple[float, float]:
    """Returns the operations of one sequence's forward: in parts that tp divides, and in experts.

    The operations are products with weights, and attention.
    """
    share = model.top_k / model.experts if model.experts else 0.0
    experts = 2 * model.expert_parameters * share * model.sequence
    weights = 2 * model.active * model.sequence - experts
    return weights + 2 * model.layers * model.hidden * model.sequence**2, experts


def _others(
    model: Model, cluster: Cluster, rows: dict[str, list[list[int]]]
) -> tuple[float, float]:
    """Returns the mean numbers of other hosts and of other ranks that receive a token.

    The choice of a token's experts is assumed to be even.
    """
    group = rows["ep"][0]
    hosts = len({rank // cluster.gpus_per_node for rank in group})
    return _spread(model, hosts), _spread(model, len(group))


def _spread(model: Model, parts: int) -> float:
    """Returns the expected number of parts to which a token is sent, if all experts are divided
    into `parts` equal parts. The part with the token itself does not count."""
    if parts == 1:
        return 0.0
    away = model.experts - model.experts // parts
    missed = math.comb(away, model.top_k) / math.comb(model.experts, model.top_k)
    return (parts - 1) * (1 - missed)


def _sharers(cluster: Cluster, rows: dict[str, list[list[int]]]) -> int:
    """Returns the number of ranks that share a network card."""
    return min(cluster.gpus_per_node, sum(map(len, rows["pp"])))


def _activations(model: Model, layout: Layout, shape: schedules.Schedule, message: float) -> float:
    """Returns the bytes of all kept layer inputs plus those of all activations of one recomputed
    layer."""
    live = max(schedules.published_activations(shape))
    layer = 17 * message + 5 * model.heads * model.sequence**2 * layout.micro
    inputs = -(-model.layers // (layout.pp * layout.chunks))
    return live * inputs * message + layer / layout.tp


def card_bytes(
    layout: Layout,
    ranks_per_host: int,
    activations: float,
    gradients: float,
    expert_gradients: float = 0.0,
    *,
    routed: float = 0.0,
) -> tuple[float, float]:
    """Returns the bytes that the busiest card sends, and the gradient bytes summed over one card.

    Args:
        activations: bytes that a rank sends to the next rank in a step; as many come back.
        gradients, expert_gradients: gradient bytes of a rank's stages.
        routed: bytes that a rank sends to other hosts for experts.
    """
    rows = _grid(layout)
    sent: dict[int, float] = defaultdict(float)
    summed: dict[int, float] = defaultdict(float)
    for ranks in rows["pp"]:
        hosts = [rank // ranks_per_host for rank in ranks]
        wrap = activations * (layout.chunks - 1) / layout.chunks
        pairs = [(*pair, activations) for pair in itertools.pairwise(hosts)]
        for one, other, moved in [*pairs, (hosts[-1], hosts[0], wrap)]:
            if one != other:
                sent[one] += moved
                sent[other] += moved
        for host in hosts:
            sent[host] += routed
    for ranks in rows["dp"]:
        copies = [(ranks[place :: layout.ep], expert_gradients) for place in range(layout.ep)]
        for members, size in [(ranks, gradients), *copies]:
            homes = {rank // ranks_per_host for rank in members}
            for host in homes if len(homes) > 1 else ():
                sent[host] += 2 * size * (len(homes) - 1) / len(homes)
                summed[host] += size
    return max(sent.values(), default=0.0), max(summed.values(), default=0.0)


def calibrated(name: str, cluster: Cluster = CLUSTERS["fire-flyer"]) -> Model:
    """Returns a preset with the efficiency that makes the plan of its first measured point
    exact."""
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
