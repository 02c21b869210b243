"""Order of a job's hosts: neighbours in rank order are neighbours in the network."""

from collections.abc import Sequence
from typing import Any

from fireflyer.errors import FabricError
from fireflyer.fabric.net import Net


def job_order(planes: Sequence[Net], hosts: Sequence[str]) -> dict[str, Any]:
    """Orders the hosts of a job by zone, then leaf, then port of their first endpoint.

    Returns:
        `hosts` in rank order, `zones` with the zone label of each, `zone_count` and `leaf_count`.

    Raises:
        FabricError: a host is unknown, has no cable or is named twice, or no host is named.
    """
    places: dict[str, tuple[int, int, int, int]] = {}
    for number, net in enumerate(planes):
        at, ports = net.attached
        for end, name in enumerate(net.endpoints):
            switch = int(at[end])
            if switch >= 0:
                place = (number, int(net.zones[switch]), switch, int(ports[end]))
                places.setdefault(name.rpartition("/")[0], place)
    if not hosts:
        raise FabricError("the job has no hosts; expected their names, one a line")
    if len(set(hosts)) < len(hosts):
        twice = next(host for place, host in enumerate(hosts) if host in hosts[:place])
        raise FabricError(f"host {twice!r} appears twice in the job")
    unknown = [host for host in hosts if host not in places]
    if unknown:
        raise FabricError(
            f"host {unknown[0]!r} has no cable in the network; {len(hosts)} hosts requested, "
            f"{len(hosts) - len(unknown)} found"
        )
    ordered = sorted(hosts, key=lambda host: places[host])
    return {
        "hosts": ordered,
        "zones": [f"plane{places[host][0]}-zone{places[host][1]}" for host in ordered],
        "zone_count": len({places[host][:2] for host in ordered}),
        "leaf_count": len({places[host][:3] for host in ordered}),
    }
