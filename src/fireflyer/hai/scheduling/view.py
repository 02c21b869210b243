"""The part of a cluster's state that its indexes and the searches for nodes read."""

from typing import Protocol

from fireflyer.hai.model.devices import DeviceTable
from fireflyer.hai.model.windows import Window
from fireflyer.hai.scheduling.capacity import Capacity
from fireflyer.hai.scheduling.changes import Changes
from fireflyer.hai.scheduling.jobs import Job
from fireflyer.hai.scheduling.placement import Topology
from fireflyer.hai.scheduling.policies import Policy


class ClusterView(Protocol):
    """A `Cluster`, to be read; its attributes are explained there."""

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
        """Returns nodes the job may use, free or not; for avoided ones see `Job.avoid`."""
