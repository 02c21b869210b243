"""The words of --rehearse: what they mean, and errors that name the word."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.errors import ConfigError
from fireflyer.hai.rehearsal.plan import Moment, check_shape, due, parse, shape_for
from fireflyer.hai.rehearsal.steps import StepReader


def test_the_words() -> None:
    found = parse("suspend@60s,kill-rank1@1.5m, slow-node2@step40+500ms,freeze-rank0@2h,resume@0s")
    assert [(e.kind, e.index, e.at_s, e.at_step, e.lasts_s) for e in found] == [
        ("suspend", -1, 60.0, None, 0.0),
        ("kill-rank", 1, 90.0, None, 0.0),
        ("slow-node", 2, None, 40, 0.5),
        ("freeze-rank", 0, 7200.0, None, 10.0),
        ("resume", -1, 0.0, None, 0.0),
    ]
    assert [e.text for e in found][2] == "slow-node2@step40+500ms"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid --rehearse '': expected e.g."),
        ("suspend", "invalid --rehearse 'suspend': expected e.g."),
        ("suspend@60s,", "invalid --rehearse '': expected e.g."),
        ("sleep@60s", "invalid --rehearse 'sleep': expected one of suspend, resume"),
        ("suspend1@60s", "suspend applies to all of the task"),
        ("kill-rank@60s", "the number of the rank is missing, e.g. kill-rank0@60s"),
        ("slow-node@step4", "the number of the node is missing, e.g. slow-node0@step4"),
        ("suspend@60", "instead of '60'"),
        ("suspend@-1s", "instead of '-1s'"),
        ("suspend@1e9s", "instead of '1e9s'"),
        ("suspend@169h", "a time of at most a week"),
        ("suspend@step", "instead of 'step'"),
        ("suspend@steps4", "instead of 'steps4'"),
        ("kill-rank0@1s+5s", "kill-rank has no duration; omit \\+5s"),
        ("slow-node0@1s+x", "instead of 'x'"),
        (",".join(["suspend@1s"] * 101), "at most 100"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_plan_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse(text)


def test_the_shape_that_the_events_name() -> None:
    assert shape_for(parse("suspend@1s")) == (1, 1)
    assert shape_for(parse("suspend@60s,kill-rank1@90s,slow-node2@120s")) == (3, 1)
    assert shape_for(parse("kill-rank3@1s,kill-node1@1s")) == (2, 2)
    plan = parse("kill-rank3@1s,kill-node1@1s")
    check_shape(plan, 2, 2)
    with pytest.raises(ConfigError, match="the task has ranks 0 to 1"):
        check_shape(plan, 2, 1)
    with pytest.raises(ConfigError, match="the task has nodes 0 to 0"):
        check_shape(plan, 1, 4)


def test_what_is_due() -> None:
    timed, stepped, resume = parse("suspend@5s,kill-rank0@step3,resume@7s")

    def moment(
        ran_s: float, *, running: bool = True, suspended: bool = False, step: int | None = None
    ) -> Moment:
        return Moment(ran_s=ran_s, running=running, suspended=suspended, step=step)

    assert [due(timed, moment(s)) for s in (4.9, 5.0)] == [False, True]
    assert not due(timed, moment(9.0, running=False))
    assert [due(stepped, moment(0.0, step=s)) for s in (None, 2, 3, 9)] == [
        False,
        False,
        True,
        True,
    ]
    assert not due(resume, moment(8.0))
    assert due(resume, moment(8.0, running=False, suspended=True))
    assert not due(resume, moment(6.0, running=False, suspended=True))


def test_steps_are_read_from_the_output_however_it_is_cut() -> None:
    text = (
        b'loaded checkpoint, step 30\nepoch 2 step 31 loss 0.5\n{"step": 32}\nstepping 99\nStep: 33/100\n'
        b"restored step 7\nstep=34"
    )
    for size in (1, 3, 1000):
        reader = StepReader()
        for at in range(0, len(text), size):
            reader.feed(text[at : at + size])
        told = reader.attempt_steps
        assert (told.first, told.last, told.resumed_from) == (31, 33, 30)
