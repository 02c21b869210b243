"""Network: loopback, and pairs of nodes over their real link."""

import threading
from collections.abc import Iterator
from pathlib import Path

from fireflyer.validator import pairs
from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings

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
        needs="a listener on another node: `fireflyer validate listen` there, --peer here",
        duration_s=3.0,
        function="fireflyer.validator.checks.network:run_pairs",
    ),
)

LOOPBACK_BYTES = 64 << 20
PAIR_S = 0.2
"""Time for each of the samples between nodes, about."""

SAMPLES = 5
FULL_SAMPLES = 20


def run_loopback(settings: Settings) -> Iterator[Measured]:
    """Sends to a thread of this process by TCP."""
    with pairs.listen(("127.0.0.1", 0), b"loopback") as listener:
        thread = threading.Thread(target=pairs.serve_one, args=(listener, b"loopback"), daemon=True)
        thread.start()
        with pairs.Link(listener.getsockname()[:2], b"loopback") as link:
            samples = SAMPLES if settings.quick else FULL_SAMPLES
            yield _rates("loopback bandwidth", link, LOOPBACK_BYTES, samples)
            yield _times("loopback latency", link)
        thread.join(pairs.TIMEOUT_S)


def run_pairs(settings: Settings) -> Iterator[Measured]:
    """Sends to each peer. The figures are those of the worst peer, which the reason names if it
    cannot be reached."""
    if not settings.peers:
        raise NotRun("no peer is given (--peer HOST:PORT)")
    secret = pairs.read_secret(Path(settings.secret_file) if settings.secret_file else None)
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
        yield Measured("network bandwidth", None, f"no peer can be reached: {reason}")
        yield Measured("network latency", skipped="no peer can be reached")
        return
    slowest = min(rates, key=lambda found: found.value or 0.0)
    longest = max(times, key=lambda found: found.value or 0.0)
    yield Measured("network bandwidth", slowest.value, reason, samples=slowest.samples)
    yield Measured("network latency", longest.value, samples=longest.samples)


def _rates(name: str, link: pairs.Link, size: int, samples: int) -> Measured:
    rates = [link.send(size) / 1e6 for _ in range(samples)]
    return Measured(name, sorted(rates)[len(rates) // 2], samples=tuple(rates))


def _times(name: str, link: pairs.Link) -> Measured:
    times = sorted(1e6 * link.echo() for _ in range(100))
    return Measured(name, times[50], samples=tuple(times[::5]))
