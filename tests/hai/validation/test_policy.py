"""Decisions about validations: which node is due, and which may return. Pure."""

import errno
import itertools
from pathlib import Path

import msgspec
import pytest
from tests.draws import cases, drawn

from fireflyer.errors import ConfigError
from fireflyer.hai.model import NodeView
from fireflyer.hai.model.validations import (
    Ended,
    Entry,
    Finding,
    Returned,
    Started,
    Suspected,
    Trigger,
)
from fireflyer.hai.validation import journal as journals
from fireflyer.hai.validation.journal import Journal
from fireflyer.hai.validation.policy import NodeState, due, fold, may_return, peers_of
from fireflyer.hai.validation.settings import REQUESTED_ONLY, ValidationSettings, load

WEEK = 7 * 86_400.0
NOW = 1e9
ALL = ValidationSettings()
RULE = "check gemm failed (rule validator-failed)"


def node(name: str, *, state: str = "ready", task: str = "", reason: str = "") -> NodeView:
    tasks = (task,) if task else ()
    return NodeView(name=name, tasks=tasks, state=state, reason=reason)  # type: ignore[arg-type]


def after(*entries: Entry) -> dict[str, NodeState]:
    states: dict[str, NodeState] = {}
    for entry in entries:
        fold(states, entry)
    return states


def ended(
    name: str, wall: float, trigger: Trigger = "weekly", error: str = "", **status: str
) -> Ended:
    findings = tuple(
        Finding(name=figure.replace("_", " "), status=found, reason="why")  # type: ignore[arg-type]
        for figure, found in status.items()
    )
    return Ended(node=name, wall=wall, task="t1", trigger=trigger, findings=findings, error=error)


def test_the_node_that_waited_longest_is_due_weekly() -> None:
    nodes = [node("a"), node("b"), node("c", task="t9"), node("d", state="down")]
    old = after(
        ended("a", NOW - 8 * 86400, gemm="passed"), ended("b", NOW - 9 * 86400, gemm="passed")
    )
    assert due(nodes, old, [], ALL, NOW) == ("b", "weekly")
    new = after(ended("a", NOW - 6 * 86400, gemm="passed"), ended("b", NOW - 86400, gemm="passed"))
    assert due(nodes, new, [], ALL, NOW) is None
    assert due(nodes, {}, [], ALL, NOW) == ("a", "weekly")
    assert due(nodes, {}, [], REQUESTED_ONLY, NOW) is None


def test_one_validation_at_a_time_and_never_beside_a_task() -> None:
    running = after(Started(node="a", wall=NOW, task="t1", trigger="weekly"))
    assert due([node("a", task="t1"), node("b")], running, ["b"], ALL, NOW) is None
    assert due([node("a", task="t9")], {}, ["a"], ALL, NOW) is None
    assert due([node("a", state="down")], {}, ["a"], ALL, NOW) is None


def test_a_requested_node_comes_first_also_if_it_is_drained() -> None:
    nodes = [node("a"), node("b", state="drained", reason="fan")]
    assert due(nodes, {}, ["b"], REQUESTED_ONLY, NOW) == ("b", "requested")


def test_a_node_is_validated_after_a_fault() -> None:
    fault = Suspected(node="a", wall=NOW - 10, kind="exit")
    fresh = ended("a", NOW - 100, gemm="passed"), ended("b", NOW - 100, gemm="passed")
    assert due([node("a"), node("b")], after(*fresh, fault), [], ALL, NOW) == ("a", "fault")
    done = after(*fresh, fault, ended("a", NOW - 5, "fault", gemm="passed"))
    assert due([node("a"), node("b")], done, [], ALL, NOW) is None


def test_a_drained_node_is_tested_again_after_a_while() -> None:
    drain = Suspected(node="a", wall=NOW - 4000, kind="validator", check="gemm", drained=True)
    nodes = [node("a", state="drained", reason=RULE)]
    assert due(nodes, after(drain), [], ALL, NOW) == ("a", "return")
    assert due(nodes, after(drain), [], ALL, NOW - 1000) is None, "an hour after the drain"
    again = after(drain, ended("a", NOW - 600, "return", gemm="failed"))
    assert due(nodes, again, [], ALL, NOW) is None, "an hour after the last test"
    assert due([node("a", state="drained", reason="fan")], after(drain), [], ALL, NOW) is None
    assert due(nodes, {}, [], ALL, NOW) is None, "an operator's drain"


