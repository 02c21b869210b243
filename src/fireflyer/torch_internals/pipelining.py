"""Private names of `torch.distributed.pipelining`."""

from torch.distributed.pipelining import _backward

stage_backward_input = _backward.stage_backward_input
"""Computes the gradients of a stage's inputs alone (zero-bubble schedules).

Instead of this entry and the next: whole backwards, at the cost of the bubble."""

stage_backward_weight = _backward.stage_backward_weight
"""Computes the gradients of a stage's parameters, which `stage_backward_input` left out."""
