"""Random histories of a cluster, from a seed: what happens to `plan` in years, in a few milliseconds.

`python -m tests.hai.plan.histories --count 50000 [--first 0]` runs many and counts what there was.
"""

import argparse
import copy
import heapq
import math
import random
import re
import sys
from collections import Counter
from itertools import pairwise

import msgspec

from fireflyer.hai.lifecycle import Action, Launch, Preempt
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.scheduling import planner
from fireflyer.hai.scheduling.cluster import ALL, AUTO, TICK_S, Cluster, Job, Node, Quota, Window
from fireflyer.hai.scheduling.jobs import Reservation
from fireflyer.hai.scheduling.planner import plan
from fireflyer.hai.scheduling.policies import POLICIES
from fireflyer.hai.scheduling.preemption import VictimIndex
from fireflyer.hai.scheduling.why import Texts, explain

DAY = 86_400.0


class History:
    """One cluster, its jobs and what befalls them, checked after every plan.

    Time is virtual. Every job needs some seconds of work; it has all of it done at the end, whatever was
    interrupted, lost or repaired on the way.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.looks = random.Random(-seed)
        self.policy = self.random.choice(sorted(POLICIES))
        self.crowded = POLICIES[self.policy].preemptive and self.looks.random() < 0.5
        """Many small jobs of few users, and some that need whole nodes: jobs move for others."""
        self.users = [f"u{number}" for number in range(self.random.randint(1, 5))]
        self.gpus = self.random.choice([0, 1, 4, 8])
        self.mixed = self.random.random() < 0.2
        if self.crowded:
            self.users, self.gpus = self.users[:2], 8
        self.kinds = self.looks.choice(
            [[""], [""], ["a100", "v100"], ["a100-pcie-40gb", "a100", ""]]
        )
        self.cluster = Cluster(self._nodes(), self.policy)
        if self.crowded:
            after_s = self.looks.choice([0.0, 60.0, 7200.0])
            rules = msgspec.structs.replace(self.cluster.policy, repack_after_s=after_s)
            self.cluster.policy = rules  # before it knows any job
        self.now = 0.0
        self.events: list[tuple[float, int, str, str, int]] = []
        self.tick = 0
        self.work: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self.ended: set[str] = set()
        self.began: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.evicted: set[str] = set()
        """Jobs that the next plan has to preempt."""
        self._rules()
        for _ in range(self.random.randint(2, 25) * (3 if self.crowded else 1)):
            self._at(self.random.uniform(0, 2 * DAY), "arrive")
        for _ in range(self.random.randint(0, 6)):
            kind = self.random.choice(["fault", "drain", "evict", "suspect", "suspend", "quota"])
            self._at(self.random.uniform(0, 3 * DAY), kind)

    def _nodes(self) -> list[Node]:
        zones = self.random.choice([1, 1, 2, 3])
        count = self.random.randint(1, 12)
        return [
            Node(
                name=f"n{number}",
                gpus=self.random.choice([2, 4, 8]) if self.mixed else self.gpus,
                memory_mib=self.random.choice([0, 64, 128]) if self.mixed else 0,
                gpu_type=self.looks.choice(self.kinds),
                zone=f"z{number * zones // count}",
                leaf=f"l{number // 3}",
            )
            for number in range(count)
        ]

    def _rules(self) -> None:
        for _ in range(self.random.choice([0, 0, 1, 3])):
            self._set_quota()
        if self.random.random() < 0.2:
            begin = self.random.uniform(0, 2 * DAY)
            names = frozenset(self.random.sample(self.cluster.names, len(self.cluster.names) // 2))
            user = self.random.choice(["", *self.users])
            end = begin + self.random.uniform(60, DAY)
            self.cluster.set_window(Window(id="w", nodes=names, begin=begin, end=end, user=user))

    def _set_quota(self) -> None:
        limit = self.random.choice([None, Quota(nodes=self.random.randint(1, 4)), Quota(gpus=8)])
        user = self.random.choice(["*", *self.users])
        priority = self.random.choice(sorted(PRIORITIES.values()))
        self.cluster.set_quota(user, priority, self.random.choice(["*", ""]), limit)

    def _at(self, when: float, kind: str, name: str = "", attempt: int = 0) -> None:
        self.tick += 1
        heapq.heappush(self.events, (when, self.tick, kind, name, attempt))

    # -- what happens ------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """To the end of all jobs.

        Raises:
            AssertionError: a promise of the scheduler is broken.
        """
        steps = 0
        while True:
            look = self.cluster.next_look(self.now)
            if not self.events and look is None:
                break
            if look is not None and (not self.events or look < self.events[0][0]):
                assert look >= self.now
                self.now = look
            else:
                self.now, _, kind, name, attempt = heapq.heappop(self.events)
                self._happens(kind, name, attempt)
            self._plan()
            steps += 1
            assert steps < 20_000, "nothing comes to an end"
        self._all_done()
        return self.counts

    def _happens(self, kind: str, name: str, attempt: int) -> None:
        self.counts[kind] += 1
        job = self.jobs.get(name)
        if kind == "arrive":
            self._arrive()
        elif kind in ("fault", "drain", "evict", "suspect"):
            self._harm(kind)
        elif kind == "repair":
            self.broken.discard(name)
            self._set(name, "ready")
        elif kind == "suspend":
            self._suspend()
        elif kind == "quota":
            self._set_quota()
        elif job is not None and job.attempt == attempt:
            if kind == "started" and job.phase == "starting":
                self.cluster.running(name, self.now)
                self.began[name] = self.now
                self._at(self.now + self.work[name], "finish", name, attempt)
            elif kind == "finish" and job.phase == "running":
                self.cluster.remove(name, self.now)
                self.ended.add(name)
            elif kind == "left" and job.phase == "suspending":
                self.cluster.requeue(name, self.now)
            elif kind == "held" and job.phase == "suspending":
                self.cluster.hold(name, self.now)
                self._at(self.now + self.random.uniform(0, DAY), "resume", name, attempt)
            elif kind == "resume" and job.phase == "held":
                self.cluster.requeue(name, self.now)

    def _arrive(self) -> None:
        name = f"t{len(self.jobs) + 1}"
        work = self.random.choice([30.0, 600.0, 7200.0, DAY]) * self.random.uniform(0.5, 2)
        largest = max(node.gpus for node in self.cluster.nodes.values())
        job = Job(
            id=name,
            order=len(self.jobs) + 1,
            nodes=self.random.randint(1, min(5, len(self.cluster.names))),
            gpus=self.random.randint(0, largest),
            memory_mib=self.random.choice([0, 0, 32]),
            user=self.random.choice(self.users),
            priority=self.random.choice([10, 10, 10, 10, AUTO, *PRIORITIES.values()]),
            estimate_s=work if self.random.random() < 0.5 else None,
        )
        if self.crowded:
            job.nodes = self.looks.choice([1, 1, 1, 1, job.nodes])
            job.gpus = (
                self.looks.choice([0, largest])
                if self.looks.random() < 0.2
                else self.looks.choice([1, 2, 3])
            )
        if job.gpus and self.kinds != [""] and self.looks.random() < 0.5:
            job.gpu_type = self.looks.choice(["a100", "a100", "v100", "a100-pcie-40gb"])
        self.jobs[name], self.work[name] = job, work
        self.cluster.submit(job, self.now)

    def _harm(self, kind: str) -> None:
        name = self.random.choice(self.cluster.names)
        if name in self.broken:
            return
        self.broken.add(name)
        self._at(self.now + self.random.uniform(60, DAY), "repair", name)
        health = {"fault": "down", "drain": "drained", "evict": "drained", "suspect": "suspect"}
        self._set(name, health[kind])
        if kind == "evict":
            self.cluster.evict(name, "new fan")
            self.evicted = {
                job.id for job in self.cluster.jobs_on(name) if job.phase != "suspending"
            }
        if kind == "fault":
            for job in self.cluster.jobs_on(name):
                job.avoid |= {name}
                self.cluster.requeue(job.id, self.now)

    def _set(self, name: str, health: str) -> None:
        node = self.cluster.nodes[name]
        fields = {
            field: getattr(node, field)
            for field in ("gpus", "gpu_type", "memory_mib", "zone", "leaf")
        }
        self.cluster.set_node(Node(name=name, health=health, **fields))  # type: ignore[arg-type]

    def _suspend(self) -> None:
        running = [job for job in self.jobs.values() if job.phase in ("starting", "running")]
        running = [job for job in running if job.id not in self.ended]
        if running:
            job = self.random.choice(running)
            self._save(job)
            self.cluster.suspending(job.id, self.now)
            self._at(self.now + self.random.uniform(0, 30), "held", job.id, job.attempt)

    def _save(self, job: Job) -> None:
        if job.phase == "running":
            self.work[job.id] = max(0.0, self.work[job.id] - (self.now - self.began[job.id]))

    # -- the plan, and what it promises ------------------------------------------------------------

    def _plan(self) -> None:
        cluster = self.cluster
        cluster.advance(self.now)
        narrow = bool(cluster.queue) and cluster.fresh != ALL
        evicting = dict(cluster.evicting)
        actions = plan(cluster, self.now)
        reserved = self._reserved()
        remembered = (
            cluster.preemption_caches,
            cluster.victim_index,
            cluster.fresh,
            cluster.alike,
            cluster.again,
        )
        movers = cluster.movers
        cluster.preemption_caches, cluster.victim_index, cluster.fresh, cluster.movers = (
            {},
            VictimIndex(cluster),
            ALL,
            {},
        )
        cluster.evicting = evicting
        assert plan(cluster, self.now) == actions, "what it remembers changes what it says"
        preempted = {action.task for action in actions if isinstance(action, Preempt)}
        assert self.evicted <= preempted, "a job stays on an evicted node"
        self.counts["evicted"] += len(self.evicted)
        self.evicted = set()
        assert remembered[4] == cluster.again
        assert actions or cluster.again or self._reserved() == reserved
        self.counts["narrow plan"] += narrow
        self.counts["narrow find"] += narrow and bool(actions)
        self.counts["cut"] += len(actions) >= planner.BATCH
        (
            cluster.preemption_caches,
            cluster.victim_index,
            cluster.fresh,
            cluster.alike,
            cluster.again,
        ) = remembered
        cluster.movers = movers
        for action in actions:
            self.counts[type(action).__name__] += 1
            self._check_action(action)
            if isinstance(action, Preempt):
                self._save(self.jobs[action.task])
            self.cluster.apply(action, self.now)
            if isinstance(action, Launch):
                self._at(self.now + self.random.uniform(0, 60), "started", *_at(action))
            elif isinstance(action, Preempt):
                self._at(self.now + self.random.uniform(0, 30), "left", *_at(action))
        self._check_cluster()
        self._check_devices()
        if not actions and not cluster.again:
            self._check_waits()
        if not actions:  # what was decided is followed by events
            self._check_rest()

    def _reserved(self) -> list[Reservation]:
        """What is kept for jobs; a time that has passed is as good as now."""
        return [
            kept
            if kept.until is None
            else Reservation(
                kept.task, kept.places, kept.whole, kept.reason, max(kept.until, self.now)
            )
            for kept in self.cluster.reserved
        ]

    def _check_action(self, action: Action) -> None:
        job = self.jobs[action.task]
        if isinstance(action, Launch):
            assert job.phase == "queued"
            assert len(set(action.nodes)) == len(action.nodes) == job.nodes, (
                "a gang starts as a whole"
            )
            assert action.attempt == job.attempt + 1
            nodes = [self.cluster.nodes[name] for name in action.nodes]
            assert all(node.health in ("ready", "suspect") for node in nodes)
            assert all(serves(node.gpu_type, job.gpu_type) for node in nodes), "the wrong type"
            zones = [node.zone for node in nodes]
            crossings = sum(a != b for a, b in pairwise(zones))
            assert crossings <= 1, "at most one pair of neighbours crosses zones"
            assert self.cluster.room_in_quota(job)
            if job.id in self.cluster.moving:
                self.counts["moved"] += (
                    self.cluster.moving[job.id] == self.cluster.places[nodes[0].name]
                )
        elif isinstance(action, Preempt):
            assert job.phase in ("starting", "running")
            if action.why.startswith("makes room for "):
                other = self.jobs[action.why.removeprefix("makes room for ")]
                assert self.cluster.policy.preemptive
                assert other.level >= job.level
                if self.cluster.policy.spares_own:
                    assert other.user != job.user or other.level > job.level
            if action.to:
                self._check_move(job, action)

    def _check_move(self, job: Job, action: Preempt) -> None:
        self.counts["move"] += 1
        cluster, policy = self.cluster, self.cluster.policy
        text, other = action.why.split(", which makes room for ")
        assert text == f"moves to {action.to}"
        waiting = self.jobs[other]
        assert waiting.phase == "queued"
        assert waiting.level >= job.level
        assert self.now >= waiting.since + policy.repack_after_s
        assert self.now >= job.launched_at + policy.quantum_s(job), "it moves within its quantum"
        assert job.nodes == 1
        assert action.to not in job.placement
        to = 1 << cluster.places[action.to]
        assert to & cluster.ready & cluster.allowed(job, self.now)
        assert cluster.capacity.fitting(job.gpus, job.memory_mib, to), "it has nowhere to go"

    def _check_cluster(self) -> None:
        cluster = self.cluster
        waiting = {job.id for job in cluster.in_order()}
        assert len(waiting) == len(cluster.queue)
        assert cluster.jobs.keys() == self.jobs.keys() - self.ended, "a job is lost"
        held: dict[str, list[Job]] = {name: [] for name in cluster.names}
        for job in cluster.jobs.values():
            assert (job.id in waiting) == (job.phase == "queued")
            assert bool(job.placement) == (job.phase in ("starting", "running", "suspending"))
            for name in job.placement:
                held[name].append(job)
        for name, jobs in held.items():
            node = cluster.nodes[name]
            taken = sum(job.gpus for job in jobs)
            assert taken <= node.gpus, "more GPUs than there are"
            assert len(jobs) <= 1 or all(job.gpus for job in jobs), "not alone on its node"
            memory = sum(job.memory_mib for job in jobs)
            assert not node.memory_mib or memory <= node.memory_mib
            whole = len(jobs) == 1 and not jobs[0].gpus
            assert cluster.capacity.free[cluster.places[name]] == (
                0 if whole else node.gpus - taken
            )

    def _check_devices(self) -> None:
        """Every job that holds nodes has devices of its own there."""
        taken: dict[str, set[int]] = {name: set() for name in self.cluster.names}
        for job in self.cluster.jobs.values():
            for name, given in zip(job.placement, job.devices, strict=bool(job.devices)):
                node = self.cluster.nodes[name]
                assert len(given) == (job.gpus or node.gpus), "too few devices"
                assert not taken[name] & set(given), "a device is given twice"
                assert set(given) <= set(range(node.gpus)), "no such device"
                taken[name] |= set(given)
            assert job.devices or not any(self.cluster.nodes[n].gpus for n in job.placement)
        for name, devices in taken.items():
            free = self.cluster.devices.free(self.cluster.places[name])
            assert {n for n in range(free.bit_length()) if free >> n & 1} == (
                set(range(self.cluster.nodes[name].gpus)) - devices
            )

    def _check_waits(self) -> None:
        """Nothing is due: a job whose devices are free waits for a rule that `why` names."""
        cluster = self.cluster
        texts = Texts(cluster, self.now)
        for job in cluster.in_order():
            found = explain(cluster, job, self.now, expect=False)
            assert texts.text(job) == found.text
            self.counts[f"waits: {found.rule}"] += 1
            assert found.rule != "start", f"{job.id} waits for nothing: {found.text}"
            if found.rule == "busy":
                free = self._free_for(job)
                places = sum(1 << cluster.places[name] for name in free)
                assert not cluster.topology.enough(job.nodes, places), f"{job.id}: {found.text}"
            elif found.rule == "reserved":
                other = next(iter(re.findall(r"reserved for (t\d+)", found.text)))
                assert other != job.id
                assert self.jobs[other].phase in ("queued", "suspending")

    def _free_for(self, job: Job) -> list[str]:
        """Counts anew, from the placements: the nodes that have what a member of the job needs."""
        found = []
        for node in self.cluster.nodes.values():
            on = [other for other in self.cluster.jobs.values() if node.name in other.placement]
            left = node.gpus - sum(other.gpus or node.gpus for other in on)
            memory = node.memory_mib - sum(other.memory_mib for other in on)
            if (
                node.health in ("ready", "suspect")
                and serves(node.gpu_type, job.gpu_type)
                and (left >= job.gpus if job.gpus else not on)
                and (not node.memory_mib or memory >= job.memory_mib)
                and all(other.gpus for other in on)
            ):
                found.append(node.name)
        return found

    def _check_rest(self) -> None:
        """Until shortly before `next_look` a plan finds nothing to do, if nothing happens."""
        look = self.cluster.next_look(self.now)
        end = min(
            DAY + self.now if look is None else look - TICK_S,
            self.events[0][0] if self.events else math.inf,
        )
        if self.now < end and self.looks.random() < (0.5 if self.cluster.windows else 0.03):
            self.counts["rest"] += 1
            asleep = copy.deepcopy(self.cluster)
            assert plan(asleep, self.looks.uniform(self.now, end)) == [], (
                "a moment is slept through"
            )

    def _all_done(self) -> None:
        """What is left is what can never run."""
        cluster = self.cluster
        for job in cluster.jobs.values():
            assert job.phase == "queued"
            capacity, everywhere = cluster.capacity, cluster.ready
            everywhere &= cluster.devices.typed(job.gpu_type)
            large = capacity.sized(job.gpus, job.memory_mib, everywhere)
            possible = cluster.topology.enough(job.nodes, large) and cluster.room_in_quota(job)
            assert not possible, f"{job.id} waits for ever"
            self.counts["impossible"] += 1
        self.counts["ended"] += len(self.ended)


def serves(kind: str, asked: str) -> bool:
    """Whether GPUs of this type are what a job asks for."""
    return asked in ("", kind) or kind.split("-")[0] == asked


def _at(action: Launch | Preempt) -> tuple[str, int]:
    return action.task, action.attempt


def main() -> int:
    """Runs `--count` histories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.count):
        try:
            total += History(seed).run()
        except AssertionError as failure:
            print(f"seed {seed}: {failure}")
            return 1
    print(f"{options.count} histories from seed {options.first}: {dict(sorted(total.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
