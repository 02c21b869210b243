"""Tensor parallelism: layers split over the ranks of a mesh, inside a host or a pair of GPUs.

`parallelize(module, plan)` splits layers by name. `cross_entropy` takes logits with a split
vocabulary.
"""

from fireflyer.haiscale.tensor.clipping import clip_grad_norm_
from fireflyer.haiscale.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from fireflyer.haiscale.tensor.loss import cross_entropy
from fireflyer.haiscale.tensor.optimizer_state import load_optimizer_state, optimizer_state
from fireflyer.haiscale.tensor.plan import Column, Row, Sequence, Vocabulary, parallelize
from fireflyer.haiscale.tensor.quantized import QuantizedPair

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "QuantizedPair",
    "Row",
    "RowParallelLinear",
    "Sequence",
    "VocabParallelEmbedding",
    "Vocabulary",
    "clip_grad_norm_",
    "cross_entropy",
    "load_optimizer_state",
    "optimizer_state",
    "parallelize",
]
