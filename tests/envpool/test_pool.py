"""Native environments step as gymnasium's do, whatever the threads, and a wrong call changes nothing."""

import os
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray
from tests.conftest import fork_child
from tests.draws import cases, drawn

from fireflyer import envpool
from fireflyer.envpool.making import NATIVE
from fireflyer.envpool.pool import Pool
from fireflyer.errors import ConfigError


def native(task: str, **arguments: Any) -> Pool:
    pool = envpool.make(task, **arguments)
    assert isinstance(pool, Pool)
    return pool


def actions_for(pool: Pool, random: np.random.Generator, count: int) -> NDArray[Any]:
    space = pool.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return random.integers(0, int(space.n), count)
    return random.uniform(-3, 3, (count, 1)).astype(np.float32)


@pytest.mark.parametrize("task", NATIVE)
def test_a_step_is_that_of_gymnasium(task: str) -> None:
    """From gymnasium's state: trajectories diverge by rounding, single steps do not."""
    random = np.random.default_rng(drawn(task).getrandbits(32))
    pool = native(task, num_envs=16, seed=7)
    one = gymnasium.make(task).unwrapped
    one.reset()
    pool.reset()
    over = np.zeros(16, bool)
    # Pendulum squares the torque by powf, in single precision; the last place of 0.001 * 2.0**2 is 2**-31.
    reward_within = 2**-31 + 1e-12 if task == "Pendulum-v1" else 1e-12
    for _ in range(cases(6_250) // 4):
        before, actions = pool.states(), actions_for(pool, random, 16)
        seen, rewards, terminated, truncated, _ = pool.step(actions)
        after = pool.states()
        for i in np.flatnonzero(~over):
            kind = np.float32 if task == "MountainCarContinuous-v0" else np.float64
            one.state = before[i].astype(kind)  # type: ignore[attr-defined]
            one.steps_beyond_terminated = None  # type: ignore[attr-defined]  # CartPole's
            theirs, reward, ended, _, _ = one.step(actions[i])
            np.testing.assert_allclose(after[i], one.state, rtol=0, atol=1e-12)  # type: ignore[attr-defined]
            np.testing.assert_allclose(seen[i], theirs, rtol=2e-7, atol=1e-12)
            assert rewards[i] == pytest.approx(float(reward), rel=1e-12, abs=reward_within)
            assert terminated[i] == ended
        assert not rewards[over].any()
        assert not (terminated | truncated)[over].any()
        over = terminated | truncated


@pytest.mark.parametrize("task", NATIVE)
def test_spaces_and_first_states(task: str) -> None:
    pool = native(task, num_envs=200, seed=3)
    one = gymnasium.make(task)
    assert pool.single_observation_space == one.observation_space
    assert pool.single_action_space == one.action_space
    seen, info = pool.reset()
    assert pool.observation_space.contains(seen)
    assert info == {}
    low, high = (np.stack([one.reset(seed=n)[0] for n in range(200)]).T[..., None].reshape(
        seen.shape[1], 200) for _ in range(2))  # fmt: skip
    spread = high.max(axis=1) - low.min(axis=1)
    ours = seen.max(axis=0) - seen.min(axis=0)
    assert np.all(np.abs(ours - spread) <= 0.1 * spread + 1e-7)


def test_episodes_end_by_the_limit_and_the_next_step_begins_anew() -> None:
    pool = native("Pendulum-v1", num_envs=2, seed=1)
    pool.reset()
    for step in range(1, 201):
        _, _, terminated, truncated, _ = pool.step(np.zeros((2, 1), np.float32))
        assert not terminated.any()
        assert truncated.tolist() == [step == 200] * 2
    before = pool.states()
    seen, rewards, _, truncated, _ = pool.step(np.ones((2, 1), np.float32))
    assert not rewards.any()
    assert not truncated.any()
    assert np.abs(pool.states() - before).min() > 0
    assert np.allclose(seen[:, 2], pool.states()[:, 1])


def trajectory(task: str, threads: int, batch: int | None, seed: int) -> NDArray[np.float64]:
    """The states after 40 steps of each environment, each with actions of its own."""
    pool = native(task, num_envs=48, batch_size=batch, num_threads=threads, seed=seed)
    plan = actions_for(pool, np.random.default_rng(1), 48 * 40).reshape(40, 48, -1)
    taken = np.zeros(48, int)
    pool.async_reset()
    left = 48 * 41
    while left:
        pool_ids = pool.recv()[4]["env_id"]
        left -= len(pool_ids)
        ready = pool_ids[taken[pool_ids] < 40]
        pool.send(plan[taken[ready], ready], ready)
        taken[ready] += 1
    return pool.states()


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_trajectories_do_not_depend_on_threads_and_batches(task: str) -> None:
    expected = trajectory(task, 1, None, 5)
    for threads, batch in ((1, 7 - 1), (2, 12), (4, 16), (3, 48)):
        assert np.array_equal(trajectory(task, threads, batch, 5), expected)
    assert not np.array_equal(trajectory(task, 1, None, 6), expected)


def test_a_seed_repeats_what_follows() -> None:
    pool = native("CartPole-v1", num_envs=8, num_threads=2)
    first, again = pool.reset(seed=4)[0], pool.reset()[0]
    assert not np.array_equal(first, again)
    assert np.array_equal(pool.reset(seed=np.int64(4))[0], first)
    assert np.array_equal(pool.reset()[0], again)
    assert len(np.unique(first[:, 0])) == 8


def test_wrappers_of_gymnasium_take_a_pool() -> None:
    pool = native("CartPole-v1", num_envs=4, seed=2)
    assert pool.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    recorded = RecordEpisodeStatistics(pool)
    recorded.reset(seed=1)
    lengths: list[int] = []
    for _ in range(200):
        info = recorded.step(recorded.action_space.sample())[4]
        if "episode" in info:
            lengths += info["episode"]["l"][info["_episode"]].tolist()
    assert len(lengths) >= 4
    assert 5 < np.mean(lengths) < 60


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pool: pool.step([0, 1, 2, 0]), "no action 2.*: expected 0 to 1"),
        (lambda pool: pool.step([0, 1, 0.5, 0]), "no action 0.5"),
        (lambda pool: pool.step([0, 1]), "2 actions for 4 environments"),
        (lambda pool: pool.send([0, 0], [1, 4]), "numbers from 0 to 3"),
        (lambda pool: pool.send([0, 0], [1, -1]), "numbers from 0 to 3"),
        (lambda pool: pool.send([0], [2.7]), "numbers from 0 to 3"),
        (lambda pool: pool.send([0], [[0]]), "numbers from 0 to 3"),
        (lambda pool: pool.set_states(np.full((4, 4), np.nan)), "not finite"),
        (lambda pool: pool.send([0, 0], [1, 1]), "environment 1 is under way"),
        (lambda pool: pool.recv(), "4 environments wanted, 0 under way"),
        (lambda pool: pool.set_states(np.zeros((3, 4))), "another shape"),
        (lambda pool: pool.reset(seed=[1, 2, 3, 4]), "one seed"),
        (lambda pool: pool.reset(options={"low": 0}), "no options"),
    ],
)
def test_a_wrong_call_changes_nothing(wrong: Any, message: str) -> None:
    pool = native("CartPole-v1", num_envs=4, num_threads=2, seed=1)
    pool.reset()
    before = pool.states()
    with pytest.raises(ValueError, match=message):
        wrong(pool)
    assert np.array_equal(pool.states(), before)
    pool.step([0, 1, 0, 1])


