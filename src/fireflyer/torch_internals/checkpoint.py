"""Private names of `torch.distributed.checkpoint`."""

from torch.distributed.checkpoint import _nested_dict, filesystem

StorageInfo = filesystem._StorageInfo
"""Datum by which torch's metadata places a tensor in a file; part of DCP's format on disk.

Instead: a class of our own, under the name that torch pickles."""

flatten_state_dict = _nested_dict.flatten_state_dict
"""Names the leaves of a nested state as DCP does. Instead: the same walk in `dcp_keys`."""
