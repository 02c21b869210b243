"""`fireflyer ckpt`: its verbs and options. What a verb does is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace what is there.")]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="Which step; default: the newest checkpoint.")
]


@ckpt.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@ckpt.command()
def ls(directory: Directory, json: Json = False) -> None:
    """List checkpoints, the newest first: step, age, size, ranks, tensors, attempt, state, metrics.

    \b
      fireflyer ckpt ls runs/gpt

    States: whole (the manifest and the sizes of the files; `verify` reads the bytes), damaged, unreadable,
    unknown version, set aside (in damaged/).
    """
    from fireflyer.cli import ckpting

    ckpting.ls(directory, json=json)


@ckpt.command()
def inspect(
    directory: Directory,
    step: Annotated[
        int | None, typer.Argument(min=0, metavar="[STEP]", help="Default: the newest.")
    ] = None,
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", "-t", metavar="GLOB", help='Only these, e.g. "model.h.0.*".'),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read them: min, max, mean, NaN count, histogram.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the tree of a state: dtypes, shapes, sizes, pieces, values.

    \b
      fireflyer ckpt inspect runs/gpt
      fireflyer ckpt inspect runs/gpt 500 --tensors "model.*" --stats
    """
    from fireflyer.cli import ckpting

    ckpting.inspect(directory, step, tensors, stats=stats, json=json)


@ckpt.command()
def verify(
    directory: Directory,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP]...", help="Default: all.")
    ] = None,
    json: Json = False,
) -> None:
    """Read every byte of checkpoints and compare its checksum; exit 1 if any is damaged.

    \b
      fireflyer ckpt verify runs/gpt
      fireflyer ckpt verify runs/gpt 400 500
    """
    from fireflyer.cli import ckpting

    raise typer.Exit(ckpting.verify(directory, steps or [], json=json))


@ckpt.command()
def diff(
    directory: Directory,
    before: Annotated[int, typer.Argument(min=0, metavar="A", help="Step.")],
    after: Annotated[int, typer.Argument(min=0, metavar="B", help="Step.")],
    other: Annotated[
        str | None, typer.Option("--in", metavar="DIR", help="Where B is, if not in DIR.")
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 1 if they differ, as git diff does.")
    ] = False,
    json: Json = False,
) -> None:
    """What changed between two checkpoints: tensors by their bytes, values.

    \b
      fireflyer ckpt diff runs/gpt 400 500
      fireflyer ckpt diff runs/gpt 500 500 --in runs/again --exit-code

    Of a tensor that changed: the largest difference of an element, and the norm of the difference
    relative to the norm of A.
    """
    from fireflyer.cli import ckpting

    differ = ckpting.diff(directory, before, other or directory, after, json=json)
    raise typer.Exit(int(differ and exit_code))


@ckpt.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File or folder to make.")],
    to: Annotated[str, typer.Option("--to", metavar="safetensors|dcp|torch", help="Format.")],
    step: StepOption = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="KEY", help='Only what is under it, e.g. "model".'),
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Of safetensors in a folder.")
    ] = "5G",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a checkpoint in another format; each byte is verified on the way.

    \b
      fireflyer ckpt export runs/gpt model.safetensors --to safetensors --root model
      fireflyer ckpt export runs/gpt hf/ --to safetensors --root model --shard-size 2G
      fireflyer ckpt export runs/gpt dcp/ --to dcp
      fireflyer ckpt export runs/gpt state.pt --to torch
    """
    from fireflyer.cli import ckpting

    ckpting.export(directory, step, out, to, root, shard, force=force, json=json)


@ckpt.command(name="import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="safetensors file or folder, DCP folder, torch file."
        ),
    ],
    directory: Directory,
    step: Annotated[int, typer.Option("--step", min=0, help="Its step.")] = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force", "-f", help="Also where runs have saved; one still running is fenced off."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Make a checkpoint of a file or folder of another format. Runs no pickle.

    \b
      fireflyer ckpt import model.safetensors runs/tuned
      fireflyer ckpt import dcp/ runs/gpt2 --step 500
    """
    from fireflyer.cli import ckpting

    ckpting.take_in(source, directory, step, force=force, json=json)


@ckpt.command()
def prune(
    directory: Directory,
    keep: Annotated[int, typer.Option("--keep", "-k", min=1, metavar="N", help="The newest N.")],
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also steps that N divides.")
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also the best N by --metric.")
    ] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="For --best.")] = None,
    mode: Annotated[str, typer.Option(metavar="min|max", help="Which is better.")] = "min",
    check: Annotated[
        bool, typer.Option("--verify", help="Read all; count only what is whole to the byte.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would go, remove nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints, never the newest whole one. A run may go on saving meanwhile.

    \b
      fireflyer ckpt prune runs/gpt --keep 3 --dry-run
      fireflyer ckpt prune runs/gpt --keep 3 --every 1000 --best 2 --metric loss

    Damaged ones stay: they neither count nor go.
    """
    from fireflyer.cli import ckpting

    ckpting.prune(
        directory, keep=keep, every=every, best=best, metric=metric, mode=mode,
        check=check, dry_run=dry_run, json=json,
    )  # fmt: skip
