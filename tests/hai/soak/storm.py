"""Who submits and steers, and who kills: seeded, but at the mercy of the clock."""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from tests.hai.soak.target import KILLED, Platform, Process
from tests.hai.soak.work import Work

from fireflyer.errors import FireflyerError, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import TaskSpec

SCRIPT = Path(__file__).with_name("work.py")
LOOK_S = 0.1
WAIT_S = 2.0
"""How long a blow waits for the event that it is to follow."""

MOMENTS = (
    *("submitted", "queued", "starting", "rank_started", "running"),
    *("suspending", "rank_exited", "gang_ended"),
)
"""Events that blows follow at once; as many come at any moment."""

MORE = ("pair", "several", "server and others", "starting server")
"""Blows at more than one process: guard and supervisor of a node in one instant; several but the server; the
server and others; the server, one that dies meanwhile, and the next server while it starts."""

Make = Callable[[random.Random], TaskSpec]


class Users:
    """Two threads: one keeps tasks in the queue, one suspends and resumes. What a dying server does not
    acknowledge is asked again, as another task."""

    def __init__(self, client: Client, seed: int, waiting: int) -> None:
        """`waiting`: tasks that are not over at a time."""
        self.acknowledged: dict[str, str] = {}
        """Kind, by task."""
        self.asked: Counter[str] = Counter()
        self.problems: list[str] = []
        self._client = client
        self._chance = random.Random(seed)
        self._waiting = waiting
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=partial(self._run, act)) for act in (self._submit, self._steer)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nothing new is asked once this returns."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _run(self, act: Callable[[random.Random], None]) -> None:
        chance = random.Random(f"{act.__name__} {self._chance.random()}")
        while not self._done.wait(LOOK_S):
            try:
                act(chance)
            except TaskError:
                self.asked["refused"] += 1
            except FireflyerError:
                self.asked["no answer"] += 1
            except Exception as error:  # noqa: BLE001  # told at the end
                self.problems.append(f"a client failed: {error!r}")
                return

    def _submit(self, chance: random.Random) -> None:
        while len(self._client.tasks(live=True)) < self._waiting and not self._done.is_set():
            kind = chance.choice([*KINDS])
            view = self._client.submit(KINDS[kind](chance))
            self.acknowledged[view.id] = kind

    def _steer(self, chance: random.Random) -> None:
        for view in self._client.tasks(live=True):
            if view.state == "suspended":
                self._client.resume(view.id)
                self.asked["resume"] += 1
            elif view.state in ("running", "starting") and chance.random() < 0.03:
                self._client.suspend(view.id)
                self.asked["suspend"] += 1


