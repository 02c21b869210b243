"""The checker of metadata histories: what a tree can and cannot have answered."""

import errno
import random

import pytest
from tests.fs3.sim.history.linearize import UNKNOWN
from tests.fs3.sim.history.meta_history import Failed, MetaOp, Tree, check_meta, perform

EXISTS, MISSING, FULL = Failed(errno.EEXIST), Failed(errno.ENOENT), Failed(errno.ENOTEMPTY)


def did(
    call: float, kind: str, *arguments: object, answer: object = None, end: float = 0
) -> MetaOp:
    return MetaOp(1, kind, arguments, call, end or call + 0.5, answer)


GOOD = {
    "made, seen, gone": [
        did(0, "mkdir", "/d"),
        did(1, "create", "/d/a"),
        did(2, "rmdir", "/d", answer=FULL),
        did(3, "readdir", "/d", answer=("a",)),
        did(4, "unlink", "/d/a"),
        did(5, "stat", "/d/a", answer=MISSING),
    ],
    "of two creators one wins": [
        did(0, "create", "/a", end=2),
        did(1, "create", "/a", end=3, answer=EXISTS),
    ],
    "an unknown rename that happened later": [
        did(0, "create", "/a"),
        did(1, "rename", "/a", "/b", end=UNKNOWN),
        did(2, "stat", "/a", answer=(False, 0, 1)),
        did(3, "stat", "/b", answer=(False, 0, 1)),
        did(4, "stat", "/a", answer=MISSING),
    ],
    "hard links share": [
        did(0, "create", "/a"),
        did(1, "link", "/a", "/b"),
        did(2, "truncate", "/a", 7),
        did(3, "stat", "/b", answer=(False, 7, 2)),
        did(4, "unlink", "/a"),
        did(5, "stat", "/b", answer=(False, 7, 1)),
    ],
    "exchange": [
        did(0, "create", "/a"),
        did(1, "mkdir", "/d"),
        did(2, "rename", "/a", "/d", "exchange"),
        did(3, "stat", "/a", answer=(True, 0, 0)),
        did(4, "rename", "/a", "/a/x", answer=Failed(errno.EINVAL)),
    ],
}

BAD = {
    "two creators win": [did(0, "create", "/a", end=2), did(1, "create", "/a", end=3)],
    "a retry that saw itself": [did(0, "create", "/a", answer=EXISTS)],
    "a removal that was done twice": [
        did(0, "create", "/a"),
        did(1, "unlink", "/a", end=4),
        did(2, "unlink", "/a", end=4),
    ],
    "lost": [did(0, "create", "/a"), did(1, "stat", "/a", answer=MISSING)],
    "in two places": [
        did(0, "create", "/a"),
        did(1, "rename", "/a", "/b"),
        did(2, "readdir", "/", answer=("a", "b")),
    ],
    "back again": [
        did(0, "create", "/a"),
        did(1, "unlink", "/a", end=UNKNOWN),
        did(2, "stat", "/a", answer=MISSING),
        did(3, "stat", "/a", answer=(False, 0, 1)),
    ],
    "a parent vanished under its child": [
        did(0, "mkdir", "/d"),
        did(1, "create", "/d/a", end=4),
        did(2, "rmdir", "/d", end=4),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_accepts_what_a_tree_can_do(name: str) -> None:
    assert check_meta(GOOD[name]).ok


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_no_tree_can_do(name: str) -> None:
    assert not check_meta(BAD[name]).ok


def test_accepts_random_true_histories() -> None:
    rng = random.Random(3)
    paths = ["/a", "/b", "/d", "/d/a", "/d/b", "/b/a"]
    refusals = 0
    for _ in range(50):
        tree, history = Tree(), []
        for moment in range(40):
            kind = rng.choice(
                [
                    "create",
                    "mkdir",
                    "unlink",
                    "rmdir",
                    "rename",
                    "link",
                    "stat",
                    "readdir",
                    "truncate",
                ]
            )
            arguments: tuple[object, ...] = (rng.choice(paths),)
            if kind in ("rename", "link"):
                arguments += (rng.choice(paths),)
            if kind == "truncate":
                arguments += (rng.randrange(9),)
            op = MetaOp(1, kind, arguments, moment - rng.random() * 2, moment + rng.random() * 2)
            tree, op.answer = perform(tree, op)
            refusals += isinstance(op.answer, Failed)
            if rng.random() < 0.1:
                op.end, op.answer = UNKNOWN, None
            history.append(op)
        assert check_meta(history).ok
    assert refusals
