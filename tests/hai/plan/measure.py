"""What a plan costs on a large, full cluster: `python -m tests.hai.plan.measure [--nodes 2000 --jobs 5000]`.

Prints, for each policy, the milliseconds of the first plan (nothing is remembered yet), and the median and
the longest of those after single events: a job ends, one arrives, a node fails.
"""

import argparse
import random
import statistics
import time

from fireflyer.hai.lifecycle import Launch, Preempt
from fireflyer.hai.scheduling.cluster import Cluster, Job, Node
from fireflyer.hai.scheduling.planner import plan
from fireflyer.hai.scheduling.policies import POLICIES


def cluster_of(nodes: int, policy: str) -> Cluster:
    """Nodes of 8 GPUs, 40 on a leaf, in two zones."""
    return Cluster(
        [
            Node(name=f"n{n}", gpus=8, zone=f"z{n * 2 // nodes}", leaf=f"l{n // 40}")
            for n in range(nodes)
        ],
        policy,
    )


def job(number: int, draw: random.Random) -> Job:
    nodes = draw.choice([1, 1, 1, 1, 2, 4, 16])
    gpus = draw.choice([1, 2, 4, 8, 0]) if nodes == 1 else 0
    return Job(
        id=f"t{number}", order=number, nodes=nodes, gpus=gpus, user=f"u{number % 97}",
        priority=draw.choice([8, 10, 10, 10, 20]), estimate_s=draw.uniform(60, 1e5),
    )  # fmt: skip


def measure(policy: str, nodes: int, jobs: int) -> str:
    """One line of the table."""
    draw = random.Random(1)
    cluster = cluster_of(nodes, policy)
    now, times = 0.0, []
    for number in range(jobs):
        now += 1.0
        cluster.submit(job(number, draw), now)
    for step in range(300):
        begin = time.perf_counter()
        actions = plan(cluster, now)
        times.append((time.perf_counter() - begin) * 1e3)
        for action in actions:
            cluster.apply(action, now)
            if isinstance(action, Launch):
                cluster.running(action.task, now)
            elif isinstance(action, Preempt):
                cluster.requeue(action.task, now)
        now += 60.0
        running = [each.id for each in cluster.jobs.values() if each.phase == "running"]
        match step % 3:
            case 0:
                cluster.remove(draw.choice(running), now)
            case 1:
                cluster.submit(job(jobs + step, draw), now)
            case _:
                name = draw.choice(cluster.names)
                for each in cluster.jobs_on(name):
                    cluster.requeue(each.id, now)
                cluster.set_node(Node(name=name, gpus=8, health="down"))
    rest = sorted(times[1:])
    waiting = len(cluster.queue)
    return (
        f"{policy:<16} first {times[0]:7.1f}  median {statistics.median(rest):6.2f}  "
        f"p99 {rest[-3]:6.2f}  longest {rest[-1]:6.2f}  ({waiting} wait)"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=5000)
    options = parser.parse_args()
    for policy in POLICIES:
        print(measure(policy, options.nodes, options.jobs), flush=True)


if __name__ == "__main__":
    main()
