"""Spans for torch's profiler: which bucket or unit a collective or a wait belongs to.

The names are `haiscale:all_reduce bucket 3`, `haiscale:wait unit blocks.0`. The span of a
collective covers only the start of the collective. The event that HFReduce records inside,
`hfreduce:all_reduce`, lasts until the collective has ended.
"""

import contextlib

from torch.autograd.profiler import record_function

from fireflyer.torch_internals.core import profiler_enabled

_NOTHING = contextlib.nullcontext()


def span(operation: str, kind: str, name: int | str) -> contextlib.AbstractContextManager[object]:
    """Returns a context that is a span if torch's profiler records, and otherwise does nothing.

    Args:
        kind: "bucket" or "unit".
        name: number of the bucket, or name of the unit.
    """
    if not profiler_enabled():
        return _NOTHING
    span: contextlib.AbstractContextManager[object] = record_function(
        f"haiscale:{operation} {kind} {name}"
    )
    return span
