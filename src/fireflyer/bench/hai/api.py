"""Measures submissions to the platform while a thousand clients follow logs.

The server process uses the local engine. One task's ranks write one line at a time, and followers
read those logs as server-sent events. Submissions form an open loop at a fixed rate: a slow answer
does not delay the next request. On the server's machine, one process holds the followers and
another sends the submissions. The submitted tasks wait, because the only node is taken. Wall times
depend on the machine's other load; the server's CPU time per submission depends on it much less.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.errors import FireflyerError, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import TaskSpec

RANKS = 8

IDLE_S = 3.0
"""Seconds during which only the followers load the server. They show the cost of the followers."""

WRITER = """\
import sys, time
while True:
    print(time.monotonic_ns(), flush=True)
    time.sleep({pause!r})
"""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the benchmark."""

    followers: int
    lines: float
    """Lines per second that are written to each log."""
    rates: tuple[int, ...]
    """Submission rates per second to try, one after the other, each with a new server."""
    seconds: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one rate."""

    rate: int
    answered: float
    """Answered submissions per second."""
    p50_s: float
    p99_s: float
    line_p99_s: float
    """99th percentile of the time from the writing of a line to its arrival."""
    lines: int
    """Number of lines that arrived while tasks were submitted."""
    cores: float
    """CPU cores that the server process used while tasks were submitted."""
    each_s: float
    """Server CPU time per submission, without the cost of the followers."""

    @property
    def good(self) -> bool:
        """Returns True if the server kept up: p99 within the limit and 98 % of the rate
        answered."""
        return self.p99_s < goals.API_P99_S and self.answered >= 0.98 * self.rate


def run(spec: Spec, tell: Callable[[str], None]) -> list[Row]:
    """Finds the highest rate that is answered in time, and the followers' latencies at that rate.

    Raises:
        FireflyerError: the server or a follower failed.
    """
    trials: list[Trial] = []
    for rate in sorted(spec.rates):
        tell(f"{rate} tasks/s: {spec.followers} followers")
        trials.append(_try(spec, rate))
        if not trials[-1].good:
            break
    good = [trial for trial in trials if trial.good] or trials[:1]
    best = good[-1]
    case = f"{spec.followers} followers, {RANKS} logs, {spec.lines:g} lines/s each"
    limit = "p99 < 250 ms" if best.good else "p99 < 250 ms, missed"
    reached = [float(best.rate) if best.good else 1e-9]
    rows = [
        Row.of_speeds(
            f"{case}: submissions", "tasks/s", reached, limit, [goals.API_RATE], (), 1.0, 2.0
        )
    ]
    for trial in trials:
        at = f"{case}, {trial.rate} tasks/s"
        asked = [goals.API_P99_S * 1e3]
        rows += [
            Row.of_times(f"{at}: p99", "ms", [trial.p99_s * 1e3], "allowed", asked),
            Row.of_times(f"{at}: p50", "ms", [trial.p50_s * 1e3], "allowed", asked),
            Row.of_times(f"{at}: line to follower, p99", "ms", [trial.line_p99_s * 1e3], "-", []),
            Row.of_times(f"{at}: server CPU a submission", "ms", [trial.each_s * 1e3], "-", []),
            Row.of_times(f"{at}: server CPU a second", "ms", [trial.cores * 1e3], "-", []),
        ]
    return rows


def _try(spec: Spec, rate: int) -> Trial:
    with _server() as client:
        writer = client.home.path / "writer.py"
        writer.write_text(WRITER.format(pause=1 / spec.lines))
        task = TaskSpec(
            script=str(writer),
            cwd=str(writer.parent),
            ranks_per_node=RANKS,
            start="exec",
            grace_s=0,
        )
        client.wait(client.submit(task).id, {"running"}, 60)
        pid = client.server().pid
        with _followers(client, spec.followers) as ended:
            alone = _cores(pid, lambda: time.sleep(IDLE_S))
            begun = time.monotonic()
            times: list[float] = []
            cores = _cores(
                pid, lambda: times.extend(asyncio.run(_submit(client, rate, spec.seconds)))
            )
            wall = time.monotonic() - begun
            seen = ended()
    times.sort()
    return Trial(
        rate=rate,
        answered=len(times) / max(wall, spec.seconds),
        p50_s=times[len(times) // 2],
        p99_s=times[min(int(len(times) * 0.99), len(times) - 1)],
        line_p99_s=seen["p99_s"],
        lines=int(seen["lines"]),
        cores=cores,
        each_s=max((cores - alone) * wall / len(times), 1e-6),
    )


def _cores(pid: int, work: Callable[[], None]) -> float:
    """Returns the CPU seconds per second that a process uses during `work`."""

    def used() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, begun = used(), time.monotonic()
    work()
    return max(used() - before, 1e-6) / (time.monotonic() - begun)


@contextlib.contextmanager
def _server() -> Iterator[Client]:
    """Starts a server in the background, with a temporary home."""
    with tempfile.TemporaryDirectory(prefix="ffapi") as folder:
        client = Client.connect(Path(folder), nodes=1)
        try:
            yield client
        finally:
            client.shutdown()


@contextlib.contextmanager
def _followers(client: Client, number: int) -> Iterator[Callable[[], dict[str, float]]]:
    """Starts `number` followers in one process and waits until each has received a line.

    Yields a function that ends the followers and returns their measurements.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "fireflyer.bench.hai.api",
        str(client.home.path),
        str(number),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise FireflyerError("the followers of the benchmark ended early")
        process.stdin.write(b"go\n")
        process.stdin.flush()

        def ended() -> dict[str, float]:
            found: dict[str, float] = json.loads(process.communicate(b"end\n", timeout=60)[0])
            return found

        yield ended
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def _submit(client: Client, rate: int, seconds: float) -> list[float]:
    """Returns the seconds from each submission's due time to its answer."""
    script = client.home.path / "writer.py"
    spec = TaskSpec(script=str(script), cwd=str(script.parent), name="waits")
    body = msgspec.json.encode(spec)
    head = _head(client, "POST", "/tasks") + f"Content-Length: {len(body)}\r\n\r\n"
    message = head.encode() + body
    free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    port = client.server().port
    for _ in range(32):
        free.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    times: list[float] = []

    async def one(due: float) -> None:
        reader, writer = await free.get()
        writer.write(message)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise TaskError(f"a submission failed: {answer.splitlines()[0]!r}")
        length = int(answer.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        times.append(time.monotonic() - due)
        free.put_nowait((reader, writer))

    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            due = begun + number / rate
            await asyncio.sleep(max(due - time.monotonic(), 0))
            group.create_task(one(due))
    while not free.empty():
        free.get_nowait()[1].close()
    return times


def _head(client: Client, method: str, path: str) -> str:
    token = client.home.read_token(client.home.token)
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"


# -- the process of the followers --------------------------------------------------------------------


class _Seen:
    """Log lines that the followers received."""

    def __init__(self) -> None:
        self.since: int | None = None
        """Time in ns from which lines count, on the clock that stamps the lines."""
        self.delays: list[float] = []
        """Seconds from the writing of each counted line to its arrival."""
        self.first = 0
        """Number of followers that have received a line."""


async def _follow(client: Client, rank: int, seen: _Seen) -> None:
    port = client.server().port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((_head(client, "GET", f"/tasks/t1/log/{rank}/stream") + "\r\n").encode())
    started = False
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if not started:
            seen.first += 1
            started = True
        if seen.since is not None:
            now = time.monotonic_ns()
            stamps = map(int, msgspec.json.decode(line[6:], type=str).split())
            seen.delays += [(now - stamp) / 1e9 for stamp in stamps if stamp >= seen.since]


async def _watch(home: Path, number: int) -> None:
    client, seen = Client(home), _Seen()
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(_follow(client, i % RANKS, seen)) for i in range(number)]
    while seen.first < number:
        await asyncio.sleep(0.05)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.readline)
    seen.since = time.monotonic_ns()
    await loop.run_in_executor(None, sys.stdin.readline)
    for task in tasks:
        task.cancel()
    delays = sorted(seen.delays) or [0.0]
    found = {"lines": len(seen.delays), "p99_s": delays[int(len(delays) * 0.99)]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    from fireflyer.program import allow_descriptors

    allow_descriptors()
    asyncio.run(_watch(Path(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
