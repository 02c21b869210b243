"""Verbs about nodes and the queue. Implementations are imported when a verb runs."""

from typing import Annotated

import typer

from fireflyer.cli.options import HomeOption, JsonOption, TaskArgument

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node, e.g. n0.")]
MOMENT = "a duration from now (90m, 2h, 1d) or a local time (2025-01-31T18:00)"

window = typer.Typer(
    name="window",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Take nodes out for a maintenance or a reservation.",
)


def why(task: TaskArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Explain why a task waits, and when it may start."""
    from fireflyer.cli.cluster import impl
    from fireflyer.hai.client import Client

    impl.why(Client(home).why(task), json=json)


def nodes(json: JsonOption = False, home: HomeOption = None) -> None:
    """List nodes with their states, the reasons, and their tasks."""
    from fireflyer.cli.cluster import impl
    from fireflyer.hai.client import Client

    impl.nodes(Client(home).nodes(), json=json)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and return.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show nodes and tasks; on a terminal, keep refreshing. --json implies --once."""
    from fireflyer.cli.cluster import impl
    from fireflyer.hai.client import Client

    impl.top(Client(home), once=once, json=json)


def drain(
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--reason", "-r", help="Reason, shown to users.")],
    until: Annotated[
        str, typer.Option(metavar="WHEN", help=f"Undrain the node at WHEN: {MOMENT}.")
    ] = "",
    evict: Annotated[
        bool, typer.Option("--evict", help="Its tasks save, leave, and continue elsewhere.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Drain a node: start no new tasks there. Running tasks continue, unless --evict is given.

    \b
      fireflyer drain n3 --reason "fan 2 fails" --until 2h
      fireflyer drain n3 --reason "new power supply" --evict
    """
    from fireflyer.cli.cluster.impl import moment
    from fireflyer.hai.client import Client

    end = moment(until, "--until") if until else None
    Client(home).drain(node, reason, end, evict=evict)


def undrain(node: NodeArgument, home: HomeOption = None) -> None:
    """Return a drained node to service."""
    from fireflyer.hai.client import Client

    Client(home).undrain(node)


def cluster_verbs(app: typer.Typer) -> None:
    """Adds the verbs of this module to `app`."""
    for verb in (why, top, nodes, drain, undrain):
        app.command()(verb)


@window.command("add")
def window_add(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", help="Names of nodes.")],
    begin: Annotated[str, typer.Option("--from", metavar="WHEN", help=f"Begin: {MOMENT}.")] = "0s",
    until: Annotated[str, typer.Option("--until", metavar="WHEN", help="End, likewise.")] = "1d",
    reason: Annotated[str, typer.Option("--reason", "-r", help="Reason, shown to users.")] = "",
    user: Annotated[str, typer.Option(help="User who may use the nodes during the window.")] = "",
    group: Annotated[
        str, typer.Option(help="Group whose tasks may use the nodes during the window.")
    ] = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Add a window. When it begins, tasks still on its nodes save, leave and continue elsewhere.

    \b
      fireflyer window add n0 n1 --from 2h --until 6h --reason "new switch"
    """
    from fireflyer.cli.cluster import impl
    from fireflyer.hai.client import Client
    from fireflyer.hai.model import WindowView

    asked = WindowView(
        nodes=tuple(nodes), begin=impl.moment(begin, "--from"),
        end=impl.moment(until, "--until"), reason=reason, user=user, group=group,
    )  # fmt: skip
    impl.windows([Client(home).add_window(asked)], json=json)


@window.command("list")
def window_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List windows that have not ended."""
    from fireflyer.cli.cluster import impl
    from fireflyer.hai.client import Client

    impl.windows(Client(home).windows(), json=json)


@window.command("remove")
def window_remove(
    id: Annotated[str, typer.Argument(metavar="WINDOW", help="Id of the window, e.g. w1.")],
    home: HomeOption = None,
) -> None:
    """Remove a window."""
    from fireflyer.hai.client import Client

    Client(home).remove_window(id)
