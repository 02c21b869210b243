"""All verbs and their options. What a verb does is imported when it runs, so `--help` stays fast."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer import __version__
from fireflyer.cli import accounts
from fireflyer.cli.ckpt import ckpt
from fireflyer.cli.cluster import cluster_verbs, window
from fireflyer.cli.config import config
from fireflyer.cli.fs import fs
from fireflyer.cli.handing import hand_over
from fireflyer.cli.options import HomeOption, JsonOption, TaskArgument
from fireflyer.cli.record import record
from fireflyer.cli.running_options import (
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
    RanksOption,
    RehearseOption,
    StartOption,
    VenvLockOption,
    WatchdogOption,
    WorkspaceOption,
)
from fireflyer.cli.sim import sim
from fireflyer.cli.workspace import workspace as workspaces
from fireflyer.program import INTERRUPTED, in_one_line

app = typer.Typer(
    name="fireflyer",
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
  fireflyer fs up --dir fs              a file system of its own
  fireflyer config show                 its settings, and where they come from

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
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", "-n", min=1, help="Virtual nodes of the local engine. [default: 2]"
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="local|slurm",
            help="What runs the tasks: this machine, or a Slurm cluster. Remembered by the home.",
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of Slurm; else the cluster's default.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")
    ] = 0,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="timeshare, fifo, fifo-backfill, las or fairshare. Remembered by the home. "
            "[default: timeshare]",
        ),
    ] = None,
    log_limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Of a rank's log in one attempt; beyond it the middle is given up, e.g. 512MiB.",
        ),
    ] = "4GiB",
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave tasks running when Ctrl-C or SIGTERM ends it.")
    ] = False,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="postgresql://USER@HOST:PORT/NAME instead of SQLite. Remembered by the home.",
        ),
    ] = None,
    database_password_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds its password; else as PGPASSFILE says."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="ADDR:PORT", help="Serve users there, too; they need tokens."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate for --listen, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of --listen has TLS.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Start the server in the foreground.

    Ctrl-C stops its tasks with their grace and then ends it; Ctrl-C again gives them no more time.
    `run` starts a server in the background by itself when none answers. Of several servers with one
    PostgreSQL one leads; the others stand by.
    """
    from fireflyer.cli import serving

    where = serving.Where(
        database=database, password_file=database_password_file, listen=listen,
        certificate=tls_cert, key=tls_key, behind_proxy=behind_proxy,
    )  # fmt: skip
    chosen = serving.choose(home, engine, partition)
    serving.serve(home, chosen, where, nodes, port, keep, policy, log_limit)


