"""Events for torch's profiler, one per collective, named like gloo's: `hfreduce:all_reduce`."""

import threading
from collections.abc import Callable

import torch
from torch.autograd.profiler import record_function

from fireflyer._native import hfreduce as native
from fireflyer.hfreduce.backend.work import Work
from fireflyer.torch_internals.core import profiler_enabled as enabled

__all__ = ["enabled", "recorded"]

_NAMES = {native.Kind.ALLREDUCE: "all_reduce"}


def recorded(kind: native.Kind, submit: Callable[[], Work]) -> Work:
    """Submits a collective inside a profiler event, and returns its work.

    The event ends when the collective ends, before any wait returns.
    """
    with record_function(f"hfreduce:{_NAMES.get(kind) or kind.name.lower()}") as event:
        work = submit()
        over: torch.futures.Future[None] = torch.futures.Future()
        event._call_end_callbacks_on_future(over)
    begun_in = threading.get_ident()

    def end() -> None:
        if threading.get_ident() != begun_in:
            over.set_result(None)
            return
        # The profiler marks an event as asynchronous if another thread ends it.
        thread = threading.Thread(target=over.set_result, args=(None,))
        thread.start()
        thread.join()

    if work.is_completed():
        end()
    else:
        work.finish_with(end)
    return work
