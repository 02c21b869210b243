"""`fireflyer fs`: its verbs and options. What a verb does is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.handing import hand_over

fs = typer.Typer(
    name="fs",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="""Run a distributed file system and use it.

\b
  fireflyer fs up --dir fs                       all of it in one process, on this machine
  fireflyer fs put --dir fs -r photos /photos
  fireflyer fs ls --dir fs -l /photos
  FIREFLYER_FS=fs fireflyer fs get -r /photos copy

Paths in the file system start at its root, with a slash or without. A name with bytes that are no UTF-8
is printed with these as \\xff, in JSON with "path_base64" beside it.
""",
)

Where = Annotated[
    str | None,
    typer.Option(
        "--dir",
        "-d",
        metavar="WHERE",
        help="Which file system: the folder of `fs up --dir`, a cluster.toml, or HOST:PORT of the "
        "manager. Default: $FIREFLYER_FS.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Also directories, with all that is in them.")
]
Top = Annotated[str, typer.Argument(metavar="[PATH]", help="In the file system.")]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="In the file system.")]
Sources = Annotated[list[str], typer.Argument(metavar="SOURCE...", help="What to copy.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="The copy's name, or a directory that is there: copies go into it."
    ),
]


@fs.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@fs.command()
def up(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", "-d", metavar="DIR", help="Run all roles, with all data in this folder."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Run a part of the cluster that this cluster.toml describes.",
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE,...",
            help="With --config: which of manager, meta and storage to run. Default: all three.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="With --config: which of its [nodes.NODE] to run."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="With --dir, first start: copies of each byte. Default: 1."),
    ] = None,
    targets: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="With --dir, first start: parts of the folder, for each copy. Default: 4.",
        ),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="With --role manager,meta: wait until the process that has these ends, then take its place.",
        ),
    ] = False,
) -> None:
    """Run a file system, or a part of one, in the foreground; SIGTERM or Ctrl-C ends it.

    \b
      fireflyer fs up --dir fs
      fireflyer fs up --config cluster.toml --role manager,meta,storage --name n1
      fireflyer fs up --config cluster.toml --role storage --name n2

    Prints one line on stdout when files can be used; a storage node alone, when the manager knows it.
    """
    from fireflyer.cli import fs_serving

    if (directory is None) == (config is None):
        raise typer.BadParameter("say one of --dir and --config")
    if directory is not None:
        if role is not None or name is not None or standby:
            raise typer.BadParameter("--role, --name and --standby go with --config")
        fs_serving.embedded(directory, replicas, targets)
    elif config is not None:
        if replicas is not None or targets is not None:
            raise typer.BadParameter("--replicas and --targets go with --dir")
        fs_serving.part(config, role, name, standby=standby)


@fs.command()
def ls(
    path: Top = "/",
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also mode, links, owner, size and time of change.")
    ] = False,
    json: Json = False,
    where: Where = None,
) -> None:
    """List a directory. Names are in the order of their bytes; those of directories end with a slash."""
    from fireflyer.cli import fs_looking

    fs_looking.ls(where, path, long=long, json=json)


@fs.command()
def cat(paths: Paths, where: Where = None) -> None:
    """Write files to stdout. Every byte is compared with its CRC first."""
    from fireflyer.cli import fs_changing

    fs_changing.cat(where, paths)


@fs.command()
def put(
    sources: Sources, target: Target, recursive: Recursive = False, where: Where = None
) -> None:
    """Copy files of this machine into the file system.

    \b
      fireflyer fs put model.bin /models/
      fireflyer fs put -r photos /photos

    A file at the target is replaced, when the copy of it is whole: one that ends early leaves what was
    there, and perhaps a file named .NAME.xxxxxxxx.part beside it.
    """
    from fireflyer.cli import fs_changing

    fs_changing.put(where, sources, target, recursive=recursive)


@fs.command()
def get(
    sources: Sources, target: Target, recursive: Recursive = False, where: Where = None
) -> None:
    """Copy files of the file system to this machine.

    \b
      fireflyer fs get /models/model.bin .
      fireflyer fs get -r /photos copy

    A file at the target is replaced, when the copy of it is whole, as with `fs put`.
    """
    from fireflyer.cli import fs_changing

    fs_changing.get(where, sources, target, recursive=recursive)


@fs.command()
def cp(sources: Sources, target: Target, recursive: Recursive = False, where: Where = None) -> None:
    """Copy files within the file system.

    \b
      fireflyer fs cp /models/model.bin /models/best.bin
      fireflyer fs cp -r /photos /backup

    The bytes go through this machine. A file at the target is replaced, when the copy of it is whole, as
    with `fs put`.
    """
    from fireflyer.cli import fs_changing

    fs_changing.cp(where, sources, target, recursive=recursive)


@fs.command()
def mv(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Files or directories to move.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The new name, or a directory that is there: sources move into it.",
        ),
    ],
    where: Where = None,
) -> None:
    """Move or rename files and directories in the file system. No bytes are copied.

    \b
      fireflyer fs mv /models/new.bin /models/best.bin
      fireflyer fs mv /a /b /archive

    Where a file has the new name it is replaced, in one step. A directory takes the place of an empty
    directory only.
    """
    from fireflyer.cli import fs_changing

    fs_changing.mv(where, sources, target)


@fs.command()
def rm(
    paths: Paths,
    recursive: Recursive = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Say nothing of what is not there.")
    ] = False,
    where: Where = None,
) -> None:
    """Remove files. With --recursive also directories, with all that is in them."""
    from fireflyer.cli import fs_changing

    fs_changing.rm(where, paths, recursive=recursive, force=force)


@fs.command()
def mkdir(
    paths: Paths,
    parents: Annotated[
        bool,
        typer.Option(
            "--parents", "-p", help="Also make missing directories above; no error if it is there."
        ),
    ] = False,
    where: Where = None,
) -> None:
    """Make directories."""
    from fireflyer.cli import fs_changing

    fs_changing.mkdir(where, paths, parents=parents)


@fs.command(name="stat")
def stat_(paths: Paths, json: Json = False, where: Where = None) -> None:
    """Show attributes of files, and how their chunks are laid out. Symlinks are not followed."""
    from fireflyer.cli import fs_looking

    fs_looking.stat_files(where, paths, json=json)


@fs.command()
def du(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH]...", help="In the file system. Default: all in the root."),
    ] = None,
    json: Json = False,
    where: Where = None,
) -> None:
    """Count bytes, files and directories at and below paths. Replicas are not counted."""
    from fireflyer.cli import fs_looking

    raise typer.Exit(fs_looking.du(where, paths or [], json=json))


@fs.command()
def find(
    path: Top = "/",
    name: Annotated[
        str | None, typer.Option(metavar="GLOB", help='Only names like this, e.g. "*.ffr".')
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--type", metavar="f|d|l", help="Only files, directories or symlinks."),
    ] = None,
    json: Json = False,
    where: Where = None,
) -> None:
    """List the paths of all that is at and below a path."""
    from fireflyer.cli import fs_looking

    raise typer.Exit(fs_looking.find(where, path, name, kind, json=json))


@fs.command()
def status(json: Json = False, where: Where = None) -> None:
    """Show what is wrong, the nodes, and the chains with their targets.

    Exit 0 whatever is wrong; `--json` has it in "problems".
    """
    from fireflyer.cli import fs_looking

    fs_looking.status(where, json=json)


@fs.command()
def grow(json: Json = False, where: Where = None) -> None:
    """Make chains of new targets: of nodes that came later, or got more targets.

    \b
      1. add [nodes.n4] to cluster.toml, start it: fireflyer fs up --role storage --name n4 ...
      2. fireflyer fs grow

    New files use the new chains, too; files that are there stay where they are. There must be free
    targets on as many nodes as a byte has replicas.
    """
    from fireflyer.cli import fs_looking

    fs_looking.grow(where, json=json)


@fs.command()
def check(
    path: Top = "/",
    all_replicas: Annotated[
        bool,
        typer.Option(
            "--all-replicas", help="Have the nodes read all replicas of the file system first."
        ),
    ] = False,
    json: Json = False,
    where: Where = None,
) -> None:
    """Read all that is stored at and below a path. Files of which some cannot be read are named.

    Exit 1 if there are such files, damage that others make good, or a chain that serves nobody. Each chunk
    is read from one of its replicas: the nodes read all of theirs within `scrub_days`, a week, or now with
    --all-replicas or `fireflyer fs scrub --now`.
    """
    from fireflyer.cli import fs_looking

    raise typer.Exit(fs_looking.check(where, path, all_replicas=all_replicas, json=json))


@fs.command()
def scrub(
    now: Annotated[
        bool, typer.Option("--now", help="Have all nodes read all they hold, and wait for that.")
    ] = False,
    json: Json = False,
    where: Where = None,
) -> None:
    """Show when each target was last read whole and what was damaged; with --now, read all of them.

    What is damaged is repaired from other replicas. Exit 1 with --now if there was damage, or a target
    could not be read.
    """
    from fireflyer.cli import fs_looking

    if not now:
        fs_looking.scrubs(where, json=json)
        return
    raise typer.Exit(fs_looking.scrub(where, json=json))


hand_over(
    fs, "bench", "Measure against raw reads and other file systems; = `fireflyer bench fs`.",
    "fireflyer.bench", "fs",
)  # fmt: skip
