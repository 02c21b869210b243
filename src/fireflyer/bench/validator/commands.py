"""Command of `fireflyer bench` for the validator."""

from fireflyer.bench.harness.command_line import JsonOption, OutputOption, Rounds, report
from fireflyer.bench.harness.report import Machine


def validator(rounds: Rounds = 7, json: JsonOption = False, output: OutputOption = None) -> None:
    """Measure the validator's memory bandwidth against a C triad, on each NUMA node.

    The triad is a source file of Fireflyer that c++ compiles at the first use. Both use the same
    sizes, one thread per CPU, and the best of 12 passes.

    \b
    fireflyer bench validator
    """
    machine = Machine.here()
    from fireflyer.bench.validator import memory

    report("validator", machine, memory.run(rounds), [], json=json, output=output)
