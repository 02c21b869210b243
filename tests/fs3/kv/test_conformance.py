"""What every engine promises, checked on each."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import draws

from fireflyer.errors import FileError, Unavailable
from fireflyer.fs3.kv import Engine, MemoryEngine, Outcome, SqliteEngine, Transaction, run
from fireflyer.fs3.kv.history import KEPT_KEYS
from fireflyer.fs3.kv.run import record_key
from fireflyer.fs3.kv.transaction import counter

Rows = list[tuple[bytes, bytes]]


@pytest.fixture(params=["memory", "sqlite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made: Engine = (
        MemoryEngine() if request.param == "memory" else SqliteEngine(tmp_path / "kv.sqlite")
    )
    yield made
    made.close()


def commit(engine: Engine, t: Transaction) -> Outcome:
    return engine.commit_many([t])[0]


def put(engine: Engine, **rows: bytes) -> None:
    def body(t: Transaction) -> None:
        for key, value in rows.items():
            t.set(key.encode(), value)

    run(engine, body)


def put_keys(engine: Engine, keys: list[bytes]) -> None:
    def body(t: Transaction) -> None:
        for key in keys:
            t.set(key, b"")

    run(engine, body)


def everything(engine: Engine) -> Rows:
    return run(engine, lambda t: t.get_range(b"", b"\xff"))


def test_rows_are_read_in_order_of_their_keys(engine: Engine) -> None:
    put(engine, b=b"2", a=b"1", c=b"3", ab=b"")
    t = engine.begin()
    assert t.get(b"a") == b"1"
    assert t.get(b"ab") == b""
    assert t.get(b"x") is None
    assert t.get_range(b"a", b"c") == [(b"a", b"1"), (b"ab", b""), (b"b", b"2")]
    assert t.get_range(b"a", b"z", 2, reverse=True) == [(b"c", b"3"), (b"b", b"2")]
    assert t.get_range(b"c", b"a") == []
    assert t.get_many([b"a", b"x", b"c"]) == {b"a": b"1", b"c": b"3"}
    t.end()


def test_a_transaction_sees_its_own_writes_and_nobody_elses(engine: Engine) -> None:
    put(engine, a=b"1", b=b"2", c=b"3", n=(5).to_bytes(8, "big"))
    t = engine.begin()
    assert t.get(b"c") == b"3"  # the snapshot is taken by now
    put(engine, b=b"other", z=b"other")
    t.set(b"ab", b"mine")
    t.clear(b"a")
    t.add(b"n", 2)
    t.add(b"m", -1)
    assert t.get_range(b"", b"\xff", 3) == [(b"ab", b"mine"), (b"b", b"2"), (b"c", b"3")]
    assert counter(t.get(b"n")) == 7
    assert counter(t.get(b"m")) == -1
    t.clear_range(b"b", b"n")
    t.set(b"c", b"again")
    assert t.get_range(b"", b"n", reverse=True) == [(b"c", b"again"), (b"ab", b"mine")]
    assert t.get(b"b") is None
    assert t.get_many([b"a", b"ab", b"b", b"c"]) == {b"ab": b"mine", b"c": b"again"}
    t.end()
    assert dict(everything(engine))[b"b"] == b"other"


def test_a_range_of_many_pages_merges_with_own_writes(engine: Engine) -> None:
    keys = [b"k%04d" % i for i in range(0, 2000, 2)]
    put_keys(engine, keys)
    t = engine.begin()
    own = [b"k%04d" % i for i in range(1, 2000, 100)]
    for key in own:
        t.set(key, b"")
    t.clear_range(b"k0100", b"k0900")
    wanted = sorted(key for key in keys + own if not b"k0100" <= key < b"k0900")
    assert [key for key, _ in t.get_range(b"k", b"l")] == wanted
    assert [key for key, _ in t.get_range(b"k", b"l", reverse=True)] == wanted[::-1]
    assert [key for key, _ in t.get_range(b"k", b"l", 700)] == wanted[:700]
    t.end()


Read = Callable[[Transaction], object]


@pytest.mark.parametrize(
    ("read", "write", "conflict"),
    [
        (lambda t: t.get(b"a"), lambda t: t.set(b"a", b"x"), True),
        (lambda t: t.get(b"a"), lambda t: t.clear(b"a"), True),
        (lambda t: t.get(b"new"), lambda t: t.set(b"new", b"x"), True),
        (lambda t: t.get(b"a"), lambda t: t.clear_range(b"A", b"b"), True),
        (lambda t: t.get(b"a"), lambda t: t.add(b"a", 1), True),
        (lambda t: t.get(b"a"), lambda t: t.set(b"b", b"x"), False),
        (lambda t: t.snapshot_get(b"a"), lambda t: t.set(b"a", b"x"), False),
        (lambda t: t.add_read_conflict(b"a"), lambda t: t.set(b"a", b"x"), True),
        (lambda t: t.get_many([b"a"]), lambda t: t.set(b"a", b"x"), True),
        (lambda t: t.get_many([b"a"], conflict=False), lambda t: t.set(b"a", b"x"), False),
        (lambda t: t.get_range(b"a", b"c"), lambda t: t.set(b"bb", b"x"), True),
        (lambda t: t.get_range(b"a", b"c"), lambda t: t.clear_range(b"bb", b"d"), True),
        (lambda t: t.get_range(b"a", b"c"), lambda t: t.set(b"c", b"x"), False),
        (lambda t: t.snapshot_range(b"a", b"c"), lambda t: t.set(b"bb", b"x"), False),
        (lambda t: t.get_range(b"a", b"z", 1), lambda t: t.set(b"bb", b"x"), False),
        (lambda t: t.get_range(b"a", b"z", 1), lambda t: t.set(b"a", b"x"), True),
        (lambda t: t.get_range(b"a", b"z", 1, reverse=True), lambda t: t.set(b"a", b"x"), False),
        (lambda t: t.get_range(b"a", b"z", 1, reverse=True), lambda t: t.set(b"y", b"x"), True),
        (lambda t: t.add(b"n", 1), lambda t: t.add(b"n", 1), False),
    ],
)
def test_a_conflict_is_a_change_of_what_was_read(
    engine: Engine, read: Read, write: Read, conflict: bool
) -> None:
    put(engine, a=b"\0" * 8, b=b"2", c=b"3")
    t = engine.begin()
    read(t)
    t.set(b"out", b"")
    run(engine, write)
    assert commit(engine, t) is (Outcome.CONFLICT if conflict else Outcome.COMMITTED)
    assert (b"out" in dict(everything(engine))) is not conflict


def test_within_a_group_an_earlier_member_conflicts_with_a_later_one(engine: Engine) -> None:
    first, second, third = engine.begin(), engine.begin(), engine.begin()
    first.get(b"a")
    first.set(b"a", b"1")
    second.get(b"a")
    second.set(b"a", b"2")
    third.set(b"a", b"3")
    third.add(b"n", 1)
    outcomes = engine.commit_many([first, second, third])
    assert outcomes == [Outcome.COMMITTED, Outcome.CONFLICT, Outcome.COMMITTED]
    assert everything(engine)[0] == (b"a", b"3")


def test_groups_apply_sets_clears_and_counts_in_order(engine: Engine) -> None:
    put(engine, a=b"old", n=(10).to_bytes(8, "big"))
    ts = [engine.begin() for _ in range(6)]
    ts[0].set(b"b", b"1")
    ts[1].add(b"n", 5)
    ts[2].clear_range(b"a", b"o")
    ts[3].add(b"n", 1)
    ts[4].set(b"c", b"2")
    ts[5].add(b"n", 1)
    assert set(engine.commit_many(ts)) == {Outcome.COMMITTED}
    run(engine, lambda t: t.add(b"n", 40))
    assert everything(engine) == [(b"c", b"2"), (b"n", (42).to_bytes(8, "big"))]


def test_a_transaction_too_old_to_be_checked_conflicts(engine: Engine) -> None:
    put(engine, a=b"1")
    old, blind = engine.begin(), engine.begin()
    old.get(b"a")
    old.set(b"old", b"")
    blind.set(b"blind", b"")
    for part in range(3):
        keys = [b"k%d-%d" % (part, i) for i in range(KEPT_KEYS // 2 + 1)]
        put_keys(engine, keys)
    assert old.get(b"a") == b"1"
    assert engine.commit_many([old, blind]) == [Outcome.CONFLICT, Outcome.COMMITTED]


@pytest.mark.parametrize("seed", draws.seeds("transactions", 12))
def test_committed_transactions_fit_one_serial_order(engine: Engine, seed: int) -> None:
    """Interleaved at random; each committed one must have read what the order of commits gives it,
    and one that only reads what was committed when it began."""
    rng = random.Random(seed)
    keys = [b"k%d" % i for i in range(8)]
    state: dict[bytes, bytes] = {}
    opened: list[tuple[Transaction, dict[bytes, bytes], list[object]]] = []
    committed = conflicts = 0
    for step in range(600):
        if len(opened) < 5 and rng.random() < 0.4:
            t = engine.begin()
            assert t.snapshot_get(keys[0]) == state.get(keys[0])
            opened.append((t, dict(state), []))
            continue
        if not opened:
            continue
        t, _, log = rng.choice(opened)
        low, high = sorted(rng.sample(keys, 2))
        key = rng.choice(keys)
        value = (step << 16).to_bytes(8, "big")
        match rng.randrange(9):
            case 0 | 1:
                log.append(("get", key, t.get(key)))
            case 2:
                limit, down = rng.choice([1, 2, 99]), rng.random() < 0.5
                rows = t.get_range(low, high, limit, reverse=down)
                log.append(("range", low, high, limit, down, rows))
            case 3 | 4:
                t.set(key, value)
                log.append(("set", key, value))
            case 5:
                t.clear(key)
                log.append(("clear", key))
            case 6 if rng.random() < 0.4:
                t.clear_range(low, high)
                log.append(("clear_range", low, high))
            case 7:
                t.add(key, 3)
                log.append(("add", key))
            case 8:
                group = rng.sample(opened, rng.randint(1, min(3, len(opened))))
                changes = [member[0].changes for member in group]
                outcomes = engine.commit_many([member[0] for member in group])
                for member, outcome, wrote in zip(group, outcomes, changes, strict=True):
                    opened.remove(member)
                    if outcome is Outcome.COMMITTED:
                        replay(state if wrote else member[1], member[2])
                        committed += 1
                    else:
                        conflicts += 1
    for t, _, _ in opened:
        t.end()
    assert everything(engine) == sorted(state.items())
    assert committed > 20
    assert conflicts > 5


def replay(state: dict[bytes, bytes], log: list[object]) -> None:
    """Runs a transaction's log on the state and checks what it read."""
    for action in log:
        match action:
            case ("get", bytes() as key, value):
                assert state.get(key) == value
            case ("range", bytes() as low, bytes() as high, int() as limit, down, rows):
                found = sorted((k, v) for k, v in state.items() if low <= k < high)
                assert (found[::-1] if down else found)[:limit] == rows
            case ("set", bytes() as key, bytes() as value):
                state[key] = value
            case ("clear", bytes() as key):
                state.pop(key, None)
            case ("clear_range", bytes() as low, bytes() as high):
                for key in [k for k in state if low <= k < high]:
                    del state[key]
            case ("add", bytes() as key):
                state[key] = (counter(state.get(key)) + 3).to_bytes(8, "big", signed=True)
            case _:
                raise AssertionError(action)


