"""Job files: one format for the command line, requests and templates."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import asdict, replace
from tests.cli.conftest import Shell
from tests.waiting import LIMIT_S

from fireflyer.cli.run.impl import Launch, with_job_file
from fireflyer.errors import ConfigError
from fireflyer.hai.model import TaskSpec, TaskView
from fireflyer.hai.model.job_file import Job, from_request, parse, read, to_spec

FULL = """
script = "train.py"
args = ["--lr", 0.1, "--epochs", 3]
name = "sweep"
nodes = 2
ranks = 4
gpus = "a100:4"
memory = "64GiB"
cpus = 16
priority = "high"
group = "vision"
expect = "90m"
watchdog = "30m"
grace = 60
start = "exec"
max_restarts = 1
max_node_faults = 2
elastic = true
[env]
THREADS = 3
[labels]
sweep = "lr"
"""


def test_a_job_file_says_what_the_options_say(tmp_path: Path) -> None:
    file = tmp_path / "jobs" / "job.toml"
    file.parent.mkdir()
    file.write_text(FULL)
    found = to_spec(read(file))
    assert found == TaskSpec(
        script=str(tmp_path / "jobs" / "train.py"), cwd=str(tmp_path / "jobs"), name="sweep",
        args=("--lr", "0.1", "--epochs", "3"), nodes=2, ranks_per_node=4, gpus=4, gpu_type="a100",
        memory_mib=65536, cpus=16, priority="high", group="vision", expected_s=5400.0, watchdog_s=1800.0,
        grace_s=60.0, start="exec", max_restarts=1, max_node_faults=2, elastic=True,
        env={"THREADS": "3"}, labels={"sweep": "lr"},
    )  # fmt: skip


def test_every_field_of_a_task_can_be_set() -> None:
    bare = TaskSpec(script="/a.py", cwd="/")
    text = FULL.replace("train.py", "/x/train.py")
    full = asdict(from_request(text.encode()))
    same = {name for name, value in asdict(bare).items() if full[name] == value}
    assert same == {"workspace", "venv"}, "these are shipped by the command line"


def test_options_count_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(FULL + 'host = "node"\n')
    asked = Job(script=str(file), nodes=8, args=("--seed", "1"), gpus="0")
    launch = with_job_file(
        Launch(job=asked, workspace_limit=1), {"nodes"}, ["THREADS=1", "MORE=2"], ["run=7"]
    )
    job = launch.job
    assert (job.nodes, job.ranks, job.gpus) == (8, 4, "a100:4")
    assert job.args == ("--lr", 0.1, "--epochs", 3, "--seed", "1")
    assert job.env == {"THREADS": "1", "MORE": "2"}
    assert job.labels == {"sweep": "lr", "host": "node", "run": "7"}
    plain = with_job_file(Launch(job=Job(script="a.py"), workspace_limit=1), set(), [], [])
    assert plain.job == Job(script="a.py"), "a script is no job file"


def test_what_a_request_cannot_have_is_refused() -> None:
    assert from_request(b'script = "/x/a.py"').cwd == "/x"
    for text, message in (
        (b"script =", "cannot read the job file: Invalid value"),
        (b"\xff", "cannot read the job file: it is not UTF-8"),
        (b"nodes = 1", "cannot read the job file: Object missing required field `script`"),
        (b'script = "a"\nnode = 2', "unknown field `node`; did you mean `nodes`?"),
        (b'script = "a"\nnodes = "2"', r"Expected `int`, got `str` - at `\$.nodes`"),
        (b'script = "/a"\nworkspace = "."', "a request cannot ship workspace: use `fireflyer run`"),
        (b'script = "/a"\nexpect = "soon"', "invalid --expect 'soon': expected e.g. 90s"),
        (b'script = "/a"\nmemory = "lots"', "invalid --memory 'lots': expected e.g. 512MiB"),
        (b'script = "/a"\ngpus = "a100:x"', "invalid --gpus 'a100:x'"),
        (b'script = "/a"\nstart = "spoon"', "invalid --start 'spoon'"),
        (b'script = "/a"\npriority = "top"', "invalid --priority 'top'"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_request(text)
    with pytest.raises(ConfigError, match=r"cannot read the job file /nowhere.toml: No such file"):
        read(Path("/nowhere.toml"))
    assert parse('script = "a"', "x").script == "a"


def test_the_same_file_from_the_command_line_and_in_a_request(shell: Shell) -> None:
    shell.script(
        "import os, sys\nprint(sys.argv[1:], os.environ['THREADS'], os.getcwd())\n", "a.py"
    )
    text = 'script = "{}a.py"\nargs = ["--lr", 0.1]\nstart = "exec"\n[env]\nTHREADS = 3\n'
    (shell.folder / "job.toml").write_text(text.format(""))
    done = shell.run("run", "job.toml", "--seed", "1")
    assert done.stdout == f"['--lr', '0.1', '--seed', '1'] 3 {shell.folder}\n"
    connection, token, _ = shell.client._connect(LIMIT_S)
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/toml; charset=utf-8",
    }
    connection.request("POST", "/tasks", text.format(f"{shell.folder}/"), headers)
    view = msgspec.json.decode(connection.getresponse().read(), type=TaskView)
    connection.close()
    same = replace(view.spec, args=("--lr", "0.1", "--seed", "1"))
    assert same == shell.client.task("t1").spec
    assert shell.client.wait(view.id, {"finished"}, LIMIT_S).id == "t2"
    refused = shell.run("run", "nowhere.toml", code=1)
    assert "cannot read the job file nowhere.toml: No such file" in refused.stderr
