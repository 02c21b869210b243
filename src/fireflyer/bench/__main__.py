"""`fireflyer bench`: the command line of the benchmarks."""

import shlex
import sys
from typing import Annotated

import typer

from fireflyer.bench.report import Machine, Report, emit
from fireflyer.program import run_app

app = typer.Typer(
    name="fireflyer bench",
    help="Measure ours against a peer and against the machine's limit, interleaved in one run.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]", help="write the report as JSON; '-' or nothing: stdout"
    ),
]


@app.callback()
def main() -> None:
    """Measure ours against a peer and against the machine's limit, interleaved in one run."""


@app.command()
def allreduce(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="processes on this host")] = 2,
    sizes: Annotated[str, typer.Option(help="tensor sizes, e.g. 64K,1M,16M,128M")] = "64K,1M,16M",
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds; medians are shown")] = 7,
    json_to: JsonTo = None,
) -> None:
    """Allreduce inside a host, zero-copy and staged, against gloo."""
    from fireflyer.bench import allreduce as bench

    if dtype not in ("float32", "float64", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is not float32, float64 or bfloat16")
    try:
        wanted = [bench.parse_size(s.strip()) for s in sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    machine = Machine.here()
    rows = bench.run(ranks, wanted, dtype, rounds)
    command = shlex.join(["fireflyer", "bench", *sys.argv[1:]])
    emit(Report(bench="allreduce", command=command, machine=machine, rows=rows), json_to)


def with_default_json(arguments: list[str]) -> list[str]:
    """`--json` without a file means standard output."""
    result: list[str] = []
    for index, argument in enumerate(arguments):
        result.append(argument)
        following = arguments[index + 1 : index + 2]
        if argument == "--json" and (not following or following[0].startswith("--")):
            result.append("-")
    return result


if __name__ == "__main__":
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(run_app(app, "fireflyer bench", with_default_json(sys.argv[1:]) or ["--help"]))
