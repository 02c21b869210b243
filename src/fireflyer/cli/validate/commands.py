"""Verbs and options of `fireflyer validate`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import HomeOption, JsonOption

validate = typer.Typer(
    name="validate", no_args_is_help=False, rich_markup_mode=None,
    help="Check this node's hardware; find the slow nodes of a fleet.",
)  # fmt: skip


QuickOption = Annotated[bool, typer.Option("--quick", help="Run all checks within a minute.")]
FullOption = Annotated[
    bool, typer.Option("--full", help="Run all checks at length: minutes to hours.")
]
CheckOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this check; may be repeated.")
]


CsvOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append the samples to FILE, for `validate fleet`."),
]
NodeNameOption = Annotated[
    str,
    typer.Option("--node", metavar="NAME", help="Name of this node in --csv; default: the host's."),
]
RoundOption = Annotated[
    str,
    typer.Option(
        "--round",
        metavar="NAME",
        help="Name of this round of measurements in --csv; a node is then defective only if two "
        "rounds agree.",
    ),
]


@validate.callback(invoke_without_command=True)
def check_node(
    context: typer.Context,
    quick: QuickOption = False,
    full: FullOption = False,
    check: CheckOption = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the checks and what they need.")
    ] = False,
    limits: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Fixed thresholds, TOML: ["disk write"] min = 500.'),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the disk checks; default: temporary files."),
    ] = None,
    memory: Annotated[
        int,
        typer.Option(
            min=0, metavar="MIB", help="Memory to test; 0: 256 MiB, or with --full 3/4 of RAM."
        ),
    ] = 0,
    fs3: Annotated[
        str, typer.Option(metavar="ADDRESS", help="File system to check; default: $FIREFLYER_FS.")
    ] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Listener on another node; may be repeated."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Secret of the listeners.")
    ] = None,
    csv: CsvOption = None,
    node_name: NodeNameOption = "",
    round_: RoundOption = "",
    json: JsonOption = False,
) -> None:
    """Check the hardware of this node.

    Each check runs in a process of its own. A check that hangs, crashes or lacks a requirement is "not
    run", with the reason; it never counts as passed. Use an idle node, because the checks load all
    CPUs. Exits with 1 if a check failed.

    \b
      fireflyer validate --quick
      fireflyer validate --quick --csv fleet.csv     on each node; then: fireflyer validate fleet fleet.csv
      fireflyer validate --full --check gemm
    """
    if context.invoked_subcommand is not None:
        return
    if not (quick or full or list_ or check):
        if json:
            raise typer.BadParameter("give --quick, --full, --list or --check NAME")
        typer.echo(context.get_help())
        raise typer.Exit(2)
    if quick and full:
        raise typer.BadParameter("give one of --quick and --full")
    from fireflyer.cli.validate import impl

    if list_:
        impl.list_checks(json=json)
        return
    request = impl.Request(
        quick=not full, checks=tuple(check or ()), limits=limits, directory=directory,
        memory_mib=memory, fs3=fs3, peers=tuple(peer or ()), secret_file=secret_file, csv=csv,
        node=node_name, round=round_,
    )  # fmt: skip
    raise typer.Exit(impl.check_node(request, json=json))


@validate.command()
def fleet(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv",
            help="Columns node, check, value, better (more|less); optional: round.",
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Name the nodes whose measurements are worse than those of the fleet.

    The criterion and the thresholds are learnt from the file, so it needs at least 3 nodes.
    Recommended are 20 measurements per node and check. If the file has a column `round` with several
    names, a node is named only if two rounds name it. Two plain rules are shown for comparison: 5 %
    below the fleet's median, and 3 robust standard deviations. Exits with 0 also if nodes are
    defective.

    \b
      fireflyer validate fleet measurements.csv
    """
    from fireflyer.cli.validate import impl

    impl.fleet(file, json=json)


@validate.command()
def node(
    name: Annotated[str, typer.Argument(metavar="NODE", help="Name of a node, e.g. n0.")],
    history: Annotated[
        bool,
        typer.Option("--history", help="Show past validations, faults and returns to service."),
    ] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Have the platform validate a node as soon as it is idle, as a task on that node.

    A node that a fault rule drained returns to service if it passes the checks of that fault.
    Validations every week and after faults need validator.toml in the platform's folder.

    \b
      fireflyer validate node n3
      fireflyer validate node n3 --history
    """
    from fireflyer.cli.validate import platform

    platform.node(home, name, history=history, json=json)


@validate.command()
def listen(
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of this node to listen on.")
    ],
    secret_file: Annotated[
        Path, typer.Option(metavar="FILE", help="Secret, 16 bytes or more; the same on all nodes.")
    ],
) -> None:
    """Answer the network checks of other nodes, until Ctrl-C.

    \b
      head -c 32 /dev/urandom | base64 > secret       copy it to all nodes
      fireflyer validate listen --address 10.0.0.1:7000 --secret-file secret
      fireflyer validate --check network --peer 10.0.0.1:7000 --secret-file secret     on another node
    """
    from fireflyer.cli.validate import impl

    impl.listen(address, secret_file)