@app.command()
def down(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave tasks running; the next server takes them up.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """End the server, after stopping its tasks.

    A server that `run` started in the background stays until then. Suspended tasks stay suspended.
    """
    from fireflyer.hai.client import Client

    Client(home).shutdown(keep=keep)


@app.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script to run.")],
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
    gpus: GpusOption = 0,
    memory: MemoryOption = "",
    priority: PriorityOption = "normal",
    group: GroupOption = "",
    label: LabelOption = None,
    expect: ExpectOption = "",
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

    What follows SCRIPT belongs to the script. Options may also come last, after `--`:

    \b
      fireflyer run --nodes 2 train.py --lr 0.1
      fireflyer run train.py --lr 0.1 -- --nodes 2

    Prints rank 0's output; changes of state go to stderr. Exit 0 when the task finished, else 1.
    Ctrl-C stops the task; Ctrl-C again leaves it stopping and returns. With --json the output goes to
    stderr and the task's last state to stdout. A server is started in the background when none
    answers; it stays until `fireflyer down`.
    """
    from fireflyer.cli.running import Launch, launch

    request = Launch(
        script=script, args=tuple(args or ()), nodes=nodes or 1, ranks=ranks or 1, name=name,
        env=tuple(env or ()), start=start, max_restarts=max_restarts, elastic=elastic,
        grace_s=grace, max_node_faults=max_node_faults, watchdog=watchdog,
        workspace=workspace, workspace_limit=workspace_limit << 20, venv_lock=venv_lock,
        gpus=gpus, memory=memory, priority=priority, group=group,
        labels=tuple(label or ()), expect=expect,
    )  # fmt: skip
    if rehearse is not None:
        from fireflyer.cli.rehearsing import rehearsed

        shown = {"detach": detach, "all_ranks": all_ranks, "json": json}
        raise typer.Exit(rehearsed(request, home, rehearse, shaped=bool(nodes or ranks), **shown))
    raise typer.Exit(launch(request, home, detach=detach, all_ranks=all_ranks, json=json))


@app.command()
def ps(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also tasks that are over.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """List tasks that run or wait."""
    from fireflyer.cli import printing
    from fireflyer.hai.client import Client

    printing.tasks(Client(home).tasks(live=not everything), json=json)


@app.command()
def show(task: TaskArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Show one task and its ranks."""
    from fireflyer.cli import printing
    from fireflyer.hai.client import Client

    printing.task(Client(home).task(task), json=json)


@app.command()
def logs(
    task: TaskArgument,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Which rank.")] = 0,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Which attempt; default: the last one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the task is over.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Print a rank's output."""
    from fireflyer.cli.following import print_log

    print_log(home, task, rank, attempt, follow=follow)


@app.command()
def events(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Only this task's.")] = None,
    after: Annotated[int, typer.Option(min=0, metavar="SEQ", help="Only newer ones.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Print the history of a task or of all.

    With --follow and --json: one object a line.
    """
    from fireflyer.cli.following import print_events

    print_events(home, task, after, follow=follow, json=json)


def _steering(verb: str, goal: str, text: str, example: str) -> None:
    def steer(
        task: TaskArgument,
        wait: Annotated[
            bool, typer.Option("--wait", "-w", help=f"Return once the task is {goal}.")
        ] = False,
        json: JsonOption = False,
        home: HomeOption = None,
    ) -> None:
        from fireflyer.cli.running import steer

        steer(home, verb, task, goal if wait else None, json=json)

    app.command(name=verb, help=f"{text}\n\n\b\n  {example}")(steer)


_steering(
    "stop", "stopped",
    "Stop a task: SIGTERM to its ranks, SIGKILL after its grace.", "fireflyer stop --wait t1",
)  # fmt: skip
_steering(
    "suspend", "suspended",
    "Ask a task to save and leave; it waits for `resume`.", "fireflyer suspend --wait t1",
)  # fmt: skip
_steering(
    "resume", "running",
    "Put a suspended task back into the queue.", "fireflyer resume t1",
)  # fmt: skip


cluster_verbs(app)


@app.command()
def dashboard(
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open it in the browser instead of printing the link.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Print a link that signs a browser in to the dashboard, once, within a minute.

    Who has the link is signed in as you. With --open it is in no process list: a file that only you can
    read leads the browser there.
    """
    from fireflyer.cli import dashboarding

    dashboarding.show(home, open_browser=open_browser)


@app.command()
def faults(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Observations to show.")] = 20,
    rules: Annotated[
        bool, typer.Option("--rules", help="Also why, and the source of each rule.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show the rules for faults, and what was observed and done of late.

    Own rules: faults.toml in the platform's folder, read when the server starts.
    """
    from fireflyer.cli import faulting

    faulting.show(home, limit, full=rules, json=json)


@app.command()
def ledger(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Only this task.")] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this user's tasks; an operator may.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only tasks of this group.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="All nodes, with the time in which nothing held them.")
    ] = False,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only the last so long, e.g. 24h. [default: all]")
    ] = "",
    until: Annotated[
        str, typer.Option(metavar="TIME", help="Leave the last so long out, e.g. 1h.")
    ] = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show where the time of tasks went: useful, lost, waiting, by cause.

    Without TASK: each task and their sum.
    """
    from fireflyer.cli import ledgering

    ledgering.show(
        home, task, user=user, group=group, cluster=cluster, since=since, until=until, json=json
    )


app.command()(sim)
app.command()(accounts.audit)
for group in (accounts.user, accounts.group, accounts.token, accounts.quota):
    app.add_typer(group)
app.add_typer(window)
app.add_typer(record)
app.add_typer(ckpt)
app.add_typer(fs)
app.add_typer(config)
app.add_typer(workspaces)

hand_over(app, "demo", "Train a model, lose a worker, carry on.", "fireflyer.demo")
hand_over(app, "bench", "Measure against peers: fireflyer bench NAME --help.", "fireflyer.bench")
hand_over(app, "lab", "Run a command on several hosts of one machine.", "fireflyer.lab")


def _act(arguments: list[str]) -> int:
    """Parses and runs; lets Typer's and Fireflyer's own errors through."""
    from fireflyer.cli.words import hai_form

    command = typer.main.get_command(app)
    result = command.main(
        args=hai_form(command, arguments) or ["--help"],
        prog_name="fireflyer",
        standalone_mode=False,
    )
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def run_line(arguments: list[str]) -> int:
    """Runs the command line; every error becomes one line on stderr and an exit code."""
    return in_one_line(lambda: _act(arguments))
