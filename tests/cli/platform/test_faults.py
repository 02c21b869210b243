"""Faults from outside: a task that hangs, one that crashes, and what the command line shows of them."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Shell
from tests.waiting import LIMIT_S, until

from fireflyer.hai.http.auth import owner
from fireflyer.hai.model.observations import Validator

HANGS_ONCE = """
import time
from fireflyer import hai

me = hai.task()

def wait_for_the_others():
    while True:
        time.sleep(3600)

def stuck():
    while True:
        time.sleep(3600)

hai.heartbeat(1)
if me.attempt == 1:
    if me.rank == 1:
        stuck()
    hai.heartbeat(2)
    wait_for_the_others()
print("done on", me.node)
"""


def history(shell: Shell, kind: str, task: str = "t1") -> list[dict[str, Any]]:
    return [e.detail for e in shell.client.events(task) if e.kind == kind]


@pytest.mark.full
def test_a_hung_rank_leaves_its_stacks_and_the_task_finishes_elsewhere(shell: Shell) -> None:
    shell.client.connect(shell.home, nodes=3)
    script = shell.script(HANGS_ONCE)
    shell.run("run", "--start", "exec", "-n", "2", "--watchdog", "5s", script)
    view = shell.client.task("t1")
    assert (view.state, view.attempt, view.restarts, view.node_faults) == ("finished", 2, 0, 1)
    assert view.avoid == ("n1",)
    assert [rank.node for rank in view.ranks] == ["n0", "n2"]
    (hang,) = history(shell, "observed")
    assert (hang["what"], hang["rank"], hang["node"]) == ("hang", 1, "n1")
    decided, done = history(shell, "acted")
    assert (decided["rule"], decided["action"]) == ("hang-of-one", "restart elsewhere")
    assert (done["ended"], done["avoid"], done["cause"]) == (True, ["n1"], "node")
    folder = Path(view.directory) / "1"
    assert "in stuck" in (folder / "1.stacks").read_text()
    assert "in wait_for_the_others" in (folder / "0.stacks").read_text()
    shown = shell.run("show", "t1").stdout
    assert "1 of 10 of nodes; avoids n1" in shown
    listed = shell.run("faults").stdout
    assert "hang-of-one" in listed
    assert "n1: hung: no output and no heartbeat for" in listed
    assert "n1: restart elsewhere (rule hang-of-one)" in listed
    books = json.loads(shell.run("ledger", "t1", "--json", "--cluster").stdout)
    parts = books["tasks"]["t1"]["parts_s"]
    assert parts["fault"] > 0
    assert parts["useful"] + parts["lost work"] + parts["restart"] > 0
    assert sum(parts.values()) == pytest.approx(books["tasks"]["t1"]["whole_s"])
    assert sum(books["cluster"]["parts_s"].values()) == pytest.approx(books["cluster"]["whole_s"])
    assert "effective training time ratio" in shell.run("ledger", "t1").stdout
    assert "WHERE IT WENT" in shell.run("ledger").stdout
    assert "idle" in shell.run("ledger", "--cluster", "--since", "1h").stdout


def test_a_script_that_crashes_again_and_again_is_stopped_early(shell: Shell) -> None:
    script = shell.script("def work():\n    raise ValueError('no')\nwork()\n")
    done = shell.run("run", "--start", "exec", "--max-restarts", "9", script, code=1)
    view = shell.client.task("t1")
    assert (view.state, view.attempt, view.restarts) == ("failed", 3, 2)
    assert "no further attempt (rule crash-loop): three times in a row" in view.reason
    assert "crash-loop" in done.stderr
    places = [found["place"] for found in history(shell, "observed")]
    assert places == ["script.py:2 ValueError"] * 3


def test_an_operators_rule_decides(shell: Shell) -> None:
    shell.home.mkdir()
    (shell.home / "faults.toml").write_text(
        '[[rule]]\nname = "give-up"\non = "exit"\ncodes = [3]\naction = "stop task"\nwhy = "so I say"\n'
    )
    script = shell.script("import sys\nsys.exit(3)\n")
    shell.run("run", "--start", "exec", script, code=1)
    view = shell.client.task("t1")
    assert (view.state, view.attempt) == ("failed", 1)
    assert view.reason.endswith("no further attempt (rule give-up): so I say")
    rules = json.loads(shell.run("faults", "--json").stdout)["rules"]
    assert rules[0]["name"] == "give-up"


def test_a_rules_file_with_an_error_is_named_by_its_line(shell: Shell) -> None:
    shell.home.mkdir()
    (shell.home / "faults.toml").write_text('[[rule]]\nname = "x"\non = "moon"\naction = "note"\n')
    done = shell.run("run", "--start", "exec", shell.script("1\n"), code=1)
    assert f"{shell.home / 'faults.toml'}, line 3: unknown observation 'moon'" in done.stderr


def test_a_failed_check_drains_its_node(shell: Shell) -> None:
    shell.client.connect(shell.home, nodes=2)
    shell.run("run", "--start", "exec", shell.script("1\n"))
    found = Validator(node="n0", check="gemm", passed=False, result="3 wrong sums")
    assert shell.client.observed(found).action == "drain node"
    shell.run("run", "--start", "exec", "-n", "1", shell.script("1\n"))
    assert shell.client.task("t2").ranks[0].node == "n1"
    assert [d["text"] for d in history(shell, "observed")] == ["check gemm failed: 3 wrong sums"]
    assert [(d["action"], d["node"]) for d in history(shell, "acted")] == [("drain node", "n0")]


def test_words_that_are_no_time(shell: Shell) -> None:
    script = shell.script("1\n")
    done = shell.run("run", "--watchdog", "soon", script, code=1)
    assert "invalid --watchdog 'soon': expected e.g. 90s" in done.stderr


ELASTIC = """
import os, time
from fireflyer import hai

