"""Base of the data-parallel wrappers: names in states, forward, elastic steps, suspend votes."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fireflyer.errors import ConfigError
from fireflyer.haiscale.elastic.training import Elastic
from fireflyer.haiscale.elastic.training import Wrapper as ElasticWrapper
from fireflyer.haiscale.gradients.suspend_vote import SuspendVote
from fireflyer.hfreduce import ProcessGroupHFReduce
from fireflyer.torch_internals.core import eval_frame_callback


@dataclass(frozen=True)
class ElasticOptions:
    """Arguments for elastic steps, which all wrappers have.

    Attributes:
        elastic: True if steps are elastic.
        redivide, members_file: see `elastic.training.Elastic`.
    """

    elastic: bool
    redivide: Callable[[int, int], object] | None
    members_file: str | os.PathLike[str] | None

    def check(self, optimizer: object) -> None:
        """Raises ConfigError if an argument is given without another argument that it needs."""
        if self.elastic and optimizer is None:
            raise ConfigError("elastic=True needs the optimizer: optimizer=...")
        if not self.elastic and (self.redivide is not None or self.members_file is not None):
            raise ConfigError("redivide= and members_file= need elastic=True")

    def controller(
        self, wrapper: ElasticWrapper, optimizer: Optimizer, group: ProcessGroupHFReduce
    ) -> Elastic:
        """Makes the controller of elastic steps."""
        return Elastic(
            wrapper, optimizer, group, redivide=self.redivide, members_file=self.members_file
        )


class Wrapper(nn.Module, ABC):
    """Wrapper around `module`. Its state has the names that `module` has without the wrapper."""

    module: nn.Module
    require_backward_grad_sync: bool
    """If False, a backward accumulates locally, as inside `no_sync`."""
    _leaving: SuspendVote
    _elastic: Elastic | None

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward(eval_frame_callback() not in (None, False))
        return self.module(*args, **kwargs)

    @abstractmethod
    def _before_forward(self, compiles: bool) -> None:
        """Prepares a forward; `compiles` is True if torch.compile is active during the forward."""

    @property
    def elastic(self) -> Elastic:
        """Controller of elastic steps.

        Raises:
            ConfigError: the model was wrapped without `elastic=True`.
        """
        if self._elastic is None:
            raise ConfigError("this model was wrapped without elastic=True")
        return self._elastic

    @property
    def suspending(self) -> bool:
        """True if a rank was asked to leave, so that all ranks should save and leave. Equal on all
        ranks between two backwards.

        In deferred mode, a vote that is sent with one backward counts from the next backward on.
        False without `should_suspend`, and while elastic ranks are about to reform the group.
        """
        return self._leaving.suspending and (self._elastic is None or self._elastic.whole)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of `module`, under the names that `module` has without the wrapper."""
        if args or kwargs.get("destination") is not None:  # an enclosing module collects states
            around: dict[str, Any] = super().state_dict(*args, **kwargs)
            return around
        state: dict[str, Any] = self.module.state_dict(**kwargs)
        return state

    def _fqn_modifiers(self) -> dict[str, str]:
        """Returns the prefix of `module`'s parts, for `torch.distributed.checkpoint.state_dict`."""
        parts = (
            self.module.named_children(),
            self.module.named_parameters(recurse=False),
            self.module.named_buffers(recurse=False),
        )
        return {name: "module" for named in parts for name, _ in named}

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Gives `named_parameters` and `named_buffers` the names of the state."""
        yield from self.module._named_members(*args, **kwargs)

    def register_comm_hook(self, *_: object, **__: object) -> None:
        """Raises ConfigError: the reduction is not torch's."""
        raise ConfigError(
            f"{type(self).__name__} reduces gradients itself and takes no hooks: use wire='bf16', 'fp16' or "
            "'int8' to compress them, or torch's DistributedDataParallel over a group of hfreduce"
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates whole gradients locally; the first backward outside reduces their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
