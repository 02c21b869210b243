"""Memory and traffic of a sharded model in bytes, computed from its units and layout alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fireflyer import hfreduce
from fireflyer.haiscale.mesh import DataLayout
from fireflyer.haiscale.reporting.facts import bytes_to_send, wire_bytes
from fireflyer.haiscale.sharding.gradients import Unit


@dataclass(frozen=True)
class Wires:
    """Formats of values between hosts.

    Attributes:
        gradients: codec of gradients; None: the gradients' own type.
        parameters: type of all-gathers, if it is narrower than the parameters' type.
    """

    gradients: str | None
    parameters: torch.dtype | None


@dataclass(frozen=True)
class Costs:
    """Costs of one rank in bytes.

    Attributes:
        parameters, gradients: size of the rank's shards, including padding.
        gathered, reduced: the rank's share of the bytes that its host must send in a step with one
            forward and one backward.
        parameter_element, gradient_element: size of the widest element on the wire.
    """

    parameters: int
    gradients: int
    gathered: float
    reduced: float
    parameter_element: float
    gradient_element: float


def costs_of(units: Sequence[Unit], layout: DataLayout, wires: Wires) -> Costs:
    parts = [one for unit in units for one in unit.group.fsdp_params]
    trained = [one for one in parts if one.sharded_param.requires_grad]
    gathered = 0.0
    for unit in units:
        shard = sum(_shard(one) * _gathered_as(one, wires) for one in unit.group.fsdp_params)
        again = unit.group.post_forward_mesh_info
        gathered += bytes_to_send(shard * layout.gather.size(), layout.gather)
        if again is not None:  # backward gathers again, in the group of `reshard_after_forward`
            among = again.shard_process_group
            gathered += bytes_to_send(shard * layout.gather.size(), among)
    travels = sum(
        _shard(one) * wire_bytes(one.sharded_param.dtype, wires.gradients) for one in trained
    )
    reduced = bytes_to_send(travels * layout.reduce.size(), layout.reduce)
    if layout.replicate is not None:
        reduced += 2 * bytes_to_send(travels, layout.replicate)
    return Costs(
        parameters=sum(_shard(one) * one.sharded_param.dtype.itemsize for one in parts),
        gradients=sum(_shard(one) * one.sharded_param.dtype.itemsize for one in trained),
        gathered=gathered,
        reduced=reduced,
        parameter_element=max(_gathered_as(one, wires) for one in parts),
        gradient_element=max(
            wire_bytes(one.sharded_param.dtype, wires.gradients) for one in trained
        ),
    )


def sent_by(units: Sequence[Unit], layout: DataLayout) -> int:
    """Returns the bytes that this rank has sent to other hosts in all groups of the model."""
    return sum(group.network_bytes_sent for group in set(_groups(units, layout)))


def _groups(units: Sequence[Unit], layout: DataLayout) -> Iterator[hfreduce.ProcessGroupHFReduce]:
    yield from (layout.gather, layout.reduce)
    if layout.replicate is not None:
        yield layout.replicate
    for unit in units:
        again = unit.group.post_forward_mesh_info
        if again is not None:
            yield again.shard_process_group


def _shard(one: Any) -> int:
    """Returns the number of elements of this rank's part of a parameter, including padding."""
    return int(one.padded_sharded_param_size.numel())


def _gathered_as(one: Any, wires: Wires) -> int:
    """Returns the size of an element in all-gathers, in bytes."""
    dtype: torch.dtype = one.mp_policy.param_dtype or one.sharded_param.dtype
    narrow = wires.parameters
    narrows = narrow is not None and dtype.is_floating_point and dtype.itemsize > narrow.itemsize
    return narrow.itemsize if narrow is not None and narrows else dtype.itemsize
