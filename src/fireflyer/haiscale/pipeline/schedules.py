"""Pipeline schedules as lists of actions, and their analysis. Pure: no clock, no torch.

A model of S stages runs on R ranks; stage s lies on rank s % R. GPipe: Huang et al., NeurIPS 2019.
1F1B: Narayanan et al., SOSP 2019. Interleaved 1F1B: Narayanan et al., SC 2021. ZB-H1: Qi et al.,
ICLR 2024.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from fireflyer.errors import ConfigError


class Kind(StrEnum):
    """Kinds of actions. A message carries the number of the stage that receives it."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"


SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = {
    Kind.RECEIVE_ACTIVATION: Kind.SEND_ACTIVATION,
    Kind.RECEIVE_GRADIENT: Kind.SEND_GRADIENT,
}
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
GPIPE, PIPEDREAM, INTERLEAVED, ZERO_BUBBLE = "gpipe", "1f1b", "interleaved", "zb-h1"
KINDS = (GPIPE, PIPEDREAM, INTERLEAVED, ZERO_BUBBLE)


class Action(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int


class Span(NamedTuple):
    """Computation in a timeline; times have the unit of the durations."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Actions of every rank, in order.

    Attributes:
        chunks: number of stages per rank.
        programs: the actions of each rank.
    """

    kind: str
    ranks: int
    microbatches: int
    chunks: int
    programs: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


def schedule(kind: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule of this kind.

    Args:
        chunks: number of stages per rank; more than one only with "interleaved".

    Raises:
        ConfigError: the kind is unknown, a number is below 1, or a condition of the schedule's
            paper does not hold.
    """
    found = outline(kind, ranks, microbatches, chunks)
    programs = (
        tuple(_with_messages(_computations(kind, rank, ranks, microbatches, chunks), ranks, chunks))
        for rank in range(ranks)
    )
    return replace(found, programs=tuple(programs))


def outline(kind: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule without its programs, for the published formulas.

    Raises:
        ConfigError: as for `schedule`.
    """
    if kind not in KINDS:
        raise ConfigError(f"invalid schedule {kind!r}: expected one of {', '.join(KINDS)}")
    for name, number in (("stages", ranks), ("chunks", microbatches), ("num_model_chunks", chunks)):
        if number < 1:
            raise ConfigError(f"invalid {name} {number}: expected at least 1")
    if kind == INTERLEAVED:
        if chunks < 2:
            raise ConfigError(
                "invalid num_model_chunks 1: Interleaved1F1B needs at least 2 stages per rank; "
                "use PipeDream"
            )
        if microbatches % ranks:
            raise ConfigError(
                f"invalid chunks {microbatches}: Interleaved1F1B needs a multiple of its {ranks} ranks"
            )
    elif chunks > 1:
        raise ConfigError(f"invalid num_model_chunks {chunks}: {kind} has one stage per rank")
    if kind in (PIPEDREAM, ZERO_BUBBLE) and microbatches < ranks:
        raise ConfigError(
            f"invalid chunks {microbatches}: {kind} needs at least as many micro-batches as its "
            f"{ranks} stages"
        )
    return Schedule(kind, ranks, microbatches, chunks, ())


def _computations(
    kind: str, rank: int, ranks: int, microbatches: int, chunks: int
) -> Iterator[Action]:
    if kind == GPIPE:
        for step in (Kind.FORWARD, Kind.BACKWARD):
            yield from (Action(step, rank, batch) for batch in range(microbatches))
    elif kind == PIPEDREAM:
        yield from _one_forward_one_backward(
            [(rank, batch) for batch in range(microbatches)],
            [(rank, batch) for batch in range(microbatches)],
            ranks - rank - 1,
        )
    elif kind == INTERLEAVED:
        warmup = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        orders = [
            [
                (part * ranks + rank, first + batch)
                for first in range(0, microbatches, ranks)
                for part in parts
                for batch in range(ranks)
            ]
            for parts in (range(chunks), range(chunks - 1, -1, -1))
        ]
        yield from _one_forward_one_backward(orders[0], orders[1], warmup)
    else:
        yield from _zero_bubble(rank, ranks, microbatches)


def _one_forward_one_backward(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warmup: int
) -> Iterator[Action]:
    warmup = min(warmup, len(forwards))
    yield from (Action(Kind.FORWARD, *forward) for forward in forwards[:warmup])
    for place, forward in enumerate(forwards[warmup:]):
        yield Action(Kind.FORWARD, *forward)
        yield Action(Kind.BACKWARD, *backwards[place])
    rest = backwards[len(forwards) - warmup :]
    yield from (Action(Kind.BACKWARD, *backward) for backward in rest)


def _zero_bubble(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yields 1F1B, except that weight gradients on rank r come r micro-batches later."""
    weights = 0
    for action in _computations(PIPEDREAM, rank, ranks, microbatches, 1):
        if action.kind is Kind.FORWARD:
            yield action
            continue
        yield action._replace(kind=Kind.BACKWARD_INPUT)
        if action.microbatch >= rank:
            yield Action(Kind.BACKWARD_WEIGHT, rank, weights)
            weights += 1
    for batch in range(weights, microbatches):
        yield Action(Kind.BACKWARD_WEIGHT, rank, batch)


def _with_messages(actions: Iterator[Action], ranks: int, chunks: int) -> Iterator[Action]:
    """Adds a receive before each computation that needs a message, and a send after it."""
    last = ranks * chunks - 1
    for action in actions:
        kind, stage, batch = action
        if ranks == 1 or kind is Kind.BACKWARD_WEIGHT:
            yield action
        elif kind is Kind.FORWARD:
            if stage > 0:
                yield Action(Kind.RECEIVE_ACTIVATION, stage, batch)
            yield action
            if stage < last:
                yield Action(Kind.SEND_ACTIVATION, stage + 1, batch)
        else:
            if stage < last:
                yield Action(Kind.RECEIVE_GRADIENT, stage, batch)
            yield action
            if stage > 0:
                yield Action(Kind.SEND_GRADIENT, stage - 1, batch)


Duration = Callable[[Action], float]


def timeline(plan: Schedule, duration: Duration, latency: Duration = lambda _: 0.0) -> list[Span]:
    """Returns the time at which each computation runs if only its messages delay it.

    Sends do not block, so durations do not change which actions wait for which. Therefore, if one
    execution ends, every execution ends. The messages of a rank are sent one after another.

    Args:
        duration: function from a computation to its time.
        latency: function from a send action to the time for which the message occupies the sender's
            card.

    Raises:
        ConfigError: ranks wait for one another in a circle, or a message has no sender.
    """
    now = [0.0] * plan.ranks
    places = [0] * plan.ranks
    cards = [0.0] * plan.ranks  # time at which each rank's card is free
    arrivals: dict[Action, float] = {}
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(plan.programs):
            while places[rank] < len(program):
                action = program[places[rank]]
                if action.kind in SENDS:
                    cards[rank] = max(cards[rank], now[rank]) + latency(action)
                    arrivals[action] = cards[rank]
                elif action.kind in RECEIVES:
                    sent = action._replace(kind=RECEIVES[action.kind])
                    if sent not in arrivals:
                        break
                    now[rank] = max(now[rank], arrivals[sent])
                else:
                    begin, now[rank] = now[rank], now[rank] + duration(action)
                    spans.append(Span(rank, action, begin, now[rank]))
                places[rank] += 1
                moved = True
    for rank, program in enumerate(plan.programs):
        if places[rank] < len(program):
            raise ConfigError(
                f"the schedule never ends: rank {rank} waits at {program[places[rank]]}"
            )
    return spans


def costs(forward: float, backward_input: float, backward_weight: float) -> Duration:
    """Returns the durations of all computations, for stages of equal cost."""
    found = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_input + backward_weight,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }
    return lambda action: found[action.kind]


def bubble(plan: Schedule, duration: Duration, latency: Duration = lambda _: 0.0) -> float:
    """Returns the idle time of the busiest rank between the first and the last action of all
    ranks."""
    spans = timeline(plan, duration, latency)
    busy = [0.0] * plan.ranks
    for span in spans:
        busy[span.rank] += span.end - span.begin
    return max(span.end for span in spans) - max(busy)


def live_activations(plan: Schedule) -> tuple[int, ...]:
    """Returns, for each rank, the largest number of stage inputs kept at one time for their
    backward."""
    peaks = []
    for program in plan.programs:
        live = peak = 0
        for action in program:
            if action.kind is Kind.FORWARD:
                live += 1
                peak = max(peak, live)
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def messages(plan: Schedule) -> tuple[int, ...]:
    """Returns the number of messages that each rank sends."""
    return tuple(sum(action.kind in SENDS for action in program) for program in plan.programs)


def check(plan: Schedule) -> None:
    """Checks that every send has exactly one receive on the right rank, and that all ranks end.

    Raises:
        ConfigError: the schedule is wrong; the error names an action.
    """
    sent: Counter[Action] = Counter()
    received: Counter[Action] = Counter()
    for rank, program in enumerate(plan.programs):
        for action in program:
            if action.kind in SENDS:
                step = 1 if action.kind is Kind.SEND_ACTIVATION else -1
                home, bucket = (action.stage - step) % plan.ranks, sent
                bucket[action] += 1
            else:
                home = action.stage % plan.ranks
                if action.kind in RECEIVES:
                    received[action._replace(kind=RECEIVES[action.kind])] += 1
            if home != rank:
                raise ConfigError(f"invalid schedule: {action} is on rank {rank}, not {home}")
    for action in sent | received:
        if sent[action] != 1 or received[action] != 1:
            raise ConfigError(
                f"invalid schedule: {action} is sent {sent[action]} times and received "
                f"{received[action]} times"
            )
    timeline(plan, lambda _: 1.0)


def published_bubble(plan: Schedule, forward: float, inputs: float, weights: float) -> float:
    """Returns the bubble by the formula of the schedule's paper, in the unit of a stage's costs."""
    each = {
        GPIPE: forward + inputs + weights,
        PIPEDREAM: forward + inputs + weights,
        INTERLEAVED: forward + inputs + weights,
        ZERO_BUBBLE: forward + inputs - weights,
    }[plan.kind]
    return (plan.ranks - 1) * each


def published_activations(plan: Schedule) -> tuple[int, ...]:
    """Returns each rank's peak of live activations by the formula of the schedule's paper."""
    ranks, total = plan.ranks, plan.microbatches * plan.chunks
    peaks = {
        GPIPE: [total] * ranks,
        PIPEDREAM: [ranks - rank for rank in range(ranks)],
        INTERLEAVED: [
            2 * (ranks - rank - 1) + (plan.chunks - 1) * ranks + 1 for rank in range(ranks)
        ],
        ZERO_BUBBLE: [ranks] * ranks,
    }[plan.kind]
    return tuple(min(total, peak) for peak in peaks)
