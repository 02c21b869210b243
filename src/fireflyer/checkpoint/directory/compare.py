"""Statistics of a checkpoint's tensors, and differences of two checkpoints; both stream the
data."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.state.boxes import whole
from fireflyer.checkpoint.state.contents import STREAM_BYTES, Contents, itemsize_of, nbytes_of
from fireflyer.checkpoint.state.tree import Container, Node, Path, Tensor, Value, path_name

Numbers = NDArray[np.float64]
BINS = 20


class Statistics(msgspec.Struct):
    """Statistics of a tensor's elements; complex elements count by magnitude."""

    count: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    min: float | None = None
    """Minimum of the finite elements. Without finite elements, this and all later fields are None
    or empty."""
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    """Standard deviation of the population."""
    histogram: list[int] = []
    """Number of elements in each of BINS equal parts of [min, max]."""


@np.errstate(all="ignore")
def statistics(contents: Contents, node: Tensor) -> Statistics | None:
    """Computes the statistics in two passes; returns None if the elements are not numbers."""
    found = Statistics()
    mean = squares = 0.0
    finite = 0
    low, high = math.inf, -math.inf
    for chunk in numbers(contents, node):
        if chunk is None:
            return None
        found.count += len(chunk)
        found.nans += int(np.isnan(chunk).sum())
        found.infinities += int(np.isinf(chunk).sum())
        found.zeros += int((chunk == 0).sum())
        plain = chunk[np.isfinite(chunk)]
        if not len(plain):
            continue
        low, high = min(low, float(plain.min())), max(high, float(plain.max()))
        # Means and sums of squares of parts merge without loss of digits (Chan et al.).
        part, total = float(plain.mean()), finite + len(plain)
        shift = part - mean
        squares += float(((plain - part) ** 2).sum()) + shift**2 * finite * len(plain) / total
        mean += shift * len(plain) / total
        finite = total
    if finite:
        found.min, found.max, found.mean = low, high, mean
        found.std = math.sqrt(squares / finite)
        found.histogram = _histogram(contents, node, low, high)
    return found


def _histogram(contents: Contents, node: Tensor, low: float, high: float) -> list[int]:
    counts = np.zeros(BINS, np.int64)
    for chunk in numbers(contents, node):
        if chunk is not None:
            plain = chunk[np.isfinite(chunk)]
            # Elements are halved before they are scaled to [0, 1], because high - low may overflow
            # a float64.
            half = high / 2 - low / 2
            share = (plain / 2 - low / 2) / half if half else np.zeros(len(plain))
            counts += np.histogram(share, BINS, (0.0, 1.0))[0]
    return [int(count) for count in counts]


def numbers(contents: Contents, node: Tensor) -> Iterator[Numbers | None]:
    """Yields parts of the elements in C order, or None for parts that are not numbers."""
    if not math.prod(node.shape):
        return
    size = itemsize_of(node)
    for chunk in _evenly(contents, node, STREAM_BYTES // size * size):
        yield as_numbers(node, chunk)


def as_numbers(node: Tensor, data: bytearray) -> Numbers | None:
    """Returns whole elements as float64 [n]; None if they are not numbers."""
    if node.kind == "numpy":
        array = np.frombuffer(data, np.dtype(node.dtype))
        if array.dtype.kind not in "biufc":
            return None
        plain = np.abs(array) if array.dtype.kind == "c" else array
        return plain.astype(np.float64)
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, node.dtype))
    try:
        plain_tensor = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor
        return plain_tensor.to(torch.float64).numpy()
    except (RuntimeError, NotImplementedError):  # packed and quantised dtypes
        return None


def _evenly(contents: Contents, node: Tensor, size: int) -> Iterator[bytearray]:
    """Yields the tensor's stream in parts of `size` bytes; the last part may be shorter."""
    rest = bytearray()
    for part in contents.read(node, whole(node.shape)):
        rest += part
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
    if rest:
        yield rest


