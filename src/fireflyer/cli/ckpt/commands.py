"""Verbs and options of `fireflyer ckpt`. Implementations are imported when a verb runs."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption
from fireflyer.program import need_directory

ckpt = typer.Typer(
    name="ckpt",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="""Look into, check, compare, convert and thin out checkpoints.

\b
  fireflyer ckpt ls runs/gpt
  fireflyer ckpt verify runs/gpt
  fireflyer ckpt export runs/gpt model/ --to safetensors --root model
""",
)

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="A CheckpointManager's directory, or an fsspec URL.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace existing output.")]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="Step of the checkpoint; default: the newest.")
]


@ckpt.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    need_directory()


@ckpt.command()
def ls(directory: Directory, json: JsonOption = False) -> None:
    """List checkpoints, the newest first: step, age, size, ranks, tensors, attempt, state, metrics.

    \b
      fireflyer ckpt ls runs/gpt

    States: whole (judged by the manifest and the file sizes; `verify` reads the bytes), damaged,
    unreadable, unknown version, set aside (in damaged/).
    """
    from fireflyer.cli.ckpt import impl

    impl.ls(directory, json=json)


@ckpt.command()
def inspect(
    directory: Directory,
    step: Annotated[
        int | None,
        typer.Argument(min=0, metavar="[STEP]", help="Step to show; default: the newest."),
    ] = None,
    tensors: Annotated[
        str | None,
        typer.Option(
            "--tensors", "-t", metavar="GLOB", help='Show only matching keys, e.g. "model.h.0.*".'
        ),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Read the tensors: min, max, mean, NaN count, histogram."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the tree of a state: dtypes, shapes, sizes, pieces, values.

    \b
      fireflyer ckpt inspect runs/gpt
      fireflyer ckpt inspect runs/gpt 500 --tensors "model.*" --stats
    """
    from fireflyer.cli.ckpt import impl

    impl.inspect(directory, step, tensors, stats=stats, json=json)


@ckpt.command()
def verify(
    directory: Directory,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP]...", help="Step to verify; default: all.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Read every byte of checkpoints and compare its checksum; exit 1 if any is damaged.

    \b
      fireflyer ckpt verify runs/gpt
      fireflyer ckpt verify runs/gpt 400 500
    """
    from fireflyer.cli.ckpt import impl

    raise typer.Exit(impl.verify(directory, steps or [], json=json))


@ckpt.command()
def diff(
    directory: Directory,
    before: Annotated[
        int, typer.Argument(min=0, metavar="A", help="Step of the first checkpoint.")
    ],
    after: Annotated[
        int, typer.Argument(min=0, metavar="B", help="Step of the second checkpoint.")
    ],
    other: Annotated[
        str | None,
        typer.Option(
            "--in", metavar="DIR", help="Directory of checkpoint B; default: the first one."
        ),
    ] = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 if the checkpoints differ, as git diff does."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the differences between two checkpoints: tensors by their bytes, and values.

    \b
      fireflyer ckpt diff runs/gpt 400 500
      fireflyer ckpt diff runs/gpt 500 500 --in runs/again --exit-code

    For each changed tensor it prints the largest difference of an element, and the norm of the
    difference relative to the norm of A.
    """
    from fireflyer.cli.ckpt import impl

    differ = impl.diff(directory, before, other or directory, after, json=json)
    raise typer.Exit(int(differ and exit_code))


@ckpt.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File or folder to create.")],
    to: Annotated[
        str, typer.Option("--to", metavar="safetensors|dcp|torch", help="Output format.")
    ],
    step: StepOption = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="KEY", help='Export only the keys below KEY, e.g. "model".'),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            "--shard-size", metavar="SIZE", help="Maximum size of a safetensors file in a folder."
        ),
    ] = "5G",
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint in another format; each byte is verified on the way.

    \b
      fireflyer ckpt export runs/gpt model.safetensors --to safetensors --root model
      fireflyer ckpt export runs/gpt hf/ --to safetensors --root model --shard-size 2G
      fireflyer ckpt export runs/gpt dcp/ --to dcp
      fireflyer ckpt export runs/gpt state.pt --to torch
    """
    from fireflyer.cli.ckpt import impl

    impl.export(directory, step, out, to, root, shard, force=force, json=json)


@ckpt.command(name="import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="safetensors file or folder, DCP folder, torch file."
        ),
    ],
    directory: Directory,
    step: Annotated[int, typer.Option("--step", min=0, help="Step of the new checkpoint.")] = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            "-f",
            help="Import even if runs have saved there; a run that is still running is fenced off.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Create a checkpoint from a file or folder of another format. No pickle is executed.

    \b
      fireflyer ckpt import model.safetensors runs/tuned
      fireflyer ckpt import dcp/ runs/gpt2 --step 500
    """
    from fireflyer.cli.ckpt import impl

    impl.take_in(source, directory, step, force=force, json=json)


@ckpt.command()
def prune(
    directory: Directory,
    keep: Annotated[
        int, typer.Option("--keep", "-k", min=1, metavar="N", help="Keep the newest N.")
    ],
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also keep steps that N divides.")
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also keep the best N by --metric.")
    ] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="Metric for --best.")] = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="min|max", help="Best value of the metric: its minimum or its maximum."
        ),
    ] = "min",
    check: Annotated[
        bool, typer.Option("--verify", help="Read all data; count only checkpoints without damage.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print what would be removed; remove nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove checkpoints, but never the newest whole checkpoint. A run may save meanwhile.

    \b
      fireflyer ckpt prune runs/gpt --keep 3 --dry-run
      fireflyer ckpt prune runs/gpt --keep 3 --every 1000 --best 2 --metric loss

    Damaged checkpoints are neither counted nor removed.
    """
    from fireflyer.cli.ckpt import impl

    impl.prune(
        directory, keep=keep, every=every, best=best, metric=metric, mode=mode,
        check=check, dry_run=dry_run, json=json,
    )  # fmt: skip
