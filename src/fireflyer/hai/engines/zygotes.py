"""The engine's end of its zygotes (`hai.zygote`): one an environment of tasks with fork servers."""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec

from fireflyer.hai.engines import Gang
from fireflyer.hai.engines.link import birth
from fireflyer.hai.engines.messages import PRESENT, TITLE_ROOM, Tree
from fireflyer.hai.processes import kill
from fireflyer.log import get_logger

KEPT = 2
"""Zygotes that live beside an engine at most: each holds what torch takes, some 300 MB."""

_log = get_logger("hai")

_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Zygote:
    """A process and its socket. One request at a time."""

    def __init__(self, python: str, preload: tuple[str, ...], env: dict[str, str]) -> None:
        """
        Raises:
            OSError: if there can be no further process.
        """
        self.gone = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        with theirs:
            command = [python, "-P", "-m", "fireflyer.hai.zygote", *preload, TITLE_ROOM]
            self.pid = os.posix_spawn(
                python, command, env,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)], setsid=True,
            )  # fmt: skip
        self._asking = asyncio.Lock()
        self.warm = asyncio.create_task(self._hear())
        """Its first word; nothing of it may be asked before."""

    async def _hear(self) -> bytes:
        """Its next word; empty when there will be none."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            if word := await loop.sock_recv(self.socket, 64):
                return word
        self.close()
        return b""

    async def ask(self, message: bytes, descriptors: tuple[int, ...] = ()) -> bool:
        """Whether it has done what the message says."""
        async with self._asking:
            try:
                if self.gone:
                    return False
                socket.send_fds(self.socket, [message], descriptors)
                return bool(await self._hear())
            except OSError as error:  # it has left, or the message is too long
                _log.debug("zygote %d: %s", self.pid, error)
                return False
            except asyncio.CancelledError:
                self.close()  # the answer would be taken for another's
                raise

    def close(self) -> None:
        """Ends and reaps it; the trees that it has grown stay."""
        if not self.gone:
            self.gone = True
            self.socket.close()
            kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class Zygotes:
    """
    Args:
        preload: modules that each imports before it answers.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._preload = preload
        self._living: dict[_Key, _Zygote] = {}

    async def prepare(self, gang: Gang) -> None:
        """Returns once there is one for the environment of the gang, or none can be had. To import everything
        takes seconds."""
        for _ in range(2):  # the first leaves if it is out of date
            zygote = self._find(gang)
            await asyncio.wait({zygote.warm})
            if await zygote.ask(PRESENT):
                return

    async def grow(self, gang: Gang, node: str) -> bool:
        """Guard, supervisor and fork server for a part of the gang; False: there is no zygote that could."""
        zygote = self._living.get(_key(gang))
        if zygote is None or not zygote.warm.done():
            return False
        directory = gang.directory.parent
        tree = Tree(
            task=gang.task,
            node=node,
            python=sys.executable,
            env={**os.environ, "FIREFLYER_TASK": gang.task},
            marks={
                "FIREFLYER_TASK": gang.task,
                "FIREFLYER_TASK_DIR": str(directory),
                "FIREFLYER_NODE": node,
            },
        )
        with birth(directory, node) as descriptors:
            return await zygote.ask(msgspec.msgpack.encode(tree), descriptors)

    def _find(self, gang: Gang) -> _Zygote:
        """A living one; perhaps one that is still importing."""
        key = _key(gang)
        zygote = self._living.pop(key, None)
        if zygote is None or zygote.gone:
            python, env = key
            zygote = _Zygote(python, self._preload, dict(env))
        self._living[key] = zygote  # the last used is the last
        while len(self._living) > KEPT:
            self._living.pop(next(iter(self._living))).close()
        return zygote

    async def close(self) -> None:
        """Ends all; what they have grown stays."""
        for zygote in self._living.values():
            zygote.warm.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await zygote.warm
            zygote.close()
        self._living.clear()


def _key(gang: Gang) -> _Key:
    """What a zygote is started with."""
    env = {**gang.env, "OMP_NUM_THREADS": "1"}
    return gang.python or sys.executable, tuple(sorted(env.items()))
