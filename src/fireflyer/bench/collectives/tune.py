"""Search for the fastest algorithm between given hosts.

Every algorithm runs for every kind and size, in the same rounds. The result is a table for
FIREFLYER_HFREDUCE_TABLE. An algorithm replaces the engine's own choice only if it is faster by more
than MARGIN.
"""

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fireflyer._native import hfreduce as native
from fireflyer.bench.collectives import cases
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.ranks import Run, Session, Timing, interleave
from fireflyer.bench.harness.report import Machine, Row
from fireflyer.errors import CollectiveError
from fireflyer.hfreduce import ProcessGroupHFReduce, rules

MARGIN = 1.05


@dataclass(frozen=True)
class Spec:
    """Options of the search.

    Attributes:
        hosts: number of hosts of a lab, or of virtual nodes of this machine.
        lab: True for a lab, False for virtual nodes.
        rate: speed of the lab's cables; None: unlimited.
        kinds: names from `rules.ALGORITHMS`.
        sizes: sizes of the float32 tensor, in bytes.
    """

    hosts: int
    ranks_per_host: int
    lab: bool
    rate: str | None
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Choice:
    """Algorithm, and the maximum number of lanes that it may use (0: all).

    Lane k consists of the k-th rank of each host.
    """

    algorithm: str
    lanes: int

    def __str__(self) -> str:
        return f"{self.algorithm}, {'all lanes' if self.lanes == 0 else f'{self.lanes} lane'}"

    def rule(self, kind: str, hosts: int, size: int) -> native.Rule:
        return native.Rule(
            kind=native.Kind[kind.upper()],
            hosts=hosts,
            bytes=size,
            algorithm=native.Algorithm[self.algorithm.upper()],
            lanes=self.lanes,
        )


def default_choice(kind: str, hosts: int, size: int) -> Choice:
    """Returns the engine's choice without a table."""
    rule = native.choose_rule([], native.Kind[kind.upper()], hosts, size)
    return Choice(rule.algorithm.name.lower(), rule.lanes)


def choices(kind: str, default: Choice, ranks_per_host: int) -> list[Choice]:
    """Returns the default, then all other choices; with one rank per host there is one lane, so the
    number of lanes does not vary."""
    lanes = (default.lanes,) if ranks_per_host == 1 else (0, 1)
    every = [Choice(name, n) for name in rules.ALGORITHMS[kind] for n in lanes]
    return [default, *(choice for choice in every if choice != default)]


def pick(times: Mapping[Choice, float], default: Choice) -> Choice:
    """Returns the fastest choice if it beats the default by more than MARGIN, else the default."""
    best = min(times, key=lambda choice: times[choice])
    return default if times[default] <= MARGIN * times[best] else best


def rules_for(kind: str, hosts: int, picked: Mapping[int, Choice]) -> list[native.Rule]:
    """Returns rules for the choices picked at each size.

    A choice applies up to halfway to the next size, on a logarithmic scale. The rules apply to
    `hosts` hosts or more; the engine's own rules for more hosts come first.
    """
    ours = native.Kind[kind.upper()]
    found = [r for r in native.default_rules() if r.kind == ours and r.hosts > hosts]
    sizes = sorted(picked)
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        if following is None:
            found.append(picked[size].rule(kind, hosts, native.ANY_BYTES))
        elif picked[following] != picked[size]:
            found.append(picked[size].rule(kind, hosts, math.isqrt(size * following)))
    return found


Timings = dict[tuple[str, int], dict[Choice, list[Timing]]]


@dataclass(frozen=True)
class Tuned:
    """Result of the search.

    Attributes:
        rows: picked choices against the engine's own choices.
        changes: descriptions of the picks that differ from the engine's own choices.
    """

    rows: list[Row]
    table: rules.Table
    changes: list[str]


