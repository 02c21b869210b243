"""Cross-entropy fused with the linear layer before it: only a block of rows has logits at a time.

Gradients are computed together with the loss, while the block is in the cache, so backward needs no
matrix products. The forward keeps the gradients of the input, the weight and the bias for backward,
each as large as its tensor, but no logits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import linear_cross_entropy as torch_linear_cross_entropy
from torch.nn.functional import nll_loss as torch_nll_loss

from fireflyer.nn.backend import kernels, refuse
from fireflyer.nn.once import once
from fireflyer.torch_internals.core import is_transformed, log_softmax_backward_out

_BLOCK_LOGITS = 1 << 22
"""Maximum number of logits of a block: 16 MiB in float32."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int,
        mean: bool, needed: tuple[bool, bool, bool], types: tuple[torch.dtype, torch.dtype],
    ) -> Tensor:  # fmt: skip
        with torch.autocast(x.device.type, enabled=False):
            found = _Blocks(x, weight, bias, target, ignored, mean, needed, types)
        ctx.save_for_backward(found.dx, found.dw, found.db)
        return found.loss

    @staticmethod
    @once("linear_cross_entropy")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        one = g.item() == 1 if g.device.type == "cpu" else False
        grads = [d if d is None or one else d * g.to(d.dtype) for d in ctx.saved_tensors]
        return *grads, None, None, None, None, None


class _Blocks:
    """Loss and gradients of one call; gradients that are not needed are None."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int,
        mean: bool, needed: tuple[bool, bool, bool], types: tuple[torch.dtype, torch.dtype],
    ) -> None:  # fmt: skip
        product, soft = types
        self.x, self.weight = x.to(product), weight.to(product)
        self.bias = None if bias is None else bias.to(product)
        self.target, self.valid, self.ignored = target, target != ignored, ignored
        self.dx = torch.empty_like(x) if needed[0] else None
        sums = torch.float32 if product.itemsize < 4 else product
        dw = torch.zeros(weight.shape, dtype=sums, device=x.device) if needed[1] else None
        db = torch.zeros(len(weight), dtype=sums, device=x.device) if needed[2] else None
        counted = int(self.valid.sum()) if mean else 1
        self.share = -1.0 / counted if counted else 0.0
        rows, classes = len(x), len(weight)
        step = min(rows, max(1, _BLOCK_LOGITS // classes))
        g = torch.zeros(step, classes, dtype=soft, device=x.device) if any(needed) else None
        picked = torch.empty(rows, dtype=soft, device=x.device)
        for begin in range(0, rows, step):
            span = slice(begin, begin + step)
            self._block(span, soft, picked, g, dw, db)
        zeros = torch.where(self.valid, 0, -100)
        self.loss = torch_nll_loss(
            picked[:, None], zeros, reduction="mean" if mean else "sum", ignore_index=-100
        )
        self.dw = None if dw is None else dw.to(weight.dtype)
        self.db = None if db is None or bias is None else db.to(bias.dtype)

    def _block(
        self, span: slice, soft: torch.dtype, picked: Tensor, g: Tensor | None,
        dw: Tensor | None, db: Tensor | None,
    ) -> None:  # fmt: skip
        x = self.x[span]
        logits = torch_linear(x, self.weight, self.bias).to(soft)
        if (twin := kernels("linear_cross_entropy", logits)) is not None:
            some = self.target[span].contiguous()
            twin.cross_entropy(logits, some, picked[span], self.ignored, self.share, g is not None)
        else:
            self._softmax(span, logits, picked, g)
        if g is None:
            return
        d = logits.to(x.dtype)
        if self.dx is not None:
            self.dx[span] = d @ self.weight
        if dw is not None:
            if dw.dtype == d.dtype:
                dw.addmm_(d.t(), x)
            else:
                dw += d.t() @ x
        if db is not None:
            db += d.sum(0)

    def _softmax(self, span: slice, logits: Tensor, picked: Tensor, g: Tensor | None) -> None:
        """Writes the targets' log-probabilities to `picked`; overwrites logits with their
        gradients."""
        logs = torch.log_softmax(logits, -1)
        valid = self.valid[span, None]
        places = self.target[span, None].where(valid, 0)
        picked[span] = logs.gather(1, places)[:, 0]
        if g is None:
            return
        given, soft = g[: len(logits)], logits.dtype
        given.scatter_(1, places, valid.to(soft) * self.share)
        log_softmax_backward_out(given, logs, -1, soft, out=logits)
        given.scatter_(1, places, 0)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    strict: bool = False,
) -> Tensor:
    """Returns the cross-entropy of `linear(input, linear_weight, linear_bias)` and class indices.

    The loss has the same bits as with torch's two operators. The input's gradient has the same bits
    if the gradient of the loss is 1 or another power of 2. The weight's gradient is a sum over
    blocks of rows, so its bits may differ.

    For class weights, label smoothing, other shapes and `reduction="none"`, torch's operators run.

    Args:
        input: (rows, features) or (features,).
        linear_weight: (classes, features).
        target: (rows,) int64.
        ignore_index: target of rows without a loss; default -100.

    Raises:
        ConfigError: `strict` is set, and torch's operators would run.
        RuntimeError: raised in backward if a second derivative is requested.
    """
    whole = input.dim() == 2 and linear_weight.dim() == 2 and target.dim() == 1 and target.numel()
    ours = whole and weight is None and label_smoothing == 0 and reduction in ("mean", "sum")
    if is_transformed() or not ours or target.is_floating_point():
        if not is_transformed():
            refuse("linear_cross_entropy", "this form has no fused operator", strict)
        return torch_linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=weight,
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
            options=options,
        )  # fmt: skip
    kind = input.device.type
    cast = torch.is_autocast_enabled(kind)
    types = (torch.get_autocast_dtype(kind), torch.float32) if cast else (input.dtype,) * 2
    asked = torch.is_grad_enabled()
    parts = (input, linear_weight, linear_bias)
    needed = tuple(asked and one is not None and one.requires_grad for one in parts)
    ignored = -100 if ignore_index is None else ignore_index
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        input, linear_weight, linear_bias, target, ignored, reduction == "mean", needed, types
    )
    return result