class Change(msgspec.Struct, frozen=True):
    """One difference. `before` and `after` are a dtype with a shape, or a value."""

    name: str
    kind: Literal["added", "removed", "changed"]
    before: str | None = None
    after: str | None = None
    max_difference: float | None = None
    """Maximum of |after - before| over all elements; infinite if only one of the two is NaN."""
    relative: float | None = None
    """Norm of (after - before) / norm of before. None if the norm of before is 0 or a norm is not
    finite."""


def differences(
    before: Contents, after: Contents, advance: Callable[[int], None] = lambda _: None
) -> list[Change]:
    """Returns all differences in the order of `before`, then the added items.

    Args:
        advance: progress callback; receives numbers of compared bytes of `before`.
    """
    old, new = _by_path(before.nodes), _by_path(after.nodes)
    changes = []
    for path, node in old.items():
        other = new.get(path)
        if other is None:
            changes.append(Change(path_name(path), "removed", before=shown(node)))
            continue
        change = _change(before, after, node, other)
        if change is not None:
            changes.append(change)
        advance(nbytes_of(node) if isinstance(node, Tensor) else 0)
    added = [path for path in new if path not in old]
    return changes + [Change(path_name(path), "added", after=shown(new[path])) for path in added]


def _by_path(nodes: Sequence[Node]) -> dict[Path, Node]:
    """Returns the nodes by path."""
    return {node.path: node for node in nodes}


def shown(node: Node) -> str:
    """Returns a short form of a node, e.g. "float32 [2, 3]", "dict", "0.5"."""
    if isinstance(node, Tensor):
        kind = "numpy " if node.kind == "numpy" else ""
        return f"{kind}{node.dtype} {list(node.shape)}"
    if isinstance(node, Container):
        return node.kind
    if node.kind == "none":
        return "None"
    if node.kind == "bytes":
        return f"bytes {node.value}"
    return repr(node.value) if node.kind == "str" else str(node.value)


def _change(before: Contents, after: Contents, old: Node, new: Node) -> Change | None:
    name = path_name(old.path)
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        same = type(old) is type(new) and (shown(old), _kind(old)) == (shown(new), _kind(new))
        return None if same else Change(name, "changed", shown(old), shown(new))
    if (old.kind, old.dtype, old.shape) != (new.kind, new.dtype, new.shape):
        return Change(name, "changed", shown(old), shown(new))
    if not math.prod(old.shape) or _same_place(before, after, old, new):
        return None
    return _compared(before, after, old, new)


def _kind(node: Node) -> str:
    return node.kind if isinstance(node, Value | Container) else ""


def _same_place(before: Contents, after: Contents, old: Tensor, new: Tensor) -> bool:
    """Returns True if both tensors refer to the same bytes, as after an incremental save."""
    return (
        isinstance(before, Snapshot)
        and isinstance(after, Snapshot)
        and before.storage is after.storage
        and old.pieces == new.pieces
    )


@np.errstate(all="ignore")
def _compared(before: Contents, after: Contents, old: Tensor, new: Tensor) -> Change | None:
    size = itemsize_of(old)
    window = STREAM_BYTES // size * size
    changed, known = False, True
    largest = difference = norm = 0.0
    for ours, theirs in zip(_evenly(before, old, window), _evenly(after, new, window), strict=True):
        changed = changed or ours != theirs
        a, b = as_numbers(old, ours), as_numbers(new, theirs)
        if a is None or b is None:
            known = False
            continue
        gap = _gaps(a, b)
        largest = max(largest, float(gap.max()))
        difference += float((gap**2).sum())
        norm += float((a**2).sum())
    if not changed:
        return None
    relative = math.sqrt(difference / norm) if norm and math.isfinite(difference + norm) else None
    text = shown(old)
    return Change(
        path_name(old.path),
        "changed",
        text,
        text,
        largest if known else None,
        relative if known else None,
    )


def _gaps(a: Any, b: Any) -> Numbers:
    """Returns |b - a|; 0 if both are NaN, infinite if only one is."""
    gap = np.abs(b - a)
    gap[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    gap[np.isnan(gap)] = math.inf
    found: Numbers = gap
    return found
