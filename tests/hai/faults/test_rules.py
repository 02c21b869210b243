"""The table: each default line, what counts, whose line wins, and where a file is wrong."""

from pathlib import Path

import pytest

from fireflyer.errors import ConfigError
from fireflyer.hai.faults.rules import (
    ACTIONS,
    NOTHING,
    Decision,
    decide,
    default_rules,
    gravest,
    load,
    merged,
    parse,
)
from fireflyer.hai.model.observations import (
    KINDS,
    Exit,
    Hang,
    Loss,
    Memory,
    Network,
    Observation,
    OutOfMemory,
    Seen,
    Straggler,
    SupervisorLost,
    Validator,
    Xid,
)

RULES = default_rules()


def seen(found: Observation, task: str = "t1", attempt: int = 1) -> Seen:
    return Seen(task=task, attempt=attempt, observation=found)


def crash(code: int = 1, place: str = "train.py:9 ValueError", ran_s: float = 5.0) -> Exit:
    return Exit(node="n0", wall=100.0, rank=0, code=code, signal=None, place=place, ran_s=ran_s)


def killed(number: int) -> Exit:
    return Exit(node="n0", wall=100.0, rank=0, code=None, signal=number)


def xid(code: int, wall: float = 1000.0, node: str = "n0") -> Xid:
    return Xid(node=node, wall=wall, code=code, device="0000:3b:00")


def flap(state: str, wall: float = 1000.0, node: str = "n0") -> Network:
    return Network(node=node, wall=wall, device="ib0", state=state)


def oom(wall: float, *, limited: bool = False) -> OutOfMemory:
    return OutOfMemory(node="n0", wall=wall, pid=7, limited=limited)


CASES: dict[str, tuple[Observation, list[Seen], str, str]] = {
    "crash-loop": (crash(), [seen(crash(), attempt=n) for n in (1, 2)], "stop task", "script"),
    "bus-error": (killed(7), [], "restart elsewhere", "node"),
    "exit": (crash(), [], "restart", "script"),
    "loss": (Loss(node="n1", rank=1, code=None, signal=9), [], "note", "script"),
    "out-of-memory-limit": (
        oom(900.0, limited=True), [seen(oom(1.0)), seen(oom(2.0))], "restart", "script",
    ),
    "out-of-memory-repeated": (
        oom(900.0), [seen(oom(1.0)), seen(oom(2.0), "t2")], "restart elsewhere", "script",
    ),
    "out-of-memory": (oom(1.0), [], "restart", "script"),
    "node-silent": (SupervisorLost(node="n0", reason="it died"), [], "restart elsewhere", "node"),
    "hang-of-one": (Hang(node="n1", quiet_s=9, rank=1), [], "restart elsewhere", "node"),
    "hang": (Hang(quiet_s=9), [], "restart", "script"),
    "straggler": (Straggler(node="n1", rank=1, factor=2, steps=16), [], "note", "node"),
    "xid-software-repeated": (
        xid(31), [seen(xid(13, 990.0 + n)) for n in range(9)], "drain node", "node",
    ),
    "xid-software": (xid(31), [], "note", "script"),
    "xid-nvlink-repeated": (xid(74), [seen(xid(74, 900.0))] * 2, "drain node", "node"),
    "xid-nvlink": (xid(74), [], "restart elsewhere", "node"),
    "xid-row-remapped": (xid(63), [], "note", "script"),
    "xid-ecc-contained": (xid(94), [], "restart elsewhere", "node"),
    "xid-ecc": (xid(95), [], "drain node", "node"),
    "xid-uncorrectable": (xid(79), [], "drain node", "node"),
    "xid-gsp": (xid(119), [], "drain node", "node"),
    "xid-other": (xid(12345), [], "note", "script"),
    "link-flaps": (
        flap("down"), [seen(flap("down", 400.0)), seen(flap("down", 500.0))], "drain node", "network",
    ),
    "link-down": (flap("error"), [], "restart", "network"),
    "link-up": (flap("up"), [], "note", "network"),
    "memory-uncorrected": (Memory(node="n0", corrected=False), [], "drain node", "node"),
    "memory-corrected": (Memory(node="n0", corrected=True), [], "note", "node"),
    "validator-failed": (Validator(node="n0", check="gemm", passed=False), [], "drain node", "node"),
    "validator-passed": (Validator(node="n0", check="gemm", passed=True), [], "note", "node"),
}  # fmt: skip


def test_every_default_line_has_its_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]
    assert {rule.on for rule in RULES} == set(KINDS)
    assert all(rule.why and rule.source for rule in RULES)


@pytest.mark.parametrize("name", CASES)
def test_default_line(name: str) -> None:
    found, history, action, cause = CASES[name]
    decision = decide(RULES, found, history, "t1")
    assert (decision.rule, decision.action, decision.cause) == (name, action, cause)


