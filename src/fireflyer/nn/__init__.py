"""Operators for training and inference: today `quant`, weights in few bits."""

from fireflyer.extras import need_torch

need_torch(__name__)
