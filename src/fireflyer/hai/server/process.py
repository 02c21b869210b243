"""The server process: one a home, on 127.0.0.1, in the foreground (`fireflyer up`) or behind a client.

    lock the home -> bind the port -> open the store -> take up old attempts -> write server.json -> serve
    with PostgreSQL: open the database -> wait for the lease of the leader -> lock the home -> as above

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
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fireflyer import log
from fireflyer.errors import ConfigError, Corrupted, FireflyerError
from fireflyer.hai.dashboard import routes
from fireflyer.hai.dashboard.door import Door
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.connection import Database, PostgreSQL, parse_url
from fireflyer.hai.database.leader import LEASE_S, LEAVE_S, Leader
from fireflyer.hai.database.store import Store
from fireflyer.hai.engines import Engine
from fireflyer.hai.home import EngineFile, Home, ServerFile, locate, write_private
from fireflyer.hai.scheduling.policies import DEFAULT, policy_named
from fireflyer.hai.server import api
from fireflyer.hai.server.access import Accounts
from fireflyer.hai.server.auth import Gate
from fireflyer.hai.server.controller import Controller
from fireflyer.hai.server.listening import Public, Web, listen, web_config
from fireflyer.hai.server.logroom import LIMIT_BYTES, LogRoom
from fireflyer.program import allow_descriptors

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
    log_limit: int = LIMIT_BYTES
    """Bytes that are kept of the log of a rank in one attempt."""
    keep: bool = False
    """Leave tasks running when a signal ends the server."""
    database: PostgreSQL | None = None
    """None: what the home remembers, else SQLite in the home."""
    public: Public | None = None
    """Where users of other machines are served, too."""
    lease_s: float = LEASE_S
    """Of the leader among the servers of one PostgreSQL database."""
    stand_by: Callable[[str], None] | None = None
    """Told who leads, before it waits for that server's end; None: do not wait, it is an error."""


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
    where = _settle_database(options)
    with contextlib.ExitStack() as held:
        if isinstance(where, PostgreSQL):
            database = held.enter_context(
                contextlib.closing(Database(where, lease_s=options.lease_s))
            )
            write_private(home.database_file, msgspec.json.encode(where) + b"\n")
            leader, lock = _lead(database, options)
            held.callback(leader.release)
        else:
            leader, lock = None, _take_home(home, 0)
        held.callback(os.close, lock)
        listeners = [held.enter_context(listen("127.0.0.1", options.port))]
        if options.public is not None:
            public = options.public
            listeners.append(held.enter_context(listen(public.host, public.port)))
        if given := LogRoom(home.tasks, options.log_limit).make():
            _log.warning("the disk was full: %d MiB of the logs of tasks given up", given >> 20)
        if not isinstance(where, PostgreSQL):
            database = held.enter_context(contextlib.closing(Database(where)))
        store = Store(database)
        accounts = Accounts(database)
        if options.public is not None and not accounts.usable():
            raise ConfigError(
                f"--listen {options.public.host} is for users, and there are none with a token: "
                "start without it, then `fireflyer user add NAME` and `fireflyer token create NAME`"
            )
        _settle_engine(options, store)
        options = msgspec.structs.replace(options, policy=_settle_policy(options))
        allow_descriptors()
        parts = _Parts(store, accounts, leader, listeners)
        asyncio.run(_serve(options, parts, make_engine, ready))


class _Parts(msgspec.Struct, frozen=True):
    """What is open while a server serves."""

    store: Store
    accounts: Accounts
    leader: Leader | None
    listeners: list[socket.socket]
    """On loopback, then the public one if there is one."""


def _take_home(home: Home, patience_s: float) -> int:
    """The lock of the home. Raises ConfigError where another one has it, so long after."""
    deadline = time.monotonic() + patience_s
    while (lock := home.take()) is None:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"a server (pid {home.holder()}) already serves {home.path}; `fireflyer down` ends it"
            )
        time.sleep(0.1)
    return lock


def _lead(database: Database, options: Options) -> tuple[Leader, int]:
    """Returns the lease and the lock of the home once this server has both. Who has lost the lease is about
    to leave the home; a process that is stopped stays in it, and meanwhile others may lead.

    Raises:
        ConfigError: another one leads or serves the home, and nobody wants to wait.
    """
    home = options.home
    while True:
        leader = Leader(database, options.lease_s)
        _await_lead(leader, options)
        try:
            return leader, _take_home(home, options.lease_s + LEAVE_S)
        except BaseException as error:
            leader.release()
            if not isinstance(error, ConfigError) or options.stand_by is None:
                raise
        options.stand_by(f"pid {home.holder()}, which does not leave {home.path},")
        time.sleep(options.lease_s)