def _spec(work: Work, **fields: object) -> TaskSpec:
    made = TaskSpec(
        script=str(SCRIPT), cwd=str(SCRIPT.parent), args=(msgspec.json.encode(work).decode(),),
        max_restarts=100_000, max_node_faults=100_000, grace_s=5.0, start="exec",
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def _steps(chance: random.Random, **more: bool) -> Work:
    return Work(chance.randint(2, 20), chance.choice([0.02, 0.05, 0.1]), **more)


KINDS: dict[str, Make] = {
    "exec": lambda chance: _spec(_steps(chance)),
    "fork": lambda chance: _spec(_steps(chance), start="fork"),
    "gang": lambda chance: _spec(
        _steps(chance), nodes=2, ranks_per_node=chance.choice([1, 2]),
        start=chance.choice(["fork", "exec"]),
    ),
    "leaves processes": lambda chance: _spec(_steps(chance, detach=True), start="fork"),
    "urgent": lambda chance: _spec(_steps(chance), nodes=2, priority="very_high"),
    "elastic": lambda chance: _spec(
        _steps(chance, elastic=True), nodes=2, elastic=True, start=chance.choice(["fork", "exec"])
    ),
}  # fmt: skip


class Killer:
    """Blows of SIGKILL against processes of one platform, which is up again after each."""

    def __init__(self, platform: Platform, seed: int, every_s: float) -> None:
        """`every_s`: between two blows, on average."""
        self.kills: Counter[str] = Counter()
        self.blows: Counter[str] = Counter()
        self.history: list[str] = []
        self.problems: list[str] = []
        self._platform = platform
        self._chance = random.Random(seed)
        self._every_s = every_s
        self._deck: list[str] = []
        self._begun = time.monotonic()

    def run(self, seconds: float, blows: int) -> None:
        """For so long, and at least so many blows."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.blows.total() < blows:
            time.sleep(self._every_s * self._chance.uniform(0.2, 1.4))
            moment = self._chance.choice((*MOMENTS, *len(MOMENTS) * ("any moment",)))
            if moment != "any moment":
                self._await(moment)
            self._look_after_server()
            self._strike(moment)
        self._look_after_server()

    def _look_after_server(self) -> None:
        """It is up again after each blow, so it has ended by itself if it is not."""
        if not self._platform.served:
            self.problems.append("the server ended by itself; its log has the reason")
            self._tell("the server ended by itself")
            self._platform.up()

    def _await(self, moment: str) -> None:
        """Until the next event of this kind, if one comes soon."""
        client = self._platform.client
        deadline = time.monotonic() + WAIT_S
        with contextlib.suppress(FireflyerError):
            _, seq = client.task_at("t1")
            while (left := deadline - time.monotonic()) > 0:
                news = client.events(after=seq, wait_s=left)
                if any(event.kind == moment for event in news):
                    return
                seq = news[-1].seq if news else seq

    def _strike(self, moment: str) -> None:
        if not self._deck:
            self._deck = [*KILLED, *KILLED, *MORE]
            self._chance.shuffle(self._deck)
        blow = self._deck.pop()
        victims = self._choose(blow, self._platform.processes())
        hit = [victim for victim in victims if self._platform.kill(victim)]
        for victim in hit:
            self.kills[victim.role] += 1
        if not hit:
            return
        self.blows[blow] += 1
        names = ", ".join(f"{v.role} {v.task} {v.node}".strip() for v in hit)
        self._tell(f"{blow} at {moment}: {names}")
        if not self._platform.served:
            self._up(blow)

    def _choose(self, blow: str, alive: list[Process]) -> list[Process]:
        chance = self._chance
        mortal = sorted(process for process in alive if process.role != "other")
        servers = [process for process in mortal if process.role == "server"]
        others = [process for process in mortal if process.role != "server"]
        if blow == "pair":
            guards = [process for process in mortal if process.role == "guard"]
            if not guards:
                return []
            task, node = (one := chance.choice(guards)).task, one.node
            roles = ("guard", "supervisor")
            return [p for p in mortal if (p.task, p.node) == (task, node) and p.role in roles]
        if blow == "several":
            return chance.sample(others, min(len(others), chance.randint(2, 5)))
        if blow == "server and others":
            return [*servers, *chance.sample(others, min(len(others), chance.randint(1, 3)))]
        if blow == "starting server":
            return servers
        wanted = [process for process in mortal if process.role == blow]
        return [chance.choice(wanted)] if wanted else []

    def _up(self, blow: str) -> None:
        """After a pause, in which processes may die unseen; sometimes a server dies while it starts."""
        time.sleep(self._chance.choice([0.0, 0.0, self._chance.uniform(0.0, 0.8)]))
        if blow in ("server and others", "starting server"):
            others = [p for p in self._platform.processes() if p.role not in ("server", "other")]
            if others and self._platform.kill(victim := self._chance.choice(sorted(others))):
                self.kills[victim.role] += 1
                self._tell(f"while no server was there: {victim.role} {victim.task} {victim.node}")
        if blow == "starting server":
            answer = self._platform.begin()
            time.sleep(self._chance.uniform(0.0, 1.5))
            for process in self._platform.processes():
                if process.role == "server" and self._platform.kill(process):
                    self.kills["server"] += 1
                    self._tell("a server while it started")
            os.close(answer)
        if not self._platform.served:
            self._platform.up()

    def _tell(self, text: str) -> None:
        self.history.append(f"{time.monotonic() - self._begun:.2f} s: {text}")
