"""Options of `fireflyer demo`, and its final output."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from typer.exceptions import Abort, TyperException

from fireflyer.demo import report
from fireflyer.demo.driver import Options, Outcome, run, tail
from fireflyer.demo.machine import describe
from fireflyer.demo.processes import Interrupts
from fireflyer.demo.progress import TerminalScreen, summary
from fireflyer.errors import ConfigError, FireflyerError
from fireflyer.program import fail, json_option, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Tokens(StrEnum):
    """Tokenizations of the text."""

    bpe = "bpe"
    bytes = "bytes"


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def demo(
    nodes: Annotated[int, typer.Option(min=1, help="Virtual nodes.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    seconds: Annotated[float, typer.Option(min=5, help="Training time.")] = 130,
    width: Annotated[int, typer.Option(min=32, help="Width of the model, a multiple of 32.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 8,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of text; default: the standard library's sources."
        ),
    ] = None,
    tokens: Annotated[Tokens, typer.Option(help="Tokenizer of the text.")] = Tokens.bpe,
    as_json: Annotated[bool, json_option()] = False,
    page: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="File of the report page.")
    ] = Path("demo-report.html"),
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="DIR", help="Folder of the data set and of the files of the run."
        ),
    ] = Path("fireflyer-demo"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep logs, checkpoints and metrics of the run.")
    ] = False,
) -> None:
    """Train a small GPT on real text, kill a rank, suspend and resume, and report.

    The command starts its own platform with virtual nodes and ends it afterwards. Ctrl-C ends
    everything. Exit codes: 0 ok, 1 the run did not reach its goal, 2 usage, 130 Ctrl-C.
    """
    if width % 32:
        raise typer.BadParameter(f"{width} is not a multiple of 32", param_hint="--width")
    options = Options(
        nodes=nodes,
        ranks=ranks,
        seconds=seconds,
        width=width,
        layers=layers,
        batch=batch,
        text=text,
        tokens=tokens.value,
        directory=directory,
        keep=keep,
    )
    raise typer.Exit(_run(options, page, as_json))


def _run(options: Options, page: Path, as_json: bool) -> int:
    console = Console(stderr=True)
    # If the variable is unset, the package tokenizers warns about forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    report.check(page)
    with Interrupts().installed() as interrupts:
        with TerminalScreen(console) as screen:
            outcome = run(options, screen, interrupts)
        _tell(outcome, as_json, console)
        if outcome.figures is not None:
            html = report.render(
                outcome.figures, outcome.story, outcome.meta, outcome.sample, options, describe()
            )
            report.save(html, page)
            console.print(f"report: {page}", highlight=False, markup=False, soft_wrap=True)
    return 1 if outcome.problems else 0


_INTERRUPTED = 130
"""Exit code that Typer returns in place of a KeyboardInterrupt."""


def run_line(arguments: list[str]) -> int:
    """Runs the command line; turns every error into one line on stderr and an exit code.

    Raises:
        KeyboardInterrupt: after every process that the run started has ended.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="fireflyer demo", standalone_mode=False)
    except Abort:
        raise KeyboardInterrupt from None
    except TyperException as error:
        return fail("UsageError", error.format_message(), error.exit_code)
    except FireflyerError as error:
        code = 2 if isinstance(error, ConfigError) else 1
        return fail(type(error).__name__, str(error), code)
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _tell(outcome: Outcome, as_json: bool, console: Console) -> None:
    """Prints the figures, the sample and the problems."""
    if outcome.figures is not None:
        console.print(summary(outcome.figures))
        if outcome.sample:
            code = Syntax(
                outcome.sample.strip(), "python", background_color="default", word_wrap=True
            )
            console.print(Panel(code, title="written by the model", title_align="left"))
        if as_json:
            write_json(msgspec.json.encode(outcome.figures))
    for problem in outcome.problems:
        console.print(
            f"not reached: {problem}", style="red", markup=False, highlight=False, soft_wrap=True
        )
    if outcome.log:
        if end := tail(outcome.log):
            console.print(end, style="dim", markup=False, highlight=False, soft_wrap=True)
        console.print(f"log: {outcome.log}", highlight=False, markup=False, soft_wrap=True)
