"""Command of `fireflyer bench` for environments."""

from typing import Annotated

import typer

from fireflyer.bench.harness.command_line import JsonOption, OutputOption, Rounds, report
from fireflyer.bench.harness.report import Machine


def envs(
    tasks: Annotated[
        str, typer.Option(metavar="LIST", help="Tasks of gymnasium, and games of ale-py.")
    ] = "CartPole-v1,Pendulum-v1,Acrobot-v1,ALE/Pong-v5",
    counts: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of environments, at most 64 for Atari.")
    ] = "16,64,256,1024",
    threads: Annotated[
        int, typer.Option(min=1, help="Threads, or processes, of each candidate.")
    ] = 2,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure steps of environments against PyPI's envpool and gymnasium's vector environments.

    A peer that is not installed has no row. Peers need PyPI's envpool, and opencv-python for
    gymnasium's Atari frames. AsyncVectorEnv has one process per environment and runs with at most
    64.

    \b
    fireflyer bench envs --tasks CartPole-v1 --counts 16,256 --output envs.json
    """
    machine = Machine.here()
    from fireflyer.bench.envs import steps as bench

    numbers = tuple(int(count) for count in counts.split(","))
    report(
        "envs",
        machine,
        bench.run(tuple(tasks.split(",")), numbers, threads, rounds),
        [],
        json=json,
        output=output,
    )