def _await_lead(leader: Leader, options: Options) -> None:
    """Returns once this server leads.

    Raises:
        ConfigError: another one leads, and nobody wants to wait.
    """
    told = ""
    while (other := leader.take()) is not None:
        if options.stand_by is None:
            raise ConfigError(
                f"another server ({other}) leads with this database, or did until at most "
                f"{options.lease_s:.0f} s ago: ask that one, or again in a moment"
            )
        if other != told:
            options.stand_by(other)
            told = other
        time.sleep(min(options.lease_s / 4, 1.0))


def _settle_database(options: Options) -> PostgreSQL | Path:
    """Where the state is: as asked for, else as the home remembers.

    Raises:
        ConfigError: the home has its tasks in SQLite.
    """
    home, wanted = options.home, options.database
    try:
        known = msgspec.json.decode(home.database_file.read_bytes(), type=PostgreSQL)
    except FileNotFoundError:
        known = None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupted(
            f"cannot read {home.database_file} ({error}); write it anew with `fireflyer up --database`"
        ) from None
    if wanted is None:
        return known if known is not None else home.database
    parse_url(wanted.url)
    if home.database.exists():
        raise ConfigError(
            f"{home.path} has its tasks in {home.database.name}, which are not moved to PostgreSQL: "
            "choose another home for it"
        )
    return wanted


def _settle_engine(options: Options, store: Store) -> None:
    """Remembers the engine. No other one knows what has become of attempts of the old one."""
    home, wanted = options.home, options.engine
    try:
        known = home.read_engine()
    except Corrupted:
        known = None
    if known == wanted:
        return
    if running := [task.id for task, _ in store.load() if task.placement]:
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


async def _serve(
    options: Options,
    parts: _Parts,
    make_engine: Callable[[Options], Engine],
    ready: Callable[[ServerFile], None],
) -> None:
    home = options.home
    policy = options.policy or DEFAULT
    room = LogRoom(home.tasks, options.log_limit)
    controller = Controller(home, parts.store, make_engine(options), policy)
    end = _End(controller, options.keep)
    token = secrets.token_urlsafe(32)
    webs = _webs(options.public, controller, parts, token, end.ask)

    def started() -> None:
        write_private(home.token, token.encode())
        port = parts.listeners[0].getsockname()[1]
        content = ServerFile(pid=os.getpid(), port=port, token_file=str(home.token))
        home.write_server(content)
        ready(content)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.by_signal)
    lost = _watch_database(parts)
    serving = zip(webs, parts.listeners, strict=True)
    answering = [asyncio.create_task(web.serve(sockets=[at])) for web, at in serving]
    running = asyncio.create_task(controller.run(started))
    ending = asyncio.create_task(end.wait())
    waking = asyncio.create_task(_wake_log_readers(controller, options))
    trimming = asyncio.create_task(room.keep(controller.writing))
    try:
        watched = {running, ending, lost, trimming, *answering}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for task in (lost, running, trimming, *answering):
            if task.done():
                task.result()
    finally:
        home.server.unlink(missing_ok=True)
        await controller.close()
        for web in webs:
            web.should_exit = True
        await asyncio.gather(*answering)
        lost.cancel()
        for task in (running, ending, waking, trimming):
            task.cancel()
        await asyncio.wait({running, ending, waking, trimming})


def _webs(
    public: Public | None, controller: Controller, parts: _Parts, token: str,
    shut_down: Callable[[bool], None],
) -> list[Web]:  # fmt: skip
    """What answers on loopback, and where the public is served."""
    accounts = parts.accounts
    sessions = Sessions(accounts)
    app = api.build(controller, parts.store, accounts, sessions, shut_down)
    pages = routes.build(controller, parts.store, accounts, sessions)
    door = Door(Gate(app, accounts, token), pages, sessions, home=True, secure=False)
    webs = [Web(web_config(door))]
    if public is not None:
        gate = Gate(app, accounts, None)
        door = Door(gate, pages, sessions, home=False, secure=public.secure)
        webs.append(Web(web_config(door, public)))
    return webs


def _watch_database(parts: _Parts) -> "asyncio.Future[None]":
    """Fails once the database is gone, or another server leads."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def fail(error: Exception) -> None:
        if not lost.done():
            lost.set_exception(error)
            lost.exception()  # marks it as seen, should another error end the server first

    parts.store.database.lost = fail
    if parts.leader is not None:

        def fail_soon(error: Exception) -> None:
            loop.call_soon_threadsafe(fail, error)

        parts.leader.lost = fail_soon
        parts.leader.alive()
    return lost


async def _wake_log_readers(controller: Controller, options: Options) -> None:
    """Logs that other machines write grow without an event here."""
    while options.engine.engine != "local":
        await asyncio.sleep(LOG_POLL_S)
        controller.logs.wake_all()


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
    """A server in the background: `python -m fireflyer.hai.server.process`, started by a client.

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
