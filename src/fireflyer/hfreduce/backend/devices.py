"""Tensors on devices: their memory, and the handles of collectives on them.

CUDA tensors are recognised. Other devices, and fake devices in tests, are registered:

    devices.register("fake", lambda tensor: context if mine(tensor) else None)
"""

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fireflyer import deprecated
from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError
from fireflyer.hfreduce.backend.compiler_exclusion import uncompiled
from fireflyer.hfreduce.backend.work import Completer, Work

PART_BYTES = 4 << 20
"""Size of a part in bytes. Larger calls are cut into parts whose copies and reductions overlap."""

_CUT = (native.Kind.ALLREDUCE, native.Kind.REDUCE, native.Kind.BROADCAST)


@dataclass(frozen=True)
class DeviceContext:
    """Device and stream of a tensor's memory.

    Attributes:
        device: runtime of the device.
        stream: returns the caller's current stream on the device, as the runtime's handle.
        torch_device: device for futures; None if torch does not know the device's streams.
    """

    device: native.Device
    stream: Callable[[], int]
    torch_device: torch.device | None = None


Finder = Callable[[torch.Tensor], DeviceContext | None]
_finders: dict[str, Finder] = {}


def register(name: str, finder: Finder) -> None:
    """Registers another kind of device.

    `finder` returns the device context of the device's tensors, and None for all other tensors.

    If torch regards the device's tensors as CPU tensors, they must be contiguous, because torch
    would copy other tensors without the device's knowledge.
    """
    _finders[name] = finder


def unregister(name: str) -> None:
    del _finders[name]


def context_of(tensor: torch.Tensor) -> DeviceContext | None:
    """Returns the device context of a tensor; None for host memory.

    Raises:
        CollectiveError: the device is unknown, or its runtime cannot be loaded.
    """
    for finder in _finders.values():
        if (context := finder(tensor)) is not None:
            return context
    if tensor.is_cpu:
        return None
    if tensor.is_cuda:
        return _cuda_context(tensor.device.index)
    raise CollectiveError(f"hfreduce does not support tensors on {tensor.device}")


@functools.cache
def _cuda_context(index: int) -> DeviceContext:
    device = torch.device("cuda", index)
    return DeviceContext(
        native.cuda_device(index), lambda: torch.cuda.current_stream(device).cuda_stream, device
    )


def parts_of(kind: native.Kind, count: int, size: int) -> list[int]:
    """Cuts a call into operations; returns their element counts, which are the same on all ranks.

    Args:
        count: number of elements of the call.
        size: total size of these elements, in bytes.
    """
    if kind not in _CUT or size <= PART_BYTES:
        return [count]
    each = PART_BYTES * count // size
    whole, rest = divmod(count, each)
    return [each] * whole + ([rest] if rest > 0 else [])


_kept: list[object] = []


def keep_for_ever(held: object) -> None:
    """Keeps memory alive that a device may still use after a call failed or did not end."""
    _kept.append(held)


@uncompiled
class DeviceWork(Work):
    """A collective on the memory of a device.

    `wait()` makes the caller's current stream wait; the calling thread does not block. With a
    timeout, the calling thread also waits until the ranks have reduced. An error that is found
    after `wait()` returned leaves NaN (or all bits set) in the result; `exception()` returns the
    error, and every later call of the group raises it.

    Args:
        settler, operations, result, held, finish: see `Work`.
        context: device context of the tensors.
        passage: the device's part of the work.
        patience_s: how long `shutdown` of the group waits for the device.
    """

    def __init__(
        self,
        settler: Completer,
        operations: list[native.Operation],
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        context: DeviceContext,
        passage: native.Passage,
        patience_s: float,
    ) -> None:
        super().__init__(settler, operations, result, held, finish)
        self._context = context
        self._passage = passage
        self._patience_s = patience_s
        self._future_device = context.torch_device

    def is_completed(self) -> bool:
        return self._passage.finished and super().is_completed()

    def _await(self, timeout: datetime.timedelta) -> None:
        if timeout or super().is_completed():
            super()._await(timeout)
        self._passage.follow(self._context.stream())

    def _after_finish(self) -> None:
        self._passage.extend(self._context.stream())

    def settle_silently(self) -> None:
        super().settle_silently()
        if not self._passage.wait(self._patience_s):
            keep_for_ever(self)


def stage(
    engine: native.Group,
    stager: native.Stager,
    context: DeviceContext,
    counts: list[int],
    call: dict[str, Any],
) -> tuple[list[native.Operation], native.Passage]:
    """Submits a call on device memory, ordered after the work in the current stream.

    Args:
        counts: elements of each operation; see `parts_of`.
        call: arguments of `native.Group.submit`.

    Raises:
        ValueError: the call asks for a result that is shared on the host.
        CollectiveError: the device's runtime refuses the call.
        NoSpace: memory for the copies of the tensors on the host is missing.
    """
    if call.pop("shared", False):
        raise ValueError("a shared result needs a tensor in host memory")
    return stager.submit(group=engine, stream=context.stream(), counts=counts, **call)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return deprecated.attribute(
            __name__, name, {"Seat": "DeviceContext", "seat_of": "context_of"}
        )
