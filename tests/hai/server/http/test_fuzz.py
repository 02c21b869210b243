"""Requests made of the OpenAPI document, and around it: none ends in a 5xx."""

import os
import socket
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import schemathesis
from tests import draws
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import PUBLIC, ask
from tests.waiting import LIMIT_S

EXAMPLES = int(os.environ.get("FIREFLYER_FUZZ_EXAMPLES") or draws.cases(20))
"""Of each operation."""

LEFT_OUT = {"POST /shutdown", "GET /events/stream", "GET /tasks/{task}/log/{rank}/stream"}
"""The end of the server, and what does not end."""


def test_the_document_has_every_route_with_its_answers(server: Server) -> None:
    server.start()
    document = read_document(server)
    found = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert found == PUBLIC.keys()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation["responses"]["200"]["content"]
            (body,) = content.values()
            assert body["schema"], (method, path)
    names = document["components"]["schemas"].keys()
    text = msgspec.json.encode(document).decode()
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names


def read_document(server: Server) -> dict[str, Any]:
    token = server.client.home.token.read_text()
    status, body = ask(server, "GET", "/openapi.json", token)
    assert status == 200
    return msgspec.json.decode(body, type=dict[str, Any])


def test_no_request_of_the_document_ends_in_a_5xx(server: Server, tmp_path: Path) -> None:
    server.start()
    document = read_document(server)
    token = server.client.home.token.read_text()
    for methods in document["paths"].values():
        for parameter in methods.get("get", {}).get("parameters", []):
            if parameter["name"] == "wait_s":
                parameter["schema"]["maximum"] = 0.01
    schema = schemathesis.openapi.from_dict(document)
    base = f"http://127.0.0.1:{server.client.server().port}"
    asked: set[str] = set()
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]  # raises what is wrong with it
        name = f"{operation.method.upper()} {operation.path}"
        if name in LEFT_OUT:
            continue

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def fuzz(case: Any) -> None:
            headers = {"Authorization": f"Bearer {token}"}
            answer = case.call(base_url=base, headers=headers, timeout=70)
            assert answer.status_code < 500, answer.text

        fuzz()
        asked.add(name)
    assert asked == PUBLIC.keys() - LEFT_OUT
    assert server.client.nodes()


def test_a_path_is_never_a_way_out(server: Server) -> None:
    server.start()
    token = server.client.home.token.read_text()
    for target in ("/tasks/..%2f..%2fhome", "/tasks/t1%2f..%2ft2", "/users/..%2f/x"):
        assert ask(server, "GET", target, token)[0] in (404, 405), target


def test_a_rank_is_a_number(server: Server, spec: Any) -> None:
    server.start()
    server.client.submit(spec("say", "x"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    token = server.client.home.token.read_text()
    for rank in ("..", "../0", "%2e%2e%2f0", "-1", "0%00", "99999999999999999999", "0.log"):
        assert ask(server, "GET", f"/tasks/t1/log/{rank}", token)[0] in (400, 404, 409), rank


def test_what_is_no_request_is_refused_and_the_server_stays(server: Server) -> None:
    server.start()
    for request in (
        b"GET /tasks HTTP/1.1\r\n\r\n",
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"GET /tasks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        address = "127.0.0.1", server.client.server().port
        with socket.create_connection(address, LIMIT_S) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert answer.split(b" ")[1:2] in ([], [b"400"], [b"401"], [b"431"]), request
        assert server.client.nodes()
