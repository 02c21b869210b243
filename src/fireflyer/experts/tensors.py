"""Tensors of an image: views on a safetensors file in memory, or on its copy on a device."""

import math
import mmap
from collections.abc import Mapping

import torch

from fireflyer.checkpoint.formats import safetensors
from fireflyer.errors import CheckpointError


class Expert:
    """Expert in the hot tier.

    Attributes:
        name: name of the expert.
        tensors: tensors by name. Do not write to them: all users of the expert share them.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.name, self.tensors = name, dict(tensors)

    def load_into(self, module: torch.nn.Module) -> None:
        """Makes these tensors the parameters of a module, without a copy.

        The module may be on the meta device. Its mode (`eval`), and buffers outside its state dict,
        are unchanged.
        """
        module.load_state_dict(self.tensors, strict=True, assign=True)


def views(mapping: mmap.mmap, where: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the tensors of an image: views on the mapping; for another device, on a copy there.

    Raises:
        Corrupted: the image is no safetensors file.
        CheckpointError: torch lacks a dtype.
    """
    size = len(mapping)
    data = memoryview(mapping)
    length = safetensors.header_bytes(where, data[:8], size)
    _, entries = safetensors.parse_header(where, data[8 : 8 + length], size)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type != "cpu":
        flat = flat[8 + length :].to(device)  # the copy begins at an aligned address
    begin = 8 + length if device.type == "cpu" else 0
    return {name: _view(flat, begin, name, entry) for name, entry in entries.items()}


def _view(flat: torch.Tensor, begin: int, name: str, entry: safetensors.Entry) -> torch.Tensor:
    dtype = getattr(torch, safetensors.dtype_name(entry), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name}: this torch has no {entry.dtype}")
    start, stop = (begin + offset for offset in entry.data_offsets)
    if math.prod(entry.shape) == 0:
        return torch.empty(entry.shape, dtype=dtype, device=flat.device)
    part = flat[start:stop]
    if (part.data_ptr()) % dtype.itemsize:
        part = part.clone()  # the tensors of other programs' files may be unaligned
    return part.view(dtype).view(entry.shape)