def test_environments_under_way() -> None:
    pool = native("Pendulum-v1", num_envs=4, batch_size=2, num_threads=2)
    pool.async_reset()
    with pytest.raises(ValueError, match="states are read while environments are under way"):
        pool.states()
    with pytest.raises(ValueError, match="under way"):
        pool.step(np.zeros((4, 1)))
    with pytest.raises(ValueError, match=r"no action .*nan"):
        pool.send([np.nan], [0])
    assert pool.reset()[0].shape == (4, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "invalid num_envs 0"),
        ({"num_threads": 0}, "num_threads 0"),
        ({"num_threads": 100_000}, "num_threads 100000"),
        ({"num_envs": 1.5}, "invalid num_envs 1.5"),
        ({"seed": "x"}, "invalid seed 'x'"),
        ({"num_envs": 4, "batch_size": 5}, r"invalid batch_size 5: expected 1 to num_envs \(4\)"),
        ({"env_type": "gym"}, "invalid env_type 'gym'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        envpool.make(**{"task": "CartPole-v1", **arguments})


def test_a_forked_child_is_told_to_make_its_own() -> None:
    pool = native("CartPole-v1", num_envs=4, num_threads=3)
    pool.reset()

    def child() -> None:
        with pytest.raises(ValueError, match="belongs to the parent process"):
            pool.step([0] * 4)
        pool.close()

    assert os.waitpid(fork_child(child), 0)[1] == 0
    pool.step([0] * 4)