def test_a_node_that_fails_again_and_again_stays_drained() -> None:
    returns = [Returned(node="a", wall=NOW - days * 86400) for days in (40, 20, 10)]
    drain = Suspected(node="a", wall=NOW - WEEK, kind="xid", drained=True)
    nodes = [node("a", state="drained", reason="Xid 79 (rule xid-uncorrectable)")]
    assert due(nodes, after(*returns, drain), [], ALL, NOW) == ("a", "return")
    states = after(*returns, Returned(node="a", wall=NOW - 9 * 86400), drain)
    assert due(nodes, states, [], ALL, NOW) is None


def test_a_validation_without_results_is_tried_again_after_a_minute() -> None:
    states = after(ended("a", NOW - 30, error="task t1 stopped"))
    assert due([node("a")], states, [], ALL, NOW) is None
    assert due([node("a")], states, [], ALL, NOW + 31) == ("a", "weekly")


@pytest.mark.parametrize(
    ("kind", "check", "status", "stays"),
    [
        ("validator", "gemm", {"gemm": "passed"}, ""),
        ("validator", "gemm", {"gemm": "not run"}, "gemm not run: why"),
        ("validator", "gemm", {"disk_write": "passed"}, "gemm not run"),
        ("validator", "gemm", {"gemm": "passed", "disk_write": "failed"}, "failed: disk write"),
        ("memory", "", {"memory_pattern": "passed"}, ""),
        ("memory", "", {"gemm": "passed"}, "memory pattern not run"),
        ("xid", "", {"gemm": "passed", "memory_pattern": "passed"}, "gpu health not run"),
        ("xid", "", {"gpu_health": "passed", "gpu_memory": "passed", "gpu_gemm": "passed"}, ""),
        ("network", "", {"infiniband_ports": "not run", "network_bandwidth": "passed"}, ""),
        ("network", "", {"gemm": "passed"}, "infiniband ports or network bandwidth not run"),
        ("exit", "", {"gemm": "passed", "memory_pattern": "passed"}, ""),
        ("exit", "", {"gemm": "passed"}, "memory pattern not run"),
    ],
)
def test_what_a_node_has_to_pass(kind: str, check: str, status: dict[str, str], stays: str) -> None:
    cause = Suspected(node="a", wall=NOW, kind=kind, check=check, drained=True)
    found = may_return(ended("a", NOW, "return", **status), [cause])
    assert found.startswith(stays) if stays else found == ""


def test_all_faults_since_the_last_return_count() -> None:
    drains = (
        Suspected(node="a", wall=NOW, kind="memory", drained=True),
        Suspected(node="a", wall=NOW, kind="validator", check="gemm", drained=True),
    )
    causes = after(*drains, ended("a", NOW, gemm="passed"))["a"].causes
    assert causes == drains
    blamed = Suspected(node="a", wall=NOW, kind="xid")
    assert may_return(ended("a", NOW, gemm="passed"), [blamed]) == "", "it did not drain the node"
    assert "memory pattern" in may_return(ended("a", NOW, gemm="passed"), causes)
    assert after(*drains, Returned(node="a", wall=NOW))["a"].causes == ()


def test_nothing_is_due_without_end() -> None:
    """Any history: after a validation of a node that is in order, the node is not due at once."""
    draw = drawn("histories of validations")
    for _ in range(cases(300)):
        states = after(*(_random(draw, NOW - 1e6 + 1000 * at) for at in range(20)))
        nodes = [node(name) for name in "abc"]
        seen: list[str] = []
        for step in itertools.count():
            found = due(nodes, states, [], ALL, NOW)
            if found is None:
                break
            seen.append(found[0])
            fold(states, ended(found[0], NOW + step * 1e-3, found[1], gemm="passed"))
            assert step < 10
        assert len(set(seen)) == len(seen)


