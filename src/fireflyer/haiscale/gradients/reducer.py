"""Gradient reducer: starts the buckets' reductions, waits for them, and hands gradients out.

States of a bucket in a step with a synchronised backward:

    filling --(its gradients and those of all earlier buckets are ready)--> reducing
    reducing --(synchronous: at the end of backward; deferred: at first use)--> arrived
    arrived --(deferred, and the script has called optimizer.step())--> stepped

Invariant: on every rank, reductions start in the order of the buckets' numbers. Then follows a
    reduction of the mask, which marks the parameters that any rank's backward reached. The reducer
    makes no other reduction. Single-threaded: autograd of CPU modules runs hooks in the thread that
    called backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.gradients import deferred
from fireflyer.haiscale.gradients.bucket_plan import PIECE_BYTES, plan
from fireflyer.haiscale.gradients.buckets import Bucket
from fireflyer.haiscale.gradients.sample_weights import SampleWeights
from fireflyer.haiscale.gradients.split_optimizer import SplitOptimizer
from fireflyer.haiscale.gradients.suspend_vote import MaskTail, SuspendVote
from fireflyer.haiscale.reporting.spans import span
from fireflyer.haiscale.reporting.times import CommunicationTimer, Times
from fireflyer.haiscale.torch_state import isolated_torch_state
from fireflyer.hfreduce.backend.planned_hierarchy import PlannedHierarchy
from fireflyer.log import get_logger
from fireflyer.torch_internals.core import DisableTorchFunctionSubclass, queue_callback

_log = get_logger("haiscale")
FIRST = 2**30
"""Priority of operations for which all buckets wait."""


@dataclass
class Options:
    """Settings of the reductions; see the arguments of `DistributedDataParallel`."""

    bucket_bytes: int
    wire: str | None
    static_graph: bool
    check_gradients: bool
    tree: PlannedHierarchy | None


class BucketReduction:
    """Bucket in flight; the owner of its pending parameters."""

    def __init__(self, reducer: "Reducer", bucket: Bucket) -> None:
        self._reducer, self._bucket = reducer, bucket
        self.stepping = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._bucket.parameters

    def arrive(self) -> None:
        self._reducer.arrive(self._bucket)


class GradientHook:
    """Hook that a parameter calls when its gradient is ready."""

    def __init__(self, reducer: "Reducer", index: int) -> None:
        self.reducer, self._index = reducer, index

    def __call__(self, _: torch.Tensor) -> None:
        self.reducer.ready(self._index)


def let_go(parameters: Iterable[nn.Parameter]) -> None:
    """Ends earlier wrappers' reducers of these parameters, after any step that was requested."""
    hooks = [
        hook
        for parameter in parameters
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    ]
    for reducer in dict.fromkeys(hook.reducer for hook in hooks if isinstance(hook, GradientHook)):
        reducer.replaced = True
        if reducer.in_backward:
            reducer.abandon()
        else:
            reducer.stop()


