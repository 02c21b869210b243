"""Python client of the platform: submit, watch and control tasks. Imports only the standard library
and msgspec.

Every call looks up the server of the home, so a `Client` stays valid when a new server replaces the
old one. If FIREFLYER_SERVER names a server, all calls go to that server, with the token of
FIREFLYER_TOKEN_FILE. A `Client` keeps no connection; several threads may use it.
"""

import fcntl
import http.client
import os
import re
import select
import ssl
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from fireflyer import errors
from fireflyer.errors import Corrupted, DeadlineExceeded, FireflyerError, PeerLost, TaskError
from fireflyer.hai import ledger
from fireflyer.hai.client import remote
from fireflyer.hai.faults.rules import Decision, Faults
from fireflyer.hai.home import Home, ServerFile, locate
from fireflyer.hai.model import (
    LINES_PER_ANSWER,
    PER_ANSWER,
    TERMINAL,
    DrainRequest,
    Event,
    LeaseRequest,
    NodeView,
    SeriesView,
    TaskLine,
    TaskSpec,
    TaskState,
    TaskView,
    WhyView,
    WindowView,
)
from fireflyer.hai.model.admission import check_text
from fireflyer.hai.model.identity import SignInCode
from fireflyer.hai.model.observations import Validator
from fireflyer.hai.model.validations import Entry, NodeHistory

START_DEADLINE_S = 60.0
CALL_DEADLINE_S = 30.0
"""Maximum time for a server's answer, beyond the wait that the request asks for."""

_POLL_S = 20.0
"""Maximum wait of one request for events; a longer wait repeats the request."""

_Listed = TypeVar("_Listed", TaskView, TaskLine)


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's log."""

    attempt: int
    data: bytes
    next_offset: int
    end: bool
    """True if the attempt is over and no byte follows."""


