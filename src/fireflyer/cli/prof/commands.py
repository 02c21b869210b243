"""Verbs and options of `fireflyer prof`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import HomeOption, JsonOption

prof = typer.Typer(
    name="prof",
    no_args_is_help=False,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""Show where the time of a training process goes.

\b
  haiprof run train.py --lr 0.1         run a script that can be attached to at any time
  haiprof attach 4711 --time 5          profile it for five seconds
  haiprof attach t1 --output prof       all ranks of a task of `fireflyer run`
  haiprof top t1                        ranks as rows, phases as bars
  haiprof report prof --html prof.html  name what slows it, with evidence
""",
)

TargetsArgument = Annotated[
    list[str], typer.Argument(metavar="PID|TASK...", help="Process ids, or one task id, e.g. t1.")
]
TimeOption = Annotated[
    float,
    typer.Option("--time", "-t", metavar="S", envvar="HAIPROF_TIME", help="Seconds to record."),
]
RecordersOption = Annotated[
    str,
    typer.Option(
        "--recorders", "-r", metavar="NAMES", envvar="HAIPROF_RECORDERS",
        help="all, or some of basic, cpu, gpu, mem, io, ib, numa, phase, trace.",
    ),
]  # fmt: skip
IntervalOption = Annotated[
    list[str] | None,
    typer.Option(
        "--interval", metavar="NAME=S",
        help="Seconds between values of a recorder. Also: HAIPROF_<NAME>_INTERVAL.",
    ),
]  # fmt: skip
RateOption = Annotated[
    float,
    typer.Option("--rate", min=0, max=1000, metavar="HZ", help="Stack samples a second; 0: none."),
]
TraceOption = Annotated[
    int,
    typer.Option(
        "--trace", min=0, max=100, metavar="STEPS", envvar="HAIPROF_TRACE",
        help="Record the operators of this many steps, and every phase and collective.",
    ),
]  # fmt: skip
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="DIR", envvar="HAIPROF_LOG_DIR",
        help="Store the profile here: one file a rank, trace.json and report.html.",
    ),
]  # fmt: skip
WaitOption = Annotated[
    float,
    typer.Option("--timeout", min=0, metavar="S", help="Seconds to wait for a process to answer."),
]
USUAL = "basic,cpu,mem,io,phase"


@prof.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@prof.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]")
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None,
    time: Annotated[
        float | None,
        typer.Option(
            "--time", "-t", metavar="S", envvar="HAIPROF_TIME",
            help="Profile SCRIPT for this many seconds from the start, and print the report. "
            "Default: only make it attachable.",
        ),
    ] = None,
    warmup: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", envvar="HAIPROF_WARMUP", help="Seconds to wait before --time begins."
        ),
    ] = 0.0,
    recorders: RecordersOption = USUAL,
    interval: IntervalOption = None,
    rate: RateOption = 100.0,
    trace: TraceOption = 0,
    output: OutputOption = None,
) -> None:  # fmt: skip
    """Run a script that can be attached to at any time.

    Exits with the exit code of the script.

    \b
      haiprof run train.py --lr 0.1
      haiprof run --time 120 --output prof train.py --lr 0.1
    """
    from fireflyer.cli.prof import impl

    options = impl.options(time or 1.0, recorders, interval, rate, trace)
    raise typer.Exit(impl.run(script, args or [], options, time, warmup, output))


@prof.command(
    "trace", context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]"
)
def trace_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None,
    time: TimeOption = 30.0,
    warmup: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="S",
            envvar="HAIPROF_WARMUP",
            help="Seconds to wait before --time begins.",
        ),
    ] = 0.0,
    steps: Annotated[
        int, typer.Option(min=1, max=100, help="Steps whose operators to record.")
    ] = 3,
    output: OutputOption = Path("haiprof"),
) -> None:
    """Run a script and record a trace that Perfetto opens: OUTPUT/trace.json.

    \b
      haiprof trace train.py --lr 0.1
    """
    from fireflyer.cli.prof import impl

    options = impl.options(time, f"{USUAL},trace", None, 100.0, steps)
    raise typer.Exit(impl.run(script, args or [], options, time, warmup, output))


@prof.command()
def attach(
    targets: TargetsArgument,
    time: TimeOption = 5.0,
    recorders: RecordersOption = USUAL,
    interval: IntervalOption = None,
    rate: RateOption = 100.0,
    trace: TraceOption = 0,
    output: OutputOption = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", "-w", help="Wait until the task runs; count the time from its first step."
        ),
    ] = False,
    warmup: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds to wait before the recording.")
    ] = 0.0,
    timeout: WaitOption = 10.0,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Profile running processes, or all ranks of a task, and print the report.

    The processes continue unchanged, even if this program is killed. A task's profile is stored
    beside its logs. For a process that was not prepared, only stacks are read, with py-spy.

    \b
      haiprof attach 4711 --time 5 --json
      haiprof attach t1 --time 30 --trace 3
    """
    from fireflyer.cli.prof import impl

    options = impl.options(time, recorders, interval, rate, trace, timeout)
    impl.attach(targets, options, output, home, wait=wait, warmup=warmup, json=json)


@prof.command()
def top(
    targets: TargetsArgument,
    time: Annotated[
        float, typer.Option("--time", "-t", metavar="S", help="Seconds to watch.")
    ] = 3600.0,
    home: HomeOption = None,
) -> None:
    """Watch the ranks of a task: steps, phases as bars, processor and memory. Ctrl-C ends it.

    \b
      haiprof top t1
    """
    from fireflyer.cli.prof import impl

    impl.top(targets, impl.options(time, "basic,phase", None, 0.0, 0), home)


@prof.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Stored profile (--output).")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page.")
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write gauges for node_exporter's textfile collector."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of all ranks for ui.perfetto.dev."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain a stored profile: what bounds a step, and findings ranked by possible saving.

    \b
      haiprof report prof --html prof.html --trace prof.json
    """
    from fireflyer.cli.prof import impl

    impl.report(folder, html, prometheus, trace, json=json)


@prof.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Stored profile.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Stored profile.")],
    json: JsonOption = False,
) -> None:
    """Compare two profiles phase by phase; says which changes are larger than the noise.

    \b
      haiprof compare prof-before prof-after
    """
    from fireflyer.cli.prof import impl

    impl.compare(before, after, json=json)


@prof.command()
def enable(json: JsonOption = False) -> None:
    """Make every Python of this environment attachable once it imports torch.

    Writes one `.pth` file to site-packages. A process has no thread, open file or timer of the
    profiler before it is attached to.
    """
    from fireflyer.cli.prof import impl

    impl.enable(json=json)


@prof.command()
def disable(json: JsonOption = False) -> None:
    """Undo `enable`. Running processes stay attachable."""
    from fireflyer.cli.prof import impl

    impl.disable(json=json)


@prof.command()
def recorders(json: JsonOption = False) -> None:
    """List the recorders, their intervals, and why a recorder is missing on this machine."""
    from fireflyer.cli.prof import impl

    impl.recorders(json=json)
