"""Bytes that a forward pass keeps for backward."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fireflyer.nn.recipe import observe


@dataclass(frozen=True)
class Saved:
    """Bytes kept for backward; memory that several tensors share counts once.

    Attributes:
        bytes: all bytes, without the model's parameters and buffers.
        modules: bytes by the name of the innermost module that first kept them; the root's name is
            "".
    """

    bytes: int
    modules: dict[str, int]


def saved(model: nn.Module, *inputs: Any, **options: Any) -> Saved:
    """Runs `model(*inputs, **options)` and returns the memory that the run keeps for backward.

    The result of the forward is dropped. Generators and buffers, such as running statistics, change
    as in any forward pass. Memory that custom code keeps without autograd is not seen.
    """
    own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen: set[int] = set()
    held = []
    found: dict[str, int] = {}
    path: list[str] = [""]

    def note(tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        if memory._cdata in own or memory._cdata in seen or not memory.nbytes():
            return
        seen.add(memory._cdata)
        held.append(memory)  # so that no later tensor reuses this memory
        found[path[-1]] = found.get(path[-1], 0) + memory.nbytes()

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(_entering(path, name), prepend=True))
            handles.append(module.register_forward_hook(_leaving(path), always_call=True))
    try:
        with observe(note), torch.enable_grad():
            model(*inputs, **options)
    finally:
        for handle in handles:
            handle.remove()
    return Saved(sum(found.values()), found)


def _memory(tensor: Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _entering(path: list[str], name: str) -> Any:
    def hook(*_: Any) -> None:
        path.append(name)

    return hook


def _leaving(path: list[str]) -> Any:
    def hook(*_: Any) -> None:
        path.pop()

    return hook
