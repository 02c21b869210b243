"""Pictures of the pages, for people to look at: `python -m tests.hai.dashboard.shoot FOLDER`.

A cluster of pretended nodes and gangs, for whose server the first seconds last hours.
"""

import math
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.hai.dashboard.browser import DESKTOP, PHONE, Browser
from tests.hai.server.fake_server import FakeEngine
from tests.hai.server.http.test_access import Somebody

from fireflyer.hai.client import Client
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home, ServerFile, locate
from fireflyer.hai.model import TaskSpec, TaskView
from fireflyer.hai.model.engine import Node
from fireflyer.hai.model.observations import Validator
from fireflyer.hai.model.validations import Ended, Finding, Returned, Suspected
from fireflyer.hai.sampling.series import LEVELS, point
from fireflyer.hai.server.process import Options, serve
from fireflyer.hai.validation.journal import Journal

LEAVES, NODES_OF_LEAF = 6, 16
STRETCH = 3000.0
STRETCHED_S = 13.0
"""So long each second lasts STRETCH, so that what `populate` does takes a day."""

PAGES = {
    "overview": "", "map": "/map", "queue": "/queue", "tasks": "/tasks", "task": "/tasks/t1",
    "waiting": "/tasks/t13", "use": "/use?window=7d", "nodes": "/nodes", "node": "/nodes/n5",
    "ledger": "/ledger", "users": "/users", "use-node": "/use?scope=node:n5", "over": "/tasks?state=over",
    "validations": "/validations", "validation": "/validations/n5", "leaf": "/map?leaf=leaf2",
    "stop": "/tasks/t1/stop", "error": "/tasks/t999",
}  # fmt: skip

DOCUMENTS = (
    ("hai-dashboard-task.png", "/tasks/t1", (1000, 820), False),
    ("hai-dashboard-phone.png", "", (390, 820), True),
    ("hai-dashboard-use.png", "/use?window=7d", (1000, 900), False),
)
"""Pictures that docs/operate/hai-dashboard.md shows."""


class Engine(FakeEngine):
    """Nodes of 8 GPUs on leaves; one is down."""

    def __init__(self, files: Path) -> None:
        super().__init__(0, files)
        for number in range(LEAVES * NODES_OF_LEAF):
            leaf = f"leaf{number // NODES_OF_LEAF + 1}"
            node = Node(
                name=f"n{number}", gpus=8, memory_mib=512_000, leaf=leaf,
                unheld="limits of cores are not enforced: /sys/fs/cgroup has no controller cpu",
            )  # fmt: skip
            if number == 77:
                node = Node(name="n77", state="down", reason="not answering", gpus=8, leaf=leaf)
            self._nodes.append(node)


class Cluster:
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.folder = folder
        self.client = Client(self.home)
        self.pid = 0

    def start(self, *, stretched: bool) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            if stretched:
                stretch()
            options = Options(home=locate(self.home), policy="timeshare")

            def ready(_server: ServerFile) -> None:
                os.write(writer, b"!")

            serve(options, ready, lambda options: Engine(options.home.path / "engine"))
            os._exit(0)
        assert os.read(reader, 1)

    def end(self) -> None:
        self.client.shutdown(keep=True)
        os.waitpid(self.pid, 0)


def populate(cluster: Cluster) -> None:
    """What happened today."""
    client, folder = cluster.client, cluster.folder
    script = folder / "train.py"
    script.write_text("")
    people = {name: Somebody(cluster, folder, name, "submit").client for name in (  # type: ignore[arg-type]
        "ada", "bob", "chen", "dana", "emil",
    )}  # fmt: skip

    def submit(user: str, name: str, nodes: int, *what: str, **more: Any) -> TaskView:
        spec = TaskSpec(
            script=str(script),
            cwd=str(folder),
            args=what or ("hold",),
            name=name,
            nodes=nodes,
            **more,
        )
        return people[user].submit(spec)

    pretrain = submit(
        "ada",
        "gpt-13b-pretrain",
        24,
        "say",
        "",
        expected_s=80_000,
        gpus=8,
        memory_mib=400_000,
        cpus=48,
    )
    client.wait(pretrain.id, {"running"}, 120)
    submit("bob", "vit-large", 8, gpus=8)
    submit("chen", "diffusion-sweep-3", 4, gpus=4)
    submit("chen", "diffusion-sweep-4", 4, gpus=4)
    pause(2)
    submit("dana", "asr-finetune", 2, "fail", "2", gpus=8, max_restarts=3)
    submit("emil", "tokenizer", 1, "finish", gpus=1)
    pause(3)
    client.suspend("t1")
    client.wait("t1", {"suspended"}, 120)
    pause(1.5)
    client.resume("t1")
    client.wait("t1", {"running"}, 120)
    submit("bob", "moe-8x7b", 32, gpus=8, priority="high")
    pause(3)
    client.observed(Validator(node="n5", check="gemm", passed=False, result="GPU 3: 11 % slower"))
    client.observed(Validator(node="n9", check="memory bandwidth", passed=True, result="2.9 TB/s"))
    client.drain("n40", "new power supply", time.time() + 7200)
    submit("dana", "asr-eval", 1, "fail", "9", gpus=2, max_restarts=1)
    submit("ada", "gpt-13b-eval", 2, gpus=8)
    for user, nodes in (("emil", 48), ("chen", 64), ("dana", 16), ("bob", 40)):
        submit(user, f"ablation-{nodes}", nodes, gpus=8, priority="low")
    pause(2)
    for rank in range(2):
        log(client, rank)


