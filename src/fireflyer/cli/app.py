"""Verbs of `fireflyer` and their options.

The implementation of a verb is imported when the verb runs, so `--help` stays fast.
"""

import os
from copy import copy
from typing import Annotated

import typer

from fireflyer import __version__
from fireflyer.cli.accounts import commands as accounts
from fireflyer.cli.ckpt.commands import ckpt
from fireflyer.cli.cluster.commands import cluster_verbs, window
from fireflyer.cli.completion import COMPLETE, Shell, completion_script, register
from fireflyer.cli.config.commands import config
from fireflyer.cli.experts.commands import experts
from fireflyer.cli.failures.commands import failures
from fireflyer.cli.fs.commands import fs
from fireflyer.cli.help import PanelCommand, ThemedGroup
from fireflyer.cli.kv.commands import kv
from fireflyer.cli.net.commands import net
from fireflyer.cli.options import HomeOption, JsonOption, TaskArgument, TasksArgument, given
from fireflyer.cli.passthrough import hand_over
from fireflyer.cli.prof.commands import prof
from fireflyer.cli.record.commands import record
from fireflyer.cli.run.options import (
    CpusOption,
    ElasticOption,
    EnvOption,
    ExpectOption,
    GpusOption,
    GraceOption,
    GroupOption,
    LabelOption,
    LimitOption,
    MaxNodeFaultsOption,
    MaxRestartsOption,
    MemoryOption,
    NameOption,
    NodesOption,
    PriorityOption,
    ProfOption,
    RanksOption,
    RehearseOption,
    StartOption,
    VenvLockOption,
    WatchdogOption,
    WorkspaceOption,
)
from fireflyer.cli.sim.commands import sim
from fireflyer.cli.up import options as of_up
from fireflyer.cli.validate.commands import validate
from fireflyer.cli.workspace.commands import workspace as workspaces
from fireflyer.program import INTERRUPTED, current_json_form, in_one_line, keep_context

