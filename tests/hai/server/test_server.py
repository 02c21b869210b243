"""The server from outside: who may talk to it, what it keeps private, how it starts and ends."""

import http.client
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.ports import take_ports
from tests.waiting import LIMIT_S

from fireflyer.errors import (
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    PeerLost,
    StorageError,
    TaskError,
)
from fireflyer.hai.client import Client
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.model import TERMINAL, TaskSpec, TaskView
from fireflyer.hai.server.listeners import listen
from fireflyer.hai.server.process import Options, serve

MakeSpec = Callable[..., TaskSpec]


def ask(client: Client, headers: dict[str, str], path: str = "/tasks") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", client.server().port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_token_opens_it_and_only_the_user_reads_the_token(
    server: Any, spec: MakeSpec
) -> None:
    server.start()
    home = server.client.home
    view = server.client.submit(spec("hold"))
    token = home.token.read_text()
    for headers in (
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"bearer {token}"},
        {"Authorization": token},
        {"Authorization": "Bearer \xff\xfe"},
    ):
        for path in ("/tasks", "/tasks/t1", "/nodes", "/docs", "/nothing"):
            status, body = ask(server.client, headers, path)
            assert status == 401
            assert view.id.encode() not in body
    assert ask(server.client, {"Authorization": f"Bearer {token}"})[0] == 200
    assert mode(home.path) == 0o700
    database = home.database
    private = [home.token, home.server, database]
    private += [database.with_name(database.name + end) for end in ("-wal", "-shm")]
    assert [mode(path) for path in private] == [0o600] * 5


def test_the_tasks_secret_is_in_the_database_alone(server: Any, spec: MakeSpec) -> None:
    server.start()
    server.client.submit(spec("say", "hello"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    with sqlite3.connect(server.client.home.database) as database:
        secret = database.execute("SELECT secret FROM task").fetchone()[0]
    database.close()
    assert len(bytes.fromhex(secret)) == 32
    token = {"Authorization": f"Bearer {server.client.home.token.read_text()}"}
    for path in ("/tasks", "/tasks/t1", "/events", "/nodes", "/tasks/t1/log/0"):
        status, body = ask(server.client, token, path)
        assert status == 200
        assert secret.encode() not in body
    assert secret not in (server.home.parent / "server.out").read_text()


def test_one_server_a_home(server: Any) -> None:
    server.start()
    home = server.client.home
    with pytest.raises(ConfigError, match=f"pid {server.pid}.*already serves"):
        serve(Options(home=home), lambda _: None)
    assert server.client.nodes()
    server.kill()
    assert not home.served()
    server.start()
    assert server.client.nodes()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on port {port}: Address already"):
            serve(Options(home=Home(tmp_path / "home"), port=port), lambda _: None)
    assert not (tmp_path / "home" / "hai.sqlite").exists()


def test_an_address_of_another_machine_is_named() -> None:
    expected = "on 192.0.2.77 port 8443: this machine has no such address; choose another --listen"
    with pytest.raises(ConfigError, match=expected), listen("192.0.2.77", 8443, "--listen"):
        pass


def test_a_given_port_is_served(server: Any) -> None:
    (port,) = take_ports(1)
    server.start(port=port)
    assert server.client.server().port == port


def test_no_server_is_told_from_a_dead_one(server: Any) -> None:
    with pytest.raises(PeerLost, match="no server serves"):
        server.client.tasks()
    with pytest.raises(PeerLost, match="no server serves"):
        Client.connect(server.home, start=False)
    server.start()
    server.kill()
    with pytest.raises(PeerLost, match="no server serves"):
        server.client.tasks()


def test_a_server_that_does_not_answer(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    monkeypatch.setattr("fireflyer.hai.client.CALL_DEADLINE_S", 0.05)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match=r"\(pid \d+\) did not answer"):
            server.client.tasks()
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_damaged_server_json_of_a_living_server(server: Any) -> None:
    server.start()
    for content in (b"", b"{", b'{"pid": 1}', b"\xff\xfe", b"[]"):
        server.client.home.server.write_bytes(content)
        with pytest.raises(Corrupted, match=rf"server.json is damaged .*\(pid {server.pid}\)"):
            server.client.tasks()


def test_a_long_list_of_tasks_comes_in_pieces(
    server: Any, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    client = server.client
    names = [client.submit(spec("hold")).id for _ in range(5)]
    assert [view.id for view in views(client, after="t3")] == ["t4", "t5"]
    assert views(client, after="t5") == []
    asked: list[str] = []
    ask = client._ask
    monkeypatch.setattr("fireflyer.hai.client.PER_ANSWER", 2)

    def two(method: str, path: str, query: dict[str, Any]) -> tuple[bytes, None]:
        asked.append(query["after"])
        found = msgspec.json.decode(ask(method, path, query)[0], type=list[TaskView])
        return msgspec.json.encode(found[:2]), None

    monkeypatch.setattr(client, "_ask", two)
    assert [view.id for view in client.tasks()] == names
    assert asked == ["", "t2", "t4"]


def views(client: Client, after: str) -> list[TaskView]:
    return msgspec.json.decode(client.call("GET", "/tasks", {"after": after}), type=list[TaskView])


def test_a_server_that_does_not_answer_yet_is_starting(server: Any) -> None:
    server.start()
    (server.home / "server.json").unlink()
    with pytest.raises(PeerLost, match=rf"pid {server.pid}\) .* is starting or ending"):
        server.client.tasks()


def test_a_stale_server_json_is_not_believed(server: Any) -> None:
    server.start()
    stale = server.client.home.server.read_bytes()
    server.kill()
    assert server.client.home.server.read_bytes() == stale
    with pytest.raises(PeerLost):
        server.client.tasks()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            b"this is not a database, whatever its name says" * 100,
            Corrupted,
            "damaged or not a database",
        ),
        ("CREATE TABLE song (title)", Corrupted, "database of another program"),
        (
            "CREATE TABLE schema_version (product, version);"
            "INSERT INTO schema_version VALUES ('other', 1)",
            Corrupted,
            "database of another program",
        ),
        (
            "CREATE TABLE schema_version (product, version);"
            "INSERT INTO schema_version VALUES ('fireflyer hai', 1000)",
            StorageError,
            "written by a newer Fireflyer",
        ),
    ],
)
def test_a_database_that_is_not_ours(
    tmp_path: Path, content: str | bytes, error: type[Exception], message: str
) -> None:
    home = Home(tmp_path)
    if isinstance(content, bytes):
        home.database.write_bytes(content)
    else:
        with sqlite3.connect(home.database) as database:
            database.executescript(content)
        database.close()
    before = home.database.read_bytes()
    with pytest.raises(error, match=message):
        serve(Options(home=home), lambda _: None)
    assert home.database.read_bytes() == before
    assert not home.served()


