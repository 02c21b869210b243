"""Data-parallel training: gradients are averaged by HFReduce while backward still runs.

Gradients live in buckets of zero-copy memory (`hfreduce.empty`), so that a reduction moves no byte that the
algorithm does not need to. The idea of buckets filled in backward order is PyTorch's (Li et al., VLDB 2020).
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError

DEFAULT_BUCKET_BYTES = 2 << 20


class _Bucket:
    """Parameters reduced together: one flat tensor, their gradients side by side, then a flag each.

    The flags travel with the gradients: a flag that is zero after averaging belongs to a parameter that took
    part in no rank's backward, whose gradient is then None as without data parallelism.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = hfreduce.empty(sum(sizes) + len(parameters), dtype=parameters[0].dtype)
        self.flat.zero_()
        *pieces, self.used = self.flat.split([*sizes, len(parameters)])
        self.views = [v.view_as(p) for v, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)
        self.work: dist.Work | None = None

    def fill_missing(self) -> None:
        """Parameters that this backward did not reach: what they hold already, or zero."""
        for index in (self.used == 0).nonzero().flatten().tolist():
            grad = self.parameters[index].grad
            if grad is None:
                self.views[index].zero_()
                continue
            if grad is not self.views[index]:
                self.views[index].copy_(grad)
            self.used[index] = 1

    def hand_out(self) -> None:
        """The averages become the parameters' gradients."""
        for parameter, view, used in zip(
            self.parameters, self.views, self.used.tolist(), strict=True
        ):
            if not used:
                parameter.grad = None
            elif parameter.grad is not view:
                parameter.grad = view

    def reset(self) -> None:
        self.missing = len(self.parameters)
        self.work = None
        self.used.zero_()


class DistributedDataParallel(nn.Module):
    """Replicates `module` over the ranks of a group and averages gradients at the end of backward.

    After `loss.backward()` every parameter's `.grad` is the average over the ranks: any optimizer works
    unchanged. Parameters that a backward does not reach on some rank count as zero there; one that no rank
    reached keeps `grad = None`.

    Args:
        module: on CPU, float32, float64 or bfloat16 parameters. Parameters and buffers are copied from the
            group's first rank.
        process_group: of backend "hfreduce"; the default group when None.
        bucket_bytes: gradients are reduced in portions of about this size.
        broadcast_buffers: copy the first rank's buffers before each forward in training mode.

    Attributes:
        module: the wrapped module.
        comm_wait_s: seconds this rank has blocked waiting for reductions, since construction.

    Raises:
        ConfigError: the group is not of the hfreduce backend, or nothing requires a gradient.
        CollectiveError, RankFailed: a reduction failed; raised by `backward`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        group = process_group or dist.group.WORLD
        if not isinstance(group, hfreduce.ProcessGroupHFReduce):
            raise ConfigError(
                "DistributedDataParallel needs a process group of backend 'hfreduce': "
                "init_process_group('hfreduce') or process_group=new_group(backend='hfreduce')"
            )
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError("DistributedDataParallel: no parameter requires a gradient")
        self.module = module
        self.comm_wait_s = 0.0
        self._group = group
        self._synchronise = True
        self._in_backward = False
        self._buffers_of_module = list(module.buffers()) if broadcast_buffers else []
        copy_from_first([*module.parameters(), *module.buffers()], group)
        self._buckets = [_Bucket(chunk) for chunk in _partition(parameters, bucket_bytes)]
        self._next_bucket = 0  # reductions start in this order on every rank
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:
            raise CollectiveError(
                "an earlier backward failed half way and the ranks may disagree: end this process group"
            )
        if self.training and self._synchronise and self._buffers_of_module:
            copy_from_first(self._buffers_of_module, self._group)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside accumulates locally; the first one outside reduces the sum."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _make_hook(self, bucket: _Bucket, index: int) -> Any:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if self._synchronise:
                self._ready(bucket, index, parameter)

        return gradient_is_ready

    def _ready(self, bucket: _Bucket, index: int, parameter: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish)
        if bucket.work is not None or bucket.used[index] != 0:
            raise CollectiveError(
                "a parameter got a second gradient within one backward; use no_sync() around all but the "
                "last backward, and use_reentrant=False for activation checkpointing"
            )
        view = bucket.views[index]
        if parameter.grad is not view:
            # zero_grad(set_to_none=True), or the first backward: autograd made a gradient of its own.
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        bucket.used[index] = 1
        bucket.missing -= 1
        while self._next_bucket < len(self._buckets):
            if self._buckets[self._next_bucket].missing:
                break
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        bucket.work = dist.all_reduce(
            bucket.flat, op=ReduceOp.AVG, group=self._group, async_op=True
        )
        self._next_bucket += 1

    def _finish(self) -> None:
        """At the end of backward: reduces what is left and waits for all of it."""
        try:
            while self._next_bucket < len(self._buckets):
                self._buckets[self._next_bucket].fill_missing()
                self._launch_next()
            start = time.monotonic()
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
            self.comm_wait_s += time.monotonic() - start
            for bucket in self._buckets:
                bucket.hand_out()
        finally:
            for bucket in self._buckets:
                bucket.reset()
            self._next_bucket = 0
            self._in_backward = False


def _partition(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Chunks of one dtype and about `bucket_bytes`, in the order in which backward reaches them."""
    chunks: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        if not chunks or size >= bucket_bytes or chunks[-1][0].dtype != parameter.dtype:
            chunks.append([])
            size = 0
        chunks[-1].append(parameter)
        size += parameter.nbytes
    return chunks


def copy_from_first(tensors: list[torch.Tensor], group: ProcessGroup) -> None:
    """Overwrites `tensors` with those of the group's first rank, byte for byte. Collective."""
    root = dist.get_global_rank(group, 0)
    works = [
        dist.broadcast(tensor.detach(), src=root, group=group, async_op=True) for tensor in tensors
    ]
    for work in works:
        assert work is not None
        work.wait()
