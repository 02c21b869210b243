"""`fireflyer run --rehearse` on the real server: scripts that survive, and scripts that do not."""

import json
import os
from typing import Any

GOOD = """
import os, sys, time
from fireflyer import hai
last = int(sys.argv[2]) == int(os.environ["FIREFLYER_ATTEMPT"])  # else it goes on until it is ended
file = hai.task().output / "step"
step = int(file.read_text()) if file.exists() else 0
print("resumed from step", step, flush=True)
limit = max(int(sys.argv[1]), step + 5)  # an event may come late: the last attempt tells steps, too
while step < limit or not last:
    step += 1
    print("step", step, flush=True)
    if hai.suspend_requested():
        if hai.task().rank == 0:
            file.write_text(str(step))
        hai.suspended()
    if step % 10 == 0 and hai.task().rank == 0:
        file.with_suffix(".new").write_text(str(step))
        file.with_suffix(".new").rename(file)
    time.sleep(0.01)  # stands for a step
"""

DEAF = """
import os, time
for step in range(1, 10000):
    print("step", step, flush=True)
    if os.environ["FIREFLYER_ATTEMPT"] != "1" and step > 20:
        break
    time.sleep(0.01)  # stands for a step
"""


def test_a_script_that_survives(shell: Any) -> None:
    script = shell.script(GOOD)
    plan = "suspend@step15,freeze-rank0@step30+50ms,slow-node0@step40+50ms,kill-rank0@step55"
    done = shell.run("run", "--start", "exec", "--json", "--rehearse", plan, script, "100", "3")
    found = json.loads(done.stdout)
    assert (found["survived"], found["task"]["state"], found["task"]["attempt"]) == (
        True,
        "finished",
        3,
    )
    suspend, freeze, slow, kill = found["rehearsal"]
    assert suspend["steps_lost"] == 0
    assert suspend["resumed_from_step"] == suspend["step_before"] >= 15
    assert kill["resumed_from_step"] % 10 == 0
    assert kill["steps_lost"] == kill["step_before"] - kill["resumed_from_step"]
    assert freeze["words"] == slow["words"] == "the attempt continued"
    assert all(line["made"] and line["survived"] for line in found["rehearsal"])


def test_the_lines_of_a_node_that_was_killed(shell: Any) -> None:
    script = shell.script(GOOD)
    plan = "kill-rank1@step15,kill-node2@step35"
    done = shell.run("run", "--start", "exec", "--rehearse", plan, script, "60", "3")
    lines = done.stdout.splitlines()
    assert lines[-3] == "rehearsal: survived; the task has finished"
    assert lines[-2].startswith("  ok  kill-rank1@step15: seen after ")
    assert lines[-1].startswith("  ok  kill-node2@step35: seen after ")
    assert "rehearsing on 3 nodes with 1 ranks each" in done.stderr


def test_a_script_that_never_asks_is_not_survived(shell: Any) -> None:
    script = shell.script(DEAF)
    done = shell.run(
        "run", "--start", "exec", "--grace", "0.1", "--rehearse", "suspend@step5,resume@0s", script,
        code=1,
    )  # fmt: skip
    text = done.stdout
    assert "rehearsal: NOT survived; the task has finished" in text
    assert "BAD suspend@step5" in text
    assert (
        "all ranks never called suspend_requested(), or did not exit after it returned True: killed "
        "after grace_s = 0.1 s. nothing was resumed: attempt 2 began again at step 1." in text
    )


def test_what_comes_too_late_is_not_survived(shell: Any) -> None:
    script = shell.script(GOOD)
    done = shell.run("run", "--start", "exec", "--rehearse", "suspend@1h", script, "3", "1", code=1)
    assert "BAD suspend@1h: not rehearsed: the task has finished before that time" in done.stdout


def test_what_cannot_be_rehearsed(shell: Any) -> None:
    script = shell.script(GOOD)
    for options, message in (
        (("--rehearse", "fly@1s"), "invalid --rehearse 'fly': expected one of"),
        (("-d", "--rehearse", "suspend@1s"), "omit --detach"),
        (("-n", "2", "--rehearse", "kill-rank2@1s"), "the task has ranks 0 to 1"),
    ):
        assert message in shell.run("run", *options, script, "3", code=1).stderr
    assert not os.path.exists(shell.home)
