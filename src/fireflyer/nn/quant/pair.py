"""Division of a column and a row layer for tensor parallelism, with act-order in both.

The row layer stores its inputs in act-order, so rank r holds the weights of features that are not
the r-th contiguous piece. The naive form gives rank r the r-th piece of the column layer's outputs.
Then all outputs must be gathered and reordered between the layers. The aware form permutes the
column layer's outputs offline into the row layer's order. Then each rank computes just the features
whose weights it holds (arXiv 2402.04925).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fireflyer.errors import ConfigError
from fireflyer.nn.quant.groups import Quantized


@dataclass(frozen=True)
class Shard:
    """One rank's part of a pair of layers.

    Attributes:
        columns: column layers with one common input, for example gate and up.
        row: the row layer that follows them.
        outputs: (features / ranks,) indices of the outputs that this rank computes, among all
            outputs of the whole column layers.
        aware: True if these outputs are the inputs of `row`, in its stored order.
    """

    columns: tuple[Quantized, ...]
    row: Quantized
    outputs: torch.Tensor
    aware: bool


def shards(
    columns: Sequence[Quantized], row: Quantized, ranks: int, aware: bool = True
) -> list[Shard]:
    """Divides column layers and the row layer that follows them among ranks.

    Between the layers, only functions that act on each feature alone are allowed.

    Raises:
        ConfigError: shapes do not fit, the number of ranks does not divide the features, or the
            group size does not divide a rank's features.
    """
    features = row.order.numel()
    for column in columns:
        if column.packed.shape[0] != features:
            raise ConfigError(
                f"a column layer with {column.packed.shape[0]} outputs does not fit a row layer "
                f"with {features} inputs"
            )
    if ranks < 1 or features % ranks:
        raise ConfigError(f"{ranks} ranks do not divide {features} features")
    count = features // ranks
    order = row.order if aware else torch.arange(features)
    made = []
    for first in range(0, features, count):
        outputs = order[first : first + count]
        parts = tuple(column.rows(outputs) for column in columns)
        made.append(Shard(parts, row.places(first, count), outputs, aware))
    return made
