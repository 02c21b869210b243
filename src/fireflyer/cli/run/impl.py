"""Implementation of `fireflyer run`, `stop`, `suspend` and `resume`."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import msgspec
from msgspec.structs import replace

from fireflyer.cli import printing
from fireflyer.cli.run.follow import Tail, follow
from fireflyer.errors import ConfigError, FireflyerError
from fireflyer.hai.client import Client
from fireflyer.hai.home import locate
from fireflyer.hai.model import Event, TaskSpec, TaskState
from fireflyer.hai.model import TaskView as View
from fireflyer.hai.model.admission import check
from fireflyer.hai.model.job_file import SUFFIX, Job, read, to_spec
from fireflyer.hai.workspaces import client as shipping
from fireflyer.hai.workspaces.containment import check_inside, folder_in, relative_to
from fireflyer.hai.workspaces.manifest import identify, in_words
from fireflyer.hai.workspaces.snapshot import take
from fireflyer.program import INTERRUPTED, plain


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Command line of `run`."""

    job: Job
    """The task; its script and folders may be relative to the working directory."""
    workspace_limit: int
    """Maximum size of the workspace in bytes."""
    shaped: bool = True
    """False if neither options nor a job file set nodes and ranks: a rehearsal may choose them."""


def with_job_file(
    launch: Launch, options: Collection[str], env: Sequence[str], labels: Sequence[str]
) -> Launch:
    """Completes a command line with its job file, if SCRIPT is one.

    Args:
        launch: the command line.
        options: fields of the job that the command line sets; they override the file.
        env: entries "K=V", or "K" for the value of K in this environment.
        labels: entries "K=V".

    Raises:
        ConfigError: the job file, an entry of the environment or a label is invalid.
    """
    job = launch.job
    if job.script.endswith(SUFFIX) and not job.module:
        found = read(Path(job.script))
        given = {name: getattr(job, name) for name in options}
        job = replace(found, **given, args=(*found.args, *job.args))
        launch = replace(launch, shaped=True)
    values = _environment(env)
    job = replace(job, env={**job.env, **values}, labels={**job.labels, **_labels(labels)})
    return replace(launch, job=job)


class Companion(Protocol):
    """Process that runs beside a task, e.g. its profiler."""

    def finish(self) -> None:
        """Called after the task's end, if `run` followed the task until then."""
        ...


def launch(
    request: Launch,
    home: Path | None,
    *,
    detach: bool,
    all_ranks: bool,
    json: bool,
    beside: Callable[[Client, View], Companion] | None = None,
) -> int:
    """Submits the task and follows it unless detached; returns the exit code.

    Args:
        beside: starts a process beside the submitted task.
    """
    spec, client = prepare(request, home)
    view = client.submit(spec)
    companion = None if beside is None else beside(client, view)
    if detach:
        printing.show_result(view, lambda: sys.stdout.write(f"{view.id}\n"), json=json)
        return 0
    followed = follow_task(client, view, all_ranks=all_ranks, json=json)
    if companion is not None and followed.state is not None:
        companion.finish()
    if json and followed.state is not None:
        printing.as_json(client.task(view.id))
    return followed.code


def prepare(request: Launch, home: Path | None) -> tuple[TaskSpec, Client]:
    """Checks the task and ships the files that it needs.

    Returns the task's specification, and a client of a running server.
    """
    job = request.job
    if job.module and job.workspace:
        raise ConfigError("-m and --workspace exclude each other: name a script of the workspace")
    script = job.script if job.module else os.path.abspath(job.script)
    spec = to_spec(replace(job, script=script, cwd=job.cwd or os.getcwd()))
    check(spec)
    snapshot = None
    if job.workspace:
        root = Path(job.workspace)
        snapshot = take(root, request.workspace_limit, without=locate(home).path)
        spec = replace(
            spec,
            script=relative_to(job.workspace, job.script),
            cwd=folder_in(job.workspace, spec.cwd),
            workspace=identify(snapshot.manifest),
        )
        check_inside(spec, snapshot.manifest)
    lock = shipping.read_lock(Path(job.venv_lock)) if job.venv_lock else None
    client = Client.connect(home, nodes=job.nodes if job.nodes > 1 else None)
    if snapshot is not None:
        shipped = shipping.ship_snapshot(client, snapshot)
        for what in shipped.left_out:
            note(f"left out of the workspace: {what}")
        note(
            f"workspace {shipped.id[:12]}: {shipped.files} files, {in_words(shipped.bytes)}; sent "
            f"{shipped.sent_files} files, {in_words(shipped.sent_bytes)}"
        )
    if lock is not None:
        spec = replace(spec, venv=shipping.give_lock(client, lock))
    return spec, client


