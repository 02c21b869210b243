"""What a plan costs on a large, full cluster: `python -m tests.hai.plan.measure [--nodes 2000 --jobs 5000]`.

Prints, for each policy, the milliseconds of CPU time of: the first plan, all plans of the first moment
together (a plan ends after `planner.BATCH` actions, and the next one goes on), and the median and the longest
plan after single events: a job ends, one arrives, a node fails. Every plan is counted.
"""

import argparse
import random
import statistics
import time

import msgspec

from fireflyer.hai.lifecycle import Launch, Preempt
from fireflyer.hai.scheduling.cluster import Cluster, Job, Node
from fireflyer.hai.scheduling.planner import plan
from fireflyer.hai.scheduling.policies import POLICIES

KINDS = ("a100-pcie-40gb", "a100-sxm4-80gb", "v100")


def cluster_of(nodes: int, policy: str) -> Cluster:
    """Nodes of 8 GPUs of three types, 40 on a leaf, in two zones."""
    return Cluster(
        [
            Node(
                name=f"n{n}",
                gpus=8,
                gpu_type=KINDS[n // 40 % 3],
                zone=f"z{n * 2 // nodes}",
                leaf=f"l{n // 40}",
            )
            for n in range(nodes)
        ],
        policy,
    )


def job(number: int, draw: random.Random) -> Job:
    """Of 97 users, mostly of normal priority, mostly of one node; half of those for some GPUs name a
    type."""
    nodes = draw.choice([1, 1, 1, 1, 2, 4, 16])
    gpus = draw.choice([1, 2, 4, 8, 0]) if nodes == 1 else 0
    return Job(
        id=f"t{number}", order=number, nodes=nodes, gpus=gpus, user=f"u{number % 97}",
        gpu_type=draw.choice(["", "", "a100", "v100"]) if gpus else "",
        priority=draw.choice([8, 10, 10, 10, 20]), estimate_s=draw.uniform(60, 1e5),
    )  # fmt: skip


def plan_all(cluster: Cluster, now: float) -> list[tuple[float, int]]:
    """Plans until there is no more to do at this moment; of each plan its CPU time in ms and its actions."""
    found: list[tuple[float, int]] = []
    while not found or cluster.again:
        begin = time.thread_time()
        actions = plan(cluster, now)
        found.append(((time.thread_time() - begin) * 1e3, len(actions)))
        for action in actions:
            cluster.apply(action, now)
            if isinstance(action, Launch):
                cluster.running(action.task, now)
            elif isinstance(action, Preempt):
                cluster.requeue(action.task, now)
    return found


def measure(policy: str, nodes: int, jobs: int, events: int) -> str:
    """One line of the table."""
    draw = random.Random(1)
    cluster = cluster_of(nodes, policy)
    now = 0.0
    for number in range(jobs):
        now += 1.0
        cluster.submit(job(number, draw), now)
    first = plan_all(cluster, now)
    rest: list[tuple[float, int]] = []
    for step in range(events):
        now += 60.0
        match step % 3:
            case 0:
                running = [each.id for each in cluster.jobs.values() if each.phase == "running"]
                cluster.remove(draw.choice(running), now)
            case 1:
                cluster.submit(job(jobs + step, draw), now)
            case _:
                name = draw.choice(cluster.names)
                for each in cluster.jobs_on(name):
                    cluster.requeue(each.id, now)
                node = cluster.nodes[name]
                cluster.set_node(msgspec.structs.replace(node, health="down"))
        rest += plan_all(cluster, now)
    times = sorted(took for took, _ in rest)
    longest, actions = max(rest)
    return (
        f"{policy:<16} first {first[0][0]:6.1f}  of {len(first)} plans {sum(t for t, _ in first):6.1f}, "
        f"{sum(n for _, n in first)} launches;  then {len(rest)} plans: "
        f"median {statistics.median(times):6.2f}  p99 {times[-len(times) // 100 - 1]:6.2f}  "
        f"longest {longest:6.2f} ({actions} actions); {len(cluster.queue)} wait"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--policy", choices=POLICIES, action="append")
    options = parser.parse_args()
    for policy in options.policy or POLICIES:
        print(measure(policy, options.nodes, options.jobs, options.events), flush=True)


if __name__ == "__main__":
    main()
