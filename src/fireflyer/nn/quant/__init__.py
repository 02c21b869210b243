"""Weights of linear layers in 4 bits, in groups with a scale and a zero point each.

`quantize` rounds to nearest, `Shard` and `shards` cut a pair of layers for tensor parallelism.
"""

from fireflyer.nn.quant.groups import Quantized, quantize
from fireflyer.nn.quant.pair import Shard, shards

__all__ = ["Quantized", "Shard", "quantize", "shards"]