app = typer.Typer(
    name="fireflyer",
    cls=ThemedGroup,
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""Train deep-learning models on ordinary machines.

\b
  fireflyer demo                        train a model, lose a worker, carry on
  fireflyer run train.py --lr 0.1       run a script as a task and follow it
  fireflyer run --nodes 2 -d train.py   two nodes, in the background
  fireflyer run --workspace . train.py  ship the folder, run in the copy
  fireflyer ps                          what runs and what waits
  fireflyer why t1                      what a task waits for
  fireflyer logs -f t1                  follow a task's output
  fireflyer record pack photos/ -o p.ffr  a folder as one record file
  fireflyer ckpt ls runs/gpt            the checkpoints of a run
  fireflyer fs up --dir fs              start a distributed file system
  fireflyer config show                 settings in force, and where they come from
  fireflyer prof attach t1 --time 5     where the time of a task's steps goes

`fireflyer VERB --help` explains a verb. Exit codes: 0 ok, 1 failure, 2 usage, 130 Ctrl-C.
""",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fireflyer {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    nodes: of_up.NodesOption = None,
    gpus: of_up.GpusOption = None,
    engine: of_up.EngineOption = None,
    partition: of_up.PartitionOption = None,
    port: of_up.PortOption = None,
    policy: of_up.PolicyOption = None,
    log_limit: of_up.LogLimitOption = None,
    keep: of_up.KeepOption = False,
    database: of_up.DatabaseOption = None,
    database_password_file: of_up.DatabasePasswordFileOption = None,
    listen: of_up.ListenOption = None,
    tls_cert: of_up.TlsCertOption = None,
    tls_key: of_up.TlsKeyOption = None,
    behind_proxy: of_up.BehindProxyOption = False,
    home: HomeOption = None,
) -> None:
    """Start the server in the foreground.

    Ctrl-C stops the server's tasks within their grace period and then ends the server. A second
    Ctrl-C ends the grace period at once. `run` starts a server in the background if none answers.
    If several servers share one PostgreSQL database, one leads and the others stand by.
    """
    from fireflyer.cli.up import impl
    from fireflyer.hai.home import Settings

    where = impl.Where(
        database=database, password_file=database_password_file, listen=listen,
        certificate=tls_cert, key=tls_key, behind_proxy=behind_proxy,
    )  # fmt: skip
    chosen = impl.choose(home, engine, partition)
    given = Settings(nodes=nodes, gpus=gpus, port=port, log_limit_mib=impl.limit_mib(log_limit))
    impl.serve(home, chosen, where, given, keep, policy)


@app.command()
def down(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave tasks running; the next server manages them.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Stop the tasks of the server, then end the server.

    A server that `run` started in the background runs until `down`. Suspended tasks stay suspended.
    """
    from fireflyer.hai.client import Client

    Client(home).shutdown(keep=keep)


@app.command(
    cls=PanelCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Python script to run, or a job file (.toml).")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None,
    nodes: NodesOption = None,
    ranks: RanksOption = None,
    name: NameOption = "",
    env: EnvOption = None,
    start: StartOption = "auto",
    max_restarts: MaxRestartsOption = 3,
    max_node_faults: MaxNodeFaultsOption = 10,
    watchdog: WatchdogOption = "0",
    elastic: ElasticOption = False,
    grace: GraceOption = 30.0,
    workspace: WorkspaceOption = None,
    workspace_limit: LimitOption = 256,
    venv_lock: VenvLockOption = None,
    rehearse: RehearseOption = None,
    prof: ProfOption = None,
    gpus: GpusOption = "0",
    memory: MemoryOption = "",
    cpus: CpusOption = 0,
    priority: PriorityOption = "normal",
    group: GroupOption = "",
    label: LabelOption = None,
    expect: ExpectOption = "",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for `python -m`.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the task's id and return.")
    ] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank's output, each line marked.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Run a script as a task, and follow it.

    Arguments after SCRIPT belong to the script. Options may also come last, after `--`:

    \b
      fireflyer run --nodes 2 train.py --lr 0.1
      fireflyer run train.py --lr 0.1 -- --nodes 2

    Ranks run with the Python of the `fireflyer` that started the server by `up` or by the first
    `run`. An environment that is activated later has no effect; start the server from it, or use
    --venv-lock. SCRIPT is a Python file, which may start other programs.

    A job file is TOML with the keys `script` and `args`, and these options as keys. Its paths are
    relative to the file. Options of the command line override the file, and ARGS follow its `args`:
    `fireflyer run --nodes 4 job.toml --lr 0.2`.

    Prints rank 0's output; state changes go to stderr. Exits with 0 if the task finished, otherwise
    with 1. Ctrl-C stops the task; a second Ctrl-C returns at once while the task is still stopping.
    With --json the output goes to stderr and the task's last state to stdout. If no server answers,
    `run` starts one in the background; that server stays until `fireflyer down`.
    """
    from fireflyer.cli.run.impl import Launch, with_job_file
    from fireflyer.cli.run.start import start_as_asked
    from fireflyer.hai.model.job_file import Job

    job = Job(
        script=script, args=tuple(args or ()), module=module, name=name, nodes=nodes or 1,
        ranks=ranks or 1, gpus=gpus, memory=memory, cpus=cpus, priority=priority, group=group,
        expect=expect, watchdog=watchdog, grace=grace, start=start, max_restarts=max_restarts,
        max_node_faults=max_node_faults, elastic=elastic, workspace=str(workspace or ""),
        venv_lock=str(venv_lock or ""),
    )  # fmt: skip
    asked = Launch(job=job, workspace_limit=workspace_limit << 20, shaped=bool(nodes or ranks))
    options = given(context, Job.__struct_fields__) - {"script", "args", "env"}
    request = with_job_file(asked, options, env or (), label or ())
    shown = {"detach": detach, "all_ranks": all_ranks, "json": json}
    raise typer.Exit(start_as_asked(request, home, rehearse, prof, **shown))


@app.command()
def ps(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Include finished tasks.")
    ] = False,
    user: Annotated[
        str | None, typer.Option("--user", "-u", metavar="NAME", help="Only tasks of this user.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            metavar="STATE",
            help="Only tasks in this state, e.g. running or failed; may be repeated. Includes "
            "finished tasks.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            "-l",
            metavar="K[=V]",
            help="Only tasks with this label, with any value or with V; may be repeated.",
        ),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """List tasks that run or wait.

    \b
      fireflyer ps --user ada --state running
      fireflyer ps --all --label sweep=lr
    """
    from fireflyer.cli.cluster import impl

    impl.list_tasks(
        home, everything=everything, user=user, states=state or [], labels=label or [], json=json
    )


@app.command()
def show(task: TaskArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Show one task and its ranks."""
    from fireflyer.cli import printing
    from fireflyer.hai.client import Client

    printing.task(Client(home).task(task), json=json)


@app.command()
def logs(
    task: TaskArgument,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Rank to read.")] = 0,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Attempt to read; default: the last one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the task is over.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Print a rank's output."""
    from fireflyer.cli.run.follow import print_log

    print_log(home, task, rank, attempt, follow=follow)


@app.command()
def events(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Print only events of this task.")
    ] = None,
    after: Annotated[
        int, typer.Option(min=0, metavar="SEQ", help="Print only events after SEQ.")
    ] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for further events.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Print the history of one task or of all tasks.

    With --follow and --json, each line is one object.
    """
    from fireflyer.cli.run.follow import print_events

    print_events(home, task, after, follow=follow, json=json)


def _steering(verb: str, goal: str, text: str, example: str) -> None:
    def steer(
        tasks: TasksArgument,
        wait: Annotated[
            bool, typer.Option("--wait", "-w", help=f"Return once each task is {goal}.")
        ] = False,
        json: JsonOption = False,
        home: HomeOption = None,
    ) -> None:
        from fireflyer.cli.run.impl import steer

        raise typer.Exit(steer(home, verb, tasks, goal if wait else None, json=json))

    app.command(name=verb, help=f"{text}\n\n\b\n  {example}")(steer)


_steering(
    "stop", "stopped",
    "Stop tasks: SIGTERM to their ranks, SIGKILL after their grace.", "fireflyer stop --wait t1 t2",
)  # fmt: skip
_steering(
    "suspend", "suspended",
    "Ask tasks to save and leave; they wait for `resume`.", "fireflyer suspend --wait t1",
)  # fmt: skip
_steering(
    "resume", "running",
    "Put suspended tasks back into the queue.", "fireflyer resume t1",
)  # fmt: skip


cluster_verbs(app)


@app.command()
def dashboard(
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open it in the browser instead of printing the link.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Print a link that signs a browser in to the dashboard. It works once, within a minute.

    Anyone with the link can sign in as you. With --open the link appears in no process list: the
    browser opens a file that only you can read, which contains the link.
    """
    from fireflyer.cli.dashboard import impl

    impl.show(home, open_browser=open_browser, json=json)


@app.command()
def faults(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Observations to show.")] = 20,
    rules: Annotated[
        bool, typer.Option("--rules", help="Show the reason and the source of each rule, too.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show the rules for faults, and the latest observations and actions.

    Your own rules go into faults.toml in the platform's folder; the server reads it at its start.
    """
    from fireflyer.cli.faults import impl

    impl.show(home, limit, full=rules, json=json)


@app.command()
def ledger(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Only this task.")] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this user's tasks; for operators.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only tasks of this group.")
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Show all nodes, including the time in which no task held them."
        ),
    ] = False,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Count only the last TIME, e.g. 24h. [default: all]")
    ] = "",
    until: Annotated[
        str, typer.Option(metavar="TIME", help="Leave out the last TIME, e.g. 1h.")
    ] = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show where the time of tasks went: useful, lost, waiting.

    Without TASK: each task and the sum of all tasks.
    """
    from fireflyer.cli.ledger import impl

    impl.show(
        home, task, user=user, group=group, cluster=cluster, since=since, until=until, json=json
    )


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="Shell that runs the script.")],
) -> None:
    """Print a script that completes verbs, options and tasks.

    \b
      source <(fireflyer completion bash)                                  # in ~/.bashrc
      fireflyer completion zsh > "${fpath[1]}/_fireflyer"
      fireflyer completion fish > ~/.config/fish/completions/fireflyer.fish
    """
    typer.echo(completion_script(shell))


app.command()(sim)
app.command()(accounts.audit)
for group in (accounts.user, accounts.group, accounts.token, accounts.quota):
    app.add_typer(group)
app.add_typer(window)
app.add_typer(record)
app.add_typer(ckpt)
app.add_typer(fs)
app.add_typer(config)
app.add_typer(net)
app.add_typer(validate)
app.add_typer(failures)
app.add_typer(prof)
app.add_typer(kv)
app.add_typer(experts)
app.add_typer(workspaces)

hand_over(app, "demo", "Train a model, lose a worker, carry on.", "fireflyer.demo")
hand_over(app, "bench", "Measure against peers: fireflyer bench NAME --help.", "fireflyer.bench")
hand_over(
    app,
    "plan",
    "Predict a training run: fireflyer plan train --help.",
    "fireflyer.haiscale.planner",
)
hand_over(app, "lab", "Run a command on several virtual hosts of this machine.", "fireflyer.lab")


def _only(verb: str) -> typer.Typer:
    """Returns an application that has only this verb; the whole application for an unknown verb.

    This saves time at the start, because Typer examines every option of every verb of an
    application. For the whole application that takes 55 ms.
    """
    narrow = copy(app)
    narrow.registered_commands = [
        command
        for command in app.registered_commands
        if verb == (command.name or getattr(command.callback, "__name__", ""))
    ]
    narrow.registered_groups = [
        group
        for group in app.registered_groups
        if group.typer_instance is not None and verb == group.typer_instance.info.name
    ]
    return narrow if narrow.registered_commands or narrow.registered_groups else app


def _act(arguments: list[str]) -> int:
    """Parses and runs the command line; Typer's and Fireflyer's own errors propagate."""
    from fireflyer.cli.numbers import strict
    from fireflyer.cli.run.hai_form import hai_form

    command = typer.main.get_command(_only(arguments[0]) if arguments else app)
    strict(command)
    keep_context(command)
    if COMPLETE in os.environ:
        register()
    if arguments[:1] == ["sim"]:
        arguments = current_json_form(arguments)
    result = command.main(
        args=hai_form(command, arguments) or ["--help"],
        prog_name="fireflyer",
        standalone_mode=False,
    )
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def run_line(arguments: list[str]) -> int:
    """Runs the command line; an error becomes one line on stderr and an exit code."""
    return in_one_line(lambda: _act(arguments), arguments)
