"""At most one process acts as primary, whatever their clocks show and however late they are."""

import random

import pytest
from tests import draws

from fireflyer.fs3.manager.election import Election, Primary
from fireflyer.fs3.manager.leases import Times

TIMES = Times(lease_s=3.0)


def test_the_first_one_wins_and_renews() -> None:
    one = Election(11, "one:1", TIMES)
    row = one.decide(5.0, None)
    assert row == Primary(1, 11, "one:1", 1)
    one.written(row, 5.0)
    assert one.holds(7.9)
    assert not one.holds(8.0)
    renewed = one.decide(6.0, row)
    assert renewed == Primary(1, 11, "one:1", 2)
    one.written(renewed, 6.0)
    assert one.holds(8.9)


def test_another_waits_until_the_row_rests_for_a_whole_period() -> None:
    two = Election(22, "two:1", TIMES)
    row = Primary(4, 11, "one:1", 9)
    assert two.decide(100.0, row) is None
    assert two.primary == "one:1"
    assert two.decide(100.0 + TIMES.dead_s - 0.01, row) is None
    moved = Primary(4, 11, "one:1", 10)
    assert two.decide(100.0 + TIMES.dead_s, moved) is None
    assert two.decide(100.0 + 2 * TIMES.dead_s, moved) == Primary(5, 22, "two:1", 1)


def test_who_is_alone_at_the_store_need_not_wait() -> None:
    assert Election(22, "two:1", TIMES, alone=True).decide(
        0.0, Primary(4, 11, "one:1", 9)
    ) == Primary(5, 22, "two:1", 1)


def test_who_is_alone_at_the_store_keeps_its_row() -> None:
    one = Election(11, "one:1", TIMES, alone=True)
    row = Primary(1, 11, "one:1", 1)
    one.written(row, 0.0)
    assert one.decide(2.0, row) == row
    one.written(row, 2.0)
    assert one.holds(4.9)
    assert one.decide(4.9, Primary(9, 7, "", 1)) == Primary(10, 11, "one:1", 1)


def test_a_primary_that_could_not_renew_begins_a_new_term() -> None:
    one = Election(11, "one:1", TIMES)
    row = Primary(1, 11, "one:1", 1)
    one.written(row, 0.0)
    assert one.decide(10.0, row) == Primary(2, 11, "one:1", 1)


def test_the_loser_stops_at_once() -> None:
    one = Election(11, "one:1", TIMES)
    one.written(Primary(1, 11, "one:1", 1), 0.0)
    one.lost()
    assert not one.holds(0.1)


@pytest.mark.parametrize("seed", draws.seeds("elections", 20))
def test_never_two_at_a_time(seed: int) -> None:
    """Three processes with clocks of their own (rates within 1 %), late commits and long pauses."""
    chance = random.Random(seed)
    rates = [chance.uniform(0.995, 1.005) for _ in range(3)]
    offsets = [chance.uniform(0, 1e6) for _ in range(3)]
    elections = [Election(at + 1, f"m{at}:1", TIMES) for at in range(3)]
    row: Primary | None = None
    due = [chance.uniform(0, 1) for _ in range(3)]
    begun: list[float | None] = [None] * 3  # a transaction under way since, by its own clock
    terms, now = set(), 0.0

    def clock(at: int) -> float:
        return offsets[at] + now * rates[at]

    while now < 400:
        now += 0.05
        for at, election in enumerate(elections):
            if now < due[at]:
                continue
            started = begun[at]
            if started is None:
                begun[at] = clock(at)
                due[at] = now + chance.choice((0.0, 0.1, 0.5, 2.0))
                continue
            decided = election.decide(clock(at), row)
            if decided is None:
                election.lost()
            else:
                row = decided
                election.written(decided, started)
                terms.add((decided.epoch, decided.holder))
            begun[at] = None
            due[at] = now + chance.choice((0.5, 0.5, 0.5, 3.0, 12.0))
        holders = [at for at, election in enumerate(elections) if election.holds(clock(at))]
        assert len(holders) <= 1, f"{holders} at {now}"
        if holders and row:
            assert row.holder == holders[0] + 1
    epochs = [epoch for epoch, _ in terms]
    assert len(epochs) == len(set(epochs))
    assert len(epochs) > 3
