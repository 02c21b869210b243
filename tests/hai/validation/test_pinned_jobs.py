"""Validation tasks start beside the queue, on idle nodes only, and make room like other tasks."""

import pytest

from fireflyer.hai.controller.pinned_jobs import PinnedJobs
from fireflyer.hai.lifecycle import Launch, Preempt
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.scheduling.cluster import Cluster, Health, Job, Node
from fireflyer.hai.scheduling.planner import plan


def cluster_of(policy: str = "timeshare", **health: Health) -> tuple[Cluster, PinnedJobs]:
    cluster = Cluster([Node(name=name, health=found) for name, found in health.items()], policy)
    return cluster, PinnedJobs(cluster)


def validation(order: int = 1) -> Job:
    return Job(id=f"v{order}", order=order, priority=PRIORITIES["low"])


def started(cluster: Cluster, found: list[Launch], now: float = 0.0) -> list[tuple[str, ...]]:
    for launch in found:
        cluster.apply(launch, now)
    return [launch.nodes for launch in found]


@pytest.mark.parametrize("health", ["ready", "suspect", "drained"])
def test_an_idle_node_is_validated_at_once(health: Health) -> None:
    cluster, pinned = cluster_of(a="ready", b=health)
    pinned.add(validation(), "b", 0.0)
    assert plan(cluster, 0.0) == []
    assert started(cluster, pinned.launches()) == [("b",)]
    assert pinned.launches() == []
    assert cluster.jobs_on("b")[0].level == PRIORITIES["low"]


def test_a_node_that_is_down_or_busy_is_not() -> None:
    cluster, pinned = cluster_of(a="down", b="ready")
    cluster.submit(Job(id="t1", order=1), 0.0)
    started(cluster, [found for found in plan(cluster, 0.0) if isinstance(found, Launch)])
    for order, name in ((2, "a"), (3, "b"), (4, "unknown")):
        pinned.add(validation(order), name, 0.0)
    assert pinned.launches() == []
    cluster.remove("t1", 1.0)
    assert started(cluster, pinned.launches()) == [("b",)]


def test_queued_tasks_come_first_except_on_drained_nodes() -> None:
    cluster, pinned = cluster_of(a="ready", b="drained")
    cluster.submit(Job(id="t1", order=1, nodes=2), 0.0)
    assert plan(cluster, 0.0) == []
    pinned.add(validation(2), "a", 0.0)
    pinned.add(validation(3), "b", 0.0)
    assert started(cluster, pinned.launches()) == [("b",)]


def test_a_validation_makes_room_for_a_task() -> None:
    cluster, pinned = cluster_of(a="ready")
    pinned.add(validation(), "a", 0.0)
    started(cluster, pinned.launches())
    cluster.running("v1", 1.0)
    cluster.submit(Job(id="t1", order=2), 2.0)
    actions = plan(cluster, 2.0)
    assert [(type(one), one.task) for one in actions] == [(Preempt, "v1")]
    cluster.apply(actions[0], 2.0)
    cluster.hold("v1", 3.0)
    pinned.wait("v1")
    assert [type(one) for one in plan(cluster, 3.0)] == [Launch]
    assert pinned.launches() == [], "the task waits for the node, too"


def test_suspended_and_ended_validations_wait_for_nothing() -> None:
    cluster, pinned = cluster_of(a="ready")
    pinned.add(validation(1), "a", 0.0)
    pinned.pause("v1")
    assert pinned.launches() == []
    pinned.wait("v1")
    cluster.remove("v1", 1.0)
    pinned.forget("v1")
    assert pinned.launches() == []
    assert pinned.nodes == {}


def test_a_recovered_validation_keeps_its_node() -> None:
    cluster, pinned = cluster_of(a="ready")
    job = validation()
    job.phase, job.placement, job.attempt = "running", ("a",), 1
    pinned.add(job, "a", 0.0)
    assert pinned.launches() == []
    assert [one.id for one in cluster.jobs_on("a")] == ["v1"]
