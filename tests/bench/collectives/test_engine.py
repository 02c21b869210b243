"""Ranks as processes: results, errors and deaths; rounds that interleave."""

import multiprocessing
import os

import pytest

from fireflyer.bench.harness.ranks import Timing, interleave, on_ranks
from fireflyer.errors import ConfigError, FireflyerError


def test_rank_0_answers() -> None:
    assert on_ranks(3, lambda rank: (rank, os.getpid()))[0] == 0
    assert multiprocessing.active_children() == []


def test_an_error_names_its_rank_and_ends_the_others() -> None:
    read, write = os.pipe()

    def body(rank: int) -> None:
        if rank == 2:
            raise OSError("no such thing")
        os.read(read, 1)  # for ever: nobody writes

    with pytest.raises(FireflyerError, match="rank 2: OSError: no such thing"):
        on_ranks(3, body)
    assert multiprocessing.active_children() == []
    os.close(read)
    os.close(write)


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(FireflyerError, match="rank 1 died"):
        on_ranks(2, lambda rank: os._exit(1) if rank == 1 else None)


def test_a_case_that_cannot_work_keeps_its_own_words() -> None:
    def body(rank: int) -> None:
        raise ConfigError("no float8 here")

    with pytest.raises(ConfigError, match=r"^no float8 here$"):
        on_ranks(2, body)


def test_rounds_interleave_and_calls_fill_a_round() -> None:
    log: list[tuple[str, int]] = []

    def candidate(name: str, wall: float) -> Timing:
        return Timing(wall, wall)

    def run_slow(calls: int) -> Timing:
        log.append(("slow", calls))
        return candidate("slow", 1e6)

    def run_fast(calls: int) -> Timing:
        log.append(("fast", calls))
        return candidate("fast", 100.0)

    timings = interleave({"slow": run_slow, "fast": run_fast}, rounds=2)
    warm = [("slow", 1), ("fast", 1), ("fast", 1)]  # a long first call says enough
    assert log == warm + [("slow", 2), ("fast", 500)] * 2
    assert timings["slow"] == [Timing(1e6, 1e6)] * 2
