"""Worker process of `ProcessPool`, which steps its share of the environments on request."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import gymnasium

from fireflyer.envpool.sharing import Layout, Shared

STEP, RESET = 1, 2

Env = gymnasium.Env[Any, Any]
Infos = dict[int, dict[str, Any]]


class _Share:
    """Environments of this process; `first` is the number, in the pool, of the process's first
    environment."""

    def __init__(self, makers: Sequence[Callable[[], Env]], first: int, shared: Shared) -> None:
        self._makers, self._first, self._shared = makers, first, shared
        self._envs: list[Env | None] = []  # None: failed; the next reset makes a new one
        for maker in makers:
            shared.stepping[first] = first + len(self._envs)
            self._envs.append(maker())
        self._over = [True] * len(makers)

    def round(self, what: int) -> Infos:
        """Steps or resets every environment; returns their infos."""
        infos: Infos = {}
        shared = self._shared
        for place in range(len(self._envs)):
            number = self._first + place
            shared.stepping[self._first] = number
            try:
                info = self._reset(place, number) if what == RESET else self._step(place, number)
            except Exception as error:  # noqa: BLE001  # user code may raise any error
                info = {"error": f"{type(error).__name__}: {error}"}
                self._drop(place)
                shared.rewards[number] = 0
                shared.terminated[number], shared.truncated[number] = False, True
            if info:
                infos[number] = info
        return infos

    def _step(self, place: int, number: int) -> dict[str, Any]:
        env = self._envs[place]
        if env is None or self._over[place]:
            return self._reset(place, number)
        shared = self._shared
        seen, reward, terminated, truncated, info = env.step(shared.actions[number])
        shared.observations[number] = seen
        shared.rewards[number] = reward
        shared.terminated[number], shared.truncated[number] = terminated, truncated
        self._over[place] = terminated or truncated
        return info

    def _reset(self, place: int, number: int) -> dict[str, Any]:
        shared = self._shared
        seed = int(shared.seeds[number])
        shared.seeds[number] = -1
        env = self._envs[place]
        if env is None:
            env = self._envs[place] = self._makers[place]()
        seen, info = env.reset(seed=None if seed < 0 else seed)
        shared.observations[number] = seen
        shared.rewards[number] = 0
        shared.terminated[number] = shared.truncated[number] = False
        self._over[place] = False
        return info

    def _drop(self, place: int) -> None:
        env, self._envs[place] = self._envs[place], None
        if env is not None:
            with contextlib.suppress(Exception):
                env.close()


def serve(
    pipe: Connection, makers: Sequence[Callable[[], Env]], first: int, name: str, layout: Layout
) -> None:  # fmt: skip
    """Serves a pool until the pool closes the pipe or the pool's process ends.

    The first message to the pool has the errors of environments that cannot be made.

    Args:
        pipe: pipe to the pool. The pool sends a byte per round (STEP or RESET) and receives the
            `info` dicts of the environments.
        makers: callables that make the environments of this process.
        first: number, in the pool, of the first environment of this process.
        name: name of the shared memory.
        layout: layout of the shared memory.
    """
    threading.Thread(target=_end_with_pool, daemon=True).start()
    shared = Shared.attach(name, layout)
    try:
        share = _Share(makers, first, shared)
    except Exception as error:  # noqa: BLE001  # user code may raise any error
        pipe.send({int(shared.stepping[first]): {"error": f"{type(error).__name__}: {error}"}})
        return
    pipe.send({})
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            pipe.send(share.round(pipe.recv_bytes(1)[0]))


def _end_with_pool() -> None:
    """Ends this process, even during a step, if the pool's process has died."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
