"""Environments in processes: results arrive, and one that fails is named and replaced."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete
from tests.envpool.broken_envs import Allowed, Counting, Unmakeable
from tests.waiting import until

from fireflyer import envpool
from fireflyer.envpool.processes import ProcessPool
from fireflyer.errors import ConfigError

ROOT = Path(__file__).parents[2]


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


def test_one_that_cannot_be_made_again_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = tmp_path / "allowed"
    allowed.touch()
    pool = ProcessPool([partial(Allowed, str(allowed), n) for n in range(2)], 1)
    try:
        pool.reset(seed=1)
        allowed.unlink()
        assert pool.step([1, 0])[4]["error"][0] == "KeyError: 'no step 1 in 0'"
        seen, _, _, truncated, info = pool.step([0, 0])
        assert (info["error"][0], truncated.tolist()) == ("OSError: not allowed", [True, False])
        assert seen[1].tolist() == [2, 2]  # the other one goes on
        error = pool.step([0, 2])[4]["error"]
        ended = f"its process ended with {-signal.SIGSEGV}"
        assert error[1] == f"{ended}; environment 0 cannot be made again: OSError: not allowed"
        allowed.touch()
        assert pool.step([0, 0])[4]["error"][0].endswith("its process ended with 0")
        assert pool.step([0, 0])[4] == {}
    finally:
        pool.close()


def test_workers_end_with_a_killed_pool_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "from tests.envpool.broken_envs import Counting\n"
        "from fireflyer.envpool.processes import ProcessPool\n"
        "class Slow(Counting):\n"
        "    def step(self, action):\n"
        "        print(os.getpid(), flush=True)\n"
        "        time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPool([Slow], 1)\n"
        "    pool.reset()\n"
        "    pool.step([0])\n"
    )
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    worker = Path("/proc", process.stdout.readline().strip(), "cmdline")
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not worker.exists() or not worker.read_text())  # empty: not reaped yet


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
    with pytest.raises(ConfigError, match="environment 0 cannot be made: OSError: no display"):
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
