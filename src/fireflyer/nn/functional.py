"""Operators under torch's names; docs/guide/nn.md lists what each keeps for backward."""

from functools import partial

from torch.nn.functional import conv1d as _conv1d
from torch.nn.functional import conv2d as _conv2d
from torch.nn.functional import conv3d as _conv3d

from fireflyer.nn.activations import dropout, leaky_relu, relu, relu6
from fireflyer.nn.gated import swiglu
from fireflyer.nn.loss import linear_cross_entropy
from fireflyer.nn.norms import add_rms_norm, rms_norm
from fireflyer.nn.pointwise import convolution, gelu, layer_norm, linear, silu
from fireflyer.nn.pooling import max_pool2d

conv1d = partial(convolution, _conv1d)
conv2d = partial(convolution, _conv2d)
conv3d = partial(convolution, _conv3d)

__all__ = [
    "add_rms_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "dropout",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "max_pool2d",
    "relu",
    "relu6",
    "rms_norm",
    "silu",
    "swiglu",
]
