"""One test a rule of docs/internals/fs3-chain.md, and the wedges that users of the namesake met."""

import pytest

from fireflyer.fs3.manager.chains import (
    Chain,
    Local,
    LocalState,
    Member,
    Public,
    needs_answer_of,
    next_chain,
    restart_from,
)

S, R, L, Y, W, X = Public  # SERVING RECOVERING LASTSRV SYNCING WAITING OFFLINE
UP = LocalState.UPTODATE
FAULTY = LocalState.FAULTY


def chain(*members: tuple[int, Public], version: int = 7) -> Chain:
    """Active members are of incarnation 1; those that hold data are of the store 100 + target."""
    return Chain(
        1,
        version,
        tuple(
            Member(
                target, state, int(state in (S, R, Y)), 100 + target if state in (S, R, L) else 0
            )
            for target, state in members
        ),
    )


def on(*targets: int, incarnation: int = 1) -> dict[int, Local]:
    return {target: Local(incarnation, store=100 + target) for target in targets}


def says(
    target: int, state: LocalState, version: int = 7, incarnation: int = 1
) -> dict[int, Local]:
    return {target: Local(incarnation, state, version, 100 + target)}


def states(of: Chain) -> list[tuple[int, Public]]:
    return [(member.target, member.state) for member in of.members]


def test_nothing_changes_while_all_serve() -> None:
    before = chain((1, S), (2, S))
    assert next_chain(before, on(1, 2)) is before


def test_a_change_adds_one_to_the_version() -> None:
    assert next_chain(chain((1, S), (2, S), (3, S)), on(2)).version == 8


def test_rule_1_a_dead_target_leaves() -> None:
    assert states(next_chain(chain((1, S), (2, S)), on(2))) == [(2, S), (1, X)]


def test_rule_1_a_new_process_does_not_serve_in_the_old_ones_place() -> None:
    after = next_chain(chain((1, S), (2, S)), on(2) | on(1, incarnation=2))
    assert states(after) == [(2, S), (1, Y)]
    assert after.members[1].incarnation == 2


def test_rule_1_a_faulty_target_leaves_and_waits() -> None:
    after = next_chain(chain((1, S), (2, S)), on(1) | says(2, FAULTY))
    assert states(after) == [(1, S), (2, W)]
    assert next_chain(after, on(1) | says(2, FAULTY)) is after


def test_rule_1_all_that_leave_together_are_last() -> None:
    after = next_chain(chain((1, S), (2, S), (3, X)), on(3))
    assert states(after) == [(1, L), (2, L), (3, W)]
    assert [member.store for member in after.members] == [101, 102, 0]


def test_rule_1_a_recovering_target_that_leaves_is_last_again() -> None:
    assert states(next_chain(chain((1, R), (2, L)), on(2))) == [(1, L), (2, L)]


def test_rule_2_who_finished_its_sync_is_the_new_tail() -> None:
    after = next_chain(chain((1, S), (2, Y), (3, W)), on(1, 3) | says(2, UP))
    assert states(after) == [(1, S), (2, S), (3, Y)]
    assert after.members[1] == Member(2, S, 1, 102)


@pytest.mark.parametrize("version", [6, 8])
def test_rule_2_only_at_the_published_version(version: int) -> None:
    before = chain((1, S), (2, Y))
    assert next_chain(before, on(1) | says(2, UP, version)) is before


def test_rule_2_a_finished_sync_counts_even_when_the_others_leave_with_it() -> None:
    assert states(next_chain(chain((1, S), (2, Y)), says(2, UP))) == [(2, S), (1, X)]


def test_rule_2_who_finished_recovering_serves() -> None:
    after = next_chain(chain((1, R), (2, L)), on(2) | says(1, UP))
    assert states(after) == [(1, S), (2, Y)]


def test_rule_3_nobody_syncs_from_nobody() -> None:
    assert states(next_chain(chain((1, S), (2, Y)), on(2))) == [(1, L), (2, W)]


def test_rule_3_another_store_is_no_witness() -> None:
    after = next_chain(chain((1, L), (2, L)), on(2) | {1: Local(2, store=999)})
    assert states(after) == [(2, S), (1, Y)]


def test_rule_3_the_last_witness_is_never_given_up() -> None:
    before = chain((1, L), (2, W))
    locals_ = on(2) | {1: Local(2, store=999)}
    assert next_chain(before, locals_ | {2: Local(1, FAULTY)}, proceed=True).targets(L) == (1,)
    assert next_chain(before, locals_) is before


def test_rule_3_after_the_wait_the_missing_are_dropped() -> None:
    before = chain((1, L), (2, L), (3, L))
    assert next_chain(before, on(2, 3)) is before
    assert states(next_chain(before, on(2, 3), proceed=True)) == [(2, R), (3, L), (1, X)]
    assert states(next_chain(before, on(2), proceed=True)) == [(2, S), (1, X), (3, X)]
    assert next_chain(before, {}, proceed=True) is before