me = hai.task()
open(os.environ["FIREFLYER_DOORS"], "a").close()
hai.hold(me.incarnation)
while not (me.output / "enough").exists():
    time.sleep(0.01)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until_joined(shell: Shell, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(found := history(shell, "rank_joined")) < count:
        assert time.monotonic() < deadline, found
        shell.client.events("t1", after=shell.client.task_at("t1")[1], wait_s=1.0)


@pytest.mark.full
def test_what_an_elastic_attempt_goes_on_without_is_observed_and_counted(shell: Shell) -> None:
    shell.client.connect(shell.home, nodes=2)
    options = ("--elastic", "--detach", "--start", "exec", "-n", "2", "--ranks", "2")
    shell.run("run", *options, shell.script(ELASTIC))
    view = shell.client.wait("t1", {"running"}, LIMIT_S)
    until((Path(view.directory) / "1" / "doors").exists)
    pid = view.ranks[3].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until_joined(shell, 1)
    pid = shell.client.task("t1").ranks[2].pid
    assert pid is not None
    os.kill(parent(pid), signal.SIGKILL)
    until_joined(shell, 3)
    (Path(view.directory) / "output" / "enough").touch()
    view = shell.client.wait("t1", {"finished"}, LIMIT_S)
    assert (view.attempt, view.restarts, view.node_faults) == (1, 0, 0)
    seen = [(o["what"], o["node"], o["rank"], o["signal"]) for o in history(shell, "observed")]
    assert seen == [("loss", "n1", 3, 9), ("loss", "n1", 2, None), ("loss", "n1", 3, None)]
    assert [done["rule"] for done in history(shell, "acted")] == ["loss"] * 3
    listed = shell.run("faults").stdout
    assert "n1: rank 3: lost: signal 9; the other ranks continue" in listed
    assert "n1: rank 2: lost with n1; the other ranks continue" in listed
    (one,) = shell.client.ledger().tasks.values()
    lost = [e.wall for e in shell.client.events("t1") if e.detail.get("lost")]
    joined = [e.wall for e in shell.client.events("t1") if e.kind == "rank_joined"]
    first, second = joined[0] - lost[0], sum(joined[1:]) - sum(lost[1:])
    assert one.parts["fault"] == pytest.approx((first + second) / 2 * 1e6, abs=10)
    assert sum(one.parts.values()) == one.whole
    shown = shell.run("ledger", "--user", owner(), "--since", "1h").stdout
    assert shown.startswith(f"{owner().upper()} ")
    assert "! fault" in shown
    books = json.loads(shell.run("ledger", "--user", owner(), "--json").stdout)
    assert books["tasks"].keys() == {"t1"}
    assert books["total"] == books["tasks"]["t1"]
    assert "user 'nobody' does not exist" in shell.run("ledger", "--user", "nobody", code=1).stderr
    both = shell.run("ledger", "t1", "--cluster").stdout
    assert both.startswith("CLUSTER ")
    assert "\n\nT1 " in both
    books = json.loads(shell.run("ledger", "--until", "1h", "--json").stdout)
    assert books["total"]["whole_s"] == 0
    error = shell.run("ledger", "--since", "1h", "--until", "2h", code=1).stderr
    assert "invalid until: expected a time later than since" in error
