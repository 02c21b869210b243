"""Memory that autograd keeps from a module's forward for its backward."""

import contextlib
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fireflyer.torch_internals.core import DisableTorchFunctionSubclass


class Activations:
    """Counts the bytes of storages that autograd holds, each once, from forward until backward
    frees them.

    These do not count: parameters, buffers, gathered parameters of sharded units, and tensors that
    activation checkpointing discards. Tensors that the loss saves outside the module's forward are
    not seen.

    Attributes:
        now: bytes held at present.
        peak: maximum of `now` since construction.
    """

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        self._model = weakref.ref(model)
        self._held: dict[int, int] = {}  # number of autograd's references to a storage, by address
        self._lasting: set[int] = set()
        self._gathered: set[int] = set()  # whole parameters of units in their forward
        self._units: dict[nn.Module, set[int]] = {}
        self._hooks = [
            hook
            for part in model.modules()
            if hasattr(part, "_get_fsdp_state")
            for hook in (
                part.register_forward_pre_hook(self._gather),
                part.register_forward_hook(self._let_go, always_call=True),
            )
        ]

    def stop(self) -> None:
        """Removes the hooks that record gathered parameters."""
        for hook in self._hooks:
            hook.remove()

    def _gather(self, part: nn.Module, _: object) -> None:
        """Records the whole parameters of a sharded unit when the unit's forward begins."""
        self._units[part] = _addresses(part.parameters())
        self._gathered |= self._units[part]

    def _let_go(self, part: nn.Module, *_: object) -> None:
        """Forgets a unit's gathered parameters: other tensors may use their memory from now on."""
        self._gathered -= self._units.pop(part, set())

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context; tensors saved inside it count until they are freed."""
        model = self._model()
        assert model is not None
        self._lasting = _addresses((*model.parameters(), *model.buffers()))
        self._gathered.clear()
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor.detach())
        address, size = _storage(tensor)
        if size and address not in self._lasting and address not in self._gathered:
            count = self._held.get(address, 0)
            self._held[address] = count + 1
            if not count:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(saved, self._release, address, size)
        return saved

    def _release(self, address: int, size: int) -> None:
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]
            self.now -= size


class _Saved:
    """Object that autograd holds in place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    # Does not wait for the gradients of pending parameters (gradients/deferred.py), because only
    # addresses are read.
    with DisableTorchFunctionSubclass():
        return {_storage(tensor)[0] for tensor in tensors}


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns address and size in bytes of the tensor's storage.

    Returns zeros for a tensor without its own storage: a tensor of another layout, or a tensor that
    consists of other tensors.
    """
    if tensor.layout is not torch.strided or tensor.data_ptr() == 0:
        return 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