def test_the_history_cannot_be_changed(server: Any, spec: MakeSpec) -> None:
    server.start()
    server.client.submit(spec("finish"))
    server.client.wait("t1", {"finished"}, LIMIT_S)
    database = sqlite3.connect(server.client.home.database)
    try:
        for statement in ("UPDATE event SET kind = 'x'", "DELETE FROM event WHERE seq = 1"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                database.execute(statement)
    finally:
        database.close()


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*home as home"):
        Home(tmp_path / "home").create()
    with pytest.raises(ConfigError, match=r"cannot use .*home as home"):
        Client(tmp_path / "home").tasks()
    with pytest.raises(ConfigError, match="as home: it is not valid UTF-8"):
        Client(tmp_path / "\udcff")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"script": "relative.py"}, "must be an absolute path"),
        ({"script": "/nowhere/x.py"}, "script /nowhere/x.py does not exist"),
        ({"script": "/tmp"}, "is a directory"),
        ({"cwd": "/nowhere"}, "working directory /nowhere does not exist"),
        ({"nodes": 0}, "nodes .--nodes. must be from 1"),
        ({"ranks_per_node": 0}, "ranks_per_node .--ranks. must be from 1"),
        ({"max_restarts": -1}, "max_restarts .--max-restarts. must be from 0"),
        ({"grace_s": -1.0}, "grace_s .--grace. must be from 0"),
        ({"env": {"RANK": "0"}}, "RANK is set by the platform"),
        ({"env": {"A=B": "0"}}, "has no usable name"),
        ({"env": {"A": "\0"}}, "has no usable name or value"),
        ({"args": ("\0",)}, "contains a NUL byte"),
        ({"args": ("ok", "\udcff\udcfe")}, "argument 2 of the script is not valid UTF-8"),
        ({"script": "/tmp/\udcff.py"}, r"the script's path is not valid UTF-8: '/tmp/.udcff.py'"),
        ({"cwd": "/\udcff"}, "the working directory is not valid UTF-8"),
        ({"name": "\udcff"}, "name .--name. is not valid UTF-8"),
        ({"name": "a\nb"}, r"control characters: 'a.nb'"),
        ({"name": "\x1b[31m"}, "control characters"),
        ({"name": "x" * 201}, "has 201 characters, more than 200"),
        ({"labels": {"a": "x" * (16 << 10)}}, "labels .--label. of 16386 bytes"),
        ({"args": ("x" * (128 << 10),)}, "argument 1 of the script has 131072 bytes"),
        ({"env": {"A": "é" * (64 << 10)}}, "environment variable 'A' .--env. has 131074 bytes"),
        ({"env": {f"A{n}": "x" * 10_000 for n in range(110)}}, "arguments and environment have"),
        ({"env": {"\udcff": ""}}, "environment variable's name .--env. is not valid UTF-8"),
        ({"env": {"A": "\udcff"}}, "environment variable 'A' .--env. is not valid UTF-8"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(
    server: Any, spec: MakeSpec, change: dict[str, Any], message: str
) -> None:
    from fireflyer.hai.model.admission import check

    with pytest.raises(ConfigError, match=message):
        check(spec(**{"args": (), **change}) if "args" not in change else spec(*change["args"]))


def test_refusals_reach_the_client_as_they_are(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=2)
    client = server.client
    with pytest.raises(ConfigError, match="script /nowhere"):
        client.submit(spec(script="/nowhere"))
    with pytest.raises(TaskError, match="asks for 3 nodes and this server has 2"):
        client.submit(spec("hold", nodes=3))
    assert client.tasks() == []
    for name in (
        "t1",
        "t",
        "1",
        "x1",
        "t-1",
        "t1.5",
        "t99999999999999999999",
        "",
        "é",
        "t1/2",
        "../../etc",
        "\udcff",
    ):
        with pytest.raises(TaskError, match=r"no task '.*' here"):
            client.task(name)
        with pytest.raises(TaskError, match=r"no task '.*' here"):
            client.events(name)
    with pytest.raises(ConfigError, match="argument 2 of the script is not valid UTF-8"):
        client.submit(spec("hold", "\udcff"))
    client.submit(spec("hold"))
    for other in ("t01", "T1", "t1 ", "t\u0661"):
        with pytest.raises(TaskError, match=r"no task '.*' here"):
            client.task(other)
    client.wait("t1", {"running"}, LIMIT_S)
    with pytest.raises(TaskError, match="is running, not suspended"):
        client.resume("t1")
    for rank, attempt in ((1, None), (0, 2)):
        with pytest.raises(TaskError, match=r"there is no rank 1|has no attempt 2"):
            client.read_log("t1", rank, attempt=attempt)
    for query in ("?after=x", "?after=-1", "?wait_s=nan", "?after=99999999999999999999"):
        with pytest.raises(ConfigError, match=r"after|wait_s"):
            client._ask("GET", "/events" + query)
    for body in (b"", b"{}", b"[]", b'{"script": 1}', b'{"script":"/x","cwd":"/","extra":1}'):
        with pytest.raises(ConfigError, match="the task cannot be read"):
            client._ask("POST", "/tasks", body=body)
    with pytest.raises(ConfigError, match="the request has more than 4 MiB"):
        client._ask("POST", "/tasks", body=b" " * ((4 << 20) + 1))
    assert len(client.tasks()) == 1


def test_events_are_told_to_those_who_wait(server: Any, spec: MakeSpec) -> None:
    server.start()
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    _, seq = client.task_at("t1")
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(client.events("t1", seq, wait_s=60)))
    waiting.start()
    client.submit(spec("hold"))  # another task's events are not what it waits for
    client.wait("t2", {"running"}, LIMIT_S)
    assert waiting.is_alive()
    client.stop("t1")
    waiting.join(LIMIT_S)
    assert [event.kind for event in found][:1] == ["stopping"]
    assert client.events("t1", after=10**6) == []