class Reducer:
    """Averages the gradients of parameters over a group.

    Args:
        named: the parameters that require gradients, by name, in the model's order.
        times: times to which the reducer adds.
        leaving: vote of the ranks on leaving the run, which has one byte of the mask. The reducer
            calls `learn` when all ranks have read the same masks.
        sample_weights: weights of ranks with unequal parts of a batch; also part of the mask.

    Attributes:
        replaced: True if the parameters have another reducer.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        options: Options,
        times: Times,
        leaving: SuspendVote,
        sample_weights: SampleWeights | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._known = {id(parameter) for parameter in self.parameters}
        self.group, self.options = group, options
        self.times = times
        self.synchronise, self.replaced = True, False
        self.in_backward = False
        self._observed: list[int] | None = []  # None after the buckets are laid out anew
        self._used = bytearray(len(named))  # parameters that this backward reached here
        self._leaving, self._sample_weights = leaving, sample_weights
        self._tail = MaskTail(leaving, sample_weights)
        self._mask = hfreduce.empty(len(named) + self._tail.size, dtype=torch.uint8)
        self._mask_work: dist.Work | None = None
        self._reached: list[int] = []  # parameters that this backward reached on any rank
        self._static: bytes | None = None  # parameters that every backward reaches here
        self._flights: dict[int, BucketReduction] = {}
        self._split: SplitOptimizer | None = None
        self._next = 0
        self._under_way = CommunicationTimer(times)
        self._lay_out(list(reversed(range(len(named)))))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(GradientHook(self, index))
            for index, parameter in enumerate(self.parameters)
        ]

    def start_deferring(self, optimizer: Optimizer) -> None:
        """Switches to deferred mode: the first use of a parameter waits for its bucket, and steps
        the bucket if the script has called `optimizer.step()`."""
        self._split = SplitOptimizer(
            optimizer,
            lambda: [*self._flights.values()],
            self.settle,
            self.times,
            lambda parameter: id(parameter) in self._known,
        )
        if not self._split.held().issuperset(map(id, self.parameters)):
            self._lay_out(list(reversed(range(len(self.parameters)))))

    def _lay_out(self, order: Sequence[int]) -> None:
        """Makes buckets; all parameters of a bucket belong to the optimizer, or none does."""
        held = self._split.held() if self._split is not None else ()
        kinds = [(p.dtype, p.device, id(p) in held) for p in self.parameters]
        sizes = [p.nbytes for p in self.parameters]
        cuts = plan(sizes, kinds, order, self.options.bucket_bytes)
        piece = max(PIECE_BYTES, self.options.bucket_bytes)
        self.buckets = [
            Bucket(number, indexes, [self.parameters[i] for i in indexes], piece)
            for number, indexes in enumerate(cuts)
        ]
        self._place = {
            index: (bucket, position)
            for bucket in self.buckets
            for position, index in enumerate(bucket.indexes)
        }

    def before_forward(self) -> None:
        """Lays the buckets out anew once, after the first backward, in the order in which gradients
        became ready on rank 0."""
        if self.replaced:
            raise ConfigError("the module was wrapped again: use the newer wrapper")
        if self.in_backward:
            raise CollectiveError(
                "an earlier backward failed half way and the ranks may disagree: end this process group"
            )
        if not self._observed or not self.synchronise:
            return
        self.settle()
        rest = [i for i in reversed(range(len(self.parameters))) if i not in set(self._observed)]
        order = torch.tensor(self._observed + rest)
        self._observed = None
        dist.broadcast(order, dist.get_global_rank(self.group, 0), self.group)
        self._lay_out(order.tolist())

    # Backward

    def ready(self, index: int) -> None:
        """Records that a gradient has been accumulated."""
        if self._flights:
            self._join(index)
        if self.synchronise:
            self._ready(index)

    def _join(self, index: int) -> None:
        """Adds a new gradient to the gradient of the last backward, which is still in flight.

        No code has used the parameter since then, not even a forward. autograd has put the new
        gradient into `grad`, where the earlier gradient will arrive.
        """
        bucket, _ = self._place[index]
        if bucket.number not in self._flights:
            return
        parameter = self.parameters[index]
        with DisableTorchFunctionSubclass():
            fresh, parameter.grad = parameter.grad, None
        self.arrive(bucket)
        arrived: torch.Tensor | None = parameter.grad
        if arrived is None:
            parameter.grad = fresh
        elif fresh is not None:
            arrived.detach().add_(fresh.detach())

    def _begin_backward(self) -> None:
        self.settle()
        self._leaving.learn()
        if self._sample_weights is not None:
            self._sample_weights.open()
        self._used[:] = bytes(len(self._used))
        if self._observed is not None:
            self._observed.clear()  # a graph may run backward twice before the next forward
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            bucket.begin()
        self.in_backward = True
        queue_callback(self._finish)

    def _ready(self, index: int) -> None:
        if not self.in_backward:
            self._begin_backward()
        if self._used[index]:
            raise CollectiveError(
                f"{self.names[index]} got a second gradient within one backward; use no_sync() around "
                "all but the last backward, and use_reentrant=False for activation checkpointing"
            )
        grad = self.parameters[index].grad
        if grad is not None and grad.layout is not torch.strided:
            raise CollectiveError(f"{self.names[index]} has a sparse gradient: use sparse=False")
        self._used[index] = 1
        if self._observed is not None:
            self._observed.append(index)
        bucket, position = self._place[index]
        bucket.fill(position)
        self._use_view(bucket, position)
        bucket.missing -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch()

    def _use_view(self, bucket: Bucket, position: int) -> None:
        """Makes `grad` the bucket's memory (synchronous), or None until arrival (deferred)."""
        if self._defers(bucket):
            bucket.parameters[position].grad = None
        else:
            bucket.hand_out(position)

    def _defers(self, bucket: Bucket) -> bool:
        return self._split is not None and all(map(deferred.can_be, bucket.parameters))

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        if self._sample_weights is not None:
            self._sample_weights.scale(bucket.flat)
        if self.options.check_gradients:
            self._check(bucket)
        self._under_way.begin()
        with span("all_reduce", "bucket", bucket.number):
            bucket.works = [
                self._reduce(piece, ReduceOp.AVG, self.options.wire, 1 + bucket.number)
                for piece in bucket.pieces
            ]
        self.times.reductions += len(bucket.works)

    def _reduce(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType, wire: str | None, priority: int
    ) -> dist.Work | None:
        if self.options.tree is not None:  # the tree runs its calls in order, without priorities
            return self.options.tree.allreduce(tensor, op, async_op=True)
        work: dist.Work = hfreduce.allreduce(
            tensor,
            op,
            self.group,
            wire=wire,
            priority=priority if self._split is not None else 0,
            async_op=True,
        )
        return work

    def _check(self, bucket: Bucket) -> None:
        if bucket.flat.sum().isfinite():
            return
        bad = [
            self.names[index]
            for index, view in zip(bucket.indexes, bucket.views, strict=True)
            if not view.isfinite().all()
        ]
        if bad:
            rank = dist.get_rank(self.group)
            _log.warning("rank %d has gradients that are not finite: %s", rank, ", ".join(bad))

    def _finish(self) -> None:
        """Ends a backward: reduces the remaining buckets, and waits for buckets that are not
        deferred."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            for position, index in enumerate(bucket.indexes):
                if not self._used[index]:
                    self._used[index] = bucket.fill(position)
                    self._use_view(bucket, position)
            self._launch()
        self._tell_what_was_reached()
        self.in_backward = False
        self.times.steps += 1
        for bucket in [bucket for bucket in self.buckets if self._defers(bucket)]:
            flight = self._flights[bucket.number] = BucketReduction(self, bucket)
            deferred.defer(bucket.parameters, flight)
        for bucket in self.buckets:
            if bucket.number not in self._flights:
                self.arrive(bucket)
        if self._split is None:
            self._leaving.learn()

    def _tell_what_was_reached(self) -> None:
        if self._static is not None:
            changed = [
                n for n, a, b in zip(self.names, self._static, self._used, strict=True) if a != b
            ]
            if changed:
                raise CollectiveError(
                    f"static_graph=True, but this backward reached other parameters than before: {changed}"
                )
            if not self._tail.size:
                return
        told = self._used + self._tail.write()
        self._mask.copy_(torch.frombuffer(told, dtype=torch.uint8))
        self._mask_work = self._reduce(self._mask, ReduceOp.MAX, None, FIRST)
        if self.options.static_graph:
            self._static = bytes(self._used)

    # Arrival

    def arrive(self, bucket: Bucket) -> None:
        """Waits for a bucket, hands its gradients out, and steps it if `step()` was called."""
        with isolated_torch_state():
            try:
                self._await(bucket)
            except Exception:  # the group has failed; an interrupt is no Exception
                self._release(bucket)
                raise
            flight = self._release(bucket)
            if not bucket.works:
                return
            self._land(bucket)
            if flight is not None and flight.stepping:
                assert self._split is not None
                self._split.step(bucket.parameters)

    def _release(self, bucket: Bucket) -> BucketReduction | None:
        """Makes the parameters of a bucket ordinary again; returns the bucket's reduction in
        flight."""
        deferred.restore(bucket.parameters)
        return self._flights.pop(bucket.number, None)

    def _await(self, bucket: Bucket) -> None:
        """Waits for a bucket and changes nothing else, so that the wait can be repeated after an
        interrupt."""
        if not bucket.works:
            return
        begun = self.times.clock()
        with span("wait", "bucket", bucket.number):
            if self._mask_work is not None:
                self._mask_work.wait()
            for work in bucket.works:
                assert work is not None
                work.wait()
        self.times.exposed_s += self.times.clock() - begun

    def _land(self, bucket: Bucket) -> None:
        """Hands out the gradients of a bucket after their arrival."""
        if self._mask_work is not None:
            self._mask_work = None
            told = self._mask.numpy().tobytes()
            self._reached = list(told[: len(self._used)])
            self._tail.read(told[len(self._used) :])
        bucket.works = []
        self._under_way.end()
        if self._sample_weights is not None:
            self._sample_weights.correct(bucket.flat)
        for position, index in enumerate(bucket.indexes):
            if self._reached[index]:
                bucket.hand_out(position)
            else:
                bucket.parameters[position].grad = None

    def settle(self) -> None:
        """Waits until no bucket is in flight."""
        for bucket in self.buckets:
            self.arrive(bucket)

    def stop(self) -> None:
        """Settles, then releases the parameters and the optimizer."""
        self.settle()
        self.abandon()

    def abandon(self) -> None:
        """Releases the parameters and the optimizer without waiting. Drops operations in flight,
        because the group may have failed."""
        for bucket in self.buckets:
            bucket.works = []
            deferred.restore(bucket.parameters)
        self._mask_work = None
        self._flights.clear()
        for hook in self._hooks:
            hook.remove()
        if self._split is not None:
            self._split.release()
            self._split = None