def test_threads_that_move_amounts_keep_the_sum(engine: Engine) -> None:
    names = [b"a%d" % i for i in range(6)]
    put(engine, **{name.decode(): (100).to_bytes(8, "big") for name in names})
    wrong: list[int] = []

    def total(t: Transaction) -> int:
        return sum(counter(value) for _, value in t.get_range(b"a", b"b"))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            source, target = rng.sample(names, 2)

            def move(t: Transaction, source: bytes = source, target: bytes = target) -> None:
                there, here = counter(t.get(target)), counter(t.get(source))
                t.set(source, (here - 1).to_bytes(8, "big", signed=True))
                t.set(target, (there + 1).to_bytes(8, "big", signed=True))
                t.add(b"moves", 1)

            run(engine, move)
            if (seen := run(engine, total)) != 600:
                wrong.append(seen)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert run(engine, total) == 600
    assert run(engine, lambda t: counter(t.get(b"moves"))) == 320


def test_an_error_of_the_body_writes_nothing(engine: Engine) -> None:
    def body(t: Transaction) -> None:
        t.set(b"a", b"")
        raise FileError(2, b"a")

    with pytest.raises(FileNotFoundError):
        run(engine, body)
    assert everything(engine) == []


def test_a_request_sent_again_gets_its_first_answer(engine: Engine) -> None:
    answers = iter([b"first", b"second"])

    def body(t: Transaction) -> bytes:
        t.add(b"done", 1)
        return next(answers)

    assert run(engine, body, request=(7, 1)) == b"first"
    assert run(engine, body, request=(7, 1)) == b"first"
    assert run(engine, body, request=(7, 2)) == b"second"
    assert run(engine, lambda t: counter(t.get(b"done"))) == 2
    assert run(engine, lambda t: t.get(record_key(7, 1))) == b"first"


