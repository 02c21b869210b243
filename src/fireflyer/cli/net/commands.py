"""Verbs and options of `fireflyer net`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

net = typer.Typer(
    name="net", no_args_is_help=False, rich_markup_mode=None, help="Plan and check a network."
)

PresetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="fire-flyer2, fat-tree2, fat-tree3, dgx-a100, mixed-speeds or multi-plane.",
    ),
]

IbnetdiscoverOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Output of `ibnetdiscover` instead of --preset.")
]


HtmlOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with drawings, too.")
]


@net.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@net.command()
def plan(
    preset: PresetOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Compute nodes of a network of two zones; with --compare, of all topologies.",
        ),
    ] = None,
    storage: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="0",
            help="Storage nodes beside the --nodes, with a port in each zone.",
        ),
    ] = None,
    cross: Annotated[
        int | None,
        typer.Option(
            min=2,
            show_default="20",
            help="With --nodes: links from each zone to the gateways between them.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare networks for --nodes; default: Tables II and III."),
    ] = False,
    dollars: Annotated[
        bool,
        typer.Option(
            "--dollars", help="Also price --preset in dollars; fails if a price is unknown."
        ),
    ] = False,
    catalogue: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Catalogue of parts, TOML; default: the paper's parts."),
    ] = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Count the switches, ports and cables of a network, and price it.

    \b
      fireflyer net plan --preset fire-flyer2
      fireflyer net plan --nodes 1200 --storage 180 --json
      fireflyer net plan --compare
      fireflyer net plan --compare --nodes 700 --storage 60
    """
    from fireflyer.cli.net import impl

    impl.plan(
        preset, nodes, storage, cross, compare=compare, dollars=dollars, catalogue=catalogue,
        html=html, json=json,
    )  # fmt: skip


@net.command()
def verify(
    preset: PresetOption = None,
    ibnetdiscover: IbnetdiscoverOption = None,
    lfts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="opensm-lfts.dump of that network; default: computed routes."
        ),
    ] = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Check that routes reach every pair, form no credit loop, and spread over the links.

    Exits with 1 if a pair is unreachable or a loop exists.

    \b
      fireflyer net verify --preset fire-flyer2
      fireflyer net verify --ibnetdiscover net.txt --lfts opensm-lfts.dump
    """
    from fireflyer.cli.net import impl

    raise typer.Exit(impl.verify(preset, ibnetdiscover, lfts, html=html, json=json))


@net.command()
def export(
    preset: PresetOption = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the files; made if missing.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a network and its routes as files for other programs.

    Writes `ibnetdiscover.txt` (also read by ibsim), `opensm-lfts.dump` (for `opensm -R file -U`),
    `topology.conf` and `topology.yaml` (Slurm). Several planes get a folder each.

    \b
      fireflyer net export --preset fire-flyer2 --to net
    """
    from fireflyer.cli.net import impl

    impl.export(preset, to, json=json)


@net.command()
def order(
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Names of the job's hosts, one a line.")
    ] = None,
    preset: PresetOption = None,
    ibnetdiscover: IbnetdiscoverOption = None,
    json: JsonOption = False,
) -> None:
    """Print the hosts of a job in the order in which ranks should be numbered.

    Hosts of one zone follow each other, then hosts of one leaf. With --json, `zones` has the label
    that HFReduce takes as FIREFLYER_ZONE on each host.

    \b
      fireflyer net order --preset fire-flyer2 --job hosts.txt
    """
    from fireflyer.cli.net import impl

    impl.order(job, preset, ibnetdiscover, json=json)


@net.command()
def flows(
    preset: PresetOption = None,
    ibnetdiscover: IbnetdiscoverOption = None,
    traffic: Annotated[
        str,
        typer.Option(metavar="KIND", help="storage, checkpoint, ring, tree, all-to-all or random."),
    ] = "random",
    size: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            metavar="SIZE",
            help="Bytes of each flow, e.g. 64M: simulate all flows until they end.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2, help="Use the first N compute nodes by zone, leaf and port; default: all."
        ),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:PORT]@TIME[-TIME]",
            help="A switch or cable that fails during --bytes, e.g. Z0S3@1ms or Z0L3:21@1ms-50ms.",
        ),
    ] = None,
    cuts: Annotated[
        int,
        typer.Option(min=0, max=500, help="Random cables that fail during --bytes, one at a time."),
    ] = 0,
    reroute: Annotated[
        str, typer.Option(metavar="TIME", help="Time from a failure to new routes.")
    ] = "1s",
    merge: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.1,
            help="Treat end times that differ by at most this fraction as equal, e.g. 0.01.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random traffic and --cuts.")] = 0,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Compute max-min fair rates of flows over the static routes, and when the flows end.

    \b
      fireflyer net flows --preset fire-flyer2 --traffic storage
      fireflyer net flows --preset fire-flyer2 --traffic tree --bytes 186M --nodes 64
      fireflyer net flows --preset fire-flyer2 --traffic ring --bytes 64M --fail Z0S3@1ms
    """
    from fireflyer.cli.net import flows as impl

    impl.flows(
        preset, ibnetdiscover, traffic, nodes, impl.Ask(size, tuple(fail or ()), cuts, reroute, merge, seed),
        html=html, json=json,
    )  # fmt: skip
