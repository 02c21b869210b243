"""Server-sent events: a log and the history arrive exactly once, over any number of connections."""

import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import Somebody, ask
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.controller.logs import _whole
from fireflyer.hai.http.streams import event_place, log_place
from fireflyer.hai.model import TaskSpec

MakeSpec = Callable[..., TaskSpec]


class Stream:
    """A connection that gets messages."""

    def __init__(self, server: Server, path: str, last: str, token: str) -> None:
        token = token or server.client.home.token.read_text()
        port = server.client.server().port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        headers = {"Authorization": f"Bearer {token}"} | ({"Last-Event-ID": last} if last else {})
        self._connection.request("GET", path, headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        assert self._answer.headers["Content-Type"].startswith("text/event-stream")

    def messages(self) -> Iterator[tuple[str, str, Any]]:
        """id, event, data of each, until the server closes."""
        fields: dict[bytes, bytes] = {}
        while line := self._answer.readline():
            name, _, value = line.rstrip(b"\n").partition(b": ")
            if name:
                fields[name] = value
            elif fields.keys() == {b"id", b"event", b"data"}:
                data = msgspec.json.decode(fields[b"data"])
                yield fields[b"id"].decode(), fields[b"event"].decode(), data
                fields = {}

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


Follow = Callable[..., Stream]


@pytest.fixture
def follow(server: Server) -> Iterator[Follow]:
    """Opens streams that are closed with the test."""
    found: list[Stream] = []

    def one(path: str, last: str = "", token: str = "") -> Stream:
        found.append(Stream(server, path, last, token))
        return found[-1]

    yield one
    for stream in found:
        stream.close()


def test_a_log_is_streamed_while_it_grows_and_ends(
    server: Server, follow: Follow, spec: MakeSpec
) -> None:
    server.start()
    client = server.client
    client.submit(spec("say", "hello\r\n\n"))
    view = client.wait("t1", {"running"}, LIMIT_S)
    stream = follow("/tasks/t1/log/0/stream")
    messages = stream.messages()
    assert next(messages) == ("1:8", "log", "hello\r\n\n")
    with Path(view.ranks[0].log).open("ab", buffering=0) as file:
        file.write("naïve".encode()[:3])
        assert next(messages) == ("1:10", "log", "na")  # half a character is held back
        file.write("naïve".encode()[3:])
        assert next(messages) == ("1:14", "log", "ïve")
        file.write(b"\xff")
        assert next(messages) == ("1:15", "log", "�")
    client.stop("t1")
    assert list(messages) == [("1:15", "end", {"attempt": 1})]
    again = follow("/tasks/t1/log/0/stream", last="1:8")
    assert list(again.messages()) == [
        ("1:15", "log", "naïve�"),
        ("1:15", "end", {"attempt": 1}),
    ]
    after = follow("/tasks/t1/log/0/stream?attempt=1&offset=14")
    assert next(after.messages()) == ("1:15", "log", "�")


def test_a_reconnect_goes_on_in_the_attempt_that_it_was_in(
    server: Server, follow: Follow, spec: MakeSpec
) -> None:
    server.start()
    client = server.client
    client.submit(spec("say", "one"))
    client.wait("t1", {"running"}, LIMIT_S)
    client.suspend("t1")
    client.wait("t1", {"suspended"}, LIMIT_S)
    client.resume("t1")
    client.wait("t1", {"running"}, LIMIT_S)
    old = follow("/tasks/t1/log/0/stream", last="1:1")
    assert list(old.messages()) == [("1:3", "log", "ne"), ("1:3", "end", {"attempt": 1})]
    assert next(follow("/tasks/t1/log/0/stream").messages()) == ("2:3", "log", "one")


def test_the_history_is_streamed_and_continues_behind_an_id(
    server: Server, follow: Follow, spec: MakeSpec
) -> None:
    server.start()
    client = server.client
    messages = follow("/events/stream").messages()
    client.submit(spec("finish"))
    found = [next(messages) for _ in range(7)]
    assert [kind for _, kind, _ in found] == [
        "submitted", "queued", "starting", "rank_started", "running", "rank_exited", "gang_ended",
    ]  # fmt: skip
    again = follow("/events/stream?task=t1", last=found[2][0]).messages()
    assert next(again) == found[3]
    assert [int(id) for id, _, _ in found] == [data["seq"] for _, _, data in found]


def test_streams_end_with_the_server(server: Server, follow: Follow, spec: MakeSpec) -> None:
    server.start()
    server.client.submit(spec("say", "x"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    streams = [follow(path) for path in ("/tasks/t1/log/0/stream", "/events/stream")]
    ends: list[list[Any]] = []
    readers = [
        threading.Thread(target=lambda s=s: ends.append(list(s.messages()))) for s in streams
    ]
    for reader in readers:
        reader.start()
    server.client.shutdown(keep=True)
    for reader in readers:
        reader.join(LIMIT_S)
    assert server.wait() == 0
    assert len(ends) == 2
    assert "end" not in [kind for found in ends for _, kind, _ in found]  # it goes on elsewhere


def test_a_stream_ends_once_its_token_is_revoked(
    server: Server, follow: Follow, spec: MakeSpec, tmp_path: Path
) -> None:
    server.start()
    ada = Somebody(server, tmp_path, "ada", "submit")
    ada.client.submit(spec("say", "x"))
    view = ada.client.wait("t1", {"running"}, LIMIT_S)
    messages = follow("/tasks/t1/log/0/stream", token=ada.made.token).messages()
    assert next(messages) == ("1:1", "log", "x")
    Administration(server.client).revoke_token(ada.made.view.id)
    with Path(view.ranks[0].log).open("ab") as file:
        file.write(b"secret")
    assert list(messages) == []


def test_an_id_that_no_stream_has_sent_is_refused() -> None:
    assert log_place(None, 3, 7) == (3, 7)
    assert log_place("2:5", 3, 7) == (2, 5)
    assert event_place("9", 3) == 9
    for bad in ("x", "1", "1:", "0:1", "1:-1", "1:2:3", "¹:1"):
        with pytest.raises(ConfigError, match="Last-Event-ID"):
            log_place(bad, None, 0)
    with pytest.raises(ConfigError, match="Last-Event-ID"):
        event_place("1:2", 0)


@pytest.mark.parametrize("text", ["", "plain", "ä€𐍈", "a€"])
@pytest.mark.parametrize("cut", range(12))
def test_characters_are_never_cut(text: str, cut: int) -> None:
    data = text.encode()
    first, used = _whole(data[:cut], last=False)
    rest, more = _whole(data[used:], last=True)
    assert first + rest == text
    assert used + more == len(data)


def test_metrics_tell_of_tasks_nodes_waits_and_streams(
    server: Server, follow: Follow, spec: MakeSpec
) -> None:
    server.start()
    client = server.client
    client.submit(spec("hold", nodes=2))
    client.wait("t1", {"running"}, LIMIT_S)
    client.submit(spec("hold"))
    stream = follow("/events/stream?after=3")
    next(stream.messages())
    token = client.home.token.read_text()
    status, body = ask(server, "GET", "/metrics", token)
    lines = body.decode().splitlines()
    assert status == 200
    for line in (
        'fireflyer_hai_queue_length{priority="normal"} 1.0',
        'fireflyer_hai_tasks{state="running"} 1.0',
        'fireflyer_hai_nodes{state="busy"} 2.0',
        "fireflyer_hai_occupancy 1.0",
        'fireflyer_hai_followers{kind="events"} 1.0',
        "fireflyer_hai_wait_seconds_count 1.0",
        'fireflyer_hai_events_total{kind="submitted"} 2.0',
        'fireflyer_hai_request_seconds_count{route="/tasks",status="200"} 2.0',
    ):
        assert line in lines, body.decode()
    client.suspend("t1")
    client.wait("t1", {"suspended"}, LIMIT_S)
    client.submit(spec("fail", "1"))
    client.stop("t2")
    client.wait("t3", {"finished"}, LIMIT_S)
    lines = ask(server, "GET", "/metrics", token)[1].decode().splitlines()
    assert "fireflyer_hai_suspend_seconds_count 1.0" in lines
    assert 'fireflyer_hai_restarts_total{cause="failed"} 1.0' in lines
