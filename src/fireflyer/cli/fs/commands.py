"""Verbs and options of `fireflyer fs`. Implementations are imported when a verb runs."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption
from fireflyer.cli.passthrough import hand_over

fs = typer.Typer(
    name="fs",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="""Run a distributed file system and use it.

\b
  fireflyer fs up --dir fs                       a whole file system in one process
  fireflyer fs put --dir fs -r photos /photos
  fireflyer fs ls --dir fs -l /photos
  FIREFLYER_FS=fs fireflyer fs get -r /photos copy

Paths in the file system start at its root, with a slash or without. Bytes of a name that are not valid
UTF-8 are printed as \\xff; with --json, "path_base64" has the exact name.
""",
)

Where = Annotated[
    str | None,
    typer.Option(
        "--dir",
        "-d",
        metavar="WHERE",
        help="File system to use: the folder of `fs up --dir`, a cluster.toml, or HOST:PORT of the "
        "manager. Default: $FIREFLYER_FS.",
    ),
]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Include directories and all their contents.")
]
Top = Annotated[str, typer.Argument(metavar="[PATH]", help="Path in the file system.")]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="Paths in the file system.")]
Sources = Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files to copy.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="Name of the copy, or an existing directory to copy into."
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
            help="With --config: roles to run, some of manager, meta, storage. Default: all three.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="With --config: node to run, one of its [nodes.NODE]."),
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
            help="With --dir, first start: targets (parts of the folder) for each copy. Default: 4.",
        ),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="With --role manager,meta: wait until the process with these roles ends, then "
            "replace it.",
        ),
    ] = False,
) -> None:
    """Run a file system, or a part of one, in the foreground; SIGTERM or Ctrl-C ends it.

    \b
      fireflyer fs up --dir fs
      fireflyer fs up --config cluster.toml --role manager,meta,storage --name n1
      fireflyer fs up --config cluster.toml --role storage --name n2

    Prints one line on stdout when the file system is usable. A process that runs only storage
    prints the line when the manager knows the node.
    """
    from fireflyer.cli.fs import impl_up

    if (directory is None) == (config is None):
        raise typer.BadParameter("give exactly one of --dir and --config")
    if directory is not None:
        if role is not None or name is not None or standby:
            raise typer.BadParameter("--role, --name and --standby require --config")
        impl_up.embedded(directory, replicas, targets)
    elif config is not None:
        if replicas is not None or targets is not None:
            raise typer.BadParameter("--replicas and --targets require --dir")
        impl_up.part(config, role, name, standby=standby)


@fs.command()
def ls(
    path: Top = "/",
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also mode, links, owner, size and time of change.")
    ] = False,
    json: JsonOption = False,
    where: Where = None,
) -> None:
    """List a directory in byte order of the names; names of directories end with a slash."""
    from fireflyer.cli.fs import impl_queries

    impl_queries.ls(where, path, long=long, json=json)


@fs.command()
def cat(paths: Paths, where: Where = None) -> None:
    """Write files to stdout. The CRC of every byte is checked first."""
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.cat(where, paths))


@fs.command()
def put(
    sources: Sources, target: Target, recursive: Recursive = False, where: Where = None
) -> None:
    """Copy files of this machine into the file system.

    \b
      fireflyer fs put model.bin /models/
      fireflyer fs put -r photos /photos
      tar c photos | fireflyer fs put - /photos.tar

    A source of - is standard input. Pipes, FIFOs and devices are read to their end. A symlink at
    the target stays: the file behind it is replaced.

    An existing file at the target is replaced once its copy is complete. An interrupted copy leaves
    the existing file, and perhaps a file named .NAME.xxxxxxxx.part beside it.
    """
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.put(where, sources, target, recursive=recursive))


@fs.command()
def get(
    sources: Sources, target: Target, recursive: Recursive = False, where: Where = None
) -> None:
    """Copy files of the file system to this machine.

    \b
      fireflyer fs get /models/model.bin .
      fireflyer fs get -r /photos copy
      fireflyer fs get /photos.tar - | tar x

    A target of - is standard output. Pipes, FIFOs and devices are written to. A symlink at the
    target stays: the file behind it is replaced.

    An existing file at the target is replaced once its copy is complete, as with `fs put`.
    """
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.get(where, sources, target, recursive=recursive))


@fs.command()
def cp(sources: Sources, target: Target, recursive: Recursive = False, where: Where = None) -> None:
    """Copy files within the file system.

    \b
      fireflyer fs cp /models/model.bin /models/best.bin
      fireflyer fs cp -r /photos /backup

    The bytes pass through this machine. An existing file at the target is replaced once its copy is
    complete, as with `fs put`.
    """
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.cp(where, sources, target, recursive=recursive))


@fs.command()
def mv(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Files or directories to move.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="New name, or an existing directory to move the sources into.",
        ),
    ],
    where: Where = None,
) -> None:
    """Move or rename files and directories in the file system. No bytes are copied.

    \b
      fireflyer fs mv /models/new.bin /models/best.bin
      fireflyer fs mv /a /b /archive

    An existing file with the new name is replaced atomically. A directory can replace only an empty
    directory.
    """
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.mv(where, sources, target))


@fs.command()
def rm(
    paths: Paths,
    recursive: Recursive = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Ignore paths that do not exist.")
    ] = False,
    where: Where = None,
) -> None:
    """Remove files; with --recursive also directories and their contents.

    A path that cannot be removed is reported; other paths are removed, and the exit code is 1.
    """
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.rm(where, paths, recursive=recursive, force=force))


@fs.command()
def mkdir(
    paths: Paths,
    parents: Annotated[
        bool,
        typer.Option(
            "--parents",
            "-p",
            help="Create missing parent directories; accept a directory that exists.",
        ),
    ] = False,
    where: Where = None,
) -> None:
    """Create directories."""
    from fireflyer.cli.fs import impl_changes

    raise typer.Exit(impl_changes.mkdir(where, paths, parents=parents))


@fs.command(name="stat")
def stat_(paths: Paths, json: JsonOption = False, where: Where = None) -> None:
    """Show attributes of files and the layout of their chunks. Symlinks are not followed."""
    from fireflyer.cli.fs import impl_queries

    raise typer.Exit(impl_queries.stat_files(where, paths, json=json))


@fs.command()
def du(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH]...", help="Path in the file system. Default: all entries of the root."
        ),
    ] = None,
    json: JsonOption = False,
    where: Where = None,
) -> None:
    """Count bytes, files and directories at and below paths. Replicas are not counted."""
    from fireflyer.cli.fs import impl_queries

    raise typer.Exit(impl_queries.du(where, paths or [], json=json))


@fs.command()
def find(
    path: Top = "/",
    name: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help='Only names that match this pattern, e.g. "*.ffr".'),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="f|d|l|p|s|c|b",
            help="Only files, directories, symlinks, pipes, sockets or devices.",
        ),
    ] = None,
    json: JsonOption = False,
    where: Where = None,
) -> None:
    """List the paths of all entries at and below a path."""
    from fireflyer.cli.fs import impl_queries

    raise typer.Exit(impl_queries.find(where, path, name, kind, json=json))


@fs.command()
def status(json: JsonOption = False, where: Where = None) -> None:
    """Show problems, the nodes, and the chains with their targets.

    Exits with 0 even if there are problems; `--json` lists them in "problems".
    """
    from fireflyer.cli.fs import impl_queries

    impl_queries.status(where, json=json)


@fs.command()
def grow(json: JsonOption = False, where: Where = None) -> None:
    """Create chains from new targets: those of new nodes, or additional targets of known nodes.

    \b
      1. add [nodes.n4] to cluster.toml, start it: fireflyer fs up --role storage --name n4 ...
      2. fireflyer fs grow

    New files also use the new chains; existing files stay where they are. Free targets must exist
    on at least as many nodes as a byte has replicas.
    """
    from fireflyer.cli.fs import impl_queries

    impl_queries.grow(where, json=json)


@fs.command()
def check(
    path: Top = "/",
    all_replicas: Annotated[
        bool,
        typer.Option(
            "--all-replicas", help="Make the nodes read all replicas of the file system first."
        ),
    ] = False,
    json: JsonOption = False,
    where: Where = None,
) -> None:
    """Read all data stored at and below a path; name the files that cannot be read.

    Exits with 1 if there are such files, damage that other replicas repair, or a chain that serves
    no requests. Each chunk is read from one of its replicas. The nodes read all of their replicas
    every `scrub_days` (default: a week), and at once with --all-replicas or
    `fireflyer fs scrub --now`.
    """
    from fireflyer.cli.fs import impl_queries

    raise typer.Exit(impl_queries.check(where, path, all_replicas=all_replicas, json=json))


@fs.command()
def mount(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Empty directory to mount at.")],
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay in this process and log to stderr.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Log of the process in the background. "
            "Default: ~/.local/state/fireflyer/mount-DIR.log.",
        ),
    ] = None,
    cache: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="How long the kernel may keep names and attributes."
        ),
    ] = 1.0,
    where: Where = None,
) -> None:
    """Show a file system as a directory of this machine, for every program.

    \b
      fireflyer fs mount /mnt/fs --dir fs
      fireflyer fs umount /mnt/fs

    Returns when the directory can be used. A program that opens a file sees all data that was written
    before the file was last closed, on any machine. Locks (flock, fcntl) hold between the processes
    of one mount, not between mounts. Needs libfuse3 and /dev/fuse.
    """
    from fireflyer.cli.fs import impl_mount

    impl_mount.mount(where, directory, foreground=foreground, log_file=log, cache_s=cache)


@fs.command()
def umount(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Mounted directory.")],
    lazy: Annotated[
        bool,
        typer.Option(
            "--lazy", "-l", help="Also unmount a directory in use; programs keep their open files."
        ),
    ] = False,
) -> None:
    """Unmount a directory, also one whose mount process was killed."""
    from fireflyer.cli.fs import impl_mount

    impl_mount.umount(directory, lazy=lazy)


@fs.command()
def scrub(
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Make all nodes read all their data now, and wait for the result."
        ),
    ] = False,
    json: JsonOption = False,
    where: Where = None,
) -> None:
    """Show when each target was last read completely and its damage; with --now, read all targets.

    Damaged chunks are repaired from other replicas. With --now, exits with 1 if there was damage,
    or if a target could not be read.
    """
    from fireflyer.cli.fs import impl_queries

    if not now:
        impl_queries.scrubs(where, json=json)
        return
    raise typer.Exit(impl_queries.scrub(where, json=json))


hand_over(
    fs, "bench", "Measure against raw reads and other file systems; = `fireflyer bench fs`.",
    "fireflyer.bench", "fs",
)  # fmt: skip
