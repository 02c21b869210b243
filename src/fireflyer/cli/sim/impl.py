"""Implementation of `fireflyer sim`."""

import gc
import sys
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from fireflyer.cli import printing
from fireflyer.cli.progress import progress
from fireflyer.cli.sim import rules as sim_rules
from fireflyer.errors import ConfigError
from fireflyer.hai.scheduling.policies import DEFAULT, POLICIES, FixedQuantum, Policy, TimeShare
from fireflyer.hai.simulation import faults
from fireflyer.hai.simulation.generate import generate
from fireflyer.hai.simulation.measures import Result, curves, measure
from fireflyer.hai.simulation.page import ROWS, Done, cell, page
from fireflyer.hai.simulation.readers import read
from fireflyer.hai.simulation.replay import Setup, replay
from fireflyer.hai.simulation.trace import Trace, UserFrom, head, with_users
from fireflyer.hai.simulation.work import Costs
from fireflyer.storage.targets import replace_content
from fireflyer.units import parse_seconds

MOST_POLICIES = 6
"""Maximum number of policies, because a page has this many colours."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `fireflyer sim`."""

    trace: Path | None
    generate: str | None
    load: float
    policy: str | None
    compare: str | None
    nodes: int
    gpus: int
    types: str
    zones: int
    whole_nodes: bool
    user_from: str | None
    faults: str
    quantum: str | None
    fixed_quantum: bool
    checkpoint_every: str
    checkpoint_cost: str
    suspend_cost: str
    restart_cost: str
    estimates: float
    quota: list[str]
    window: list[str]
    tick: str
    jobs: int | None
    form: str | None
    seed: int
    json: bool
    output: Path | None
    html: Path | None


def simulate(asked: Asked) -> None:
    """Replays the trace, prints a table, and writes the requested files.

    Raises:
        ConfigError: an option is invalid.
        TraceError: the trace cannot be read or replayed.
    """
    if asked.json and str(asked.html) == "-":
        raise ConfigError("--json and --html - both write to stdout: give --html a file")
    policies = _policies(asked)
    setups = [_setup(asked, name, rules) for name, rules in policies.items()]
    trace = _trace(asked)
    sim_rules.check_names(trace, setups[0].quotas, setups[0].windows)
    done = [_replayed(trace, setup) for setup in setups]
    results = [result for result, _ in done]
    if asked.output is not None:
        _write(asked.output, msgspec.json.format(as_json(results), indent=2) + b"\n")
    if asked.json or str(asked.html) != "-":
        printing.show_result(document(results), lambda: _print(results), json=asked.json)
    if asked.html is not None:
        _write(asked.html, page(done).encode())


def document(results: list[Result]) -> dict[str, Any]:
    """Returns the first policy's figures; those of the other policies are under `compared`."""
    first, *others = (msgspec.to_builtins(result) for result in results)
    if others:
        first["compared"] = others
    return cast(dict[str, Any], first)


def as_json(results: list[Result]) -> bytes:
    """Encodes the document of `--json` and `--output`."""
    return msgspec.json.encode(document(results))


def _policies(asked: Asked) -> dict[str, Policy]:
    """Returns the requested policies in order, by their names in the report."""
    names = [asked.policy] if asked.policy else []
    names += [name.strip() for name in (asked.compare or "").split(",") if name.strip()]
    found: dict[str, Policy] = {}
    for name in names or [DEFAULT]:
        if name == "timeshare" and asked.fixed_quantum:
            name = "timeshare-fixed"
        if name not in POLICIES:
            raise ConfigError(f"unknown policy {name!r}: expected one of {', '.join(POLICIES)}")
        found[name] = POLICIES[name]
    if len(found) > MOST_POLICIES:
        raise ConfigError(f"too many policies: at most {MOST_POLICIES} can be compared at once")
    if asked.quantum is not None:
        quantum_s = parse_seconds(asked.quantum, "--quantum")
        changed = {name: with_quantum(policy, quantum_s) for name, policy in found.items()}
        if changed == found and not any(_has_quantum(policy) for policy in found.values()):
            raise ConfigError(f"--quantum requires the policy timeshare, not {', '.join(found)}")
        found = changed
    return found


def _has_quantum(policy: Policy) -> bool:
    return isinstance(policy, TimeShare | FixedQuantum)


def with_quantum(policy: Policy, quantum_s: float) -> Policy:
    """Returns the policy with another quantum; a policy without a quantum is returned unchanged."""
    match policy:
        case TimeShare():
            return msgspec.structs.replace(policy, shortest_s=quantum_s)
        case FixedQuantum():
            return msgspec.structs.replace(policy, fixed_s=quantum_s)
        case _:
            return policy


