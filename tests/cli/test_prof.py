"""`fireflyer run --prof`: its options, and results beside the logs and on the task's page."""

import json
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli.run.profiling import parse
from fireflyer.errors import ConfigError
from fireflyer.haiprof.attach.collect import read_profile
from fireflyer.haiprof.trace_file import STEPS

TRAINS_UNTIL_PROFILED = """
import sys
from pathlib import Path
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not Path(sys.argv[1]).exists():
    optimizer.zero_grad()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
"""


def test_a_list_of_recorders_goes_on_until_the_next_key() -> None:
    assert parse("time=120,recorders=basic,phase,trace=1") == {
        "time": "120", "recorders": "basic,phase", "trace": "1",
    }  # fmt: skip
    assert parse("recorders=basic, trace,rate=50") == {"recorders": "basic,trace", "rate": "50"}


@pytest.mark.parametrize(
    "text",
    ["", "time", "basic,phase", "time=0", "time=-1", "time=soon", "time=nan", "trace=1.5", "time=1,time=2",
     "recorders=nothing", "recorders=", "output=x"],
)  # fmt: skip
def test_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid"):
        parse(text)


def test_a_task_that_cannot_be_profiled_is_not_submitted(shell: Any) -> None:
    script = shell.script("")
    done = shell.run("run", "--prof", "time=1", "--start", "exec", script, code=1)
    assert done.stderr == "fireflyer: --prof needs ranks that are forked: omit --start exec\n"
    done = shell.run("run", "--prof", "time=1", "--rehearse", "suspend@1s", script, code=1)
    assert "exclude each other" in done.stderr
    assert not shell.client.home.served()


@pytest.mark.full
def test_the_first_attempt_is_profiled_from_its_first_step(shell: Any) -> None:
    folder = shell.home / "tasks" / "t1" / "1" / "haiprof"
    script = shell.script(TRAINS_UNTIL_PROFILED)
    asked = "time=0.5,recorders=basic,phase,trace=1"
    done = shell.run("run", "--ranks", "2", "--prof", asked, script, str(folder / "trace.json"))
    assert f"profile of t1: fireflyer prof report {folder}" in done.stderr
    profiles = read_profile(folder)
    assert [profile.header.rank for profile in profiles] == [0, 1]
    assert all(len(profile.steps) > 5 for profile in profiles)
    assert (folder / "report.html").exists()
    events = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
    for profile in profiles:
        number = profile.header.rank
        steps = [e for e in events if (e["pid"], e.get("tid"), e["ph"]) == (number, STEPS, "X")]
        whole = sum(row.seconds for row in profile.steps)
        assert sum(step["dur"] for step in steps) / 1e6 == pytest.approx(whole, rel=1e-6)
        assert any(e["name"].startswith("aten::") for e in events if e["pid"] == number)
    shell.run("prof", "report", str(folder))


@pytest.mark.full
def test_a_detached_task_is_profiled_too(shell: Any) -> None:
    folder = shell.home / "tasks" / "t1" / "1" / "haiprof"
    script = shell.script(TRAINS_UNTIL_PROFILED)
    shell.run("run", "-d", "--prof", "time=0.5", script, str(folder / "report.html"))
    shell.client.wait("t1", {"finished"}, 200)
    assert len(read_profile(folder)[0].steps) > 5
    assert Path(shell.home, "tasks", "t1", "haiprof.log").read_text() == ""
