"""The engine's zygotes (`hai.forkserver.zygote`): one for each environment of tasks that start by
fork."""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec

from fireflyer.hai.engines.link import open_descriptors
from fireflyer.hai.model.engine import Gang
from fireflyer.hai.processes import kill
from fireflyer.hai.supervisor.messages import PRESENT, TITLE_ROOM, Tree
from fireflyer.log import get_logger

KEPT = 2
"""Maximum number of zygotes of an engine: each uses about 300 MB, because it has torch imported."""

_log = get_logger("hai")

_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Zygote:
    """Zygote process and its socket. One request at a time."""

    def __init__(self, python: str, preload: tuple[str, ...], env: dict[str, str]) -> None:
        """Starts the process.

        Raises:
            OSError: no further process can be created.
        """
        self.gone = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        with theirs:
            command = [python, "-P", "-m", "fireflyer.hai.forkserver.zygote", *preload, TITLE_ROOM]
            self.pid = os.posix_spawn(
                python, command, env,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)], setsid=True,
            )  # fmt: skip
        self._asking = asyncio.Lock()
        self.warm = asyncio.create_task(self._receive())
        """Task that receives the zygote's first message; send no request before it is done."""

    async def _receive(self) -> bytes:
        """Returns the next message; empty if the zygote has exited."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            if word := await loop.sock_recv(self.socket, 64):
                return word
        self.close()
        return b""

    async def ask(self, message: bytes, descriptors: tuple[int, ...] = ()) -> bool:
        """Sends a request; returns whether the zygote has carried out the request."""
        async with self._asking:
            try:
                if self.gone:
                    return False
                socket.send_fds(self.socket, [message], descriptors)
                return bool(await self._receive())
            except OSError as error:  # the zygote has exited, or the message is too long
                _log.debug("zygote %d: %s", self.pid, error)
                return False
            except asyncio.CancelledError:
                self.close()  # the next request would get the answer to this request
                raise

    def close(self) -> None:
        """Ends and reaps the zygote; the processes that it started keep running."""
        if not self.gone:
            self.gone = True
            self.socket.close()
            kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class Zygotes:
    """Zygotes of one engine.

    Args:
        preload: modules that each zygote imports before it answers.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._preload = preload
        self._living: dict[_Key, _Zygote] = {}

    async def prepare(self, gang: Gang) -> None:
        """Returns once a zygote for the gang's environment is ready, or cannot be started. The
        imports take seconds."""
        for _ in range(2):  # a zygote with outdated imports exits instead of answering
            zygote = self._find(gang)
            await asyncio.wait({zygote.warm})
            if await zygote.ask(PRESENT):
                return

    async def fork_tree(self, gang: Gang, node: str) -> bool:
        """Starts guard, supervisor and fork server for a part of the gang; returns False if no
        zygote could do so."""
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
        with open_descriptors(directory, node) as descriptors:
            return await zygote.ask(msgspec.msgpack.encode(tree), descriptors)

    def _find(self, gang: Gang) -> _Zygote:
        """Returns a living zygote for the gang, which may still be importing modules."""
        key = _key(gang)
        zygote = self._living.pop(key, None)
        if zygote is None or zygote.gone:
            python, env = key
            zygote = _Zygote(python, self._preload, dict(env))
        self._living[key] = zygote  # the most recently used is last
        while len(self._living) > KEPT:
            self._living.pop(next(iter(self._living))).close()
        return zygote

    async def close(self) -> None:
        """Ends all zygotes; the processes that they started keep running."""
        for zygote in self._living.values():
            zygote.warm.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await zygote.warm
            zygote.close()
        self._living.clear()


def _key(gang: Gang) -> _Key:
    """Returns the interpreter and the environment that a zygote is started with."""
    env = {**gang.env, "OMP_NUM_THREADS": "1"}
    return gang.python or sys.executable, tuple(sorted(env.items()))
