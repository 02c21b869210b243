"""A cluster in a few words."""

from typing import Any

from fireflyer.hai.lifecycle import Action, Launch, Preempt
from fireflyer.hai.scheduling.cluster import Cluster, Job, Node
from fireflyer.hai.scheduling.planner import plan


class Bench:
    """A cluster, its clock, and the actions so far."""

    def __init__(self, policy: str, nodes: int | list[Node], gpus: int = 0) -> None:
        if isinstance(nodes, int):
            nodes = [Node(name=f"n{number}", gpus=gpus) for number in range(nodes)]
        self.cluster = Cluster(nodes, policy)
        self.now = 0.0
        self.count = 0

    def submit(self, *asked: tuple[int, str] | dict[str, Any]) -> list[Action]:
        """Jobs of (nodes, user), or of fields; then a plan."""
        for each in asked:
            fields: dict[str, Any] = (
                each if isinstance(each, dict) else {"nodes": each[0], "user": each[1]}
            )
            self.count += 1
            number = self.count
            fields = {"id": f"t{number}", "order": number, **fields}
            self.cluster.submit(Job(**fields), self.now)
        return self.plan()

    def plan(self, later: float = 0.0) -> list[Action]:
        """Lets time pass, plans, and applies; what is launched runs at once."""
        self.now += later
        actions = plan(self.cluster, self.now)
        for action in actions:
            self.cluster.apply(action, self.now)
            if isinstance(action, Launch):
                self.cluster.running(action.task, self.now)
        return actions

    def end(self, *tasks: str) -> list[Action]:
        """These are over; then a plan."""
        for task in tasks:
            self.cluster.remove(task, self.now)
        return self.plan()

    def leave(self, *tasks: str, after: float = 0.0) -> list[Action]:
        """These have made room and wait again; then a plan."""
        self.now += after
        for task in tasks:
            self.cluster.requeue(task, self.now)
        return self.plan()


def launched(actions: list[Action]) -> list[tuple[str, tuple[str, ...]]]:
    return [(action.task, action.nodes) for action in actions if isinstance(action, Launch)]


def preempted(actions: list[Action]) -> list[str]:
    return [action.task for action in actions if isinstance(action, Preempt)]