@pytest.mark.parametrize("code", [44, 48, 61, 62, 69, 79, 64, 95, 119])
def test_xids_that_need_hands_drain_the_node(code: int) -> None:
    assert decide(RULES, xid(code), ()).action == "drain node"


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63])
def test_xids_of_software_and_a_remapped_row_are_noted(code: int) -> None:
    assert decide(RULES, xid(code), ()).action == "note"


def test_only_hangs_end_an_attempt_that_runs() -> None:
    assert {rule.name for rule in RULES if rule.end} == {"hang", "hang-of-one"}


@pytest.mark.parametrize(
    "history",
    [
        [crash(), crash(code=2)],
        [crash(), crash(place="train.py:10 ValueError")],
        [crash(), crash(ran_s=61.0)],
        [crash(), killed(9)],
        [crash()],
    ],
)
def test_another_code_place_or_a_longer_run_is_no_crash_loop(history: list[Exit]) -> None:
    assert decide(RULES, crash(), [seen(past) for past in history], "t1").rule == "exit"


def test_crashes_of_another_task_do_not_count() -> None:
    assert decide(RULES, crash(), [seen(crash(), "t2")] * 5, "t1").rule == "exit"


def test_kills_from_outside_are_no_crash_loop() -> None:
    assert decide(RULES, killed(9), [seen(killed(9))] * 5, "t1").rule == "exit"


def test_flaps_of_another_node_or_long_ago_do_not_count() -> None:
    other = [seen(flap("down", 900.0, "n1"))] * 5
    old = [seen(flap("down", 5000.0 - 3601.0))] * 5
    up = [seen(flap("up", 4900.0))] * 5
    assert decide(RULES, flap("down", 5000.0), other + old + up).rule == "link-down"
    edge = [seen(flap("down", 5000.0 - 3600.0))] * 2
    assert decide(RULES, flap("down", 5000.0), edge).rule == "link-flaps"


def test_nothing_is_done_where_no_line_fits() -> None:
    assert decide((), crash(), ()) == NOTHING


def test_the_gravest_wins_and_the_first_of_equals() -> None:
    made = [Decision(action=action, rule=action) for action in ACTIONS]
    assert gravest(made).action == "stop task"
    first, second = (Decision(action="restart", rule=name) for name in "ab")
    assert gravest([first, second]) == first
    assert gravest([]) == NOTHING


def test_an_operators_lines_come_first_and_replace_their_namesakes(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(
        '[[rule]]\nname = "exit"\non = "exit"\naction = "stop task"\n\n'
        '[[rule]]\nname = "preempted"\non = "exit"\ncodes = [75]\naction = "restart elsewhere"\n'
    )
    table = load(tmp_path)
    names = [rule.name for rule in table]
    assert names == ["preempted", *(rule.name for rule in RULES)]
    assert decide(table, crash(75), ()).rule == "preempted"
    assert decide(table, crash(1), ()).action == "stop task"
    assert load(tmp_path / "nowhere") == RULES
    assert merged((), RULES) == RULES


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[[rule]]\nname = "a"\non = "xid"\naction = "dance"\n', 4, "one of note, restart"),
        ('[[rule]]\nname = "a"\non = "xid"\naction = "note"\nfoo = 1\n', 5, "unknown key 'foo'"),
        ('# c\n\n[[rule]]\nname = "a"\naction = "note"\n', 3, "no 'on'"),
        ('[[rule]]\nname = "a"\non = "moon"\naction = "note"\n', 3, "'moon'"),
        ('[[rule]]\nname = "a"\non = "hang"\ncodes = [1]\naction = "note"\n', 4, "only with xid"),
        ('[[rule]]\nname = "a"\non = "xid"\ncodes = ["x"]\naction = "note"\n', 4, "Expected `int`"),
        ('[[rule]]\nname = "a"\non = "xid"\nat_least = 0\naction = "note"\n', 4, "1 or more"),
        ('[[rule]]\nname = "a"\non = "xid"\nwithin_s = -1\naction = "note"\n', 4, "0 or more"),
        ('[[rule]]\nname = ""\non = "xid"\naction = "note"\n', 2, "empty"),
        ("[[rule]]\nname = \n", 2, "Invalid value"),
        ('\n[rules]\nname = "a"\n', 2, "unknown 'rules'"),
        ('[rule]\nname = "a"\n', 1, "two brackets"),
        (
            '[[rule]]\nname = "a"\non = "xid"\naction = "note"\n\n'
            '[[rule]]\nname = "a"\non = "xid"\naction = "note"\n',
            7,
            "used twice",
        ),
    ],
)  # fmt: skip
def test_an_error_is_named_by_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    (tmp_path / "faults.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert f"line {line}" in str(caught.value)
    assert says in str(caught.value)
    assert str(tmp_path / "faults.toml") in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="F, line 1"):
        parse("rule = 3", "F")
