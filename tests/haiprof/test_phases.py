"""Phases of synthetic events: every nanosecond of a step belongs to one phase."""

from itertools import pairwise
from typing import Literal

import pytest
from tests.draws import drawn, seeds

from fireflyer.haiprof import events
from fireflyer.haiprof.events import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    FRAMEWORK,
    OPTIMIZER,
    OTHER,
    PHASES,
    UPDATE,
    Event,
)
from fireflyer.haiprof.phases import PhaseAccountant, Row
from fireflyer.haiprof.records import summary

MS = 1_000_000
KINDS = [FORWARD, BACKWARD, DATA, UPDATE, COMMUNICATION, CHECKPOINT, CALLBACKS, FRAMEWORK]


class Tape:
    """Events at moments that the test chooses, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0
        self.events: list[Event] = []

    def wait(self, ms: int) -> "Tape":
        self.now += ms
        return self

    def mark(self, what: Literal["begin", "end"], phase: int, label: int = 0) -> "Tape":
        self.events.append(Event(self.now * MS, what == "begin", phase, 0, label))
        return self

    def span(self, phase: int, ms: int, label: int = 0) -> "Tape":
        return self.mark("begin", phase, label).wait(ms).mark("end", phase, label)

    def rows(self) -> list[Row]:
        return list(PhaseAccountant().feed(self.events))


def in_ms(row: Row) -> dict[str, int]:
    assert sum(row.phases.values()) == pytest.approx(row.seconds)
    return {name: round(seconds * 1e3) for name, seconds in row.phases.items() if seconds}


def plain_step(tape: Tape) -> None:
    tape.wait(1).span(DATA, 10).wait(2).span(OPTIMIZER, 1)
    tape.span(FORWARD, 20).wait(3).span(BACKWARD, 40).wait(4).span(UPDATE, 8, 1)


def test_a_plain_step_and_the_time_between_its_phases() -> None:
    tape = Tape()
    for _ in range(3):
        plain_step(tape)
    rows = tape.rows()
    assert len(rows) == 2
    assert in_ms(rows[0]) == {
        "other": 1, "data": 12, "optimizer": 13, "forward": 23, "backward": 40,
    }  # fmt: skip
    assert rows[0].between == pytest.approx(
        {"other": 0.001, "data": 0.002, "forward": 0.003, "optimizer": 0.004}
    )
    assert [row.step for row in rows] == [0, 1]
    assert rows[1].begin_ns == rows[0].begin_ns + 89 * MS
    found = summary(rows)
    assert found["steps"] == 2
    assert found["covered"] == pytest.approx(88 / 89)


def test_the_row_comes_with_the_end_of_its_step() -> None:
    tape = Tape()
    for _ in range(2):
        plain_step(tape)
    accountant = PhaseAccountant()
    assert list(accountant.feed(tape.events[:-1])) == []
    assert len(list(accountant.feed(tape.events[-1:]))) == 1


def test_without_a_loader_the_script_makes_its_batch_before_the_forward() -> None:
    tape = Tape()
    for _ in range(3):
        tape.wait(5).span(FORWARD, 10).span(BACKWARD, 10).span(UPDATE, 5, 1)
    assert in_ms(tape.rows()[0]) == {"data": 5, "forward": 10, "backward": 10, "optimizer": 5}


def test_accumulation_is_one_step() -> None:
    tape = Tape()
    for _ in range(3):
        for _ in range(4):
            tape.span(DATA, 1).span(FORWARD, 2).span(BACKWARD, 3).wait(1)
        tape.span(UPDATE, 5, 1)
    rows = tape.rows()
    assert len(rows) == 2
    assert in_ms(rows[0]) == {"data": 4, "forward": 8, "backward": 12, "optimizer": 6, "other": 3}


def test_two_optimizers_that_take_turns_make_one_step() -> None:
    tape = Tape()
    for _ in range(4):
        tape.span(DATA, 1).span(FORWARD, 10).span(BACKWARD, 20).span(UPDATE, 3, 1)
        tape.wait(1).span(FORWARD, 5).span(BACKWARD, 10).span(UPDATE, 2, 2)
    rows = tape.rows()
    assert len(rows) == 3
    expected = {"data": 1, "forward": 16, "backward": 30, "optimizer": 5}
    assert [in_ms(row) for row in rows] == [expected] * 3


def test_a_critic_that_steps_more_often_ends_steps_of_its_own() -> None:
    tape = Tape()
    for _ in range(3):
        for label in (1, 1, 1, 2):
            tape.span(FORWARD, 2).span(BACKWARD, 3).span(UPDATE, 1, label)
    rows = tape.rows()
    assert sum(row.seconds for row in rows) == pytest.approx(6e-3 * (rows[-1].step + 1), rel=1)
    assert all(set(in_ms(row)) == {"forward", "backward", "optimizer"} for row in rows)


def test_a_closure_runs_inside_the_optimizer() -> None:
    tape = Tape()
    for _ in range(3):
        tape.span(DATA, 5).wait(1).mark("begin", UPDATE, 1).wait(2)
        tape.span(FORWARD, 10).wait(3).span(BACKWARD, 20).wait(4).mark("end", UPDATE, 1)
    row = tape.rows()[0]
    assert in_ms(row) == {"data": 6, "optimizer": 6, "forward": 13, "backward": 20}
    assert "optimizer" not in row.between


def test_a_forward_inside_a_backward_is_recomputation() -> None:
    tape = Tape()
    for _ in range(2):
        tape.span(FORWARD, 10).mark("begin", BACKWARD).wait(5).span(FORWARD, 10, 3).wait(5)
        tape.mark("end", BACKWARD).span(UPDATE, 2, 1)
    assert in_ms(tape.rows()[0]) == {"forward": 10, "backward": 20, "optimizer": 2}


def test_communication_and_checkpoints_interrupt_without_a_change_of_what_follows() -> None:
    tape = Tape()
    for _ in range(2):
        tape.span(FORWARD, 10).wait(1).span(COMMUNICATION, 7).wait(1)
        tape.mark("begin", BACKWARD).wait(5).span(COMMUNICATION, 3).mark("end", BACKWARD)
        tape.span(UPDATE, 2, 1).span(CHECKPOINT, 9)
    assert in_ms(tape.rows()[0]) == {
        "forward": 12, "communication": 10, "backward": 5, "optimizer": 2, "checkpoint": 9,
    }  # fmt: skip


def test_the_rest_of_a_step_inside_the_loop_of_a_trainer_is_framework() -> None:
    tape = Tape()
    for _ in range(3):
        tape.wait(1).mark("begin", FRAMEWORK).wait(2).span(DATA, 10).wait(4)
        tape.mark("begin", UPDATE, 1).span(FORWARD, 20).wait(3).span(BACKWARD, 40).wait(8)
        tape.mark("end", UPDATE, 1).wait(16).mark("end", FRAMEWORK)
    row = tape.rows()[0]
    assert in_ms(row) == {
        "forward": 23, "backward": 40, "optimizer": 8, "data": 14, "framework": 18, "other": 1,
    }  # fmt: skip
    assert row.between == pytest.approx(
        {"forward": 0.003, "data": 0.004, "framework": 0.018, "other": 0.001}
    )


def test_callbacks_are_named_and_hide_neither_phases_nor_what_they_interrupt() -> None:
    tape = Tape()
    for _ in range(3):
        tape.span(DATA, 10).span(CALLBACKS, 1, 7).wait(2).span(FORWARD, 20).wait(1)
        tape.span(CALLBACKS, 4, 8).wait(1).span(BACKWARD, 40).span(UPDATE, 8, 1)
        tape.mark("begin", CALLBACKS, 7).wait(3).mark("begin", FRAMEWORK).wait(1)
        tape.mark("end", FRAMEWORK).span(CHECKPOINT, 5).mark("end", CALLBACKS, 7)
    row = tape.rows()[0]
    assert in_ms(row) == {
        "forward": 22, "backward": 40, "optimizer": 8, "data": 12, "checkpoint": 5, "callbacks": 9,
    }  # fmt: skip
    assert row.callbacks == pytest.approx({"7": 0.005, "8": 0.004})


def test_a_report_moves_time_from_backward_to_communication_but_no_more_than_there_is() -> None:
    tape = Tape()
    for reported in (0, 4, 50):
        tape.span(FORWARD, 10).span(BACKWARD, 20)
        tape.events.append(Event(reported * MS, True, OTHER, 0, 0))
        tape.span(UPDATE, 2, 1)
    first, second = tape.rows()
    assert in_ms(first) == {"forward": 10, "backward": 16, "communication": 4, "optimizer": 2}
    assert in_ms(second) == {"forward": 10, "communication": 20, "optimizer": 2}


def test_a_phase_that_ended_with_an_exception_does_not_stay_open() -> None:
    tape = Tape()
    for _ in range(2):
        tape.mark("begin", FORWARD, 1).wait(3).mark("begin", COMMUNICATION, 9).wait(2)
        tape.mark("end", FORWARD, 1).span(BACKWARD, 5).span(UPDATE, 2, 1)
    assert in_ms(tape.rows()[0]) == {
        "forward": 3, "communication": 2, "backward": 5, "optimizer": 2,
    }  # fmt: skip


def test_other_threads_and_ends_without_a_beginning_change_nothing() -> None:
    tape = Tape()
    tape.mark("end", BACKWARD).mark("end", UPDATE, 1)
    for _ in range(2):
        plain_step(tape)
    noise = [Event(event.time_ns, True, FORWARD, 3, 0) for event in tape.events]
    mixed = [event for pair in zip(tape.events, noise, strict=True) for event in pair]
    assert list(PhaseAccountant().feed(mixed)) == tape.rows()


@pytest.mark.parametrize("seed", seeds("haiprof phases", 40))
def test_any_nesting_accounts_for_every_nanosecond(seed: int) -> None:
    random = drawn(f"haiprof phases {seed}")
    tape = Tape()
    open_: list[tuple[int, int]] = []
    for _ in range(300):
        tape.wait(random.randint(0, 5))
        if open_ and random.random() < 0.5:
            tape.mark("end", *open_.pop(random.choice([-1, -1, -1, 0])))
        else:
            kind = random.choice(
                [FORWARD, BACKWARD, DATA, UPDATE, COMMUNICATION, CHECKPOINT, CALLBACKS, FRAMEWORK]
            )
            open_.append((kind, random.randint(0, 2)))
            tape.mark("begin", *open_[-1])
    rows = tape.rows()
    for row in rows:
        assert sum(row.phases.values()) == pytest.approx(row.seconds)
        assert set(row.phases) == set(PHASES)
        assert all(seconds >= 0 for seconds in row.phases.values())
        assert all(row.between[name] <= row.phases[name] + 1e-12 for name in row.between)
        assert sum(row.callbacks.values()) == pytest.approx(row.phases["callbacks"])
    for one, following in pairwise(rows):
        assert following.begin_ns == one.begin_ns + round(one.seconds * 1e9)


def test_events_travel_as_integers() -> None:
    sent = [Event(10**13, True, UPDATE, 15, 255), Event(0, False, FORWARD, 0, 0)]
    assert list(events.unpacked(events.packed(sent))) == sent
    with pytest.raises(ValueError, match="bytes length"):
        list(events.unpacked(b"1234567"))
