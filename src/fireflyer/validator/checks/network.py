"""Network: loopback, and pairs of nodes over their real link."""

import threading
from collections.abc import Iterator
from pathlib import Path

from fireflyer.errors import ConfigError
from fireflyer.validator import pairs
from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings
from fireflyer.validator.sampling import sampled

CHECKS = (
    Check(
        name="loopback",
        figures=(Figure("loopback bandwidth", "MB/s"), Figure("loopback latency", "us", "less")),
        duration_s=1.0,
        function="fireflyer.validator.checks.network:run_loopback",
    ),
    Check(
        name="network",
        figures=(Figure("network bandwidth", "MB/s"), Figure("network latency", "us", "less")),
        needs="`fireflyer validate listen` on another node, and --peer with its address here",
        duration_s=3.0,
        function="fireflyer.validator.checks.network:run_pairs",
    ),
)

LOOPBACK_BYTES = 16 << 20
PAIR_S = 0.1
"""Approximate time for each transfer between nodes."""

SAMPLES = 5
FULL_SAMPLES = 20

BEST_OF = 4
"""Transfers per sample. A sample is the fastest: other processes only slow a transfer down."""

ECHOES = 200
BEST_OF_ECHOES = 10
"""Round trips per sample. A sample is the shortest of them."""


def run_loopback(settings: Settings) -> Iterator[Measured]:
    """Sends to a thread of this process over TCP."""
    with pairs.listen(("127.0.0.1", 0), b"loopback") as listener:
        thread = threading.Thread(target=pairs.serve_one, args=(listener, b"loopback"), daemon=True)
        thread.start()
        with pairs.Link(listener.getsockname()[:2], b"loopback") as link:
            samples = SAMPLES if settings.quick else FULL_SAMPLES
            yield _rates("loopback bandwidth", link, LOOPBACK_BYTES, samples)
            yield _times("loopback latency", link)
        thread.join(pairs.TIMEOUT_S)


def run_pairs(settings: Settings) -> Iterator[Measured]:
    """Sends to each peer.

    The figures are those of the worst peer, and the reason names the unreachable peers. With
    `any_peer` the figures are those of the best peer, because one bad peer is no fault of this
    node.
    """
    if not settings.peers:
        raise NotRun("no peer is given (--peer HOST:PORT)")
    try:
        secret = pairs.read_secret(Path(settings.secret_file) if settings.secret_file else None)
    except ConfigError as error:
        raise NotRun(str(error)) from None
    rates, times, failed = [], [], []
    for peer in settings.peers:
        try:
            with pairs.Link(pairs.parse_address(peer), secret) as link:
                size = link.bytes_for(PAIR_S)
                rates.append(_rates(peer, link, size, SAMPLES if settings.quick else FULL_SAMPLES))
                times.append(_times(peer, link))
        except OSError as error:
            failed.append(f"{peer}: {error}")
    reason = "; ".join(failed)
    if not rates:
        if settings.any_peer:
            raise NotRun(f"no peer can be reached: {reason}")
        yield Measured("network bandwidth", None, f"no peer can be reached: {reason}")
        yield Measured("network latency", skipped="no peer can be reached")
        return
    rate = (max if settings.any_peer else min)(rates, key=lambda found: found.value or 0.0)
    latency = (min if settings.any_peer else max)(times, key=lambda found: found.value or 0.0)
    blamed = "" if settings.any_peer else reason
    yield Measured("network bandwidth", rate.value, blamed, samples=rate.samples)
    yield Measured("network latency", latency.value, samples=latency.samples)


def _rates(name: str, link: pairs.Link, size: int, samples: int) -> Measured:
    rates = [link.send(size) / 1e6 for _ in range(samples * BEST_OF)]
    return sampled(name, rates, BEST_OF, "more")


def _times(name: str, link: pairs.Link) -> Measured:
    times = [1e6 * link.echo() for _ in range(ECHOES)]
    return sampled(name, times, BEST_OF_ECHOES, "less")