def test_wait_sees_states_that_were_passed_and_never_hangs_on_a_task_that_is_over(
    server: Any, spec: MakeSpec
) -> None:
    server.start()
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    with pytest.raises(DeadlineExceeded, match=r"t1 is running, not finished, after 0.05 s"):
        client.wait("t1", {"finished"}, 0.05)
    client.stop("t1")
    with pytest.raises(TaskError, match="task t1 is stopped"):
        client.wait("t1", {"finished"}, LIMIT_S)


def test_a_log_is_read_by_offset_and_followed(server: Any, spec: MakeSpec) -> None:
    server.start()
    client = server.client
    client.submit(spec("say", "hello\n"))
    view = client.wait("t1", {"running"}, LIMIT_S)
    assert client.read_log("t1", 0, 0, wait_s=30) == (b"hello\n", 6)
    assert client.read_log("t1", 0, 2) == (b"llo\n", 6)
    assert client.read_log("t1", 0, 6) == (b"", 6)
    assert client.read_log("t1", 0, 600) == (b"", 600)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(client.read_log("t1", 0, 6, wait_s=60)))
    waiting.start()
    with Path(view.ranks[0].log).open("ab") as file:
        file.write(b"world\n")
    waiting.join(LIMIT_S)
    assert found == [(b"world\n", 12)]
    waiting = threading.Thread(
        target=lambda: found.append(client.read_log_chunk("t1", 0, 12, wait_s=60))
    )
    waiting.start()
    client.stop("t1")
    waiting.join(LIMIT_S)
    assert (found[1].data, found[1].end) == (b"", True)
    assert client.read_log_chunk("t1", 0, 12).end


