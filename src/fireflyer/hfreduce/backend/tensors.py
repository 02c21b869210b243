"""Conversions to the engine's arguments: dtypes, operations, and dense memory of tensors."""

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import ReduceOp

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError

DTYPES = {
    torch.float32: native.DType.FLOAT32,
    torch.float64: native.DType.FLOAT64,
    torch.float16: native.DType.FLOAT16,
    torch.bfloat16: native.DType.BFLOAT16,
    torch.float8_e4m3fn: native.DType.FLOAT8_E4M3FN,
    torch.float8_e5m2: native.DType.FLOAT8_E5M2,
    torch.int64: native.DType.INT64,
    torch.int32: native.DType.INT32,
    torch.int16: native.DType.INT16,
    torch.int8: native.DType.INT8,
    torch.uint8: native.DType.UINT8,
    torch.bool: native.DType.BOOL,
}
OPS = {
    ReduceOp.SUM: native.ReduceOp.SUM,
    ReduceOp.AVG: native.ReduceOp.AVG,
    ReduceOp.MIN: native.ReduceOp.MIN,
    ReduceOp.MAX: native.ReduceOp.MAX,
    ReduceOp.PRODUCT: native.ReduceOp.PRODUCT,
    ReduceOp.BAND: native.ReduceOp.BAND,
    ReduceOp.BOR: native.ReduceOp.BOR,
    ReduceOp.BXOR: native.ReduceOp.BXOR,
}
_BITWISE = (native.ReduceOp.BAND, native.ReduceOp.BOR, native.ReduceOp.BXOR)
Buffers = list[tuple[int, int]]


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options(kind: type, opts: Any, timeout: Any = None, *, op: Any = None, root: Any = None) -> Any:
    """Returns the options of a call, even if the call uses torch's short forms.

    The short forms pass values by position or name: `allreduce(tensors, op, timeout)`,
    `broadcast(tensor, root, timeout)`, `barrier(timeout)`.

    Args:
        kind: class of the options.
        opts: options object, or the timeout, root or operation that is passed instead.
    """
    if isinstance(opts, datetime.timedelta):
        timeout, opts = opts, None
    elif isinstance(opts, int):
        root, opts = opts, None
    elif isinstance(opts, ReduceOp | ReduceOp.RedOpType):
        op, opts = opts, None
    if opts is not None and timeout is None and op is None and root is None:
        return opts
    made = opts or kind()
    if timeout is not None:
        made.timeout = timeout
    if op is not None:
        made.reduceOp = op if isinstance(op, ReduceOp) else ReduceOp(op)
    if root is not None:
        made.rootRank = root
    return made


def will_wait(opts: Any) -> bool:
    """Returns True if the caller waits for the result at once."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def seconds_of(opts: Any) -> float:
    """Returns the timeout of this call in seconds; 0: the group's timeout applies."""
    timeout = getattr(opts, "timeout", None)
    return max(0.0, timeout.total_seconds()) if timeout is not None else 0.0  # torch's -1 ms: unset


def op_of(opts: Any) -> native.ReduceOp:
    """Returns the engine's operation: for PREMUL_SUM, SUM; `premultiplier` returns its factor."""
    if opts is None or opts.reduceOp.op == ReduceOp.PREMUL_SUM:
        return native.ReduceOp.SUM
    return op_named(opts.reduceOp)


def premultiplier(opts: Any) -> Any:
    """Returns the factor by which each rank multiplies its values before the sum, or None."""
    if opts is None or opts.reduceOp.op != ReduceOp.PREMUL_SUM:
        return None
    return opts.reduceOp.factor


