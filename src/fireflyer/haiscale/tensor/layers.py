"""Layers whose weights are split over the ranks of a tensor-parallel mesh.

States of these layers have the names and shapes of the whole model: `state_dict` holds DTensors,
and `load_state_dict` takes DTensors or plain whole tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from fireflyer.haiscale.copies import Uncopied
from fireflyer.haiscale.tensor import exchanges

SEQUENCE = -2
"""Dimension that sequence parallelism splits: activations are (..., sequence, features)."""

Split = Callable[[torch.Tensor, int], nn.Parameter]
"""Function that returns this rank's piece of a parameter along a dimension; tied parameters stay
tied."""


class ShardedLayer(Uncopied):
    """Base of layers with split parameters.

    Attributes:
        mesh: the tensor-parallel ranks; has one dimension.
        split_dims: dimension along which each split parameter is split, by name.
    """

    def __init__(self, mesh: DeviceMesh, split_dims: Mapping[str, int]) -> None:
        super().__init__()
        self.mesh, self.split_dims = mesh, dict(split_dims)
        self.group: ProcessGroup = mesh.get_group()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.split_dims:
            if (key := prefix + name) in destination:
                destination[key] = self.whole_of(name, destination[key])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        for name in self.split_dims:
            given, own = state_dict.get(prefix + name), self._parameters.get(name)
            if given is None or own is None:
                continue
            if given.shape == (shape := self.whole_shape(name)):
                state_dict[prefix + name] = self.piece_of(name, given)
            else:
                state_dict[prefix + name] = own.detach()
                errors.append(
                    f"size mismatch for {prefix + name}: the state has {tuple(given.shape)}, "
                    f"the whole parameter {tuple(shape)}."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def whole_shape(self, name: str) -> torch.Size:
        """Returns the shape of a split parameter as a whole."""
        shape = list(getattr(self, name).shape)
        shape[self.split_dims[name]] *= self.group.size()
        return torch.Size(shape)

    def whole_of(self, name: str, piece: torch.Tensor) -> DTensor:
        """Returns a DTensor with the whole parameter's shape and this rank's piece.

        Args:
            piece: the parameter, or a tensor of the same shape that belongs to it.
        """
        where = [Shard(self.split_dims[name])]
        return DTensor.from_local(piece.detach(), self.mesh, where, run_check=False)

    def square_of(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the sum of squares of a whole tensor, float64."""
        return piece.double().square().sum()

    def piece_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of a DTensor or of a plain whole tensor.

        Collective if the DTensor has another layout.
        """
        dim = self.split_dims[name]
        if isinstance(whole, DTensor):
            if whole.device_mesh == self.mesh and whole.placements == (Shard(dim),):
                return whole.to_local()
            whole = whole.full_tensor()
        return exchanges.piece_of(whole, dim, self.group.rank(), self.group.size())


class ColumnParallelLinear(ShardedLayer):
    """Linear layer whose output features are split over the ranks.

    Args:
        linear: the whole layer.
        gather: join the outputs, so that each rank returns all features.
        sequence: the input is split along the sequence.
    """

    def __init__(
        self, linear: nn.Linear, mesh: DeviceMesh, cut: Split, gather: bool, sequence: bool
    ) -> None:
        super().__init__(mesh, {"weight": 0, "bias": 0})
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.gather, self.sequence = gather, sequence
        self.weight = cut(linear.weight, 0)
        self.bias = None if linear.bias is None else cut(linear.bias, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self._entered(x)
        y = functional.linear(whole, self.weight, self.bias)
        return exchanges.gather(y, -1, self.group) if self.gather else y

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            return exchanges.enter_from(x, SEQUENCE, self.group)
        return exchanges.enter(x, self.group)


class RowParallelLinear(ShardedLayer):
    """Linear layer whose input features are split over the ranks.

    Args:
        linear: the whole layer.
        scatter: the input has all features; each rank takes its piece.
        sequence: leave the output split along the sequence.
    """

    def __init__(
        self, linear: nn.Linear, mesh: DeviceMesh, cut: Split, scatter: bool, sequence: bool
    ) -> None:
        super().__init__(mesh, {"weight": 1})
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scatter, self.sequence = scatter, sequence
        self.weight = cut(linear.weight, 1)
        self.bias = linear.bias
        if sequence and self.bias is not None:
            sum_gradients(self.bias, self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scatter:
            x = exchanges.split(x, -1, self.group)
        y = _left(functional.linear(x, self.weight), self.sequence, self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(ShardedLayer):
    """Embedding whose rows are split over the ranks.

    Args:
        embedding: the whole layer.
        sequence: leave the output split along the sequence.
    """

    def __init__(
        self, embedding: nn.Embedding, mesh: DeviceMesh, cut: Split, sequence: bool
    ) -> None:
        super().__init__(mesh, {"weight": 0})
        self.num_embeddings, self.embedding_dim = (
            embedding.num_embeddings,
            embedding.embedding_dim,
        )
        self.padding_idx, self.sequence = embedding.padding_idx, sequence
        self.weight = cut(embedding.weight, 0)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        check_indices(indices, self.num_embeddings)
        local = indices - self.group.rank() * rows
        absent = (local < 0) | (local >= rows)
        local = local.masked_fill(absent, 0)
        found = functional.embedding(local, self.weight)
        if self.padding_idx is not None:
            kept = found.detach()
            found = torch.where((indices == self.padding_idx).unsqueeze(-1), kept, found)
        return _left(found.masked_fill(absent.unsqueeze(-1), 0), self.sequence, self.group)


def _left(partial: torch.Tensor, sequence: bool, group: ProcessGroup) -> torch.Tensor:
    if sequence:
        return exchanges.reduce_to(partial, SEQUENCE, group)
    return exchanges.reduce(partial, group)


def check_indices(indices: torch.Tensor, count: int) -> None:
    """Raises IndexError unless all indices lie in [0, count), as torch's embedding does."""
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < count:
        raise IndexError(f"index out of range: expected 0 to {count - 1}")


def sum_gradients(parameter: nn.Parameter, group: ProcessGroup) -> None:
    """Makes backward sum a whole parameter's gradient over ranks with different pieces of a
    sequence."""

    def total(gradient: torch.Tensor) -> torch.Tensor:
        result = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=group)
        return result

    if parameter.requires_grad:
        parameter.register_hook(total)
