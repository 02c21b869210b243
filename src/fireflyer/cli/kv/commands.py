"""Verbs and options of `fireflyer kv`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.kv.cache import cache
from fireflyer.cli.options import JsonOption

kv = typer.Typer(
    name="kv",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Key-value stores on shared storage.",
)

kv.add_typer(cache)

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Store: a folder, fs3://HOST:PORT/PATH or fs3:///PATH.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Key, as UTF-8 text.")]
HexOption = Annotated[bool, typer.Option("--hex", help="Keys are written in hexadecimal.")]


@kv.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@kv.command()
def get(
    url: UrlArgument,
    key: KeyArgument,
    hexadecimal: HexOption = False,
    snapshot: Annotated[
        str | None, typer.Option(metavar="ID", help="Read this snapshot, not the newest state.")
    ] = None,
) -> None:
    """Write the value of a key to stdout, byte for byte. Exits with 1 if there is none.

    \b
      fireflyer kv get /mnt/db greeting
    """
    from fireflyer.cli.kv import impl

    raise typer.Exit(impl.get(url, key, hexadecimal=hexadecimal, snapshot=snapshot))


@kv.command()
def put(
    url: UrlArgument,
    key: KeyArgument,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="Value, as UTF-8 text; default: stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the value from FILE.")
    ] = None,
    ttl: Annotated[
        str, typer.Option(metavar="TIME", help="Drop the value after TIME, e.g. 24h.")
    ] = "",
    hexadecimal: HexOption = False,
) -> None:
    """Set a value; it is durable when the command returns. Creates a missing store.

    Fences off the writer: a program that has the store open for writing gets an error from then on.

    \b
      fireflyer kv put /mnt/db greeting hello
      fireflyer kv put fs3:///db weights --file weights.bin
    """
    from fireflyer.cli.kv import impl

    impl.put(url, key, value, file, ttl, hexadecimal=hexadecimal)


@kv.command()
def delete(url: UrlArgument, key: KeyArgument, hexadecimal: HexOption = False) -> None:
    """Delete a key; a missing key is no error. Fences off the writer, as `put` does."""
    from fireflyer.cli.kv import impl

    impl.delete(url, key, hexadecimal=hexadecimal)


@kv.command()
def scan(
    url: UrlArgument,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="Only keys with this prefix.")] = "",
    start: Annotated[str, typer.Option(metavar="KEY", help="First key.")] = "",
    end: Annotated[str, typer.Option(metavar="KEY", help="Key to stop before.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of pairs to print.")] = 1000,
    hexadecimal: HexOption = False,
    keys_only: Annotated[bool, typer.Option("--keys", help="Print no values.")] = False,
    json: JsonOption = False,
) -> None:
    """List keys and values in the order of the keys.

    A value is shortened to 60 characters. With --json each line is one object, with whole values;
    bytes that are not UTF-8 are written in Base64, as "key64" and "value64".

    \b
      fireflyer kv scan /mnt/db --prefix user/ --limit 20
    """
    from fireflyer.cli.kv import impl

    impl.scan(
        url, prefix, start, end, limit, hexadecimal=hexadecimal, keys_only=keys_only, json=json
    )


@kv.command()
def stat(url: UrlArgument, json: JsonOption = False) -> None:
    """Show the epoch, the tables, and the log that is replayed when the store is opened."""
    from fireflyer.cli.kv import impl

    impl.stat(url, json=json)


@kv.command()
def check(url: UrlArgument, json: JsonOption = False) -> None:
    """Read every object that the newest state needs, and verify it. Exits with 1 if one is damaged."""
    from fireflyer.cli.kv import impl

    raise typer.Exit(impl.check(url, json=json))


@kv.command()
def compact(url: UrlArgument, json: JsonOption = False) -> None:
    """Merge all tables into one run, and delete what is no longer needed.

    Fences off the writer: a program that has the store open for writing gets an error from then on.
    Such a program merges tables and deletes unused objects by itself.
    """
    from fireflyer.cli.kv import impl

    impl.compact(url, json=json)


@kv.command()
def gc(url: UrlArgument, json: JsonOption = False) -> None:
    """Delete objects that nothing needs. Fences off the writer, as `compact` does.

    Needs a few KiB of free space for a manifest; a program that has the store open needs none.
    """
    from fireflyer.cli.kv import impl

    impl.gc(url, json=json)