def steer(home: Path | None, verb: str, tasks: list[str], goal: str | None, *, json: bool) -> int:
    """Stops, suspends or resumes tasks.

    If `goal` is given, the call then waits until each task has that state. If the request fails for
    one task, the other tasks still get it, and the exit code is 1. With `json` each failed request
    is an object that names the task and the error, unless only one task is given.
    """
    client = Client(home)
    call: dict[str, Any] = {"stop": client.stop, "suspend": client.suspend, "resume": client.resume}
    views: list[View] = []
    refused: list[tuple[str, FireflyerError]] = []
    for task in tasks:
        try:
            views.append(call[verb](task))
        except FireflyerError as error:
            if len(tasks) == 1:
                raise
            refused.append((task, error))
    if json:
        for task, refusal in refused:
            printing.task_error(task, refusal)
    if goal is None:
        reached: Iterable[View] = views
    else:
        reached = (client.wait(view.id, {cast(TaskState, goal)}) for view in views)

    def line(view: View) -> str:
        if verb == "stop" and view.state != "stopped":
            return f"{view.id} stopping"
        return f"{view.id} {view.state}" + (f": {view.reason}" if view.reason else "")

    printing.show_lines(reached, line, json=json)
    for _, refusal in refused:
        note(plain(str(refusal)))
    return int(bool(refused))


def _environment(entries: Sequence[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for item in entries:
        name, equals, value = item.partition("=")
        if not equals:
            if name not in os.environ:
                raise ConfigError(
                    f"--env {name}: {name} is not set in this environment; give --env {name}=VALUE"
                )
            value = os.environ[name]
        env[name] = value
    return env


def _labels(entries: Sequence[str]) -> dict[str, str]:
    labels = dict(item.split("=", 1) for item in entries if "=" in item)
    if len(labels) < len(entries):
        raise ConfigError("invalid --label: expected K=V, each K at most once")
    return labels


class Followed(NamedTuple):
    """Outcome of following a task."""

    state: TaskState | None
    """Final state of the task; None if the user left before the task was over."""
    interrupted: bool = False
    """True if Ctrl-C was pressed."""

    @property
    def code(self) -> int:
        """Exit code of the command."""
        if self.interrupted:
            return INTERRUPTED
        return 0 if self.state == "finished" else 1


def follow_task(client: Client, view: View, *, all_ranks: bool, json: bool) -> Followed:
    """Follows the task until it ends or until a second Ctrl-C; the first Ctrl-C stops the task."""
    world = view.spec.nodes * view.spec.ranks_per_node
    out = sys.stderr.buffer if json else sys.stdout.buffer
    ranks = range(world) if all_ranks else [0]
    tail = Tail(client, view.id, ranks, out, mark=all_ranks)
    seen = 0

    def tell(event: Event) -> None:
        nonlocal seen
        seen = event.seq
        if event.kind == "rank_exited":
            shown = view.spec.elastic and event.detail["code"] != 0
        else:
            shown = event.kind not in ("rank_started", "gang_ended", "progress", "acted")
        if shown:
            note(f"{event.task} {event.kind} {printing.details(event)}".rstrip())

    try:
        try:
            return Followed(follow(client, view.id, tail, seen, tell))
        except KeyboardInterrupt:
            note(f"stopping {view.id}; Ctrl-C again returns at once")
            client.stop(view.id)
            return Followed(follow(client, view.id, tail, seen, tell), interrupted=True)
    except KeyboardInterrupt:
        note(f"{view.id} is still stopping; `fireflyer logs -f {view.id}` follows it")
        return Followed(None, interrupted=True)


def note(text: str) -> None:
    """Writes a message to the user on stderr."""
    sys.stderr.write(f"fireflyer: {text}\n")
    sys.stderr.flush()
