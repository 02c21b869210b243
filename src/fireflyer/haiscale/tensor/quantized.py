"""Column and row layers in 4 bits on tensor-parallel ranks, without a gather between them."""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.consistency import tell_all
from fireflyer.haiscale.copies import Uncopied
from fireflyer.haiscale.tensor import exchanges
from fireflyer.haiscale.tensor.plan import tensor_mesh
from fireflyer.nn.quant import Quantized, shards


class QuantizedPair(Uncopied):
    """Column layers, a function that acts on each feature, and a row layer, with weights in 4 bits.

    Args:
        columns: whole column layers with one common input, for example gate and up; equal on all
            ranks.
        row: the whole row layer that follows them.
        between: function of the outputs of `columns`, for example `lambda g, u: silu(g) * u`.
        biases: (features,) bias of each column layer, or None.
        bias: bias of the row layer, or None.
        mesh: one dimension, or several with one named "tp"; default: all ranks.
        aware: False selects a naive form, for comparison, that gathers and reorders between the
            layers.

    Raises:
        ConfigError: raised on all ranks if layers do not fit, if the number of ranks does not
            divide the features, or if the group size does not divide a rank's features.
    """

    def __init__(
        self,
        columns: Sequence[Quantized],
        row: Quantized,
        between: Callable[..., torch.Tensor],
        *,
        biases: Sequence[torch.Tensor | None] | None = None,
        bias: torch.Tensor | None = None,
        mesh: DeviceMesh | None = None,
        aware: bool = True,
    ) -> None:
        super().__init__()
        self.group = tensor_mesh(mesh).get_group()
        parts, fault = [], ""
        try:
            parts = shards(columns, row, self.group.size(), aware)
        except ConfigError as error:
            fault = str(error)
        for rank, said in enumerate(tell_all(fault, self.group)):
            if said:
                raise ConfigError(said if said == fault else f"rank {rank}: {said}")
        self.shard, self.between, self.bias = parts[self.group.rank()], between, bias
        self.order = row.order
        whole = biases if biases is not None else [None] * len(columns)
        self.biases = [b if b is None else b[self.shard.outputs] for b in whole]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the row layer's output, equal on all ranks. Collective."""
        x = exchanges.enter(x, self.group)
        outputs = [
            column.linear(x, bias)
            for column, bias in zip(self.shard.columns, self.biases, strict=True)
        ]
        hidden = self.between(*outputs)
        if not self.shard.aware:
            whole = exchanges.gather(hidden, -1, self.group)[..., self.order]
            hidden = exchanges.split(whole, -1, self.group)
        y = exchanges.reduce(functional.linear(hidden, self.shard.row.stored()), self.group)
        return y if self.bias is None else y + self.bias
