"""The server process, one per home (the folder of the platform's state), on 127.0.0.1. It runs in
the foreground (`fireflyer up`) or is started by a client.

    lock the home -> bind the port -> open the store -> recover old attempts -> write server.json
        -> serve
    with PostgreSQL: open the database -> wait for the leader's lease -> lock the home -> as above

SIGINT, SIGTERM or the shutdown call ends the server: it stops the tasks with their grace period
(unless the tasks are kept running), answers waiting requests and removes server.json. A second
signal ends the grace period of running ranks. A server whose home was removed or replaced ends the
processes of its tasks and exits.
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
from fireflyer.errors import ConfigError, Corrupted, FireflyerError, StorageError
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.log_quota import LIMIT_BYTES, LogQuota
from fireflyer.hai.dashboard import app as dashboard
from fireflyer.hai.dashboard.auth_middleware import AuthMiddleware
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.connection import Database, PostgreSQL, parse_url
from fireflyer.hai.database.leader import LEASE_S, LEAVE_S, Leader
from fireflyer.hai.database.store import Store
from fireflyer.hai.engines.inventory import Device
from fireflyer.hai.home import EngineFile, Home, ServerFile, locate, write_private
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import Authenticator
from fireflyer.hai.http.throttle import Throttle
from fireflyer.hai.model.engine import Engine
from fireflyer.hai.scheduling.policies import DEFAULT, policy_named
from fireflyer.hai.server import api
from fireflyer.hai.server.listeners import Public, Web, listen, web_config
from fireflyer.hai.server.settings import DEFAULT_NODES, inventory, read_settings
from fireflyer.program import allow_descriptors, open_standard_streams

LOG_POLL_S = 1.0
"""Poll interval in seconds for logs that other machines write."""

HOME_POLL_S = 1.0
"""Poll interval in seconds for a home that was removed or replaced."""

_log = log.get_logger("hai")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the server."""

    home: Home
    engine: EngineFile = EngineFile()
    """Engine that runs the tasks."""
    nodes: int = DEFAULT_NODES
    """Number of virtual nodes of the local engine."""
    devices: tuple[Device, ...] = ()
    """GPUs of this machine, which the local engine divides among its nodes."""
    port: int = 0
    """Port on loopback; 0: any free port."""
    policy: str | None = None
    """Scheduling policy; None: the home's last policy, else the default."""
    log_limit: int = LIMIT_BYTES
    """Maximum size in bytes, on disk, of one rank's log in one attempt."""
    keep: bool = False
    """True: leave tasks running when a signal ends the server."""
    database: PostgreSQL | None = None
    """PostgreSQL database; None: the database recorded in the home, else SQLite in the home."""
    public: Public | None = None
    """Additional address for users on other machines."""
    lease_s: float = LEASE_S
    """Seconds of the leader's lease among the servers of one PostgreSQL database."""
    stand_by: Callable[[str], None] | None = None
    """Called with the leader's name before this server waits for the lease; None: raise an error
    instead."""


def chosen_engine(options: Options) -> Engine:
    """Creates the engine that the options name.

    Raises:
        ConfigError: Slurm cannot be used, or has no such partition.
    """
    if options.engine.engine == "slurm":
        from fireflyer.hai.engines.slurm.engine import SlurmEngine

        return SlurmEngine(options.home.path, options.engine.partition)
    from fireflyer.hai.engines.local import LocalEngine
    from fireflyer.hai.supervisor.cgroups import find_base

    return LocalEngine(options.nodes, devices=options.devices, base=find_base())


def serve(
    options: Options,
    ready: Callable[[ServerFile], None],
    make_engine: Callable[[Options], Engine] = chosen_engine,
) -> None:
    """Serves until a signal or the shutdown call ends the server.

    Args:
        options: options of the server.
        ready: called with the content of server.json once the server answers requests.
        make_engine: creates the engine that runs the gangs.

    Raises:
        ConfigError: the home is served already, or the port is in use.
        StorageError: the database cannot be used.
    """
    if not 1 <= options.nodes <= 10_000:
        raise ConfigError(f"invalid number of nodes {options.nodes}: expected 1 to 10000")
    home = options.home
    home.create()
    where = _choose_database(options)
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
            listeners.append(held.enter_context(listen(public.host, public.port, "--listen")))
        if given := LogQuota(home.tasks, options.log_limit).make():
            _log.warning(
                "the disk was full: freed %d MiB from the middle of task logs", given >> 20
            )
        if not isinstance(where, PostgreSQL):
            database = held.enter_context(contextlib.closing(Database(where)))
        store = Store(database)
        accounts = Accounts(database)
        if options.public is not None and not accounts.usable():
            raise ConfigError(
                f"--listen {options.public.host} needs a user with a token, and no user has one: "
                "start without it, then `fireflyer user add NAME` and `fireflyer token create NAME`"
            )
        _record_engine(options, store)
        options = msgspec.structs.replace(options, policy=_choose_policy(options))
        allow_descriptors()
        parts = _Parts(store, accounts, leader, listeners, lock)
        asyncio.run(_serve(options, parts, make_engine, ready))


