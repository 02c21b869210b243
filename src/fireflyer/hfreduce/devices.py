"""Tensors on devices: where their memory lies, and the handles of collectives on them.

CUDA tensors are known by themselves. Whoever has another device, or plays one in a test, registers it:

    devices.register("fake", lambda tensor: seat if mine(tensor) else None)
"""

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError
from fireflyer.hfreduce.uncompiled import uncompiled
from fireflyer.hfreduce.work import Settler, Work

PART_BYTES = 4 << 20
"""Calls on larger tensors are cut, so that copies and reductions of different parts overlap."""

_CUT = (native.Kind.ALLREDUCE, native.Kind.REDUCE, native.Kind.BROADCAST)


@dataclass(frozen=True)
class Seat:
    """Where the memory of a tensor lies.

    Attributes:
        device: its runtime.
        stream: gives the caller's current stream there, as the runtime's handle.
        torch_device: for futures; None where torch knows nothing of the device's streams.
    """

    device: native.Device
    stream: Callable[[], int]
    torch_device: torch.device | None = None


Finder = Callable[[torch.Tensor], Seat | None]
_finders: dict[str, Finder] = {}


def register(name: str, finder: Finder) -> None:
    """Makes another kind of device known; `finder` gives the seat of its tensors and None for all others.

    A tensor of `finder`'s may be a CPU tensor for torch: then it must be contiguous, since torch would copy
    it without asking the device.
    """
    _finders[name] = finder


def unregister(name: str) -> None:
    del _finders[name]


def seat_of(tensor: torch.Tensor) -> Seat | None:
    """The seat of a tensor; None for host memory.

    Raises:
        CollectiveError: nothing is known about its device, or its runtime cannot be loaded.
    """
    for finder in _finders.values():
        if (seat := finder(tensor)) is not None:
            return seat
    if tensor.is_cpu:
        return None
    if tensor.is_cuda:
        return _cuda_seat(tensor.device.index)
    raise CollectiveError(f"hfreduce has no way to tensors on {tensor.device}")


@functools.cache
def _cuda_seat(index: int) -> Seat:
    device = torch.device("cuda", index)
    return Seat(
        native.cuda_device(index), lambda: torch.cuda.current_stream(device).cuda_stream, device
    )


def parts_of(kind: native.Kind, count: int, size: int) -> list[int]:
    """Elements of each operation that a call on `count` elements of `size` bytes in all is cut into; alike
    on all ranks."""
    if kind not in _CUT or size <= PART_BYTES:
        return [count]
    each = PART_BYTES * count // size
    whole, rest = divmod(count, each)
    return [each] * whole + ([rest] if rest > 0 else [])


_kept: list[object] = []


def keep_for_ever(held: object) -> None:
    """For memory that a device may use as long as it likes, because it failed or never came to an end."""
    _kept.append(held)


@uncompiled
class DeviceWork(Work):
    """A collective on the memory of a device.

    `wait()` makes the caller's current stream wait, not the caller; with a timeout the caller waits, too,
    until the ranks have reduced. An error that is found later is in `exception()`, and every later call of
    the group raises it; the result is then NaN (or all bits set).

    Args:
        settler, operations, result, held, finish: see `Work`.
        seat: of the tensors.
        passage: what the device has to do.
        patience_s: how long a group that ends waits for the device.
    """

    def __init__(
        self,
        settler: Settler,
        operations: list[native.Operation],
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        seat: Seat,
        passage: native.Passage,
        patience_s: float,
    ) -> None:
        super().__init__(settler, operations, result, held, finish)
        self._seat = seat
        self._passage = passage
        self._patience_s = patience_s
        self._future_device = seat.torch_device

    def is_completed(self) -> bool:
        return self._passage.finished and super().is_completed()

    def _await(self, timeout: datetime.timedelta) -> None:
        if timeout or super().is_completed():
            super()._await(timeout)
        self._passage.follow(self._seat.stream())

    def _after_finish(self) -> None:
        self._passage.extend(self._seat.stream())

    def settle_silently(self) -> None:
        super().settle_silently()
        if not self._passage.wait(self._patience_s):
            keep_for_ever(self)


def stage(
    engine: native.Group,
    stager: native.Stager,
    seat: Seat,
    counts: list[int],
    call: dict[str, Any],
) -> tuple[list[native.Operation], native.Passage]:
    """Submits a call on device memory, behind what is in the current stream.

    Args:
        counts: see `parts_of`.
        call: the arguments of `native.Group.submit`.

    Raises:
        ValueError: a result that lies once a host.
        CollectiveError: the device's runtime refuses.
        NoSpace: no memory for the mirrors.
    """
    if call.pop("shared", False):
        raise ValueError("a shared result lies in host memory: so must the tensor")
    return stager.submit(group=engine, stream=seat.stream(), counts=counts, **call)
