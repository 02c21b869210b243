"""Costs of profiling: time to the first step's row, time per step, CPU of sampling, and a trace.

The trace is compared with torch.profiler. The profiled script itself records the CPU time of each
step, in turn with and without a session."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.bench.prof.board import PLAIN, TORCH, TORCH_STACKS, Board
from fireflyer.bench.prof.loop import TRACED_STEPS
from fireflyer.errors import FireflyerError
from fireflyer.haiprof.attach.collect import Attached, Options, collect

START_TIMEOUT_S = 120.0
WARM_STEPS = 100
RECORDERS = "basic,cpu,mem,io"
"""Recorders of `haiprof attach` that run in the profiler."""


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark."""

    rounds: int = 5
    seconds: float = 2.0
    """Length in seconds of each session and of each period without a session."""


@dataclass
class Found:
    """Values of each round, by case.

    Attributes:
        first_row_s: time between the attach and the row of the first step.
        phases_us, phases_process_us: CPU time that the hooks of phases add to a step, in the training
            thread and in the process.
        step_us: CPU time of the process in a step without a session.
        sampling, profiler: CPU use of the agent's thread and of the profiler, in percent.
        recording: CPU use of the agent's thread and the profiler together, with all recorders.
        trace_s, torch_s, torch_stacks_s: CPU time that a trace adds: ours, torch.profiler's, and
            torch.profiler's with stacks.
    """

    first_row_s: list[float] = field(default_factory=list)
    phases_us: list[float] = field(default_factory=list)
    phases_process_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    profiler: list[float] = field(default_factory=list)
    recording: list[float] = field(default_factory=list)
    trace_s: list[float] = field(default_factory=list)
    torch_s: list[float] = field(default_factory=list)
    torch_stacks_s: list[float] = field(default_factory=list)


