"""HaiScale: parallel training over HFReduce (paper section V).

`ddp.DistributedDataParallel` replicates a module and averages its gradients while backward runs.
`fsdp.FullyShardedDataParallel` shards a module. `mesh` makes meshes of ranks with named dimensions.
`record(model)` measures how a step's time is spent, `report(model)` returns the result, and
`show(model)` prints it.
"""

from typing import TYPE_CHECKING, Any

from fireflyer.extras import need_torch

if TYPE_CHECKING:
    from fireflyer.haiscale.reporting.recorder import Recorder as Recorder
    from fireflyer.haiscale.reporting.report import Report as Report
    from fireflyer.haiscale.reporting.report import peak_flops as peak_flops
    from fireflyer.haiscale.reporting.report import record as record
    from fireflyer.haiscale.reporting.report import report as report
    from fireflyer.haiscale.reporting.report import show as show

__all__ = ["Recorder", "Report", "peak_flops", "record", "report", "show"]

need_torch(__name__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        import fireflyer.haiscale.reporting.report as face

        return getattr(face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