def _setup(asked: Asked, name: str, rules: Policy) -> Setup:
    if asked.zones > asked.nodes:
        raise ConfigError(
            f"invalid --zones {asked.zones}: expected at most the number of nodes, {asked.nodes}"
        )
    every_ms = round(parse_seconds(asked.checkpoint_every, "--checkpoint-every") * 1000)
    if not every_ms:
        raise ConfigError("invalid --checkpoint-every 0: expected a time above 0")
    return Setup(
        nodes=asked.nodes, gpus=asked.gpus, types=sim_rules.types(asked.types, asked.nodes),
        zones=asked.zones, whole_nodes=asked.whole_nodes,
        policy=name, rules=rules, fault_rates=faults.parse(asked.faults), seed=asked.seed,
        quotas=tuple(map(sim_rules.quota, asked.quota)),
        windows=tuple(
            sim_rules.window(text, number, asked.nodes)
            for number, text in enumerate(asked.window, start=1)
        ),
        estimates=asked.estimates, tick_ms=round(parse_seconds(asked.tick, "--tick") * 1000),
        costs=Costs(
            checkpoint_every_ms=every_ms,
            checkpoint_ms=round(parse_seconds(asked.checkpoint_cost, "--checkpoint-cost") * 1000),
            suspend_ms=round(parse_seconds(asked.suspend_cost, "--suspend-cost") * 1000),
            restart_ms=round(parse_seconds(asked.restart_cost, "--restart-cost") * 1000),
        ),
    )  # fmt: skip


def _trace(asked: Asked) -> Trace:
    if (asked.trace is None) == (asked.generate is None):
        raise ConfigError("give the jobs to replay: either --trace FILE or --generate CLUSTER:JOBS")
    if asked.user_from is not None and asked.user_from not in get_args(UserFrom):
        raise ConfigError(
            f"invalid --user-from {asked.user_from!r}: expected one of {', '.join(get_args(UserFrom))}"
        )
    if asked.trace is not None:
        found = read(asked.trace, asked.form)
    else:
        name, _, count = (asked.generate or "").partition(":")
        if not (count.isascii() and count.isdecimal()):
            raise ConfigError(
                f"invalid --generate {asked.generate!r}: expected CLUSTER:JOBS, e.g. philly:5000"
            )
        found = generate(
            name, int(count), capacity=asked.nodes * asked.gpus, load=asked.load, seed=asked.seed
        )
    if asked.jobs is not None:
        found = head(found, asked.jobs)
    return with_users(found, cast(UserFrom | None, asked.user_from))


def _replayed(trace: Trace, setup: Setup) -> Done:
    gc.disable()  # a replay makes no reference cycles; the collector would take a tenth of its time
    try:
        with progress(setup.policy, len(trace.jobs), "jobs") as advance:
            done = replay(trace, setup, advance)
        return measure(done), curves(done)
    finally:
        gc.enable()


def _print(results: list[Result]) -> None:
    first = results[0]
    sys.stdout.write(
        f"{first.trace}: {first.jobs:,} jobs of {first.users:,} users on {first.nodes} nodes of "
        f"{first.gpus_per_node} GPUs\n"
    )
    if first.over_quota:
        sys.stdout.write(f"left out: {first.over_quota:,} jobs larger than their quota\n")
    if first.too_large:
        sys.stdout.write(f"left out: {first.too_large:,} jobs larger than the cluster\n")
    for why, count in sorted(first.left_out.items()):
        sys.stdout.write(f"left out: {count:,} {why}\n")
    rows: list[list[str]] = [
        [name, *(cell(getattr(result, field), unit) for result in results)]
        for field, name, unit in ROWS
    ]
    whole = [max(result.capacity_gpu_ms, 1) for result in results]
    for cause in first.split_gpu_ms:
        shares = (f"{r.split_gpu_ms[cause] / w:.2%}" for r, w in zip(results, whole, strict=True))
        rows.append([f"GPU-time: {cause}", *shares])
    rows.append(["plans", *(f"{result.plans:,}" for result in results)])
    rows.append(["plan, mean", *(f"{result.plan_mean_ms:.3f} ms" for result in results)])
    rows.append(["replayed in", *(f"{result.wall_s:.1f} s" for result in results)])
    printing.table(["", *(result.policy for result in results)], rows)


def _write(path: Path, data: bytes) -> None:
    """Writes the file atomically; "-" is stdout."""
    if str(path) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    replace_content(path, data)
