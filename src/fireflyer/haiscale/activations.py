"""How much memory autograd keeps for the backward of a module's forward."""

import contextlib
import weakref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Activations:
    """Counts storages that autograd holds, each once, from forward until backward frees them.

    Parameters and buffers do not count, nor does what activation checkpointing forgets. What the loss outside
    of the module's forward saves is not seen.

    Attributes:
        now: bytes.
        peak: bytes, since construction.
    """

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        self._model = weakref.ref(model)
        self._held: dict[int, int] = {}  # how often autograd holds a storage, by address
        self._lasting: set[int] = set()

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """What is saved inside is counted, until it is freed."""
        model = self._model()
        assert model is not None
        lasting = (*model.parameters(), *model.buffers())
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # an address is no value: nothing is waited for
            self._lasting = {_storage(tensor)[0] for tensor in lasting}
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor.detach())
        address, size = _storage(tensor)
        if size and address not in self._lasting:
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
    """What autograd holds in the place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the memory that it keeps alive; strange layouts have none of their own."""
    if tensor.layout is not torch.strided:
        return 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
