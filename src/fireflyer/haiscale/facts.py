"""What a wrapper of a model tells of itself, for reports; and the least bytes that averaging must send."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from fireflyer import hfreduce
from fireflyer.errors import ConfigError

if TYPE_CHECKING:
    from fireflyer.haiscale.reducer import Times

WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / 256}


@dataclass(frozen=True)
class Facts:
    """Of one rank; bytes of one step of one forward and backward.

    Attributes:
        sent: bytes that this rank has sent to other hosts so far.
        hosts: the ranks of each host.
        crosses: communication goes on into the next forward.
        sharded: parameters are spread over ranks.
        parameter_bytes, gradient_bytes: memory of what this rank keeps.
        must_send: the rank's share of the least bytes that its host has to send.
        must_gather: of these, those of parameters.
        element_bytes: of an element of the gradients between hosts.
        gathered_bytes: of an element of the parameters between hosts.
        reductions: portions into which the gradients are cut.
    """

    times: "Times"
    sent: Callable[[], int]
    rank: int
    world: int
    hosts: tuple[tuple[int, ...], ...]
    crosses: bool
    sharded: bool
    parameter_bytes: int
    gradient_bytes: int
    must_send: float
    element_bytes: float
    reductions: int
    must_gather: float = 0.0
    gathered_bytes: float = 0.0


@runtime_checkable
class Measurable(Protocol):
    """A wrapper that can be recorded."""

    def facts(self) -> Facts:
        """As they are now; not collective."""


@runtime_checkable
class Wrapper(Measurable, Protocol):
    """What this package wraps a model in."""

    def settle(self) -> None:
        """Returns when nothing is under way."""


def facts_of(model: nn.Module) -> Facts:
    """Raises ConfigError for a module that is not wrapped by HaiScale."""
    if not isinstance(model, Measurable):
        raise ConfigError(
            f"{type(model).__name__} cannot be recorded: give what haiscale wrapped, a "
            "DistributedDataParallel or FullyShardedDataParallel"
        )
    return model.facts()


def refuse_wrapped(module: nn.Module) -> None:
    """Raises ConfigError for a module that HaiScale has wrapped, or that has such a part."""
    for name, part in module.named_modules():
        if isinstance(part, Wrapper):
            place = f"{name} is" if name else "this module is"
            raise ConfigError(f"{place} a {type(part).__name__} already: wrap its .module")


def wire_bytes(dtype: torch.dtype, wire: str | None) -> float:
    """Bytes of an element between hosts; int8 with the scales of its blocks."""
    narrow = dtype.is_floating_point and dtype != torch.float64
    return float(dtype.itemsize) if wire is None or not narrow else WIRE_BYTES[wire]


def bytes_to_send(size: float, group: hfreduce.ProcessGroupHFReduce) -> float:
    """This rank's share of S(H-1)/H: what a host sends of S bytes in a reduce-scatter, or in an all-gather,
    over H hosts. An allreduce is both."""
    hosts = group.hosts
    mine = next(ranks for ranks in hosts if group.rank() in ranks)
    return size * (len(hosts) - 1) / len(hosts) / len(mine)
