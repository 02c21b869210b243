"""`make soak-kv SECONDS=600`: processes of the store and of the page cache on fs3, killed by SIGKILL.

Writers that replace each other, readers, cache processes, and the file system's own service are
killed; sometimes a second writer starts beside the first. Checked are: no acknowledged write is
lost; no write that was called after a newer writer opened is acknowledged; readers never go back; no
page is another key's; nothing is damaged on the disk; the cache keeps to its capacity.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.kv.soak.role import CAPACITY, KEYS

from fireflyer import kv
from fireflyer.bench.fs.cluster import Service
from fireflyer.kv import inspection
from fireflyer.kv.pages import inspection as pages
from fireflyer.storage import open_storage

URL = "fs3:///soak"
KINDS = ("writer", "reader", "pages", "pages")


class Worker:
    """A process of one role, and a thread that keeps its lines."""

    def __init__(self, kind: str, seed: int, lines: list[tuple[str, int, list[str]]]) -> None:
        self.kind = kind
        command = [sys.executable, "-m", "tests.kv.soak.role", kind, URL, str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines, self._seed = lines, seed
        self.opened = threading.Event()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if not line.endswith("\n"):
                    return
                self._lines.append((self.kind, self._seed, line.split()))
                if " opened " in line:
                    self.opened.set()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.thread.join()


class Soak:
    """The file system, the processes, and what they told."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.lines: list[tuple[str, int, list[str]]] = []
        self.workers: list[Worker] = []
        self.kills: Counter[str] = Counter()
        self._seed = seed * 1_000_000
        self.service = self._serve()

    def _serve(self) -> Service:
        service = Service(self.folder / "up.log", ["--dir", self.folder / "fs"])
        service.wait_until_ready()
        return service

    def start(self, kind: str) -> Worker:
        self._seed += 1
        self.workers.append(Worker(kind, self._seed, self.lines))
        return self.workers[-1]

    def disturb(self) -> None:
        """Kills something, and starts what is missing."""
        chance = self.rng.random()
        if chance < 0.06:
            self.kills["file system"] += 1
            self.service.kill()
            self.service = self._serve()
        elif chance < 0.2:
            self.start("writer")  # beside the one that writes: it must notice
        else:
            victim = self.rng.choice(self.workers)
            self.kills[victim.kind] += 1
            victim.kill()
        for worker in [each for each in self.workers if each.process.poll() is not None]:
            worker.thread.join()
            self.workers.remove(worker)
        for kind in set(KINDS):
            missing = KINDS.count(kind) - sum(each.kind == kind for each in self.workers)
            for _ in range(missing):
                self.start(kind)

    def run(self, seconds: float) -> None:
        for kind in KINDS:
            self.start(kind)
        for worker in self.workers:
            worker.opened.wait(60)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(2.0, self.rng.expovariate(1.5)))
            self.disturb()
        for worker in self.workers:
            worker.kill()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.service.close()


def judged(soak: Soak) -> tuple[list[str], Counter[str]]:
    """Returns what is wrong, and counts."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    opened: list[tuple[float, int]] = []
    acknowledged: dict[int, str] = {}
    for kind, _, words in soak.lines:
        counts[f"{kind} {words[1]}"] += 1
        if words[1] in ("WRONG", "damaged"):
            wrong.append(" ".join((kind, *words)))
        if kind == "writer" and words[1] == "opened":
            opened.append((float(words[0]), int(words[2])))
        if words[1] == "pages" and int(words[5]) > CAPACITY + (8 << 20):
            wrong.append(f"the cache has {words[5]} bytes")
        if words[1] == "pages" and int(words[4]):
            wrong.append(f"the cache found {words[4]} damaged pages")
    for _, _, words in soak.lines:
        if words[1] != "acknowledged":
            continue
        epoch = int(words[3].partition(".")[0])
        zombie = any(newer > epoch and at < float(words[2]) for at, newer in opened)
        if zombie:
            wrong.append(f"a zombie was acknowledged: {' '.join(words)}")
        for key in words[4:]:
            acknowledged[int(key)] = max(acknowledged.get(int(key), ""), words[3])
    with kv.open(f"{URL}/store", poll=0) as store:
        for number in range(KEYS):
            found = store.get(b"key%d" % number)
            value = found.decode("ascii").split("/")[1] if found else ""
            if value < acknowledged.get(number, ""):
                wrong.append(f"key {number} has {value!r}, {acknowledged[number]} was acknowledged")
    for part, check in (("store", inspection.check), ("pages", pages.check)):
        wrong += [f"damaged: {each}" for each in check(open_storage(f"{URL}/{part}"))["damaged"]]
    return wrong, counts


def soak(seconds: float, seed: int) -> tuple[list[str], Counter[str], Counter[str]]:
    """Runs a soak; returns what is wrong, counts of lines, and counts of kills."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="fireflyer-soak-kv-") as folder:
        os.environ["FIREFLYER_FS"] = str(Path(folder) / "fs")
        run = Soak(Path(folder), seed)
        try:
            run.run(seconds)
            wrong, counts = judged(run)
        finally:
            run.close()
    return wrong, counts, run.kills


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak-kv")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    wrong, counts, kills = soak(chosen.seconds, chosen.seed)
    for each in wrong[:20]:
        print(each)
    print(f"kills: {dict(kills)}\nlines: {dict(counts)}\n{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
