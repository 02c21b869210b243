"""Verbs of `fireflyer kv cache`."""

from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

cache = typer.Typer(
    name="cache",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Page caches of LLM engines.",
)

CacheArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Cache: a folder, fs3://HOST:PORT/PATH or fs3:///PATH.")
]


@cache.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@cache.command()
def stat(url: CacheArgument, json: JsonOption = False) -> None:
    """Show segments, pages, bytes, and the bytes of each salt. Reads only the heads of segments.

    \b
      fireflyer kv cache stat /mnt/pages
    """
    from fireflyer.cli.kv import impl

    impl.cache_stat(url, json=json)


@cache.command()
def check(url: CacheArgument, json: JsonOption = False) -> None:
    """Read every segment and verify every byte. Exits with 1 if one is damaged.

    A damaged page is a miss for engines, never a wrong page, and needs no repair.
    """
    from fireflyer.cli.kv import impl

    raise typer.Exit(impl.cache_check(url, json=json))
