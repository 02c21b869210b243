"""Size and peers of a collective, from the arguments of its call."""

import sys
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from fireflyer.haiprof.inside.buffer import EventBuffer

_INPUTS = ("tensor", "tensors", "input", "input_tensor", "tensor_list", "input_list")
_MOST = 100_000


def note(
    buffer: EventBuffer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> None:
    """Records a call, unless it only waits for an earlier call."""
    into = buffer.collectives
    if into is None or name.endswith(".wait") or len(into) >= _MOST:
        return
    kwargs = kwargs or {}
    values = [*args, *kwargs.values()]
    named = [kwargs[key] for key in _INPUTS if key in kwargs]
    size = max((_bytes(value) for value in named or values), default=0)
    into.append((name, monotonic_ns() - buffer.base_ns, size, _peers(values)))


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(value))


def _tensors(value: Any) -> Iterator[Any]:
    tensor = sys.modules["torch"].Tensor
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, tensor):
            yield item


def _peers(values: list[Any]) -> list[int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    groups = [v for v in values if isinstance(v, distributed.ProcessGroup)]
    ranks = distributed.get_process_group_ranks(groups[0] if groups else None)
    return [int(rank) for rank in ranks]