def record(home: Path) -> None:
    """A week of samples of the cluster and of a node, and the day of a task, with a gap at night."""
    draw = random.Random(1)
    store = Store(Home(home).database)
    samples = Samples(store.database)
    created = store.row("t1").created
    now = time.time()
    for minute in range(7 * 24 * 60, -1, -10):
        when = now - 60 * minute
        if 1500 < minute < 1800:
            continue
        day = 0.5 + 0.4 * math.sin(when / 86_400 * math.tau)
        held = 700 * day + draw.uniform(-20, 20)
        cpu = {
            "cpu": held * draw.uniform(4, 5),
            "memory": held * 4e9,
            "gpu": draw.uniform(0.7, 0.95),
        }
        points = {
            "cluster": point(
                held=held, capacity=760, queued=12 * day + draw.random(), running=40 * day,
                useful=draw.uniform(0.88, 0.97), gpu_memory=held * 3e10, read=held * 1e6,
                written=held * 2e5, received=held * 3e6, sent=held * 3e6, **cpu,
            ),
            "node:n5": point(held=8 * round(day), capacity=8, cpu=30 * day, memory=2e11, gpu=day),
        }  # fmt: skip
        if when > created:
            step = (when - created) / 2.4
            loss = 1.8 + 6 / (1 + step / 900) + draw.uniform(-0.05, 0.05)
            points["task:t1"] = point(
                held=192, step=step, loss=loss, speed=draw.uniform(0.39, 0.43), cpu=900,
                gpu=draw.uniform(0.85, 0.93),
            )  # fmt: skip
        for level in LEVELS:
            samples._put(level, when, points)
    store.close()


def validate(home: Path) -> None:
    """Weekly validations of all nodes; one of them is slow, and failed before it came back."""
    journal, draw, now = Journal(home), random.Random(3), time.time()
    for week in range(8, -1, -1):
        for number in range(LEAVES * NODES_OF_LEAF):
            speed = 0.8 if number == 9 and week < 3 else 1.0
            found = [
                Finding(
                    name=name, status="passed", unit=unit,
                    value=usual * draw.gauss(1, 0.01) * (speed if name == "disk write" else 1),
                )
                for name, usual, unit in (
                    ("memory bandwidth", 240, "GB/s"), ("disk write", 2900, "MB/s"),
                    ("gemm", 61, "GFLOP/CPU-s"), ("network latency", 3, "us"),
                )
            ]  # fmt: skip
            if number == 5 and week == 1:
                found[2] = Finding(name="gemm", status="failed", value=50.0, reason="2 bits differ")
            wall = now - week * 7 * 86_400 - 600 * number
            journal.add(
                Ended(
                    node=f"n{number}", wall=wall, task="t9", trigger="weekly", findings=tuple(found)
                )
            )
    wall = now - 6.9 * 86_400
    journal.add(Suspected(node="n5", wall=wall, kind="validator", check="gemm", drained=True))
    journal.add(Returned(node="n5", wall=wall + 7200))


def pause(seconds: float) -> None:
    """Time in which things last."""
    time.sleep(seconds)


def log(client: Client, rank: int) -> None:
    """As a training script writes."""
    loss = 7.2
    lines = ["\x1b[32mresumed from step 1200\x1b[0m\n"]
    for step in range(1200, 1260):
        loss -= loss * 0.011
        lines.append(
            f"step {step:5d}  loss {loss:.4f}  lr 2.9e-04  tokens/s 1.42e6  grad norm {loss / 9:.3f}\n"
        )
    Path(client.task("t1").ranks[rank].log).write_text("".join(lines))


def stretch() -> None:
    """From here on this process has a clock that runs fast, until it has caught up with the world's."""
    read = time.time
    begun = read()

    def stretched() -> float:
        return read() - max(STRETCHED_S - (read() - begun), 0.0) * (STRETCH - 1)

    time.time = stretched


def shoot_pages(browser: Browser, folder: Path, pages: dict[str, str]) -> None:
    """Takes the pictures of pages, and names what is wider than the window."""
    for size, kind in ((DESKTOP, "desktop"), (PHONE, "phone")):
        for dark in (False, True):
            for name, address in pages.items():
                browser.look(size, dark=dark)
                browser.open(address)
                if browser.overhang() or browser.wide():
                    print(f"{name} on a {kind}: {browser.overhang()} px, {browser.wide()}")
                height = browser.run("return document.documentElement.scrollHeight")
                browser.look((size[0], min(int(height), 3000)), dark=dark)
                browser.picture(folder / f"{name}-{kind}{'-dark' if dark else ''}.png")


def shoot(cluster: Cluster, folder: Path) -> None:
    browser = Browser(cluster.folder)
    try:
        browser.open(cluster.client.dashboard_link())
        browser.until_text("h1", "Overview")
        root = browser.driver.current_url
        shoot_pages(browser, folder, {name: root + page for name, page in PAGES.items()})
        for name, page, size, dark in DOCUMENTS:
            browser.look(size, dark=dark)
            browser.open(root + page)
            if "/tasks/" in page:
                browser.until_text("#log-note", "Live.")
            browser.picture(folder / name)
        browser.driver.delete_all_cookies()
        shoot_pages(browser, folder, {"sign-in": root})
    finally:
        browser.close()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        cluster = Cluster(Path(temporary))
        try:
            cluster.start(stretched=True)
            populate(cluster)
            cluster.end()
            record(cluster.home)
            validate(cluster.home)
            cluster.start(stretched=False)
            shoot(cluster, folder)
            cluster.end()
        except BaseException:
            os.kill(cluster.pid, signal.SIGKILL)
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
