"""Tasks from the command line, on the real server and the local engine."""

import json
import os
import select
import signal
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from tests.waiting import LIMIT_S

DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
while True:
    signal.pause()
"""

STEPS = """
import os, sys
flag = os.environ.get("FLAG")
print(f"args {sys.argv[1:]} rank {os.environ['RANK']} flag {flag}", flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""

HOLD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("holding", flush=True)
while True:
    signal.pause()
"""

SAVE = """
import time
from fireflyer import hai
print("attempt", hai.task().attempt, flush=True)
while not hai.suspend_requested():
    time.sleep(0.01)  # stands for a step
hai.suspended()
"""

WAIT_FOR_FILE = """
import sys
print("waiting", flush=True)
with open(sys.argv[1]) as fifo:
    fifo.read()
print("done", flush=True)
"""

Started = Callable[[Any], Any]


def test_run_follows_and_ends_as_the_task_does(shell: Any) -> None:
    script = shell.script(STEPS)
    done = shell.run("run", "--start", "exec", "-e", "FLAG=a b", script, "--lr", "0.1", "-h")
    assert done.stdout == "args ['--lr', '0.1', '-h'] rank 0 flag a b\n"
    notes = [line.split()[1:3] for line in done.stderr.splitlines()]
    kinds = ["submitted", "queued", "starting", "running", "finished"]
    assert notes == [["t1", kind] for kind in kinds]
    done = shell.run(
        "run", "--start", "exec", "-e", "CODE=3", "--max-restarts", "1", script, code=1
    )
    assert done.stdout == "args [] rank 0 flag None\n" * 2
    assert "t2 restarting 1 of 1: " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fireflyer: t2 failed ")


def test_the_hai_form(shell: Any) -> None:
    script = shell.script(STEPS)
    done = shell.run("run", script, "a", "--", "-n", "2", "--start", "exec", "--all-ranks")
    assert sorted(done.stdout.splitlines()) == [
        "0| args ['a'] rank 0 flag None",
        "1| args ['a'] rank 1 flag None",
    ]
    done = shell.run("run", "--start", "exec", script, "a", "--", "b", "--")
    assert done.stdout == "args ['a', '--', 'b'] rank 0 flag None\n"


def test_json_is_alone_on_stdout(shell: Any) -> None:
    script = shell.script(STEPS)
    done = shell.run("run", "--start", "exec", "--json", script)
    view = json.loads(done.stdout)
    assert (view["id"], view["state"], view["ranks"][0]["ended"]) == ("t1", "finished", "exit 0")
    assert "args [] rank 0" in done.stderr
    assert [task["id"] for task in json.loads(shell.run("ps", "-a", "--json").stdout)] == ["t1"]
    assert json.loads(shell.run("ps", "--json").stdout) == []
    assert json.loads(shell.run("show", "t1", "--json").stdout) == view
    nodes = json.loads(shell.run("nodes", "--json").stdout)
    assert [(node["name"], node["state"], node["tasks"]) for node in nodes] == [
        ("n0", "ready", []), ("n1", "ready", []),
    ]  # fmt: skip
    events = json.loads(shell.run("events", "t1", "--json").stdout)
    assert [event["kind"] for event in events] == [
        "submitted", "queued", "starting", "rank_started", "running", "rank_exited", "gang_ended",
        "finished",
    ]  # fmt: skip
    assert shell.run("logs", "t1").stdout == "args [] rank 0 flag None\n"
    table = shell.run("ps", "-a").stdout.splitlines()
    assert table[0].split() == [
        "TASK", "NAME", "STATE", "RANKS", "GPUS", "ATTEMPT", "RESTARTS", "AGE", "REASON",
    ]  # fmt: skip
    assert table[1].split()[:6] == ["t1", "script.py", "finished", "1", "x", "1"]
    assert shell.run("show", "t9", code=1).stderr.startswith("fireflyer: no task 't9' here")
    top = shell.run("top").stdout  # into a pipe: once, and no escape sequences
    assert "no tasks" in top
    assert "\x1b" not in top


def test_a_detached_task_is_steered(shell: Any, started: Started) -> None:
    script = shell.script(SAVE)
    done = shell.run("run", "-d", "--start", "exec", "--ranks", "2", script)
    assert (done.stdout, done.stderr) == ("t1\n", "")
    log = started(shell.start("logs", "-f", "t1"))
    log.until("stdout", "attempt 1\n")
    assert shell.run("suspend", "--wait", "t1").stdout == "t1 suspended\n"
    ends = [rank.ended for rank in shell.client.task("t1").ranks]
    assert ends == ["suspended", "suspended"]
    assert shell.run("resume", "--wait", "t1").stdout == "t1 running\n"
    log.until("stdout", "attempt 2\n")
    assert json.loads(shell.run("stop", "--wait", "t1", "--json").stdout)["state"] == "stopped"
    log.end(0)
    assert shell.run("stop", "t1").stdout == "t1 stopped\n"
    assert shell.client.task("t1").restarts == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(("verb", "goal"), [("suspend", "suspended"), ("stop", "stopped")])
def test_who_had_to_be_killed_is_said(shell: Any, started: Started, verb: str, goal: str) -> None:
    script = shell.script(DEAF)
    shell.run("run", "-d", "--start", "exec", "--grace", "0.1", script)
    started(shell.start("logs", "-f", "t1")).until("stdout", "deaf\n")
    said = shell.run(verb, "--wait", "t1").stdout
    assert said == f"t1 {goal}: rank 0 had to be killed after the grace period\n"


def test_a_task_outlives_its_server(shell: Any, started: Started) -> None:
    fifo = shell.folder / "fifo"
    os.mkfifo(fifo)
    shell.run("run", "-d", "--start", "exec", shell.script(WAIT_FOR_FILE), str(fifo))
    before = shell.client.wait("t1", {"running"}, LIMIT_S)
    server = os.pidfd_open(shell.client.server().pid)
    signal.pidfd_send_signal(server, signal.SIGKILL)
    select.select([server], [], [], LIMIT_S)
    os.close(server)
    assert shell.run("ps", code=1).stderr.startswith("fireflyer: no server serves")
    up = started(shell.start("up"))
    up.until("stderr", "Ctrl-C ends")
    after = shell.client.task("t1")
    assert (after.state, after.attempt, after.ranks) == ("running", 1, before.ranks)
    fifo.write_bytes(b"")
    view = shell.client.wait("t1", {"finished"}, LIMIT_S)
    assert (view.attempt, view.restarts, view.ranks[0].ended) == (1, 0, "exit 0")
    assert shell.run("logs", "t1").stdout == "waiting\ndone\n"


def test_ctrl_c_stops_the_task(shell: Any, started: Started) -> None:
    run = started(shell.start("run", "--start", "exec", shell.script(HOLD)))
    run.until("stdout", "holding")
    run.process.send_signal(signal.SIGINT)
    _, err = run.end(130)
    assert "fireflyer: stopping t1; Ctrl-C again returns at once\n" in err
    *_, stopped, last = err.splitlines()
    assert stopped.startswith("fireflyer: t1 stopped")
    assert last == "fireflyer: interrupted"
    assert "Traceback" not in err


def test_a_second_ctrl_c_returns_at_once(shell: Any, started: Started) -> None:
    stubborn = HOLD.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    run = started(shell.start("run", "--start", "exec", "--grace", "600", shell.script(stubborn)))
    run.until("stdout", "holding")
    run.process.send_signal(signal.SIGINT)
    run.until("stderr", "stopping t1")
    seen: list[str] = []
    while "stopping" not in seen:
        seen = [event.kind for event in shell.client.events("t1", wait_s=60)]
    run.process.send_signal(signal.SIGINT)
    _, err = run.end(130)
    assert "t1 is still stopping" in err
    os.kill(shell.client.task("t1").ranks[0].pid, signal.SIGKILL)
    assert shell.client.wait("t1", {"stopped"}, LIMIT_S).state == "stopped"


def test_up_serves_until_ctrl_c(shell: Any, started: Started) -> None:
    up = started(shell.start("up", "--nodes", "3"))
    up.until("stderr", "Ctrl-C ends")
    assert len(shell.client.nodes()) == 3
    shell.run("run", "-d", "--start", "exec", shell.script(HOLD))
    shell.client.wait("t1", {"running"}, LIMIT_S)
    again = shell.run("up", code=1).stderr
    assert again == (
        f"fireflyer: a server (pid {up.process.pid}) already serves {shell.home}; "
        "`fireflyer down` ends it\n"
    )
    up.process.send_signal(signal.SIGINT)
    up.end(0)
    database = sqlite3.connect(shell.home / "hai.sqlite")
    try:
        assert database.execute("SELECT state FROM task").fetchall() == [("stopped",)]
    finally:
        database.close()


@pytest.mark.full
def test_many_first_commands_start_one_server(shell: Any, started: Started) -> None:
    script = shell.script(STEPS)
    runs = [started(shell.start("run", "-d", "--start", "exec", script)) for _ in range(4)]
    names = [run.end(0)[0] for run in runs]
    assert sorted(names) == ["t1\n", "t2\n", "t3\n", "t4\n"]
    shell.run("down")
    assert (shell.home / "server.log").read_text().count("stopping all tasks") == 1


@pytest.mark.parametrize("follow", [False, True])
def test_a_closed_pipe_is_no_traceback(shell: Any, started: Started, follow: bool) -> None:
    shell.run("run", "--start", "exec", shell.script(STEPS))
    events = started(shell.start("events", *(["-f"] if follow else [])))
    events.process.stdout.close()
    events.process.stdout = None
    if follow:
        events.until("stderr", "") and shell.run("run", "-d", "--start", "exec", "script.py")
    events.process.wait(LIMIT_S)
    assert b"Traceback" not in events.process.stderr.read()


def test_up_says_that_other_commands_go_elsewhere(shell: Any, started: Started) -> None:
    elsewhere = "https://192.0.2.77:8443"
    shell.env["FIREFLYER_SERVER"] = elsewhere
    up = started(shell.start("up"))
    up.until(
        "stderr", f"commands here still go to FIREFLYER_SERVER {elsewhere}, not to this server"
    )
    up.process.send_signal(signal.SIGINT)
    up.end(0)