class _Parts(msgspec.Struct, frozen=True):
    """Open resources of a serving server."""

    store: Store
    accounts: Accounts
    leader: Leader | None
    listeners: list[socket.socket]
    """The loopback listener, then the public listener if there is one."""
    lock: int
    """Descriptor that holds the home's lock."""


def _take_home(home: Home, patience_s: float) -> int:
    """Locks the home and returns the lock's descriptor. Raises ConfigError if another server still
    holds the lock after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (lock := home.take()) is None:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"a server (pid {home.holder()}) already serves {home.path}; `fireflyer down` ends it"
            )
        time.sleep(0.1)
    return lock


def _lead(database: Database, options: Options) -> tuple[Leader, int]:
    """Returns the leader's lease and the home's lock once this server has both. A server that loses
    the lease releases the home's lock soon afterwards. A server that is stopped (SIGSTOP) keeps the
    lock, and other servers may lead meanwhile.

    Raises:
        ConfigError: another server leads or holds the home, and `stand_by` is None.
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
        options.stand_by(f"pid {home.holder()}, which still uses {home.path},")
        time.sleep(options.lease_s)


def _await_lead(leader: Leader, options: Options) -> None:
    """Returns once this server leads.

    Raises:
        ConfigError: another server leads, and `stand_by` is None.
    """
    told = ""
    while (other := leader.take()) is not None:
        if options.stand_by is None:
            raise ConfigError(
                f"another server ({other}) leads this database, or led it at most "
                f"{options.lease_s:.0f} s ago: use that server, or try again later"
            )
        if other != told:
            options.stand_by(other)
            told = other
        time.sleep(min(options.lease_s / 4, 1.0))


def _choose_database(options: Options) -> PostgreSQL | Path:
    """Returns the location of the state: the requested database, else the database recorded in the
    home.

    Raises:
        ConfigError: PostgreSQL is requested, but the home has its tasks in SQLite.
        Corrupted: the home's record of its database cannot be read.
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
            f"{home.path} has its tasks in {home.database.name}, and they cannot be moved to PostgreSQL: "
            "choose another home for --database"
        )
    return wanted


def _record_engine(options: Options, store: Store) -> None:
    """Records the engine in the home. Raises ConfigError while attempts of another engine may run,
    because only that engine can recover them."""
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
            f"{running[0]} was started on the engine {name!r} and may still be running: end "
            "the task first, with a server on that engine (`fireflyer up --engine ...`)"
        )
    home.write_engine(wanted)


def _choose_policy(options: Options) -> str:
    """Returns the requested policy, and records it in the home. Without a request, returns the
    policy recorded in the home.

    Raises:
        ConfigError: no such policy.
    """
    name = options.policy or options.home.read_policy() or DEFAULT
    policy_named(name)
    if options.policy is not None:
        write_private(options.home.policy, f"{name}\n".encode())
    return name


async def _serve(
    options: Options,
    parts: _Parts,
    make_engine: Callable[[Options], Engine],
    ready: Callable[[ServerFile], None],
) -> None:
    home = options.home
    policy = options.policy or DEFAULT
    quota = LogQuota(home.tasks, options.log_limit)
    controller = Controller(home, parts.store, make_engine(options), policy)
    end = _End(controller, options.keep)
    token = secrets.token_urlsafe(32)
    webs = _webs(options.public, controller, parts, token, end.ask)
    port = parts.listeners[0].getsockname()[1]
    content = ServerFile(pid=os.getpid(), port=port, token_file=str(home.token))
    answers = asyncio.Event()

    def started() -> None:
        _publish(home, content, token)
        ready(content)
        answers.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.by_signal)
    lost = _watch_database(parts)
    serving = zip(webs, parts.listeners, strict=True)
    answering = [asyncio.create_task(web.serve(sockets=[at])) for web, at in serving]
    running = asyncio.create_task(controller.run(started))
    ending = asyncio.create_task(end.wait())
    waking = asyncio.create_task(_wake_log_readers(controller, options))
    trimming = asyncio.create_task(quota.keep(controller.writing))
    owning = asyncio.create_task(_watch_home(home, parts.lock, content, token, answers))
    try:
        watched = {running, ending, lost, trimming, owning, *answering}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if not home.owned_by(parts.lock):
            raise StorageError(
                f"{home.path} was removed or replaced while this server (pid {os.getpid()}) used "
                "it; the processes of its tasks are ended, and their files in it are lost"
            )
        for task in (lost, running, trimming, *answering):
            if task.done():
                task.result()
    finally:
        home.leave(parts.lock)
        owning.cancel()
        if not home.owned_by(parts.lock):
            await controller.abandon()
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
    """Returns the web servers for loopback and, if there is one, the public address."""
    accounts = parts.accounts
    sessions = Sessions(accounts)
    app = api.build(controller, parts.store, accounts, sessions, shut_down)
    throttle = Throttle()
    pages = dashboard.build(controller, parts.store, accounts, sessions, throttle)
    gate = Authenticator(app, accounts, token, throttle)
    auth = AuthMiddleware(gate, pages, sessions, home=True, secure=False)
    webs = [Web(web_config(auth))]
    if public is not None:
        gate = Authenticator(app, accounts, None, throttle)
        auth = AuthMiddleware(gate, pages, sessions, home=False, secure=public.secure)
        webs.append(Web(web_config(auth, public)))
    return webs


def _publish(home: Home, content: ServerFile, token: str) -> None:
    write_private(home.token, token.encode())
    home.write_server(content)


async def _watch_home(
    home: Home, lock: int, content: ServerFile, token: str, answers: asyncio.Event
) -> None:
    """Returns once the home was removed or replaced. Writes server.json again if only that file is
    gone."""
    await answers.wait()
    while home.owned_by(lock):
        if not home.server.exists() or not home.token.exists():
            with contextlib.suppress(OSError):  # writing fails if the folder was removed just now
                _publish(home, content, token)
        await asyncio.sleep(HOME_POLL_S)


def _watch_database(parts: _Parts) -> "asyncio.Future[None]":
    """Returns a future that fails once the database is gone or another server leads."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def fail(error: Exception) -> None:
        if not lost.done():
            lost.set_exception(error)
            lost.exception()  # marks the exception as retrieved: another error may end the server

    parts.store.database.lost = fail
    if parts.leader is not None:

        def fail_soon(error: Exception) -> None:
            loop.call_soon_threadsafe(fail, error)

        parts.leader.lost = fail_soon
        parts.leader.alive()
    return lost


