"""HFReduce: collectives that reduce on the CPU (paper section IV).

    import torch.distributed as dist
    dist.init_process_group("hfreduce")      # a backend like any other, registered with torch;
                                             # joins a running group if FIREFLYER_JOIN is set

    grads = hfreduce.empty(1_000_000)        # zero-copy memory: reduced in place
    hfreduce.allreduce(grads, op=dist.ReduceOp.AVG)

An entry point registers the backend when torch is imported; importing `fireflyer.hfreduce.torch`
registers it, too. Importing this package alone does not import torch.
"""

from typing import TYPE_CHECKING, Any

from fireflyer.extras import need_torch
from fireflyer.hfreduce.registration import register_backend as register_backend

if TYPE_CHECKING:
    from fireflyer.hfreduce.torch import (
        ProcessGroupHFReduce as ProcessGroupHFReduce,
    )
    from fireflyer.hfreduce.torch import Wire as Wire
    from fireflyer.hfreduce.torch import all_gather as all_gather
    from fireflyer.hfreduce.torch import allreduce as all_reduce  # noqa: F401  # torch's name
    from fireflyer.hfreduce.torch import allreduce as allreduce
    from fireflyer.hfreduce.torch import empty as empty
    from fireflyer.hfreduce.torch import empty_like as empty_like
    from fireflyer.hfreduce.torch import reduce_scatter as reduce_scatter

__all__ = [
    "ProcessGroupHFReduce",
    "Wire",
    "all_gather",
    "allreduce",
    "empty",
    "empty_like",
    "reduce_scatter",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    if name == "all_reduce":  # torch's name
        name = "allreduce"
    if name in __all__:
        need_torch(f"{__name__}.{name}")
        import fireflyer.hfreduce.torch as face

        return getattr(face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
