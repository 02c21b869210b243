"""Implementation of `fireflyer experts`."""

import sys
from typing import NamedTuple

from fireflyer.cli.printing import show_result, table
from fireflyer.errors import ConfigError, ExpertError, FireflyerError
from fireflyer.experts import folder, manifest, sim
from fireflyer.experts.streams import STREAMS
from fireflyer.kv.opening import is_missing
from fireflyer.program import plain, report
from fireflyer.storage import Storage, open_storage
from fireflyer.units import parse_bytes, parse_seconds


def add(place: str, name: str, source: str, *, json: bool) -> None:
    """Adds an expert and prints its size."""
    found = folder.add(place, name, source)
    _print([(name, found.size)], json=json)


def pack(place: str, *, json: bool) -> None:
    """Packs the files of a folder and prints the new experts."""
    found = [(name, each.size) for name, each in folder.pack(_storage(place))]
    _print(found, json=json)
    if not found and not json:
        sys.stdout.write(f"no new .safetensors file in {plain(place)}\n")


def show(place: str, *, json: bool) -> None:
    """Prints the experts of a folder."""
    storage = _storage(place)
    found = [(name, manifest.read(storage, name).size) for name in manifest.names(storage)]
    _print(found, json=json)


def check(place: str, *, json: bool) -> int:
    """Checks all experts of a folder; returns 1 if one is damaged."""
    storage = _storage(place)
    states = {name: _state(storage, name) for name in manifest.names(storage)}
    damaged = [name for name, state in states.items() if state != "good"]
    show_result(states, lambda: table(("EXPERT", "STATE"), list(states.items())), json=json)
    return report(f"{len(damaged)} of {len(states)} experts failed the check") if damaged else 0


def _storage(place: str) -> Storage:
    if is_missing(place):
        raise ExpertError(
            f"there is no folder of experts at {place}: `fireflyer experts add` creates one"
        )
    return open_storage(place)


def _state(storage: Storage, name: str) -> str:
    try:
        folder.check(storage, name)
    except FireflyerError as error:
        return str(error)
    return "good"


def _print(found: list[tuple[str, int]], *, json: bool) -> None:
    def show_text() -> None:
        if found:
            table(("EXPERT", "MIB"), [(name, f"{size / (1 << 20):,.1f}") for name, size in found])

    show_result([{"expert": name, "bytes": size} for name, size in found], show_text, json=json)


class Asked(NamedTuple):
    """Options of `fireflyer experts sim`, as given."""

    experts: int
    size: str
    hot: str
    warm: str
    cold_rate: str
    warm_rate: str
    use: str
    requests: int
    lookahead: int
    seed: int


def simulate(asked: Asked, streams: str, *, json: bool) -> None:
    """Simulates each stream with each policy, and prints a table and the paper's figures.

    Raises:
        ConfigError: an option is invalid.
    """
    setup = sim.Setup(
        experts=asked.experts,
        expert_bytes=parse_bytes(asked.size, "--bytes"),
        hot_bytes=parse_bytes(asked.hot, "--hot"),
        warm_bytes=parse_bytes(asked.warm, "--warm"),
        cold_rate=parse_bytes(asked.cold_rate, "--cold-rate"),
        warm_rate=0 if asked.warm_rate == "0" else parse_bytes(asked.warm_rate, "--warm-rate"),
        use_s=parse_seconds(asked.use, "--use"),
        requests=asked.requests,
        lookahead=asked.lookahead,
        seed=asked.seed,
    )
    names = list(dict.fromkeys(streams.split(",")))
    for name in names:
        if name not in STREAMS:
            raise ConfigError(f"invalid --streams {name!r}: expected {', '.join(STREAMS)}")
    found = [sim.simulate(setup, name, policy) for name in names for policy in sim.POLICIES]
    paper = [{"what": what, "figure": figure} for what, figure in sim.PAPER]
    result = {
        "setup": setup, "outcomes": found, "paper": paper,
        "cold_switch_s": setup.cold_switch_s, "warm_switch_s": setup.warm_switch_s,
    }  # fmt: skip
    show_result(result, lambda: _print_outcomes(setup, found), json=json)


def _print_outcomes(setup: sim.Setup, found: list[sim.Outcome]) -> None:
    rows = [
        (
            *(each.stream, each.policy, f"{each.hot_hits:.1%}", f"{each.hits:.1%}"),
            *(f"{each.late:.1%}", f"{each.switch_s:.3f}", f"{each.switch_p99_s:.2f}"),
            *(str(each.loads), f"{each.total_s:,.0f}"),
        )
        for each in found
    ]
    heads = ("STREAM", "POLICY", "HOT", "HIT", "LATE", "SWITCH S", "P99 S", "LOADS", "TOTAL S")
    table(heads, rows)
    cold, warm = setup.cold_switch_s, setup.warm_switch_s
    ratio = f", {cold / warm:.1f}x faster" if warm else ""
    sys.stdout.write(
        f"\na switch to a cold expert takes {cold:.2f} s, to a warm one {warm:.2f} s{ratio}\n"
        "\nthe paper (arXiv 2405.07518), on its own hardware:\n"
    )
    for what, figure in sim.PAPER:
        sys.stdout.write(f"  {what}: {figure}\n")
