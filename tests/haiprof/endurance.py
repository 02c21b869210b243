"""A training process under many sessions, and under profilers that are killed at any moment.

`python -m tests.haiprof.endurance --cycles 500 --kills 100` prints one line; exit 1 if anything is left.
"""

import argparse
import subprocess
import sys
import time
from random import Random

from tests.haiprof.scripts import PREPARE, TRAINS, descriptors, running, threads
from tests.waiting import until

from fireflyer.haiprof.attach.collect import Options, collect

SHOWS_HOOKS = """
import sys, threading, torch.optim.optimizer as o, torch.autograd as a, torch.nn.modules.module as m
from torch.utils.data.dataloader import _BaseDataLoaderIter as d
def places():
    return (dict(o._global_optimizer_pre_hooks), dict(o._global_optimizer_post_hooks),
            a._engine_run_backward, m.Module.__call__, d.__next__,
            type(model)._compiled_call_impl, dict(vars(model)))
def check():
    while sys.stdin.readline():
        hooks = "clean" if places() == clean else "hooks are left"
        print(hooks, len(sys._current_frames()), "threads", flush=True)
clean = places()
threading.Thread(target=check, daemon=True).start()
print("ready", flush=True)
"""
"""Says that it is ready, then answers each line: are the places of hooks as they were, and how many
threads run Python?"""

CLEAN = b"clean 2 threads\n"
"""Answer without a session: the thread that trains and the thread that answers."""

SCRIPT = PREPARE + TRAINS.replace("class Data", SHOWS_HOOKS + "class Data")

KILLED = (
    "import sys; from fireflyer.haiprof.attach.collect import *\n"
    "print(flush=True)\n"
    "collect([int(sys.argv[1])], Options(seconds=600, trace_steps=1, timeout_s=60))"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print(endure(asked.cycles, asked.kills, asked.seed))


def endure(cycles: int, kills: int, seed: int) -> str:
    """Attaches and detaches; kills profilers; returns what was done.

    Raises:
        AssertionError: a session failed, or the process is not as it was.
    """
    random = Random(seed)
    with running(SCRIPT, pipes=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"ready\n"
        attach(script.pid, 3, trace=True)  # what torch.profiler keeps is there now: one thread
        until(lambda: answer(script) == CLEAN)
        most, before = threads(script.pid), descriptors(script.pid)
        steps = 0
        begin = time.monotonic()
        for number in range(cycles):
            steps += attach(script.pid, 1, trace=number % 20 == 0)
        took = time.monotonic() - begin
        for _ in range(kills):
            command = [sys.executable, "-c", KILLED, str(script.pid)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as profiler:
                assert profiler.stdout is not None
                profiler.stdout.readline()
                time.sleep(random.uniform(0.0, 0.3))
                profiler.kill()
            assert script.poll() is None
        attach(script.pid, 3)
        until(lambda: answer(script) == CLEAN, lambda: answer(script).decode())
        until(
            lambda: threads(script.pid) <= most and descriptors(script.pid) == before,
            lambda: (threads(script.pid), most, descriptors(script.pid), before),
        )
    return (
        f"{cycles} cycles in {took:.0f} s ({steps} steps seen), {kills} profilers killed: as it was"
    )


def answer(script: "subprocess.Popen[bytes]") -> bytes:
    """Returns what the script says about its hooks and threads."""
    assert script.stdin is not None
    assert script.stdout is not None
    script.stdin.write(b"\n")
    script.stdin.flush()
    return script.stdout.readline()


def attach(pid: int, steps: int, *, trace: bool = False) -> int:
    asked = Options(seconds=60, most_steps=steps, trace_steps=int(trace), timeout_s=60)
    (found,) = collect([pid], asked)
    assert not found.session.failure, found.session.failure
    return len(found.profile.steps)


if __name__ == "__main__":
    main()
