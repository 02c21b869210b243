"""Prefetcher: gathers parameters before their module's turn, in the order of the last forward.

Prefetches depend only on the order of modules, never on arrivals, so all ranks start the same
all-gathers in the same order. An unneeded gather is dropped at the end of the forward or of
backward.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from fireflyer.errors import ConfigError
from fireflyer.haiscale.sharding.gradients import Sharding, Unit
from fireflyer.torch_internals.core import current_graph_task_id
from fireflyer.torch_internals.sharding import FSDPParamGroup, TrainingState


@contextlib.contextmanager
def _outside_inference() -> Iterator[None]:
    """Leaves `torch.inference_mode`, because autograd would reject tensors that are gathered in
    this mode and kept for training."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Prefetcher:
    """Replaces `unshard` in each unit (parameter group of `fully_shard`).

    Args:
        ahead: number of units to gather before their turn in forward.
        backward: when to gather a unit before its turn in backward; None: never.

    Attributes:
        closed: reason why gathering is forbidden at the moment; "" if it is allowed.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        sharding: Sharding,
        ahead: int,
        backward: BackwardPrefetch | None,
    ) -> None:
        self.closed = ""
        self._units, self._sharding, self._ahead = list(units), sharding, ahead
        self._order: list[Unit] = []  # units of the last forward
        self._entered: list[Unit] = []  # units of this forward
        self._follows = False  # True while this forward repeats the order of the last forward
        self._prefetching = False
        self._hooks = [
            root.register_forward_pre_hook(self._begin, prepend=True),
            root.register_forward_hook(self._end),
        ]
        for unit in units:
            unit.group.unshard_async_op = True
            unit.group.unshard = self._unshard(unit)
            unit.group.wait_for_unshard = self._wait(unit)
            if backward != BackwardPrefetch.BACKWARD_PRE:
                self._prefetch_after(unit, backward is not None)

    def release(self) -> None:
        """Ends the prefetching by this object."""
        for hook in self._hooks:
            hook.remove()

    def check_open(self) -> None:
        if self.closed:
            raise ConfigError(f"parameters cannot be gathered: {self.closed}")

    def _begin(self, *_: Any) -> None:
        if current_graph_task_id() == -1:
            self._entered, self._follows = [], True

    def _end(self, *_: Any) -> None:
        if current_graph_task_id() != -1:
            return
        self._order = self._entered
        for unit in self._units:
            gathered, unit.group._all_gather_result = unit.group._all_gather_result, None
            if gathered is not None and gathered.all_gather_work is not None:
                gathered.all_gather_work.wait()

    def _unshard(self, unit: Unit) -> Any:
        @_outside_inference()
        def unshard(async_op: bool = False) -> None:
            self.check_open()
            self._sharding.arrive(unit)  # gathered values must be final
            group = unit.group
            if group._training_state != TrainingState.PRE_BACKWARD and unit.is_stale():
                group._to_sharded()
            if not group.is_unsharded and group._all_gather_result is None:
                unit.note_versions()
            FSDPParamGroup.unshard(group, async_op)
            if group._training_state == TrainingState.FORWARD and not self._prefetching:
                self._enter(unit)

        return unshard

    def _wait(self, unit: Unit) -> Any:
        @_outside_inference()
        def wait_for_unshard() -> None:
            waits = unit.group._all_gather_result is not None
            FSDPParamGroup.wait_for_unshard(unit.group)
            if waits:
                self._sharding.watch(unit)

        return wait_for_unshard

    def _enter(self, unit: Unit) -> None:
        """Records a unit's turn in forward, and gathers the following units while it computes."""
        place = len(self._entered)
        self._entered.append(unit)
        self._follows = self._follows and self._order[place : place + 1] == [unit]
        if self._follows:
            for follower in self._order[place + 1 : place + 1 + self._ahead]:
                self._prefetch(follower, "forward")

    def _prefetch(self, unit: Unit, direction: str) -> None:
        self._prefetching = True
        try:
            FSDPParamGroup._prefetch_unshard(unit.group, direction)
        finally:
            self._prefetching = False

    def _prefetch_after(self, unit: Unit, prefetches: bool) -> None:
        """Sets when the unit after this unit in backward is gathered: when this unit's gradients
        are ready if `prefetches` is True, otherwise in its turn."""
        group = unit.group
        by_group = {id(one.group): one for one in self._units}
        following: list[Unit] = []

        def note() -> None:
            if group._training_state == TrainingState.PRE_BACKWARD and group._post_forward_indices:
                place = group._post_forward_indices.pop()
                if place > 0 and prefetches:
                    before = group.comm_ctx.post_forward_order[place - 1]
                    following.append(by_group[id(before)])

        def post_backward(*_: Any) -> None:
            FSDPParamGroup.post_backward(group)
            while following:
                self._prefetch(following.pop(), "backward")

        group._backward_prefetch = note
        group.post_backward = post_backward
