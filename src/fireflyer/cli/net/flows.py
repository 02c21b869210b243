"""Implementation of `fireflyer net flows`."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.cli.net.output import show, write_page
from fireflyer.cli.net.sources import sites
from fireflyer.errors import ConfigError
from fireflyer.fabric.flows import Failure, Run, flow_figures, run_flows
from fireflyer.fabric.net import Floats, Net
from fireflyer.fabric.traffic import Traffic, traffic
from fireflyer.units import parse_bytes, parse_seconds

_FAIL = re.compile(r"([^@:]+)(?::(\d{1,3}))?@([^-]+)(?:-(.+))?")


@dataclass(frozen=True)
class Ask:
    """Options of the simulation of flows, as given."""

    size: str | None
    fail: tuple[str, ...]
    cuts: int
    reroute: str
    merge: float
    seed: int


def flows(
    preset: str | None, ibnetdiscover: Path | None, kind: str, nodes: int | None, ask: Ask, *,
    html: Path | None, json: bool,
) -> None:  # fmt: skip
    """Prints the rates of flows; with --bytes also when the flows end. All planes of a network are
    equal, so only the first is computed."""
    if ask.size is None and (ask.fail or ask.cuts or ask.merge):
        raise ConfigError("--fail, --cuts and --merge need --bytes SIZE")
    begin = time.perf_counter()
    net = sites(preset, ibnetdiscover)[0].net
    of = traffic(net, kind, nodes, ask.seed)
    result: dict[str, Any] = {"traffic": kind, **flow_figures(net, of)}
    runs: dict[str, Run] = {}
    if ask.size is not None:
        size = parse_bytes(ask.size, "--bytes")
        runs = _runs(net, of, size, ask)
        result |= _finish(size, runs)
    result["wall_s"] = round(time.perf_counter() - begin, 4)
    if html is not None:
        from fireflyer.fabric.report import flows_page

        whole = {name: run.ends_s for name, run in runs.items()}
        write_page(html, flows_page(preset or str(ibnetdiscover), net, of, result, whole))
    show(result, json=json)


def _runs(net: Net, of: Traffic, size: int, ask: Ask) -> dict[str, Run]:
    whole = run_flows(net, of, size, merge=ask.merge)
    failures = [_failure(net, text) for text in ask.fail]
    failures += _cuts(net, ask.cuts, float(whole.ends_s.max()), ask.seed)
    if not failures:
        return {"whole": whole}
    reroute_s = parse_seconds(ask.reroute, "--reroute")
    if reroute_s < 0:
        raise ConfigError(f"invalid --reroute {ask.reroute}: expected at least 0s")
    failed = run_flows(net, of, size, failures, reroute_s=reroute_s, merge=ask.merge)
    return {"whole": whole, "with failures": failed}


def _finish(size: int, runs: dict[str, Run]) -> dict[str, Any]:
    whole, last = runs["whole"], list(runs.values())[-1]
    ended: Floats = last.ends_s[np.isfinite(last.ends_s)]
    result: dict[str, Any] = {
        "bytes": size, "events": last.events,
        "finish_p50_s": float(np.median(ended)) if len(ended) else None,
        "finish_p99_s": float(np.quantile(ended, 0.99)) if len(ended) else None,
        "finish_s": float(ended.max()) if len(ended) else None,
    }  # fmt: skip
    if last is not whole:
        result["stranded"] = len(last.ends_s) - len(ended)
        result["finish_without_failures_s"] = float(whole.ends_s.max())
    return result


def _failure(net: Net, text: str) -> Failure:
    """Parses NAME[:PORT]@TIME[-TIME]."""
    found = _FAIL.fullmatch(text.strip())
    if not found:
        raise ConfigError(
            f"invalid --fail {text!r}: expected NAME[:PORT]@TIME[-TIME], e.g. Z0S3@1ms"
        )
    name, port, at, until = found.groups()
    if name not in net.switches:
        raise ConfigError(f"invalid --fail {text!r}: the network has no switch {name!r}")
    switch = net.switches.index(name)
    at_s = parse_seconds(at, "--fail")
    until_s = math.inf if until is None else parse_seconds(until, "--fail")
    if until_s <= at_s:
        raise ConfigError(f"invalid --fail {text!r}: it ends before it begins")
    if port is None:
        return Failure(at_s, switches=(switch,), until_s=until_s)
    if not 1 <= int(port) < net.peers.shape[1] or net.peers[switch, int(port)] < 0:
        raise ConfigError(
            f"invalid --fail {text!r}: port {port} of {name} has no cable to a switch"
        )
    return Failure(at_s, links=((switch, int(port)),), until_s=until_s)


def _cuts(net: Net, count: int, span_s: float, seed: int) -> Sequence[Failure]:
    """Returns `count` permanent failures of random cables between switches.

    The times are random within `span_s`, the duration of a run without failures.
    """
    random = np.random.default_rng(seed)
    rows, ports = np.nonzero(net.peers >= 0)
    drawn = random.choice(len(rows), min(count, len(rows)), replace=False)
    times = np.sort(random.uniform(0, span_s, len(drawn)))
    return [
        Failure(at, links=((int(rows[one]), int(ports[one])),))
        for at, one in zip(times.tolist(), drawn.tolist(), strict=True)
    ]
