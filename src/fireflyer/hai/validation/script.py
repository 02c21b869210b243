"""Script of a validation task: runs the checks on its node and writes the results to `output`.

The argument is one JSON object, an `Order`. A suspend ends the running check; the task is then
queued again and starts from the beginning.
"""

import os
import sys

import msgspec

from fireflyer.hai import rank
from fireflyer.hai.model.validations import Finding
from fireflyer.validator import runner
from fireflyer.validator.limits import Bound, Limits
from fireflyer.validator.model import Settings, all_checks, chosen

RESULT = "validation.json"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Checks to run, their limits, and the listeners of the network check."""

    checks: tuple[str, ...] = ()
    limits: dict[str, Bound] = {}
    peers: tuple[str, ...] = ()
    secret_file: str = ""


def main(argument: str) -> int:
    """Runs the checks; returns the exit code."""
    order = msgspec.json.decode(argument, type=Order)
    settings = Settings(
        drill=os.environ.get("FIREFLYER_VALIDATOR_DRILL", ""),
        peers=order.peers, secret_file=order.secret_file, any_peer=True,
    )  # fmt: skip
    findings = []
    for result in runner.run(
        chosen(all_checks(), order.checks), settings, Limits(order.limits),
        stop=rank.suspend_requested, budget_s=runner.QUICK_S,
    ):  # fmt: skip
        fields = {name: getattr(result, name) for name in Finding.__struct_fields__}
        findings.append(Finding(**fields))
        sys.stdout.write(f"{result.name}: {result.status} {result.reason}\n")
        sys.stdout.flush()
    if rank.suspend_requested():
        rank.suspended()
    folder = rank.task().output
    part = folder / f"{RESULT}.part"
    part.write_bytes(msgspec.json.encode(findings))
    part.replace(folder / RESULT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
