"""`fireflyer fs`: its verbs and options. What a verb does is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

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
""",
)

Where = Annotated[
    str | None,
    typer.Option(
        "--dir",
        "-d",
        metavar="WHERE",
        help="Folder of `fs up --dir`, cluster.toml, or HOST:PORT of the manager; else $FIREFLYER_FS.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Directories with all that is in them.")
]
Top = Annotated[str, typer.Argument(metavar="[PATH]", help="Default: the root.")]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...")]
Sources = Annotated[list[str], typer.Argument(metavar="SOURCE...", help="What to copy.")]
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A name, or a directory that is there.")
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
        typer.Option("--dir", "-d", metavar="DIR", help="All roles, all data in this folder."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="cluster.toml of several processes."),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(metavar="ROLE,...", help="With --config: of manager, meta, storage; or all."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NODE", help="With --config: which of its nodes this is.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="With --dir, first start: copies of each byte; or 1.")
    ] = None,
    targets: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="With --dir, first start: parts of the folder; or 4."),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="With --role manager,meta: wait until the other one ends."),
    ] = False,
) -> None:
    """Run a file system, or a part of one, in the foreground; SIGTERM or Ctrl-C ends it.

    \b
      fireflyer fs up --dir fs
      fireflyer fs up --config cluster.toml --role manager,meta,storage --name n1
      fireflyer fs up --config cluster.toml --role storage --name n2

    Prints one line on stdout when files can be used (a storage node alone: when it is registered).
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
        bool, typer.Option("--long", "-l", help="Mode, links, owner, size, time too.")
    ] = False,
    json: Json = False,
    where: Where = None,
) -> None:
    """List a directory."""
    from fireflyer.cli import fs_looking

    fs_looking.ls(where, path, long=long, json=json)


@fs.command()
def cat(paths: Paths, where: Where = None) -> None:
    """Write files to stdout; every byte is compared with its CRC."""
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

    A file gets its name when it is whole: a copy that ends early leaves what was there.
    """
    from fireflyer.cli import fs_changing

    fs_changing.put(where, sources, target, recursive=recursive)


@fs.command()
def get(
    sources: Sources, target: Target, recursive: Recursive = False, where: Where = None
) -> None:
    """Copy files of the file system to this machine; likewise.

    \b
      fireflyer fs get /models/model.bin .
      fireflyer fs get -r /photos copy
    """
    from fireflyer.cli import fs_changing

    fs_changing.get(where, sources, target, recursive=recursive)


@fs.command()
def cp(sources: Sources, target: Target, recursive: Recursive = False, where: Where = None) -> None:
    """Copy files within the file system; likewise."""
    from fireflyer.cli import fs_changing

    fs_changing.cp(where, sources, target, recursive=recursive)


@fs.command()
def mv(sources: Sources, target: Target, where: Where = None) -> None:
    """Rename files and directories; a file at the target is replaced."""
    from fireflyer.cli import fs_changing

    fs_changing.mv(where, sources, target)


@fs.command()
def rm(
    paths: Paths,
    recursive: Recursive = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="What is not there is no error.")
    ] = False,
    where: Where = None,
) -> None:
    """Remove files, or directories with all that is in them."""
    from fireflyer.cli import fs_changing

    fs_changing.rm(where, paths, recursive=recursive, force=force)


@fs.command()
def mkdir(
    paths: Paths,
    parents: Annotated[
        bool, typer.Option("--parents", "-p", help="Also what is missing above; one there is fine.")
    ] = False,
    where: Where = None,
) -> None:
    """Make directories."""
    from fireflyer.cli import fs_changing

    fs_changing.mkdir(where, paths, parents=parents)


@fs.command(name="stat")
def stat_(paths: Paths, json: Json = False, where: Where = None) -> None:
    """Show all that is known of files: attributes, and how their chunks are laid out."""
    from fireflyer.cli import fs_looking

    fs_looking.stat_files(where, paths, json=json)


@fs.command()
def du(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Default: all in the root.")
    ] = None,
    json: Json = False,
    where: Where = None,
) -> None:
    """Count bytes, files and directories at and below paths."""
    from fireflyer.cli import fs_looking

    fs_looking.du(where, paths or [], json=json)


@fs.command()
def find(
    path: Top = "/",
    name: Annotated[
        str | None, typer.Option(metavar="GLOB", help='Only such names, e.g. "*.ffr".')
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--type", metavar="f|d|l", help="Only files, directories, links.")
    ] = None,
    json: Json = False,
    where: Where = None,
) -> None:
    """List all that is at and below a path."""
    from fireflyer.cli import fs_looking

    fs_looking.find(where, path, name, kind, json=json)


@fs.command()
def status(json: Json = False, where: Where = None) -> None:
    """Show what is wrong, the nodes, and the chains with the states of their targets."""
    from fireflyer.cli import fs_looking

    fs_looking.status(where, json=json)


@fs.command()
def grow(json: Json = False, where: Where = None) -> None:
    """Make chains of targets that are in none: of nodes that came later, or got more targets.

    \b
      1. add [nodes.n4] to cluster.toml, start it: fireflyer fs up --role storage --name n4 ...
      2. fireflyer fs grow
    New files use the new chains, too; files that are there stay where they are. There must be free
    targets on as many nodes as a byte has replicas.
    """
    from fireflyer.cli import fs_looking

    fs_looking.grow(where, json=json)


@fs.command()
def check(path: Top = "/", json: Json = False, where: Where = None) -> None:
    """Read all that is stored at and below a path; exit 1 if any cannot be had, or a chain serves nobody.

    Each chunk is read from one of its replicas; the nodes themselves read all of theirs once a week.
    """
    from fireflyer.cli import fs_looking

    raise typer.Exit(fs_looking.check(where, path, json=json))
