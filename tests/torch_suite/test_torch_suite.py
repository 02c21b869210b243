"""torch's own tests of collectives and DDP over hfreduce: the most telling ones, and their runner."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.torch_suite.expected import EXPECTED_FAILURES, EXPECTED_HANGS, MOST_TELLING, surprise
from tests.torch_suite.host import Host
from tests.torch_suite.ranks import Outcome, Ranks, outcome_of


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("torch-suite"))
    yield host
    host.close()


@pytest.mark.full
@pytest.mark.parametrize("name", MOST_TELLING)
def test_over_hfreduce(host: Host, name: str) -> None:
    outcome = host.run(name)
    assert outcome.kind == "passed", outcome.text


def test_the_lists_agree() -> None:
    assert len(set(MOST_TELLING)) == 40
    assert not set(MOST_TELLING) & set(EXPECTED_FAILURES)
    assert set(EXPECTED_HANGS) <= set(EXPECTED_FAILURES)


def test_an_outcome_that_is_not_as_listed_is_a_surprise() -> None:
    listed = next(iter(EXPECTED_FAILURES))
    assert surprise(listed, Outcome("failed", "...")) == ""
    assert surprise(listed, Outcome("passed")).startswith("passed, but is listed")
    assert surprise(listed, Outcome("skipped", "...")).startswith("skipped, but is listed")
    assert surprise("test_new", Outcome("failed", "reason")) == "failed: reason"
    assert surprise("test_new", Outcome("passed")) == ""
    assert surprise("test_new", Outcome("skipped", "...")) == ""


# -- ranks -----------------------------------------------------------------------------------------


def hang() -> None:
    signal.pause()


def end(code: int) -> None:
    raise SystemExit(code)


def fail() -> None:
    raise AssertionError("wrong sum")


def run(folder: Path, deadline_s: float, *bodies: Callable[[], None]) -> list[tuple[int, Outcome]]:
    ranks = Ranks(folder)
    for rank, body in enumerate(bodies):
        ranks.start(rank, partial(outcome_of, body, {72: "no GPU"}))
    try:
        return ranks.outcomes(deadline_s)
    finally:
        ranks.kill()


def test_ranks_that_hang_are_killed_and_named(tmp_path: Path) -> None:
    ended = dict(run(tmp_path, 1.0, hang, lambda: end(0)))
    assert ended == {0: Outcome("failed", "hung"), 1: Outcome("passed")}
    assert "in hang" in (tmp_path / "0.out").read_text()


def test_the_first_failure_ends_the_other_ranks(tmp_path: Path) -> None:
    (first, outcome), other = run(tmp_path, 60.0, hang, fail)
    assert first == 1
    assert "wrong sum" in outcome.text
    assert other == (0, Outcome("failed", "killed: another rank failed"))


def test_an_exit_code_of_a_skip_is_a_skip(tmp_path: Path) -> None:
    ended = dict(run(tmp_path, 60.0, lambda: end(72), lambda: end(3)))
    assert ended == {0: Outcome("skipped", "no GPU"), 1: Outcome("failed", "exit 3")}


def test_a_rank_that_is_killed_has_failed(tmp_path: Path) -> None:
    ((_, outcome),) = run(tmp_path, 60.0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert outcome == Outcome("failed", "ended with wait status 9")
