"""Private names of `torch.distributed.tensor`; importing them does not load FSDP."""

from torch.distributed.tensor import _utils

compute_local_shape_and_global_offset = _utils.compute_local_shape_and_global_offset
"""Returns shape and offsets of a DTensor's local part.

Instead: `torch.distributed.tensor.placement_types`, applied to one dimension after the other."""