async def _wake_log_readers(controller: Controller, options: Options) -> None:
    """Wakes, at a regular interval, the clients that follow logs, because writes by other machines
    cause no event on this machine."""
    while options.engine.engine != "local":
        await asyncio.sleep(LOG_POLL_S)
        controller.logs.wake_all()


class _End:
    """Shutdown request, and the steps before the server exits."""

    def __init__(self, controller: Controller, keep: bool) -> None:
        self._controller = controller
        self._keep = keep
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def ask(self, keep: bool) -> None:
        """Starts the shutdown; the first call decides whether tasks keep running."""
        if not self._asked.is_set():
            self._keep = keep
            self._asked.set()

    def by_signal(self) -> None:
        """Handles a signal: the first starts the shutdown, the second ends the grace period."""
        if self._asked.is_set():
            self._hurried.set()
        self.ask(self._keep)

    async def wait(self) -> None:
        """Returns once the server may exit."""
        await self._asked.wait()
        if self._keep:
            return
        _log.info("stopping all tasks; a second signal ends their grace period")
        try:
            await self._stop()
        except StorageError as error:
            _log.error(
                "ending all processes, because the stop of the tasks cannot be stored: %s", error
            )
            await self._controller.abandon()

    async def _stop(self) -> None:
        stopping = asyncio.create_task(self._controller.stop_all())
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await self._controller.stop_all(at_once=True)
        hurried.cancel()
        await stopping


def background_options(home: Home, nodes: int | None) -> Options:
    """Returns the options of a server that `run` starts: the options of the home's last `up`.
    `nodes` applies if that `up` set no number of nodes.

    Raises:
        ConfigError: the home's options cannot be used.
        Corrupted: a file of the home is damaged.
    """
    settings, engine = read_settings(home), home.read_engine()
    devices, count = inventory(settings, nodes) if engine.engine == "local" else ((), DEFAULT_NODES)
    limit = settings.log_limit_mib
    return Options(
        home=home, engine=engine, nodes=count, devices=devices, port=settings.port or 0,
        log_limit=LIMIT_BYTES if limit is None else limit << 20,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs a server in the background. A client starts it as `python -m
    fireflyer.hai.server.process`.

    `--ready-fd` is a pipe that gets one JSON line: the content of server.json, or the error.
    """
    parser = argparse.ArgumentParser(prog="fireflyer-server")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    open_standard_streams()
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
        serve(background_options(home, options.nodes), tell)
    except FireflyerError as error:
        _log.error("%s", error)
        tell({"error": type(error).__name__, "message": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
