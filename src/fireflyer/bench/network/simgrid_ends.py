"""Script for the system's Python, which has SimGrid: python3 simgrid_ends.py JOB RESULT (both
JSON).

The job has `links` (bytes per second by name) and `flows`: [sender, receiver, links, bytes]. The result
has `seconds`, for which SimGrid ran, and `ends`: the time at which each flow ended.
"""

import json
import sys
import time

import simgrid


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    engine = simgrid.Engine([
        "simgrid_ends", "--cfg=network/model:CM02", "--cfg=network/TCP-gamma:0",
        "--cfg=network/crosstraffic:0", "--cfg=maxmin/precision:1e-9",
        "--cfg=surf/precision:1e-12", "--log=root.thres:error",
    ])  # fmt: skip
    zone = simgrid.NetZone.create_full_zone("net")
    links = {}
    for name, rate in job["links"].items():
        links[name] = zone.create_link(f"l{name}", float(rate))
        links[name].set_latency(0)
        links[name].seal()
    ends = sorted({end for flow in job["flows"] for end in flow[:2]})
    hosts = {end: zone.create_host(f"h{end}", 1e9) for end in ends}
    for host in hosts.values():
        host.seal()
    routed = set()
    for sender, receiver, path, _ in job["flows"]:
        if (sender, receiver) not in routed:
            routed.add((sender, receiver))
            used = [simgrid.LinkInRoute(links[str(one)]) for one in path]
            zone.add_route(
                hosts[sender].netpoint, hosts[receiver].netpoint, None, None, used, False
            )
    zone.seal()
    comms = []

    def all_flows() -> None:
        for sender, receiver, _, size in job["flows"]:
            comm = simgrid.Comm.sendto_init(hosts[sender], hosts[receiver])
            comms.append(comm.set_payload_size(int(size)))
        for comm in comms:
            comm.start()
        simgrid.Comm.wait_all(comms)

    simgrid.Actor.create("flows", next(iter(hosts.values())), all_flows)
    begin = time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - begin
    with open(result_path, "w") as file:
        json.dump({"seconds": seconds, "ends": [comm.finish_time for comm in comms]}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