@pytest.mark.parametrize("seed", draws.seeds("requests", 5))
def test_uncertain_commits_happen_once(seed: int) -> None:
    engine = MemoryEngine(seed, conflicts=0.3, maybe=0.3)

    def body(t: Transaction) -> bytes:
        t.set(b"n", (counter(t.get(b"n")) + 1).to_bytes(8, "big"))
        return b"%d" % counter(t.get(b"n"))

    answers = [run(engine, body, request=(1, number)) for number in range(1, 201)]
    assert answers == [b"%d" % number for number in range(1, 201)]


def test_endless_conflicts_are_unavailable() -> None:
    engine = MemoryEngine(conflicts=1.0)
    with pytest.raises(Unavailable, match="conflicted with others 5 times"):
        run(engine, lambda t: t.set(b"a", b""), retries=5)


def test_transactions_begun_together_share_a_snapshot_and_a_commit(engine: Engine) -> None:
    put(engine, a=b"1", b=b"2")
    keys = [b"a", b"b", b"none"] + [b"k%d" % i for i in range(100)]
    first, second, third = engine.begin_many(3, keys)
    assert [first.get(key) for key in keys[:3]] == [b"1", b"2", None]
    first.set(b"a", b"first")
    assert second.get(b"a") == b"1"
    second.set(b"c", b"from what is old by then")
    third.add(b"n", 1)
    third.end()
    outcomes = engine.commit_many([first, second])
    assert outcomes == [Outcome.COMMITTED, Outcome.CONFLICT]
    assert everything(engine) == [(b"a", b"first"), (b"b", b"2")]


def test_who_began_together_and_commits_nothing_keeps_nobody_from_it(engine: Engine) -> None:
    for t in engine.begin_many(3, [b"a"]):
        t.set(b"a", b"lost")
        t.end()
    assert engine.commit_many(engine.begin_many(2, [])) == [Outcome.COMMITTED] * 2
    with pytest.raises(ZeroDivisionError):
        run(engine, lambda t: 1 // 0)
    put(engine, b=b"1")
    assert everything(engine) == [(b"b", b"1")]
