"""The server process: one a home, on 127.0.0.1, in the foreground (`fireflyer up`) or behind a client.

    lock the home -> bind the port -> open the store -> take up old attempts -> write server.json -> serve

The end, by SIGINT, SIGTERM or the shutdown call: tasks are stopped with their grace (unless kept),
waiting requests are answered, server.json goes. A second signal gives running ranks no more grace.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn

from fireflyer import log
from fireflyer.errors import ConfigError, Corrupted, FireflyerError
from fireflyer.hai import api
from fireflyer.hai.controller import Controller
from fireflyer.hai.engines import Engine
from fireflyer.hai.home import EngineFile, Home, ServerFile, locate, write_private
from fireflyer.hai.policies import DEFAULT, policy_named
from fireflyer.hai.store import Store

DEFAULT_NODES = 2

LOG_POLL_S = 1.0
"""How often those who follow logs written on other machines look."""

_log = log.get_logger("hai")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to serve."""

    home: Home
    engine: EngineFile = EngineFile()
    """What runs the tasks."""
    nodes: int = DEFAULT_NODES
    """Number of virtual nodes of the local engine."""
    port: int = 0
    """0: any free port."""
    policy: str | None = None
    """Scheduling policy; None: what the home remembers, else the default."""
    keep: bool = False
    """Leave tasks running when a signal ends the server."""


def chosen_engine(options: Options) -> Engine:
    """The engine that the options name.

    Raises:
        ConfigError: Slurm cannot be used, or has no such partition.
    """
    if options.engine.engine == "slurm":
        from fireflyer.hai.engines.slurm import SlurmEngine

        return SlurmEngine(options.home.path, options.engine.partition)
    from fireflyer.hai.engines.local import LocalEngine

    return LocalEngine(options.nodes)


def serve(
    options: Options,
    ready: Callable[[ServerFile], None],
    make_engine: Callable[[Options], Engine] = chosen_engine,
) -> None:
    """Serves until told to end.

    Args:
        options: what and where to serve.
        ready: called once requests are answered.
        make_engine: what runs the gangs.

    Raises:
        ConfigError: the home is served already, or the port is in use.
        StorageError: the database cannot be used.
    """
    if not 1 <= options.nodes <= 10_000:
        raise ConfigError(f"a server has from 1 to 10000 nodes, not {options.nodes}")
    home = options.home
    home.create()
    lock = home.take()
    if lock is None:
        raise ConfigError(
            f"a server (pid {home.holder()}) already serves {home.path}; `fireflyer down` ends it"
        )
    try:
        with _listen(options.port) as listener, contextlib.closing(Store(home.database)) as store:
            _settle_engine(options, store)
            options = msgspec.structs.replace(options, policy=_settle_policy(options))
            asyncio.run(_serve(options, listener, store, make_engine, ready))
    finally:
        os.close(lock)


def _settle_engine(options: Options, store: Store) -> None:
    """Remembers the engine. No other one knows what has become of attempts of the old one."""
    home, wanted = options.home, options.engine
    try:
        known = home.read_engine()
    except Corrupted:
        known = None
    if known == wanted:
        return
    if running := [task.id for task in store.load() if task.placement]:
        name = "unknown" if known is None else known.engine
        raise ConfigError(
            f"{running[0]} was started on the engine {name!r} and may run on: end it there first, "
            "with a server on that engine (`fireflyer up --engine ...`)"
        )
    home.write_engine(wanted)


def _settle_policy(options: Options) -> str:
    """Remembers the policy that was asked for, else recalls the last one.

    Raises:
        ConfigError: there is no such policy.
    """
    file = options.home.policy
    name = options.policy
    if name is None:
        name = file.read_text().strip() if file.exists() else DEFAULT
    policy_named(name)
    if options.policy is not None:
        write_private(file, f"{name}\n".encode())
    return name


@contextlib.contextmanager
def _listen(port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
        except OverflowError:
            raise ConfigError(f"port {port} is not from 0 to 65535") from None
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port}: {os.strerror(error.errno or 0)}; choose another --port"
            ) from None
        yield listener


async def _serve(
    options: Options,
    listener: socket.socket,
    store: Store,
    make_engine: Callable[[Options], Engine],
    ready: Callable[[ServerFile], None],
) -> None:
    home = options.home
    controller = Controller(home, store, make_engine(options), options.policy or DEFAULT)
    end = _End(controller, options.keep)
    token = secrets.token_urlsafe(32)
    config = uvicorn.Config(
        api.build(controller, token, end.ask),
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http="h11",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    web = _Web(config)

    def started() -> None:
        write_private(home.token, token.encode())
        port = listener.getsockname()[1]
        content = ServerFile(pid=os.getpid(), port=port, token_file=str(home.token))
        home.write_server(content)
        ready(content)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.by_signal)
    answering = asyncio.create_task(web.serve(sockets=[listener]))
    running = asyncio.create_task(controller.run(started))
    ending = asyncio.create_task(end.wait())
    waking = asyncio.create_task(_wake_log_readers(controller, options))
    try:
        await asyncio.wait({running, ending, answering}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, answering):
            if task.done():
                task.result()
    finally:
        home.server.unlink(missing_ok=True)
        await controller.close()
        web.should_exit = True
        await answering
        for task in (running, ending, waking):
            task.cancel()
        await asyncio.wait({running, ending, waking})


async def _wake_log_readers(controller: Controller, options: Options) -> None:
    """Logs that other machines write grow without an event here."""
    while options.engine.engine != "local":
        await asyncio.sleep(LOG_POLL_S)
        controller.wake_log_readers()


class _Web(uvicorn.Server):
    """uvicorn without its signal handlers: the server has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _End:
    """The ask to end, and what has to happen before."""

    def __init__(self, controller: Controller, keep: bool) -> None:
        self._controller = controller
        self._keep = keep
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def ask(self, keep: bool) -> None:
        """Begins the end; the first ask decides whether tasks are kept running."""
        if not self._asked.is_set():
            self._keep = keep
            self._asked.set()

    def by_signal(self) -> None:
        """The first signal asks; a second one hurries."""
        if self._asked.is_set():
            self._hurried.set()
        self.ask(self._keep)

    async def wait(self) -> None:
        """Returns once the server may go."""
        await self._asked.wait()
        if self._keep:
            return
        _log.info("stopping all tasks; a second signal gives them no more time")
        stopping = asyncio.create_task(self._controller.stop_all())
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await self._controller.stop_all(at_once=True)
        hurried.cancel()
        await stopping


def main(arguments: list[str] | None = None) -> int:
    """A server in the background: `python -m fireflyer.hai.server`, started by a client.

    `--ready-fd` is a pipe that gets one JSON line: server.json's content, or the error.
    """
    parser = argparse.ArgumentParser(prog="fireflyer-server")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=DEFAULT_NODES)
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    log.configure(logging.INFO)
    ready = os.fdopen(options.ready_fd, "wb")
    os.set_inheritable(options.ready_fd, False)

    def tell(message: object) -> None:
        if not ready.closed:
            with contextlib.suppress(BrokenPipeError):
                ready.write(msgspec.json.encode(message) + b"\n")
                ready.close()

    try:
        home = locate(options.home)
        serve(Options(home=home, engine=home.read_engine(), nodes=options.nodes), tell)
    except FireflyerError as error:
        _log.error("%s", error)
        tell({"error": type(error).__name__, "message": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