def run(spec: Spec, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measures all cases in turn, in each round.

    Raises:
        FireflyerError: the script ended.
    """
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        board = Board(Path(folder, "board"))
        with _script(Path(folder, "board")) as child:
            bench = _Bench(child, board, spec)
            bench.wait_for(WARM_STEPS)
            for number in range(spec.rounds):
                tell(f"round {number + 1} of {spec.rounds}")
                bench.phases(found)
                bench.sampling(found)
                bench.traces(found)
    return list(_rows(found))


@contextmanager
def _script(board: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "fireflyer.bench.prof.loop", str(board)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


class _Bench:
    def __init__(self, child: "subprocess.Popen[bytes]", board: Board, spec: Spec) -> None:
        self._child, self._board, self._spec = child, board, spec

    def wait_for(self, steps: int) -> None:
        """Waits until the script has done this many more steps."""
        goal = self._board.count + steps
        end = time.monotonic() + START_TIMEOUT_S
        while self._board.count < goal:
            if self._child.poll() is not None or time.monotonic() > end:
                raise FireflyerError("bench prof: the profiled script has ended or hangs")
            time.sleep(0.005)

    def phases(self, found: Found) -> None:
        """Compares steps with and without hooks.

        The first fifth of a session does not count, because the search for root modules runs then.
        """
        before = self._plain()
        attached = self._session(recorders="phase", rate_hz=0.0)
        assert attached.first_step_s is not None
        found.first_row_s.append(attached.first_step_s)
        rows = attached.profile.steps
        begin, end = rows[len(rows) // 5].begin_ns, rows[-1].begin_ns
        hooked = self._steps(begin, end)
        after = self._plain()
        bare = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
        found.step_us.append(bare[0] / 1e3)
        found.phases_us.append((hooked[1] - bare[1]) / 1e3)
        found.phases_process_us.append((hooked[0] - bare[0]) / 1e3)

    def sampling(self, found: Found) -> None:
        """Measures the CPU use of sampling, first with one recorder of the profiler, then with all
        recorders."""
        agent, profiler = self._sampling("basic")
        found.sampling.append(agent)
        found.profiler.append(profiler)
        found.recording.append(sum(self._sampling(RECORDERS)))

    def _sampling(self, recorders: str) -> tuple[float, float]:
        """Returns the CPU use of the agent's thread and of this process, in percent; the CPU time for
        reading the agent's times does not count."""
        begin, here = time.monotonic(), time.process_time()
        agent = _AgentTime(self._child.pid)
        self._session(recorders=recorders, rate_hz=100.0, watch=lambda _: agent.look())
        wall, spent = time.monotonic() - begin, time.process_time() - here - agent.own_s
        return 100 * agent.seconds() / wall, 100 * spent / wall

    def traces(self, found: Found) -> None:
        """Compares the CPU time that each trace of the same number of steps adds to the process."""
        each = self._plain()[0]
        begin = self._board.count
        self._session(recorders="phase,trace", rate_hz=100.0, trace_steps=TRACED_STEPS,
                      most_steps=TRACED_STEPS + 20)  # fmt: skip
        found.trace_s.append(self._excess(begin, each))
        for command, into in ((TORCH, found.torch_s), (TORCH_STACKS, found.torch_stacks_s)):
            begin = self._board.count
            self._board.command = command
            while self._board.command != PLAIN:
                self.wait_for(1)
            into.append(self._excess(begin, each))

    def _session(
        self, *, recorders: str, rate_hz: float, trace_steps: int = 0, most_steps: int | None = None,
        watch: Callable[[list[Attached]], None] = lambda _: None,
    ) -> Attached:  # fmt: skip
        asked = Options(
            seconds=self._spec.seconds if most_steps is None else 60.0, recorders=recorders,
            rate_hz=rate_hz, trace_steps=trace_steps, most_steps=most_steps,
        )  # fmt: skip
        (attached,) = collect([self._child.pid], asked, None, watch)
        if attached.session.failure:
            raise FireflyerError(f"bench prof: {attached.session.failure}")
        return attached

    def _plain(self) -> tuple[float, float]:
        begin = time.monotonic_ns()
        self.wait_for(20)
        time.sleep(self._spec.seconds)
        return self._steps(begin, time.monotonic_ns())

    def _steps(self, begin_ns: int, end_ns: int) -> tuple[float, float]:
        """Returns the CPU time per step between two moments: a mean and a median.

        The mean is that of the process, and includes the steps in which the agent sends. The median
        is that of the training thread, because hooks cost the same in each step and other programs
        on the machine do not.
        """
        times = [self._board.step(n) for n in range(self._board.count)]
        inside = [step for step in times if begin_ns <= step[0] <= end_ns]
        mean = (inside[-1][1] - inside[0][1]) / (len(inside) - 1)
        return mean, median(after[2] - before[2] for before, after in pairwise(inside))

    def _excess(self, begin: int, each: float) -> float:
        """Returns the CPU time in seconds beyond `each` per step, from step `begin` until shortly
        after now, so that the work after a recording counts, too.
        """
        time.sleep(0.2)
        self.wait_for(1)
        first, last = self._board.step(begin - 1), self._board.step(self._board.count - 1)
        steps = self._board.count - begin
        return ((last[1] - first[1]) - each * steps) / 1e9


class _AgentTime:
    """CPU time of the threads that a process starts during a session."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}/task")
        self._before = {path.name for path in self._folder.iterdir()}
        self._spent: dict[str, float] = {}
        self.own_s = 0.0
        """CPU time that `look` itself used."""

    def look(self) -> None:
        """Reads the times; called during the session, because /proc shows only living threads."""
        begin = time.thread_time()
        for path in self._folder.iterdir():
            if path.name not in self._before:
                try:
                    ran = int((path / "schedstat").read_text().split()[0])
                except OSError:
                    continue
                self._spent[path.name] = ran / 1e9
        self.own_s += time.thread_time() - begin

    def seconds(self) -> float:
        """Returns the sum of the threads' times, in seconds."""
        return sum(self._spent.values())


def _rows(found: Found) -> Iterator[Row]:
    step = median(found.step_us)
    limits = [
        ("attach to the first step's row", "s", found.first_row_s, goals.PROF_FIRST_ROW_S),
        (f"phases, thread that trains, step of {step:.0f} us", "us", found.phases_us,
         goals.PROF_PHASES_US),
        ("phases, whole process", "us", found.phases_process_us, goals.PROF_PHASES_US),
        ("sampling at 100 Hz, agent", "% of a CPU", found.sampling, goals.PROF_SAMPLING_PERCENT),
        ("sampling at 100 Hz, profiler", "% of a CPU", found.profiler, goals.PROF_SAMPLING_PERCENT),
        (f"both, recorders {RECORDERS}", "% of a CPU", found.recording, goals.PROF_SAMPLING_PERCENT),
    ]  # fmt: skip
    for case, unit, values, (most, aim) in limits:
        positive = [max(value, 1e-3) for value in values]
        yield Row.of_times(
            case, unit, positive, "limit", [most] * len(values), goal=1.0, aim=most / aim
        )
    name = f"full trace of {TRACED_STEPS} steps, CPU time added"
    for peer, values in (("torch.profiler", found.torch_s),
                         ("torch.profiler, with_stack", found.torch_stacks_s)):  # fmt: skip
        ours = [max(value, 1e-3) for value in found.trace_s]
        yield Row.of_times(name, "s", ours, peer, values, goal=1.0, aim=2.0)
