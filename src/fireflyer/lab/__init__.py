"""Several hosts on one machine: network namespaces joined by shaped links, with byte counters."""

from fireflyer.lab.hosts import Host, Lab, remove_stale

__all__ = ["Host", "Lab", "remove_stale"]
