"""Lab: several hosts on one machine, as network namespaces with shaped links and byte counters."""

from fireflyer.lab.hosts import Host, Lab, remove_stale

__all__ = ["Host", "Lab", "remove_stale"]
