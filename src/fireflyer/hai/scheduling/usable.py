"""Nodes that a job may use, free or not. Pure."""

from fireflyer.hai.scheduling.jobs import AVOID_S, Job
from fireflyer.hai.scheduling.view import ClusterView


def allowed(cluster: ClusterView, job: Job, now: float) -> int:
    """Returns the ready and suspect nodes with GPUs of the job's type that no window closes for the
    job. For avoided nodes see `Job.avoid`."""
    found = cluster.ready | cluster.suspect
    if job.gpu_type:
        found &= cluster.devices.typed(job.gpu_type)
    for window in cluster.windows.values():
        if window.end > now >= window.closes(job.estimate_s) and not window.admits(
            job.user, job.group
        ):
            for name in window.nodes:
                if name in cluster.places:
                    found &= ~(1 << cluster.places[name])
    if job.avoid and (job.phase != "queued" or now < job.since + AVOID_S):
        others = found
        for name in job.avoid & cluster.places.keys():
            others &= ~(1 << cluster.places[name])
        large = cluster.capacity.sized(job.gpus, job.memory_mib, others)
        if cluster.topology.enough(job.nodes, large):
            found = others
    return found


def large_enough(cluster: ClusterView, job: Job) -> int:
    """Returns the nodes that are large enough for a member of the job and have its type of GPUs, in
    any state."""
    found = (1 << len(cluster.names)) - 1
    if job.gpu_type:
        found &= cluster.devices.typed(job.gpu_type)
    return cluster.capacity.sized(job.gpus, job.memory_mib, found)
