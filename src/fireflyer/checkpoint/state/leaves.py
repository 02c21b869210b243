"""Leaves: tensors of a state (whole, or one rank's box) and the location of their bytes."""

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fireflyer.checkpoint.state.boxes import Box, Shape, whole
from fireflyer.errors import CheckpointError

MAX_DIMENSIONS = 63
"""Maximum number of a tensor's dimensions. numpy allows one more dimension, which the byte view
uses."""

_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]*")
_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d{0,9}(\[[0-9A-Za-z/]{1,20}\])?")

Local = torch.Tensor | np.ndarray[Any, Any]
"""Tensor or array that lies entirely in this process."""


class Shard:
    """This rank's box of a tensor that is distributed over several ranks.

    A save assembles one tensor of `shape` from all ranks' boxes. As a leaf of `into=`, a Shard is
    filled with its box of the saved tensor, regardless of how the saved tensor was cut.
    """

    __slots__ = ("local", "offsets", "shape")

    def __init__(self, local: Local, shape: Shape, offsets: Shape) -> None:
        """
        Args:
            local: the box's elements; may be empty.
            shape: shape of the whole tensor.
            offsets: index of the box's first element in the whole tensor.

        Raises:
            ValueError: if the box does not lie in the whole tensor.
        """
        self.local, self.shape, self.offsets = local, tuple(shape), tuple(offsets)
        sizes = zip(self.offsets, local.shape, self.shape, strict=False)
        if not len(local.shape) == len(self.shape) == len(self.offsets) or any(
            offset < 0 or offset + extent > limit for offset, extent, limit in sizes
        ):
            raise ValueError(
                f"a box of shape {list(local.shape)} at {list(self.offsets)} "
                f"is not inside shape {list(self.shape)}"
            )


Leaf = torch.Tensor | np.ndarray[Any, Any] | Shard
"""Leaf of a state; torch.Tensor includes DTensor."""


class Description(NamedTuple):
    """Properties of a leaf that all ranks must know."""

    kind: Literal["torch", "numpy"]
    dtype: str
    """torch: "float32", "bfloat16", ...; numpy: its dtype.str, e.g. "<f4"."""
    itemsize: int
    shape: Shape
    """Shape of the whole tensor."""
    box: Box | None
    """Box of this rank; None if the rank has no element."""


def is_leaf(item: object) -> bool:
    """Returns True if a state may hold the item as a tensor; `describe` may still reject it."""
    kind = type(item)
    return (
        kind is torch.Tensor
        or kind is torch.nn.Parameter
        or kind is np.ndarray
        or kind is Shard
        or _is_dtensor(item)
    )