def test_rule_3_after_the_wait_a_recovering_target_stops_waiting_too() -> None:
    before = chain((1, R), (2, L))
    assert next_chain(before, on(1)) is before
    assert states(next_chain(before, on(1), proceed=True)) == [(1, R), (2, X)]


def test_rule_4_a_new_chain_begins_when_all_are_there() -> None:
    before = Chain.new(1, [1, 2])
    assert next_chain(before, on(1)) is before
    after = next_chain(before, on(1, 2))
    assert states(after) == [(1, R), (2, L)]
    assert after.members[0] == Member(1, R, 1, 101)


def test_rule_4_the_only_last_one_serves_at_once() -> None:
    assert states(next_chain(chain((1, L), (2, X)), on(1, 2))) == [(1, S), (2, Y)]


def test_rule_4_waits_for_a_faulty_one() -> None:
    before = chain((1, L), (2, L))
    assert next_chain(before, on(1) | says(2, FAULTY)) is before


def test_rule_6_alive_or_not() -> None:
    after = next_chain(chain((1, S), (2, Y), (3, W), (4, X)), on(1, 2, 4))
    assert states(after) == [(1, S), (2, Y), (4, W), (3, X)]


def test_rule_7_one_at_a_time_in_turn_and_not_the_faulty() -> None:
    after = next_chain(chain((1, S), (2, W), (3, W), (4, W)), on(1, 3, 4) | says(2, FAULTY))
    assert states(after) == [(1, S), (3, Y), (2, W), (4, W)]


def test_a_word_is_needed_of_those_that_seem_to_stay() -> None:
    before = chain((1, S), (2, S), (3, S), (4, Y))
    assert needs_answer_of(before, on(1, 2, 3, 4)) == ()
    assert needs_answer_of(before, on(1, 3)) == (1, 3)
    assert needs_answer_of(before, on(4)) == ()
    assert needs_answer_of(before, on(1, 2) | on(3, incarnation=2)) == (1, 2)


def test_the_operator_restarts_from_what_is_left() -> None:
    lost = chain((1, L), (2, W), (3, X))
    after = restart_from(lost, 2)
    assert states(after) == [(2, L), (1, X), (3, X)]
    assert states(next_chain(after, on(2, 3))) == [(2, S), (3, Y), (1, X)]
    with pytest.raises(ValueError, match="serves"):
        restart_from(chain((1, S)), 1)
    with pytest.raises(ValueError, match="not a member"):
        restart_from(lost, 9)


def test_a_chain_needs_targets_each_once() -> None:
    for targets in ([], [1, 1]):
        with pytest.raises(ValueError, match="each once"):
            Chain.new(1, targets)


def heal(of: Chain, locals_: dict[int, Local]) -> Chain:
    """The chain after its targets did what it asks of them, until it rests."""
    for _ in range(20):
        for member in of.members:
            if member.target in locals_ and member.state in (Y, R):
                local = locals_[member.target]
                if local.incarnation == member.incarnation:
                    done = Local(local.incarnation, UP, of.version, local.store)
                    locals_ = locals_ | {member.target: done}
        after = next_chain(of, locals_)
        if after is of:
            return of
        of = after
    raise AssertionError(f"no rest: {of}")


def test_335_a_replaced_disk_heals() -> None:
    """The namesake never brings a target with an empty store back."""
    empty = {2: Local(2, store=555)}
    after = heal(chain((1, S), (2, S)), on(1) | empty)
    assert states(after) == [(1, S), (2, S)]
    assert after.members[1] == Member(2, S, 2, 555)


def test_335_both_stop_and_one_comes_back_empty() -> None:
    stopped = next_chain(chain((1, S), (2, S)), {})
    after = heal(stopped, {1: Local(2, store=555), 2: Local(2, store=102)})
    assert states(after) == [(2, S), (1, S)]
    assert next_chain(stopped, {1: Local(2, store=555)}).targets(L) == (2,)


def test_345_a_tail_that_is_ahead_returns() -> None:
    """It committed, died before it said so, and differs from its predecessor: synced, not wedged."""
    before = chain((1, S), (2, S))
    alone = next_chain(before, on(1))
    assert states(alone) == [(1, S), (2, X)]
    returned = next_chain(alone, on(1) | on(2, incarnation=2))
    assert states(returned) == [(1, S), (2, Y)]
    assert states(heal(returned, on(1) | on(2, incarnation=2))) == [(1, S), (2, S)]


def test_229_a_successor_that_finds_itself_diverged_is_synced_again() -> None:
    """Said FAULTY while it serves or syncs, it leaves, sees that, says ONLINE, and is synced."""
    for state in (S, Y):
        out = next_chain(chain((1, S), (2, state)), on(1) | says(2, FAULTY))
        assert states(out) == [(1, S), (2, W)]
        assert states(heal(out, on(1, 2))) == [(1, S), (2, S)]