class Client:
    """Client of the server of one home.

    Every method raises PeerLost if no server serves the home or the server goes away, and
    DeadlineExceeded if the server does not answer. The server's own errors (TaskError, ConfigError,
    ...) are raised unchanged.

    Args:
        home: the platform's folder; default: the server at $FIREFLYER_SERVER, else the home
            $FIREFLYER_HOME, else ~/.local/state/fireflyer. $FIREFLYER_TOKEN_FILE replaces the
            home's token.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = locate(home)
        self._remote = remote.from_environment() if home is None else None
        """Server that the environment names; None: the home's server."""

    @classmethod
    def connect(
        cls, home: Path | None = None, *, start: bool = True, nodes: int | None = None
    ) -> "Client":
        """Returns a client of a server that answers.

        Args:
            home: as for the constructor.
            start: start a server in the background if none serves the home; it stays until
                `shutdown()` or `fireflyer down`.
            nodes: virtual nodes of a server that is started; default 2.

        Raises:
            PeerLost: no server, and `start` is false.
            ConfigError: the home cannot be used.
            StorageError: the home's database or server.json cannot be used.
            DeadlineExceeded: the server did not start in time.
        """
        client = cls(home)
        if client._remote is not None and client._remote.url:
            client.nodes()
            return client
        if client.home.served():
            with suppress(PeerLost, Corrupted):
                client.nodes()
                return client
        if not start and not client.home.served():
            raise client._no_server()
        client.home.create()
        with client.home.starting():
            if not client.home.served():
                _start_server(client.home, nodes)
        client.nodes()
        return client

    def submit(self, spec: TaskSpec) -> TaskView:
        """Submits a task. Once this returns, the task is on disk and survives the server."""
        check_text(spec)
        return self._view("POST", "/tasks", body=msgspec.json.encode(spec))

    def task(self, id: str) -> TaskView:
        """Returns the current state of a task."""
        return self._view("GET", _path(id))

    def task_at(self, id: str) -> tuple[TaskView, int]:
        """Returns the current state of a task, and the seq of its newest event; later events have a
        higher seq."""
        data, headers = self._ask("GET", _path(id))
        seq = int(headers["X-Fireflyer-Seq"] or 0)
        return msgspec.json.decode(data, type=TaskView), seq

    def tasks(
        self,
        *,
        live: bool = False,
        user: str | None = None,
        states: Collection[TaskState] = (),
        labels: Mapping[str, str] | None = None,
    ) -> list[TaskView]:
        """Returns tasks in order of submission.

        Args:
            live: only tasks that are not over.
            user: only this user's tasks.
            states: only tasks in one of these states.
            labels: only tasks with these labels; an empty value matches any value of the label.
        """
        chosen = _list_query(live, user, states, labels)
        return self._pages("/tasks", chosen, list[TaskView], PER_ANSWER)

    def task_lines(
        self,
        *,
        live: bool = False,
        user: str | None = None,
        states: Collection[TaskState] = (),
        labels: Mapping[str, str] | None = None,
    ) -> list[TaskLine]:
        """Returns the tasks that `tasks` returns, without ranks, arguments and environment: much
        faster for thousands of tasks."""
        chosen = _list_query(live, user, states, labels)
        return self._pages("/task-lines", chosen, list[TaskLine], LINES_PER_ANSWER)

    def _pages(
        self, path: str, query: dict[str, Any], kind: type[list[_Listed]], most: int
    ) -> list[_Listed]:
        """Returns a list of tasks, fetched in pages of at most `most` tasks."""
        found: list[_Listed] = []
        more = True
        while more:
            data, _ = self._ask("GET", path, {**query, "after": found[-1].id if found else ""})
            piece = msgspec.json.decode(data, type=kind)
            found += piece
            more = len(piece) == most
        return found

    def stop(self, id: str) -> TaskView:
        """Asks the task to stop: SIGTERM to its ranks, SIGKILL after its `grace_s`."""
        return self._view("POST", _path(id, "stop"))

    def suspend(self, id: str) -> TaskView:
        """Asks the task's ranks to save and exit; the suspended task waits for `resume`."""
        return self._view("POST", _path(id, "suspend"))

    def resume(self, id: str) -> TaskView:
        """Puts a suspended task back into the queue."""
        return self._view("POST", _path(id, "resume"))

    def why(self, id: str) -> WhyView:
        """Returns the reason why a task waits, and the earliest time at which it can start."""
        data, _ = self._ask("GET", _path(id, "why"))
        return msgspec.json.decode(data, type=WhyView)

    def drain(
        self, node: str, reason: str, until: float | None = None, *, evict: bool = False
    ) -> None:
        """Drains a node, so that no new task starts there until `undrain` or until a wall clock
        time. With `evict` the tasks on the node save, exit and continue on other nodes."""
        body = msgspec.json.encode(DrainRequest(reason=reason, until=until, evict=evict))
        self._ask("POST", f"/nodes/{quote(node, safe='')}/drain", body=body)

    def undrain(self, node: str) -> None:
        """Makes a drained node available again."""
        self._ask("POST", f"/nodes/{quote(node, safe='')}/undrain")

    def validate(self, node: str) -> None:
        """Requests a validation of a node as soon as the node is idle."""
        self._ask("POST", f"/nodes/{quote(node, safe='')}/validate")

    def validations(self, node: str) -> list[Entry]:
        """Returns the newest entries of a node's validation journal: validations, faults, and
        returns to service."""
        data, _ = self._ask("GET", f"/nodes/{quote(node, safe='')}/validations")
        return list(msgspec.json.decode(data, type=NodeHistory).entries)

    def windows(self) -> list[WindowView]:
        """Returns maintenance windows and reservations that are not over, sorted by begin."""
        data, _ = self._ask("GET", "/windows")
        return msgspec.json.decode(data, type=list[WindowView])

    def add_window(self, window: WindowView) -> WindowView:
        """Adds a maintenance window or a reservation; returns the window with its id."""
        data, _ = self._ask("POST", "/windows", body=msgspec.json.encode(window))
        return msgspec.json.decode(data, type=WindowView)

    def remove_window(self, id: str) -> None:
        """Removes a window."""
        self._ask("DELETE", f"/windows/{quote(id, safe='')}")

    def lease(self, id: str, asked: LeaseRequest) -> bool:
        """Requests the lease of an attempt for one partition of its ranks; returns whether the
        lease was granted. Ranks call `fireflyer.hai.lease` instead."""
        data, _ = self._ask("POST", _path(id, "lease"), body=msgspec.json.encode(asked))
        return msgspec.json.decode(data, type=dict[str, bool])["granted"]

    def faults(self, limit: int = 100) -> Faults:
        """Returns the rules in force and the newest events `observed` and `acted`, oldest first."""
        data, _ = self._ask("GET", "/faults", {"limit": limit})
        return msgspec.json.decode(data, type=Faults)

    def observed(self, result: Validator) -> Decision:
        """Submits the result of a node check. Returns the rules' decision, which the server has
        already carried out."""
        data, _ = self._ask("POST", "/observations", body=msgspec.json.encode(result))
        return msgspec.json.decode(data, type=Decision)

    def ledger(
        self,
        task: str | None = None,
        *,
        user: str | None = None,
        group: str | None = None,
        since: float = 0.0,
        until: float | None = None,
        cluster: bool = False,
    ) -> ledger.LedgerView:
        """Returns how tasks spent their time, by cause. By default includes all tasks that the
        token may see.

        Args:
            task: only this task.
            user: only this user's tasks; for another user the token needs the scope operate.
            group: only this group's tasks.
            since: wall clock, seconds since 1970; earlier time is left out.
            until: wall clock as `since`; None: now.
            cluster: also report all nodes; the token needs the scope operate.
        """
        query: dict[str, Any] = {"since": since, "cluster": int(cluster)}
        if task is not None:
            _check_id(task)
        named = {"task": task, "user": user, "group": group, "until": until}
        query |= {name: value for name, value in named.items() if value is not None}
        data, _ = self._ask("GET", "/ledger", query)
        return msgspec.json.decode(data, type=ledger.LedgerView)

    def events(self, task: str | None = None, after: int = 0, wait_s: float = 0.0) -> list[Event]:
        """Returns events with a seq above `after`, oldest first, at most 1000 per call.

        Args:
            task: only this task's events.
            after: seq to continue from.
            wait_s: maximum wait for the first event; the result is empty if no event arrives.
        """
        deadline = time.monotonic() + wait_s
        while True:
            wait = min(max(deadline - time.monotonic(), 0.0), _POLL_S)
            query: dict[str, Any] = {"after": after, "wait_s": wait}
            if task is not None:
                _check_id(task)
                query["task"] = task
            data, _ = self._ask("GET", "/events", query, wait_s=wait)
            found = msgspec.json.decode(data, type=list[Event])
            if found or time.monotonic() >= deadline:
                return found

    def wait(
        self, id: str, states: Collection[TaskState], timeout_s: float | None = None
    ) -> TaskView:
        """Waits until the task is in one of `states`, or has entered one since the call.

        Returns:
            The task at the time of the return, which may already be in a later state.

        Raises:
            TaskError: the task is over and can never enter any of `states`.
            DeadlineExceeded: after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        view, after = self.task_at(id)
        while view.state not in states:
            if view.state in TERMINAL:
                raise TaskError(f"task {id} is {view.state}: {view.reason}")
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                wanted = " or ".join(sorted(states))
                raise DeadlineExceeded(
                    f"task {id} is {view.state}, not {wanted}, after {timeout_s} s"
                )
            news = self.events(task=id, after=after, wait_s=min(left, _POLL_S))
            view = self.task(id)
            if any(event.kind in states for event in news):
                break
            after = news[-1].seq if news else after
        return view

    def read_log(
        self, id: str, rank: int, offset: int = 0, attempt: int | None = None, wait_s: float = 0.0
    ) -> tuple[bytes, int]:
        """Returns bytes of a rank's log from `offset` on, at most 1 MiB, and the offset to continue
        from.

        Args:
            id: the task.
            rank: the rank.
            offset: byte offset to start from.
            attempt: default: the current or last attempt.
            wait_s: maximum wait for more bytes while the attempt runs.
        """
        chunk = self.read_log_chunk(id, rank, offset, attempt, wait_s)
        return chunk.data, chunk.next_offset

    def read_log_chunk(
        self, id: str, rank: int, offset: int = 0, attempt: int | None = None, wait_s: float = 0.0
    ) -> LogChunk:
        """Reads a log like `read_log`, and also returns the attempt and whether the log is
        complete."""
        wait = min(wait_s, _POLL_S)
        query: dict[str, Any] = {"offset": offset, "wait_s": wait}
        if attempt is not None:
            query["attempt"] = attempt
        data, headers = self._ask("GET", _path(id, "log", str(rank)), query, wait_s=wait)
        return LogChunk(
            attempt=int(headers["X-Fireflyer-Attempt"] or 0),
            data=data,
            next_offset=int(headers["X-Fireflyer-Next"] or 0),
            end=headers["X-Fireflyer-End"] == "1",
        )

    def series(
        self, scope: str = "cluster", seconds: float = 6 * 3600.0, until: float | None = None
    ) -> SeriesView:
        """Returns the use of the hardware over time: means of at most 500 intervals.

        Args:
            scope: "cluster", "node:n0", "user:ada", "task:t7" or "rank:t7/0".
            seconds: length of the time span.
            until: wall clock at the end of the time span; None: now.
        """
        query: dict[str, Any] = {"scope": scope, "seconds": seconds}
        if until is not None:
            query["until"] = until
        data, _ = self._ask("GET", "/series", query)
        return msgspec.json.decode(data, type=SeriesView)

    def nodes(self) -> list[NodeView]:
        """Returns the nodes and the tasks on them."""
        data, _ = self._ask("GET", "/nodes")
        return msgspec.json.decode(data, type=list[NodeView])

    def dashboard_link(self) -> str:
        """Returns a link to the dashboard with a code that signs in one browser as this client's
        user. The code is valid for one minute and for one use. Until then the link is a secret:
        anyone who has the link can sign in."""
        data, _ = self._ask("POST", "/sign-in-codes")
        code = msgspec.json.decode(data, type=SignInCode).code
        if self._remote is not None and self._remote.url:
            address = self._remote.url
        else:
            address = f"http://127.0.0.1:{self.server().port}"
        return f"{address}/dashboard/sign-in#code={code}"

    def server(self) -> ServerFile:
        """Returns the server's process id and port."""
        if not self.home.served():
            raise self._no_server()
        return self.home.read_server()

    def shutdown(self, *, keep: bool = False) -> None:
        """Stops the server's tasks, with their grace periods, then ends the server. Waits until a
        server on this machine is gone.

        Args:
            keep: leave the tasks running; the next server adopts them.
        """
        if self._remote is not None and self._remote.url:
            self._ask("POST", "/shutdown", {"keep": int(keep)})
            return
        try:
            process = os.pidfd_open(self.server().pid)
        except ProcessLookupError:
            raise self._no_server() from None
        try:
            self._ask("POST", "/shutdown", {"keep": int(keep)})
            select.select([process], [], [])
        finally:
            os.close(process)

    def call(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        body: bytes | None = None,
    ) -> bytes:
        """Sends a request for which `Client` has no method; returns the body of the response."""
        return self._ask(method, path, query, body=body)[0]

    # -- one request -------------------------------------------------------------------------------

    def _view(self, method: str, path: str, body: bytes | None = None) -> TaskView:
        data, _ = self._ask(method, path, body=body)
        return msgspec.json.decode(data, type=TaskView)

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        body: bytes | None = None,
        wait_s: float = 0.0,
    ) -> tuple[bytes, http.client.HTTPMessage]:
        timeout = wait_s + CALL_DEADLINE_S
        target = path + ("?" + urlencode(query, doseq=True) if query else "")
        try:
            connection, token, name = self._connect(timeout)
        except OSError as error:
            raise PeerLost(f"the server cannot be reached: {error}") from None
        try:
            connection.request(method, target, body, {"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            data = answer.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the server ({name}) did not answer within {timeout:.0f} s; see {self.home.log}"
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise PeerLost(
                f"the certificate of the server ({name}) is not trusted here "
                f"({error.verify_message}); set FIREFLYER_CA_FILE to the file of your own authority"
            ) from None
        except (OSError, http.client.HTTPException):
            raise PeerLost(self._gone(name)) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise _error_of(data, answer.status)
        return data, answer.headers

    def _connect(self, timeout_s: float) -> tuple[http.client.HTTPConnection, str, str]:
        """Returns an unopened connection, the token, and the server's name for messages."""
        if self._remote is not None and self._remote.url:
            remote = self._remote
            return remote.connection(timeout_s), self.home.read_token(remote.token), remote.url
        server = self.server()
        path = Path(server.token_file) if self._remote is None else self._remote.token
        token = self.home.read_token(path)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
        return connection, token, f"pid {server.pid}"

    def _gone(self, name: str) -> str:
        if self._remote is not None and self._remote.url:
            return f"the server {name} cannot be reached; its tasks continue"
        return (
            f"the server ({name}) of {self.home.path} stopped responding; its tasks continue; "
            "start it again with `fireflyer up`"
        )

    def _no_server(self) -> PeerLost:
        return PeerLost(f"no server serves {self.home.path}; start one with `fireflyer up`")


def _list_query(
    live: bool,
    user: str | None,
    states: Collection[TaskState],
    labels: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Returns the query parameters for a list of tasks."""
    named = [f"{name}={value}" for name, value in (labels or {}).items()]
    query: dict[str, Any] = {"live": int(live), "state": list(states), "label": named}
    if user is not None:
        query["user"] = user
    return query


def _path(*parts: str) -> str:
    _check_id(parts[0])
    return "/tasks/" + "/".join(quote(part, safe="") for part in parts)


def _check_id(id: str) -> None:
    """Raises TaskError unless `id` is a task id; nothing else may enter a URL."""
    if not re.fullmatch(r"t[0-9]+", id, re.ASCII):
        raise TaskError(f"no task {id!a} here; `fireflyer ps --all` lists them")


def _error_of(data: bytes, status: int) -> FireflyerError:
    """Returns the typed error that the server answered with."""
    try:
        content = msgspec.json.decode(data, type=dict[str, str])
        name, message = content["error"], content["message"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return FireflyerError(f"the server failed with HTTP {status}; see its server.log")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, FireflyerError):
        return kind(message)
    return FireflyerError(message)


def _start_server(home: Home, nodes: int | None) -> None:
    """Starts a server in its own session and waits until it reports that it is ready."""
    # If a standard stream of this program is closed, the pipe may get a number below 3. The
    # server's standard streams need those numbers, so the server gets a copy of the writer with a
    # higher number.
    reader, low = os.pipe()
    writer = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(low)
    command = [sys.executable, "-P", "-m", "fireflyer.hai.server.process", "--home", str(home.path)]
    command += ["--ready-fd", str(writer)]
    if nodes is not None:
        command += ["--nodes", str(nodes)]
    try:
        log = os.open(home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home.path,
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(log)
            os.close(writer)
        answer = _read_line(reader, START_DEADLINE_S)
    finally:
        os.close(reader)
    if answer is None:
        process.kill()
        process.wait()
        raise DeadlineExceeded(
            f"the server did not start in {START_DEADLINE_S:.0f} s; see {home.log}"
        )
    if not answer.endswith(b"\n") or b'"error"' in answer:
        process.wait()
        if answer:
            raise _error_of(answer, 500)
        raise PeerLost(f"the server died while it started; see {home.log}")
    process.returncode = 0  # detached: the server outlives this process, which never waits for it


def _read_line(descriptor: int, timeout_s: float) -> bytes | None:
    """Reads until the data ends with a newline or the stream ends; returns None after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            return None
        more = os.read(descriptor, 4096)
        data += more
        if not more or data.endswith(b"\n"):
            return data
