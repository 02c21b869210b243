"""Read-only view of a cluster's state, for its indexes and the searches for nodes."""

from typing import Protocol

from fireflyer.hai.model.devices import DeviceTable
from fireflyer.hai.model.windows import Window
from fireflyer.hai.scheduling.capacity import Capacity
from fireflyer.hai.scheduling.changes import Changes
from fireflyer.hai.scheduling.jobs import Job
from fireflyer.hai.scheduling.placement import Topology
from fireflyer.hai.scheduling.policies import Policy


class ClusterView(Protocol):
    """Read-only view of a `Cluster`, which documents the attributes."""

    policy: Policy
    names: list[str]
    places: dict[str, int]
    on: list[dict[str, Job]]
    capacity: Capacity
    devices: DeviceTable
    topology: Topology
    ready: int
    suspect: int
    windows: dict[str, Window]
    changes: Changes

    def allowed(self, job: Job, now: float) -> int:
        """Returns the nodes that the job may use, free or not. For avoided nodes see
        `Job.avoid`."""