def test_the_end_stops_tasks_and_keeps_suspended_ones(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=1)
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    client.suspend("t1")
    for _ in range(3):
        client.submit(spec("hold"))
    client.wait("t2", {"running"}, LIMIT_S)
    client.shutdown()
    assert server.wait() == 0
    assert not server.client.home.server.exists()
    server.start(nodes=1)
    assert [view.state for view in client.tasks()] == ["suspended", *["stopped"] * 3]
    client.resume("t1")
    assert client.wait("t1", {"running"}, LIMIT_S).attempt == 2
    assert server.launches() == ["t1.1", "t1.2", "t2.1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_as_shutdown_does(
    server: Any, spec: MakeSpec, number: signal.Signals
) -> None:
    server.start()
    server.client.submit(spec("hold"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    os.kill(server.pid, number)
    assert server.wait() == 0
    store = Store(server.client.home.database)
    try:
        assert store.row("t1").state == "stopped"
    finally:
        store.close()


def test_shutdown_with_keep_leaves_attempts_to_the_next_server(server: Any, spec: MakeSpec) -> None:
    server.start()
    client = server.client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    client.shutdown(keep=True)
    server.start()
    view = client.task("t1")
    assert (view.state, view.attempt, view.restarts) == ("running", 1, 0)
    client.stop("t1")
    client.wait("t1", {"stopped"}, LIMIT_S)
    assert server.launches() == ["t1.1"]


def test_a_server_with_fewer_nodes_passes_over_what_no_longer_fits(
    server: Any, spec: MakeSpec
) -> None:
    server.start(nodes=2)
    client = server.client
    client.submit(spec("hold", nodes=2))
    client.submit(spec("hold", nodes=2))
    client.wait("t1", {"running"}, LIMIT_S)
    server.kill()
    server.start(nodes=1)
    client.stop("t1")
    client.submit(spec("finish"))
    client.wait("t3", TERMINAL, LIMIT_S)
    view = client.task("t2")
    assert (view.state, view.reason) == ("queued", "asks for 2 nodes; of 2 such nodes 1 is down")


def test_importing_starts_nothing() -> None:
    script = (
        "import sys, threading, os; before = len(os.listdir('/proc/self/fd'));"
        "import fireflyer.hai.server.process, fireflyer.hai.client, fireflyer.hai;"
        "assert threading.active_count() == 1; assert len(os.listdir('/proc/self/fd')) == before;"
        "assert 'torch' not in sys.modules; assert fireflyer.hai.Client"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    subprocess.run([sys.executable, "-P", "-c", script], check=True, env=environment)
