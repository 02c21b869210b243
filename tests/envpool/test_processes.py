"""Environments in processes: results arrive, and one that fails is named and replaced."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete
from tests.envpool.broken_envs import Counting, Unmakeable

from fireflyer import envpool
from fireflyer.envpool.processes import ProcessPool
from fireflyer.errors import ConfigError


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessPool]:
    """Four environments in two processes."""
    pool = ProcessPool([partial(Counting, n) for n in range(4)], 2)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared: ProcessPool) -> ProcessPool:
    shared.reset(seed=10)
    return shared


def test_results_and_seeds(pool: ProcessPool) -> None:
    seen, rewards, terminated, truncated, info = pool.step([0, 5, 4, 0])
    assert seen.tolist() == [[1, 10], [1, 11], [1, 12], [1, 13]]
    assert rewards.tolist() == [0, 5, 4, 0]
    assert terminated.tolist() == [False, False, True, False]
    assert not truncated.any()
    assert info["_pid"].tolist() == [False, True, False, False]
    assert info["pid"][1] not in (0, os.getpid())
    seen, rewards, terminated, _, info = pool.step([0] * 4)
    assert seen.tolist() == [[2, 10], [2, 11], [0, -1], [2, 13]]  # the third began anew
    assert not terminated.any()
    assert info == {}


@pytest.mark.parametrize(
    ("action", "error", "together"),
    [
        (1, "KeyError: 'no step 2 in 1'", False),
        (2, f"its process ended with {-signal.SIGSEGV}", True),
    ],
)
def test_one_that_fails_is_replaced(
    pool: ProcessPool, action: int, error: str, together: bool
) -> None:
    pool.step([0] * 4)
    seen, rewards, terminated, truncated, info = pool.step([0, action, 7, 7])
    assert truncated.tolist() == [together, True, False, False]
    assert not terminated.any()
    assert rewards.tolist() == [0, 0, 7, 7]
    assert seen[2:].tolist() == [[2, 12], [2, 13]]
    assert info["error"][1] == error
    if together:
        assert info["error"][0] == f"environment 1, of the same process, failed: {error}"
    seen = pool.step([0] * 4)[0]
    assert seen.tolist() == [
        [0 if together else 3, -1 if together else 10],
        [0, -1],
        [3, 12],
        [3, 13],
    ]
    assert pool.step([0] * 4)[4] == {}


def test_one_that_hangs_is_replaced(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asserted of the other process: a busy machine may hold it up for a second, too."""
    with monkeypatch.context() as short:
        short.setattr(pool, "_deadline_s", 1.0)
        _, rewards, _, truncated, info = pool.step([0, 3, 0, 0])
    assert truncated[:2].all()
    assert not rewards[:2].any()
    assert info["error"][1] == "it took over 1 s"
    assert info["error"][0] == "environment 1, of the same process, failed: it took over 1 s"
    assert pool.step([0] * 4)[0][:2].tolist() == [[0, -1], [0, -1]]


def test_a_wrong_call_changes_nothing(pool: ProcessPool) -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(4,\)"):
        pool.step([0] * 3)
    with pytest.raises(ValueError, match="one seed"):
        pool.reset(seed=[1, 2, 3, 4])
    for wrong in ([0, 10, 0, 0], [0, 0, 0, -1], [0.5, 0, 0, 0], [np.nan, 0, 0, 0]):
        with pytest.raises(ValueError, match="outside Discrete"):
            pool.step(wrong)
    assert pool.step([0] * 4)[0][:, 0].tolist() == [1] * 4


def test_any_task_of_gymnasium() -> None:
    pool = envpool.make("FrozenLake-v1", num_envs=3, num_threads=2, seed=4, is_slippery=False)
    try:
        one = gymnasium.make("FrozenLake-v1", is_slippery=False)
        one.reset(seed=4)
        assert pool.observation_space.contains(pool.reset()[0])
        for action in (2, 2, 1):
            seen, rewards, terminated, _, info = pool.step(np.full(3, action))
            theirs, reward, ended, _, _ = one.step(action)
            assert seen.tolist() == [theirs] * 3
            assert rewards.tolist() == [reward] * 3
            assert terminated.tolist() == [ended] * 3
            assert info["prob"].tolist() == [1.0] * 3
    finally:
        pool.close()


def test_what_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_TEST_MAKEABLE", str(os.getpid()))
    with pytest.raises(ConfigError, match="environment 0 cannot be made: its process ended with 1"):
        ProcessPool([Unmakeable])
    with pytest.raises(ConfigError, match="invalid task 'Nothing-v0'"):
        envpool.make("Nothing-v0")
    with pytest.raises(ConfigError, match=r"invalid task 'FrozenLake-v1'.*no_such_option"):
        envpool.make("FrozenLake-v1", no_such_option=1)
    with pytest.raises(ConfigError, match="batch_size must be num_envs"):
        envpool.make("FrozenLake-v1", num_envs=4, batch_size=2)
    with pytest.raises(ConfigError, match="environment 1 has the spaces"):
        ProcessPool([Counting, partial(gymnasium.make, "CartPole-v1")])
    monkeypatch.setattr(Counting, "observation_space", Dict({"a": Discrete(2)}))
    with pytest.raises(ConfigError, match="invalid space Dict"):
        ProcessPool([Counting])


def test_atari(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = envpool.make("ALE/Breakout-v5", num_envs=3, batch_size=2, num_threads=2, seed=1)
    pool.async_reset()
    for _ in range(4):
        seen, _, terminated, truncated, info = pool.recv()
        assert (seen.shape, seen.dtype) == ((2, 4, 84, 84), np.uint8)
        assert not (terminated | truncated).any()
        with pytest.raises(ValueError, match="returned last"):
            pool.send([0, 0], info["env_id"][::-1])
        with pytest.raises(ValueError, match="2 numbers from 0 to 3"):
            pool.send([0, 4])
        pool.send([1, 2], info["env_id"])
    whole: Any = envpool.make("ALE/Breakout-v5", num_envs=2, seed=3, img_height=50)
    first = whole.reset()[0]
    assert first.shape == (2, 4, 50, 84)
    assert np.array_equal(whole.reset(seed=3)[0], first)
    for wrong in ("ALE/Chess-v5", "ALE/Pong-v4"):
        with pytest.raises(ConfigError, match="expected a game of ale-py"):
            envpool.make(wrong)
    with pytest.raises(ConfigError, match=r"invalid option of ALE/Pong-v5.*colour"):
        envpool.make("ALE/Pong-v5", colour=True)
