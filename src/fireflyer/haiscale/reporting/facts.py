"""Figures of a model wrapper for reports, and the minimum bytes that averaging must send."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fireflyer import hfreduce
from fireflyer.errors import ConfigError
from fireflyer.haiscale.reporting.times import Times

WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / 256}


@dataclass(frozen=True)
class Facts:
    """Figures of one rank; numbers of bytes are for a step with one forward and one backward.

    Attributes:
        sent: function that returns the number of bytes that this rank has sent to other hosts so
            far.
        hosts: ranks of each host.
        deferred: True if communication continues into the next forward.
        sharded: True if parameters are divided among ranks.
        parameter_bytes, gradient_bytes: memory that this rank keeps.
        must_send: this rank's share of the minimum number of bytes that its host has to send.
        must_gather: part of `must_send` for parameters.
        element_bytes: size of a gradient element between hosts.
        gathered_bytes: size of a parameter element between hosts.
        reductions: number of portions into which the gradients are cut.
    """

    times: Times
    sent: Callable[[], int]
    rank: int
    world: int
    hosts: tuple[tuple[int, ...], ...]
    deferred: bool
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
    """Model that can be recorded."""

    def facts(self) -> Facts:
        """Returns the present figures; not collective."""


@runtime_checkable
class Wrapper(Measurable, Protocol):
    """Model wrapper of this package."""

    def settle(self) -> None:
        """Waits until nothing is in flight."""


def facts_of(model: nn.Module) -> Facts:
    """Returns the model's figures; raises ConfigError for a module not wrapped by HaiScale."""
    if not isinstance(model, Measurable):
        raise ConfigError(
            f"cannot record a {type(model).__name__}: expected a haiscale DistributedDataParallel or "
            "FullyShardedDataParallel"
        )
    return model.facts()


def refuse_wrapped(module: nn.Module) -> None:
    """Raises ConfigError for a module that HaiScale has wrapped, or that contains such a part."""
    for name, part in module.named_modules():
        if isinstance(part, Wrapper):
            place = f"{name} is" if name else "this module is"
            raise ConfigError(f"{place} already a {type(part).__name__}: wrap its .module")


def wire_bytes(dtype: torch.dtype, wire: str | None) -> float:
    """Returns the size of an element between hosts in bytes; int8 includes its blocks' scales."""
    narrow = dtype.is_floating_point and dtype != torch.float64
    return float(dtype.itemsize) if wire is None or not narrow else WIRE_BYTES[wire]


def bytes_to_send(size: float, group: hfreduce.ProcessGroupHFReduce) -> float:
    """Returns this rank's share of the bytes that its host must send: S(H-1)/H.

    S is `size` and H is the number of hosts. A host sends this number of bytes in a reduce-scatter
    or an all-gather of S bytes. An allreduce consists of both.
    """
    hosts = group.hosts
    mine = next(ranks for ranks in hosts if group.rank() in ranks)
    return size * (len(hosts) - 1) / len(hosts) / len(mine)