def _random(draw, wall: float) -> Entry:  # type: ignore[no-untyped-def]  # noqa: ANN001
    name = draw.choice("abc")
    return draw.choice(  # type: ignore[no-any-return]
        [
            Suspected(node=name, wall=wall, kind="exit", drained=draw.random() < 0.3),
            ended(name, wall, gemm=draw.choice(["passed", "failed"])),
            ended(name, wall, error="lost"),
            Returned(node=name, wall=wall),
        ]
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [("a", "bcd"), ("c", "dea"), ("e", "abc"), ("x", "abc")],
)
def test_listeners_of_a_node_form_a_ring_without_itself(name: str, found: str) -> None:
    assert peers_of(name, {each: each for each in "abcde"}) == tuple(found)
    assert peers_of("a", {"a": "here"}) == ()


# -- files -----------------------------------------------------------------------------------------


def test_a_journal_survives_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert list(journal.read()) == []
    entries: list[Entry] = [
        Suspected(node="a", wall=1.0, kind="xid", drained=True),
        Started(node="a", wall=2.0, task="t1", trigger="return"),
        ended("a", 3.0, "return", gemm="passed"),
        Returned(node="a", wall=4.0),
    ]
    for entry in entries[:2]:
        journal.add(entry)
    with (tmp_path / "validator.jsonl").open("ab") as file:
        file.write(b'\n{"type": "ended", "no')
    for entry in entries[2:]:
        journal.add(entry)
    assert list(Journal(tmp_path).read()) == entries
    journal.add(Returned(node="ab", wall=5.0))
    assert journal.of("a", 2) == entries[2:]
    assert journal.of("b", 9) == []
    assert (tmp_path / "validator.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_thinned_journal_has_the_states_of_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any history, also over many thinnings and a drain that is older than all entries left."""
    monkeypatch.setattr(journals, "KEPT", 5)
    monkeypatch.setattr(journals, "LEAST_BYTES", 4000)
    draw = drawn("thinned journals")
    drained = Suspected(node="d", wall=1.0, kind="xid", drained=True)
    history: list[Entry] = [drained]
    history += [_random(draw, 2.0 + at) for at in range(400)]
    history += [ended("d", 500.0 + at, "return", gemm="failed") for at in range(60)]
    journal, largest = Journal(tmp_path), 0
    for entry in history:
        journal.add(entry)
        largest = max(largest, (tmp_path / "validator.jsonl").stat().st_size)
    whole, thinned = after(*history), dict[str, NodeState]()
    for line in Journal(tmp_path).read():
        fold(thinned, line)
    assert thinned == whole
    assert thinned["d"].drained == drained.wall
    assert thinned["d"].causes == (drained,)
    for name in "abcd":
        of_node = [entry for entry in history if entry.node == name]
        assert journal.of(name, 5) == of_node[-5:]
    assert largest < 30_000 < sum(len(msgspec.json.encode(entry)) for entry in history)
    assert [path.name for path in tmp_path.iterdir()] == ["validator.jsonl"]


def test_a_journal_that_cannot_be_thinned_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "KEPT", 1)
    monkeypatch.setattr(journals, "LEAST_BYTES", 200)

    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    journal = Journal(tmp_path)
    entries: list[Entry] = [Returned(node="a", wall=float(at)) for at in range(9)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        for entry in entries:
            journal.add(entry)
    assert list(Journal(tmp_path).read()) == entries
    assert [path.name for path in tmp_path.iterdir()] == ["validator.jsonl"]
    for at in range(9, 40):
        journal.add(Returned(node="a", wall=float(at)))
    assert len(journal.of("a", 99)) < 20


def test_settings(tmp_path: Path) -> None:
    assert load(tmp_path) == REQUESTED_ONLY
    path = tmp_path / "validator.toml"
    path.write_text('every_s = 60\nchecks = ["gemm"]\n[limits."disk write"]\nmin = 5\n')
    found = load(tmp_path)
    assert (found.every_s, found.checks, found.limits["disk write"].min) == (60, ("gemm",), 5)
    for text, message in (
        ("every = 3", "unknown field `every`"),
        ('checks = ["gem"]', "invalid check 'gem'"),
        ("every_s = -1", "every_s must be 0 or more"),
        ("retest_s = inf", "retest_s must be 0 or more"),
        ("[", "validator.toml"),
        ("[limits.gemm]\nmax = nan", "min not above max"),
        ('[limits."disk wirte"]\nmin = 5', "unknown figure 'disk wirte'"),
        ('[peers]\nn0 = "h:1"', "invalid secret_file ''"),
        ('secret_file = "/s"\n[peers]\nn0 = "h"', "peer of 'n0': invalid address 'h'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
