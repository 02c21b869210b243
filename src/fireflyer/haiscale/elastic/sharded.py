"""Sharded model as `elastic.training.Wrapper`; resharded after each reform, from memory if
possible."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fireflyer.errors import ShardsLost
from fireflyer.haiscale.consistency import Options, described
from fireflyer.hfreduce import ProcessGroupHFReduce


class ShardedModel(Protocol):
    """Interface of `FullyShardedDataParallel` that the elastic steps use."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def _alike(self) -> Options: ...
    def discard(self) -> bool: ...
    def reshard(
        self, process_group: ProcessGroup | None, *, steps: int | None, values: bool = True
    ) -> object: ...


class Shards:
    """Implementation of `elastic.training.Wrapper`.

    Attributes:
        lost: error while parameters have no values, because no surviving rank had some of their
            rows in memory; else None.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: Optimizer,
        group: ProcessGroupHFReduce,
    ) -> None:
        self._model, self._optimizer, self._group = model, optimizer, group
        self._buffers: list[torch.Tensor] = []
        self.lost: ShardsLost | None = None

    def described(self) -> list[str]:
        return described(self._model.module, self._model._alike)

    def keep(self) -> None:
        self._drop_gradients()
        self._buffers = [buffer.detach().clone() for buffer in self._model.module.buffers()]

    def void(self) -> None:
        self._drop_gradients()
        with torch.no_grad():
            for buffer, kept in zip(self._model.module.buffers(), self._buffers, strict=True):
                buffer.copy_(kept)

    def drop(self) -> None:
        self._model.discard()

    def align(self, progress: Sequence[int], leader: int) -> Callable[[], None]:
        mine = progress[self._group.rank()]
        holds = mine >= 0 and self.lost is None
        try:
            self._model.reshard(self._group, steps=mine if holds else None)
            self.lost = None
        except ShardsLost as error:
            self._model.reshard(self._group, steps=None, values=False)
            self.lost = error
        return lambda: None  # `reshard` installed the state; if it failed, the old parts remain

    def restored(self) -> None:
        self.lost = None

    def reformed(self) -> None:
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._model.module.parameters():
            parameter.grad = None
