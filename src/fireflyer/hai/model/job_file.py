"""Job files: a task as TOML, the same for `fireflyer run job.toml`, `POST /tasks` and templates.

    script = "train.py"          # relative to the file
    args = ["--lr", "0.1"]
    nodes = 2
    gpus = "a100:4"
    memory = "64GiB"
    expect = "90m"
    [labels]
    sweep = "lr"

Keys are the options of `fireflyer run`, with `_` for `-`. An option of the command line overrides
the file, so a file can serve as a template. Pure, except for `read`.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec
from msgspec.structs import replace

from fireflyer.errors import ConfigError
from fireflyer.hai.model import PRIORITIES, Priority, TaskSpec
from fireflyer.hai.model.devices import parse_request
from fireflyer.units import parse_mib, parse_seconds

RUN_MODULE = str(Path(__file__).parents[1] / "run_module.py")
"""Script that runs the module named by its first argument."""

SUFFIX = ".toml"

Start = Literal["auto", "fork", "exec"]

Value = str | int | float


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task as a user writes it."""

    script: str
    args: tuple[Value, ...] = ()
    module: bool = False
    """True if `script` is the name of a module."""
    name: str = ""
    cwd: str = ""
    """Working directory; empty: the command line's working directory, or the script's folder."""
    env: dict[str, Value] = {}
    labels: dict[str, Value] = {}
    nodes: int = 1
    ranks: int = 1
    """Ranks on each node."""
    gpus: str | int = 0
    """Number, or type and number: "a100:2"."""
    memory: str | int = ""
    """Size, e.g. "64GiB"; a number is MiB."""
    cpus: int = 0
    """Cores on each node; 0: all."""
    priority: str = "normal"
    group: str = ""
    expect: str | float = ""
    """Duration, e.g. "90m"; a number is seconds."""
    watchdog: str | float = "0"
    grace: float = 30.0
    start: str = "auto"
    max_restarts: int = 3
    max_node_faults: int = 10
    elastic: bool = False
    workspace: str = ""
    """Folder to ship; only for the command line."""
    venv_lock: str = ""
    """Lock file to ship; only for the command line."""


def parse(text: str, what: str) -> Job:
    """Returns the task of a job file.

    Raises:
        ConfigError: the text is not TOML, or a key or value is wrong; the message names `what`.
    """
    try:
        return msgspec.toml.decode(text, type=Job, strict=True)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {what}: {error}{_meant(str(error))}") from None


def _meant(error: str) -> str:
    """Returns a hint with the known key that is most similar to an unknown key; "" if no key is
    similar."""
    unknown = re.search("unknown field `([^`]*)`", error)
    keys = [field.encode_name for field in msgspec.structs.fields(Job)]
    like = difflib.get_close_matches(unknown[1].replace("-", "_"), keys, 1) if unknown else []
    return f"; did you mean `{like[0]}`?" if like else ""


def read(path: Path) -> Job:
    """Reads a job file. Relative paths in the file are resolved against the file's folder.

    Raises:
        ConfigError: the file cannot be read, or is not a job file.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the job file {path}: it is not UTF-8") from None
    job = parse(text, f"the job file {path}")
    folder = os.path.abspath(path.parent)

    def absolute(text: str) -> str:
        return os.path.normpath(os.path.join(folder, text)) if text else ""

    return replace(
        job,
        script=job.script if job.module else absolute(job.script),
        cwd=absolute(job.cwd) or folder,
        workspace=absolute(job.workspace),
        venv_lock=absolute(job.venv_lock),
    )


def to_spec(job: Job) -> TaskSpec:
    """Returns the task to submit, without workspace and environment; `admission.check` checks it.

    Raises:
        ConfigError: a value is invalid; the message names the option.
    """
    if job.start not in get_args(Start):
        raise ConfigError(
            f"invalid --start {job.start!r}: expected one of {', '.join(get_args(Start))}"
        )
    priority = job.priority.lower().replace("-", "_")
    if priority not in ("auto", *PRIORITIES):
        known = ", ".join(PRIORITIES)
        raise ConfigError(f"invalid --priority {job.priority!r}: expected one of auto, {known}")
    gpus, gpu_type = parse_request(str(job.gpus))
    args = (job.script, *job.args) if job.module else job.args
    return TaskSpec(
        script=RUN_MODULE if job.module else job.script,
        args=tuple(map(str, args)),
        name=job.name or (job.script if job.module else ""),
        cwd=job.cwd or os.path.dirname(job.script),
        env={name: str(value) for name, value in job.env.items()},
        nodes=job.nodes,
        ranks_per_node=job.ranks,
        start=cast(Start, job.start),
        max_restarts=job.max_restarts,
        elastic=job.elastic,
        grace_s=job.grace,
        max_node_faults=job.max_node_faults,
        watchdog_s=parse_seconds(str(job.watchdog), "--watchdog"),
        gpus=gpus,
        gpu_type=gpu_type,
        memory_mib=parse_mib(str(job.memory), "--memory") if job.memory else 0,
        cpus=job.cpus,
        priority=cast(Priority, priority),
        group=job.group,
        labels={name: str(value) for name, value in job.labels.items()},
        expected_s=parse_seconds(str(job.expect), "--expect") if job.expect else 0.0,
    )


def from_request(data: bytes) -> TaskSpec:
    """Returns the task of a job file in the body of a request.

    Raises:
        ConfigError: the body is not a job file, or names files that a request cannot ship.
    """
    try:
        job = parse(data.decode(), "the job file")
    except UnicodeDecodeError:
        raise ConfigError("cannot read the job file: it is not UTF-8") from None
    shipped = [name for name in ("workspace", "venv_lock") if getattr(job, name)]
    if shipped:
        raise ConfigError(
            f"a request cannot ship {' and '.join(shipped)}: use `fireflyer run` with the job file"
        )
    return to_spec(job)
