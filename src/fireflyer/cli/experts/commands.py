"""Verbs and options of `fireflyer experts`."""

from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

experts = typer.Typer(
    name="experts",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Experts (models) that are served from tiers of memory.",
)

FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER", help="Experts: a folder, fs3://HOST:PORT/PATH or fs3:///PATH."
    ),
]


@experts.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@experts.command()
def add(
    folder: FolderArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new expert.")],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A safetensors file, a folder of shards, a DCP folder or a torch.save file.",
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Add a model to a folder of experts, with its checksums.

    \b
      fireflyer experts add fs3:///experts poet runs/poet/model.safetensors
    """
    from fireflyer.cli.experts import impl

    impl.add(folder, name, source, json=json)


@experts.command()
def pack(folder: FolderArgument, json: JsonOption = False) -> None:
    """Make experts of the .safetensors files of a folder, which stay where they are.

    Writes the checksums of each file beside it. Files that are experts already are left alone.

    \b
      fireflyer experts pack /data/experts
    """
    from fireflyer.cli.experts import impl

    impl.pack(folder, json=json)


@experts.command("ls")
def list_experts(folder: FolderArgument, json: JsonOption = False) -> None:
    """List the experts of a folder."""
    from fireflyer.cli.experts import impl

    impl.show(folder, json=json)


@experts.command()
def check(folder: FolderArgument, json: JsonOption = False) -> None:
    """Read every expert and compare its checksums. Exits with 1 if one is damaged."""
    from fireflyer.cli.experts import impl

    raise typer.Exit(impl.check(folder, json=json))


@experts.command()
def sim(
    count: Annotated[int, typer.Option("--experts", min=1, help="Number of experts.")] = 150,
    size: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Bytes of an expert.")
    ] = "14G",
    hot: Annotated[str, typer.Option(metavar="SIZE", help="Size of the hot tier.")] = "64G",
    warm: Annotated[str, typer.Option(metavar="SIZE", help="Size of the warm memory.")] = "512G",
    cold_rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second into warm memory.")
    ] = "5G",
    warm_rate: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Bytes a second from warm memory to the hot tier; 0: the hot tier maps warm memory.",
        ),
    ] = "50G",
    use: Annotated[
        str, typer.Option(metavar="TIME", help="Time that a generation takes.")
    ] = "500ms",
    streams: Annotated[
        str, typer.Option(metavar="LIST", help="Streams of requests: zipf, bursty.")
    ] = "zipf,bursty",
    requests: Annotated[int, typer.Option(min=1, help="Requests of a stream.")] = 2000,
    lookahead: Annotated[
        int, typer.Option(min=1, help="Requests ahead that the router's hints name.")
    ] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the streams.")] = 1,
    json: JsonOption = False,
) -> None:
    """Simulate hit rates and switch times of experts on given tiers.

    Compares LRU, LRU with a router's hints, and an oracle that knows all requests. The simulation
    uses the tiers of the store; reads and copies take the time that follows from the given rates.

    \b
      fireflyer experts sim
      fireflyer experts sim --experts 40 --bytes 2G --hot 16G --warm 16G --cold-rate 3G --warm-rate 0
    """
    from fireflyer.cli.experts import impl

    impl.simulate(
        impl.Asked(count, size, hot, warm, cold_rate, warm_rate, use, requests, lookahead, seed),
        streams, json=json,
    )  # fmt: skip