def run(spec: Spec) -> Tuned:
    """Measures on the hosts of a lab or on virtual nodes.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        CollectiveError: an algorithm gave wrong results.
        FireflyerError: a rank failed.
    """
    os.environ.pop(rules.VARIABLE, None)  # the ranks begin with the engine's own choices
    if spec.lab:
        with Area.in_lab(spec.hosts, spec.rate, spec.ranks_per_host) as area:
            return conclude(spec, area.run(partial(_rank, spec)))
    with tempfile.TemporaryDirectory() as folder:
        area = Area(None, spec.ranks_per_host, folder, nodes=spec.hosts)
        return conclude(spec, area.run(partial(_rank, spec)))


def conclude(spec: Spec, timings: Timings) -> Tuned:
    """Picks the choices from the medians and returns their rows, table and changes."""
    where = "" if spec.lab else "virtual nodes, "
    rows: list[Row] = []
    changes: list[str] = []
    table: list[native.Rule] = []
    for kind in spec.kinds:
        picked = {}
        for size in spec.sizes:
            walls = {c: [t.wall for t in list_] for c, list_ in timings[kind, size].items()}
            default = default_choice(kind, spec.hosts, size)
            best = pick({c: statistics.median(list_) for c, list_ in walls.items()}, default)
            picked[size] = best
            case = f"{kind}, {where}{spec.hosts}x{spec.ranks_per_host}, {size_text(size)}"
            row = Row.of_times(
                f"{case}: {best}", "us", walls[best], f"default: {default}", walls[default]
            )
            rows.append(row)
            if best != default:
                changes.append(
                    f"{kind} of {size_text(size)}: {best} instead of {default}, {row.ratio:.2f}x as fast"
                )
        table += rules_for(kind, spec.hosts, picked)
    return Tuned(rows, rules.Table(_place(spec), spec.hosts, tuple(table)), changes)


def described(table: Sequence[native.Rule]) -> Iterable[str]:
    """Yields one line per rule."""
    for rule in table:
        size = "any size" if rule.bytes == native.ANY_BYTES else f"up to {size_text(rule.bytes)}"
        choice = Choice(rule.algorithm.name.lower(), rule.lanes)
        yield f"{rule.kind.name.lower():<10} {rule.hosts:>3} hosts and more, {size}: {choice}"


def _place(spec: Spec) -> str:
    kind = f"lab, {spec.rate or 'no'} limit" if spec.lab else "virtual nodes"
    shape = f"{spec.hosts}x{spec.ranks_per_host}"
    return f"{Machine.here()}; {kind}, {shape}"


def _rank(spec: Spec, place: Place) -> Timings:
    return {
        (kind, size): _measure(place.session, spec, kind, size)
        for kind in spec.kinds
        for size in spec.sizes
    }


def _measure(session: Session, spec: Spec, kind: str, size: int) -> dict[Choice, list[Timing]]:
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroupHFReduce)
    case = cases.build(kind, "zero-copy", torch.float32, size, "sum")
    listed = choices(kind, default_choice(kind, spec.hosts, size), spec.ranks_per_host)
    names = {str(choice): choice for choice in listed}
    runs: dict[str, Run] = {}
    for name, choice in names.items():
        follow = partial(group.set_rules, [choice.rule(kind, spec.hosts, size)])
        follow()
        if wrong := session.total(case.wrong()):
            raise CollectiveError(f"{kind} by {name}: {wrong} elements of {size} bytes are wrong")
        runs[name] = _following(session, follow, case.run)
    if case.input is not None:
        case.input.zero_()
    return {names[name]: list_ for name, list_ in interleave(runs, spec.rounds).items()}


def _following(session: Session, follow: Callable[[], None], call: Callable[[], object]) -> Run:
    """Returns a run that calls `follow`, which sets the rules, and then times `call`.

    Before that, the run makes an untimed call, which sets up the plan and the links.
    """

    def run(calls: int) -> Timing:
        follow()
        call()
        return session.time(call, calls)

    return run
