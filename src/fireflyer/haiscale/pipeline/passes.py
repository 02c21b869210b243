"""Forward and backward of one micro-batch through one stage.

Private functions of torch 2.13 used here: `stage_backward_input` and `stage_backward_weight` of its
pipelining package, which divide a backward in two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fireflyer.errors import ConfigError
from fireflyer.torch_internals.pipelining import stage_backward_input, stage_backward_weight


def tensors_of(output: object, stage: int) -> list[torch.Tensor]:
    """Returns the tensors of a stage's output: one tensor, or a tuple of them."""
    found: list[Any] = list(output) if isinstance(output, tuple | list) else [output]
    if not found or not all(isinstance(value, torch.Tensor) for value in found):
        raise ConfigError(
            f"invalid module of stage {stage}: its output is {type(output).__name__}, expected a "
            "tensor or a tuple of tensors"
        )
    return found


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


class Pass:
    """Processing of one micro-batch on one stage, from its forward to the end of its backward.

    Attributes:
        inputs: tensors that the stage received.
        outputs: tensors that the stage produced, or its loss on the last stage.
    """

    def __init__(self, stage: int, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.stage, self.inputs = stage, list(inputs)
        self.outputs: list[torch.Tensor] = []
        self._module = module
        self._gradients: list[torch.Tensor] | None = None
        self._groups: list[dict[str, Any]] | None = None

    def forward(self, recomputes: bool) -> list[torch.Tensor]:
        try:
            if recomputes:
                output = checkpoint(self._module, *self.inputs, use_reentrant=False)
            else:
                output = self._module(*self.inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"the module of stage {self.stage} cannot take its input ({_shapes(self.inputs)}): "
                f"{error}"
            ) from error
        self.outputs = tensors_of(output, self.stage)
        return self.outputs

    def lose(self, criterion: Callable[..., Any], labels: Sequence[Any], divisor: int) -> Any:
        """Replaces the outputs by the loss divided by `divisor`; returns the loss before the
        division."""
        try:
            loss = criterion(*self.outputs, *labels)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            outputs, targets = _shapes(self.outputs), _shapes(labels) or "none"
            raise ConfigError(
                f"the criterion on stage {self.stage} cannot take the output ({outputs}) and the "
                f"labels ({targets}): {error}"
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"invalid criterion on stage {self.stage}: it returned {what}, expected a scalar tensor"
            )
        self.outputs = [loss / divisor]
        return loss.detach()

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Accumulates the gradients of the parameters; returns the gradients of the inputs."""
        roots = [out for out in self.outputs if out.requires_grad]
        if roots:
            torch.autograd.backward(roots, list(gradients) or None)
        self.outputs = []
        return self._input_gradients()

    def backward_input(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the gradients of the inputs; `backward_weight` computes the gradients of the
        parameters."""
        self._gradients = list(gradients)
        if not any(value.requires_grad for value in self.inputs):
            return []
        roots = [out for out in self.outputs if out.requires_grad]
        _, self._groups = stage_backward_input(
            roots, list(gradients) or None, self.inputs, self._module.parameters()
        )
        self.outputs = []
        return self._input_gradients()

    def backward_weight(self) -> None:
        if self._groups is not None:
            stage_backward_weight(self._module.parameters(), self._groups)
        else:
            assert self._gradients is not None
            self.backward(self._gradients)
        self._groups = self._gradients = None
        self.inputs = []

    def divisible(self) -> None:
        """Replaces output views by tensors that `backward_input` can detach."""
        self.outputs = [out.clone() if out._is_view() else out for out in self.outputs]

    def _input_gradients(self) -> list[torch.Tensor]:
        wanted = [value for value in self.inputs if value.requires_grad]
        return [
            value.grad if value.grad is not None else torch.zeros_like(value) for value in wanted
        ]