def _is_dtensor(item: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without this module no DTensor exists
    return module is not None and isinstance(item, module.DTensor)


def local_of(leaf: Leaf) -> Local:
    """Returns the leaf's part in this process; the part shares the leaf's memory."""
    if isinstance(leaf, Shard):
        return leaf.local
    if not _is_dtensor(leaf):
        return leaf
    with torch.no_grad():
        local = leaf.to_local()  # type: ignore[union-attr]
        return local if type(local) in (torch.Tensor, torch.nn.Parameter) else local.wait()  # type: ignore[no-any-return]


def describe(leaf: Leaf) -> Description:
    """Describes a leaf.

    Raises:
        CheckpointError: if the leaf cannot be saved; the error gives the reason, without the leaf's
            name.
    """
    local = local_of(leaf)
    if isinstance(local, np.ndarray):
        dtype = local.dtype
        if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
            raise CheckpointError(f"unsupported numpy dtype {dtype}")
        kind, name, size = "numpy", dtype.str, dtype.itemsize
    else:
        _check_tensor(local)
        kind, name = "torch", str(local.dtype).removeprefix("torch.")
        size = local.dtype.itemsize
    if dtype_size(kind, name) != size:
        raise CheckpointError(f"unsupported {kind} dtype {name}")
    shape = tuple(local.shape) if isinstance(leaf, np.ndarray) else tuple(leaf.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"it has {len(shape)} dimensions, but at most {MAX_DIMENSIONS} are supported"
        )
    box: Box | None
    if isinstance(leaf, Shard):
        box = Box(leaf.offsets, tuple(local.shape))
    elif _is_dtensor(leaf):
        box = _dtensor_box(leaf, tuple(local.shape))
    else:
        box = whole(shape)
    found = box if box is not None and box.elements else None
    return Description(kind, name, size, shape, found)  # type: ignore[arg-type]


def _check_tensor(tensor: torch.Tensor) -> None:
    if (
        (type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
    ):
        raise CheckpointError(
            f"unsupported: a {tensor.layout} {type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        )
    held = tensor.untyped_storage().nbytes()
    if held < (used := end_in_storage(tensor)):
        raise CheckpointError(
            f"its memory was freed: it needs {used} bytes, but its storage has {held}"
        )


def end_in_storage(tensor: torch.Tensor) -> int:
    """Returns the number of bytes that the tensor needs in its storage."""
    if 0 in tensor.shape:
        return 0
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    last = tensor.storage_offset() + sum(stride * (extent - 1) for stride, extent in sizes)
    return int(last + 1) * tensor.dtype.itemsize


def _dtensor_box(leaf: Any, local: Shape) -> Box | None:
    from fireflyer.torch_internals.tensor import compute_local_shape_and_global_offset

    for placement in leaf.placements:
        if placement.is_partial():
            raise CheckpointError(
                f"it is a DTensor with the placement {placement}: reduce it first, e.g. with redistribute()"
            )
    if leaf.device_mesh.get_coordinate() is None:
        return None
    shape, offsets = compute_local_shape_and_global_offset(
        leaf.shape, leaf.device_mesh, leaf.placements
    )
    if tuple(shape) != local and (whole(shape).elements or whole(local).elements):
        raise CheckpointError(
            f"the local part of a DTensor has shape {list(local)}: expected {list(shape)}"
        )
    return Box(tuple(int(offset) for offset in offsets), local)


def address_of(local: Local) -> int | None:
    """Returns the address of the bytes if they lie in C order in host memory; None otherwise."""
    if isinstance(local, np.ndarray):
        return int(local.__array_interface__["data"][0]) if local.flags.c_contiguous else None
    return local.data_ptr() if local.device.type == "cpu" and lies_in_order(local) else None


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor's bytes lie in C order in its device's memory."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_box(local: Local, box: Box, out: np.ndarray[Any, Any]) -> None:
    """Writes the elements of `box` (in the coordinates of `local`) to `out` in C order.

    Args:
        out: uint8 [count * itemsize], contiguous; its address is a multiple of the element size.
    """
    if isinstance(local, np.ndarray):
        part = np.ascontiguousarray(local[box.slices])
        out[:] = np.frombuffer(part.tobytes(), np.uint8)
        return
    with torch.no_grad():
        target = torch.from_numpy(out).view(local.dtype).view(box.shape)
        target.copy_(local.detach()[box.slices])


@functools.lru_cache(1024)
def dtype_size(kind: str, dtype: str) -> int | None:
    """Returns the size of an element in bytes; None if this build of torch or numpy lacks the
    dtype.

    Raises:
        CheckpointError: if no state can have the dtype.
    """
    if kind == "torch":
        found = getattr(torch, dtype, None)
        if isinstance(found, torch.dtype) and not dtype.startswith(("q", "uq")):
            return found.itemsize
        if found is None and _TORCH_DTYPE.fullmatch(dtype):
            return None
    elif _NUMPY_DTYPE.fullmatch(dtype):
        try:
            known = np.dtype(dtype)
        except TypeError:
            return None
        except ValueError as error:
            raise CheckpointError(f"invalid numpy dtype {dtype!r}: {error}") from error
        if known.str == dtype:
            return known.itemsize
    raise CheckpointError(f"unsupported {kind} dtype {dtype!r:.40} in a state")


def new_local(kind: str, dtype: str, shape: Shape) -> Local:
    """Returns a new contiguous tensor or array.

    Raises:
        CheckpointError: if this build of torch or numpy lacks the dtype.
    """
    try:
        if kind == "numpy":
            return np.empty(shape, np.dtype(dtype))
        found = getattr(torch, dtype)
        if not isinstance(found, torch.dtype):
            raise TypeError(f"torch.{dtype} is not a dtype")
        return torch.empty(shape, dtype=found)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"unknown {kind} dtype {dtype!r}") from error


def byte_view(local: Local) -> torch.Tensor | np.ndarray[Any, Any]:
    """Returns the memory of a tensor or array as uint8 [*shape, itemsize].

    The result is an array if the memory is on the CPU, else a tensor.
    """
    if isinstance(local, np.ndarray):
        return np.asarray(_Bytes(local))
    view = local.detach().unsqueeze(-1).view(torch.uint8)
    return view.numpy() if view.device.type == "cpu" else view


class _Bytes:
    """View of an array's memory as bytes, with one more dimension, by numpy's array protocol. The
    view keeps the array alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        size = array.dtype.itemsize
        self.keep = array
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (array.__array_interface__["data"][0], not array.flags.writeable),
            "shape": (*array.shape, size),
            "strides": (*array.strides, 1),
        }


def overlaps_itself(local: Local) -> bool:
    """Returns True if elements may share memory, e.g. after `expand`.

    Such a tensor cannot hold every value of its shape.

    The result is also True for strides that interleave without overlap, but no view by torch or
    numpy has such strides.
    """
    if isinstance(local, np.ndarray):
        strides, extent = [abs(stride) for stride in local.strides], local.itemsize
    else:
        strides, extent = list(local.stride()), 1
    if 0 in local.shape:
        return False
    for stride, size in sorted(zip(strides, local.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


@contextlib.contextmanager
def writable(local: Local) -> Iterator[Local]:
    """Yields a tensor or array to fill byte by byte; `local` receives its value at the end."""
    lazy = isinstance(local, torch.Tensor) and (local.is_conj() or local.is_neg())
    if not lazy or not isinstance(local, torch.Tensor):
        yield local
        return
    plain = torch.empty_like(local).resolve_conj().resolve_neg()
    yield plain
    with torch.no_grad():
        local.copy_(plain)
