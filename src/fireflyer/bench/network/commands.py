"""Command of `fireflyer bench` for the flows of a network."""

from typing import Annotated

import typer

from fireflyer.bench.harness.command_line import JsonOption, OutputOption, Rounds, report
from fireflyer.bench.harness.report import Machine


def net(
    hosts: Annotated[int, typer.Option(min=8, max=800, help="Hosts in the comparison.")] = 200,
    rounds: Rounds = 3,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure max-min fair flows against SimGrid, and 15,000 flows of the paper's network.

    SimGrid is Debian's package python3-simgrid, run by the system's Python; without it the rows
    give the reason. Both solvers compute the time at which each flow ends, for two trees and
    storage reads at once.

    \b
    fireflyer bench net --hosts 400 --output net.json
    """
    machine = Machine.here()
    from fireflyer.bench.network import flows as bench

    report("net", machine, bench.run(hosts, rounds), [], json=json, output=output)