def averaged(
    op: native.ReduceOp,
    dtype: torch.dtype,
    result: torch.Tensor | None,
    world: int,
    finish: Callable[[], None] | None,
) -> tuple[native.ReduceOp, Callable[[], None] | None]:
    """Replaces the mean of integers by a sum and, after the wait, a division rounded towards zero.

    Args:
        result: receives the sum; None if another rank receives it.
        finish: callback that runs at the end, whether or not the mean is replaced; or None.

    Returns:
        The operation to submit, and the callback to run at its end.
    """
    if op is not native.ReduceOp.AVG or dtype.is_floating_point or dtype is torch.bool:
        return op, finish

    def divide() -> None:
        if result is not None:
            result.div_(world, rounding_mode="trunc")
        if finish is not None:
            finish()

    return native.ReduceOp.SUM, divide


def op_named(op: Any) -> native.ReduceOp:
    """Returns the engine's operation for a `torch.distributed.ReduceOp`.

    Raises:
        ValueError: the operation is not supported.
    """
    found = OPS.get(getattr(op, "op", op))
    if found is None:
        raise ValueError(f"hfreduce does not support the reduction {op}")
    return found


def dtype_for(tensor: torch.Tensor, op: native.ReduceOp) -> native.DType:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"hfreduce cannot reduce {tensor.dtype}")
    if not has_meaning(tensor.dtype, op):
        raise TypeError(f"{op.name} is not defined for {tensor.dtype}")
    return dtype


def has_meaning(dtype: torch.dtype, op: native.ReduceOp) -> bool:
    return op not in _BITWISE if dtype.is_floating_point else op != native.ReduceOp.AVG


def check_dtypes(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
    for other in others:
        if other.dtype != tensor.dtype:
            raise TypeError(
                f"tensors of one call differ in dtype: {tensor.dtype} and {other.dtype}"
            )
        if other.device != tensor.device:
            address_of(tensor)
            address_of(other)
            raise ValueError(
                f"tensors of one call lie on different devices: {tensor.device} and {other.device}"
            )


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def buffers_of(tensors: Iterable[torch.Tensor]) -> Buffers:
    return [(t.data_ptr(), t.nbytes) for t in tensors]


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's first element.

    Raises:
        CollectiveError: the tensor's elements do not lie in strided memory of its own.
    """
    if tensor.layout is torch.strided and not tensor.is_nested:
        try:
            address = tensor.data_ptr()
        except RuntimeError as error:  # raised inside a torch.func transformation
            raise _without_memory(tensor) from error
        if address or not tensor.numel():
            return address
    raise _without_memory(tensor)


def _without_memory(tensor: torch.Tensor) -> CollectiveError:
    if tensor.is_meta:
        what, help_ = "a tensor on the meta device", "give it memory first"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        what, help_ = f"a tensor of layout {tensor.layout}", "pass its to_dense(), or its parts"
    elif hasattr(tensor, "to_local"):
        what, help_ = f"a {type(tensor).__name__}", "pass its .to_local()"
    else:
        what, help_ = f"a {type(tensor).__name__}", "pass the tensors of which it consists"
    return CollectiveError(
        f"hfreduce needs tensors with strided memory of their own; {what}, {tuple(tensor.shape)}, "
        f"has none: {help_}"
    )


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns contiguous memory with the tensor's values."""
    address_of(tensor)
    return tensor.contiguous()


def writable(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns contiguous memory with the values; if it is a copy, also a callback that copies back."""
    address_of(tensor)
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous()
    return flat, lambda: _store(tensor, flat)


def writable_on_host(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns writable host memory, and a callback that copies the memory to the tensor.

    If the memory is the tensor's own, there is no callback (None). If the tensor lies on a device,
    the memory lacks the tensor's values.
    """
    address_of(tensor)
    if tensor.is_cpu:
        return writable(tensor)
    flat = torch.empty(tensor.shape, dtype=tensor.dtype)
    return flat, lambda: _store(tensor, flat)


def _store(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(flat)


def all_writable(
    tensors: list[torch.Tensor],
) -> tuple[list[torch.Tensor], Callable[[], None] | None]:
    pairs = [writable(t) for t in tensors]
    finishes = [finish for _, finish in pairs if finish is not None]

    def finish_all() -> None:
        for finish in finishes:
            finish()

    return [flat for flat, _ in pairs], finish_all if finishes else None
