"""What is refused is written down, and cannot fill a disk."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from tests.hai.dashboard.conftest import Visitor
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import Somebody

from fireflyer.errors import Unauthenticated
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.dashboard.routes import refusal_log
from fireflyer.hai.dashboard.routes.refusal_log import RefusalLog
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.connection import Database
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.model.identity import Identity, NewToken, TokenRequest

MakeVisitor = Callable[..., Visitor]

OWNER = Identity(user="owner", token="home", scope="admin")


def test_a_refused_form_is_a_line_of_the_audit_log(server: Server, visitor: MakeVisitor) -> None:
    eve = visitor("eve", "operate")
    csrf = eve.get("/dashboard").csrf
    evil = "https://evil.example"
    for path in ("/tasks/t1/stop", "/nodes/n0/drain", "/sign-out"):
        assert eve.ask("POST", f"/dashboard{path}", {"csrf": csrf}, origin=evil).status == 403
        assert eve.ask("POST", f"/dashboard{path}", {"csrf": "x"}).status == 403
    found = [e for e in Administration(server.client).audit() if e.outcome == "PermissionDenied"]
    assert [(e.user, e.action, e.object, e.address) for e in found] == [
        ("eve", what, f"/dashboard{path}", "127.0.0.1")
        for what, path in (
            ("stop", "/tasks/t1/stop"), ("drain", "/nodes/n0/drain"), ("sign_out", "/sign-out"),
        )
        for _ in range(2)
    ]  # fmt: skip


def test_a_refused_sign_in_is_a_line_of_one_of_the_logs(server: Server, tmp_path: Path) -> None:
    server.start()
    ada = Somebody(server, tmp_path, "ada", "submit").made
    admin = Administration(server.client)
    admin.revoke_token(ada.view.id)
    wrong = f"{ada.token[:-20]}{'A' * 20}"
    unknown = f"hai_{'0' * 12}_{'A' * 43}"
    stranger = Visitor(server)
    for text in (ada.token, wrong, unknown, "no token"):
        assert stranger.sign_in(text).status == 401
    evil = {"origin": "https://evil.example"}
    assert stranger.ask("POST", "/dashboard/sign-in", {"token": ada.token}, **evil).status == 403
    found = [e for e in admin.audit() if e.action == "sign_in"]
    assert [(e.user, e.token, e.address, e.outcome) for e in found] == [
        ("ada", ada.view.id, "127.0.0.1", "Unauthenticated")
    ] * 2
    lines = [line for line in server.output().splitlines() if "rejected" in line]
    assert len(lines) == 1  # the others are counted until a minute has passed
    assert (
        "rejected sign-ins and forms: 1, the last from 127.0.0.1: the token is missing" in lines[0]
    )
    said = server.output()
    for secret in (ada.token, wrong, unknown):
        assert secret[-20:] not in said


class Harness:
    """Refusals of a database with one user, and what they want to be called for."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(folder / "hai.sqlite")
        accounts = Accounts(self.database)
        accounts.add_user("ada")
        self.made: NewToken = accounts.create_token(TokenRequest(user="ada"), OWNER)
        self.trail = AuditLog(self.database)
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.refusals = RefusalLog(self.trail, accounts, lambda *what: self.later.append(what))
        scope: dict[str, Any] = {"type": "http", "client": ("10.0.0.9", 1), "headers": []}
        self.request = Request(scope)

    def fail(self, text: str, times: int) -> None:
        for _ in range(times):
            self.refusals.sign_in(self.request, text, Unauthenticated("wrong"))

    def lines(self) -> int:
        return len(self.trail.entries(0, 1000))

    def minute(self) -> None:
        ((seconds, call),) = self.later
        assert seconds == refusal_log.MINUTE_S
        self.later.clear()
        call()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    found = Harness(tmp_path)
    yield found
    found.database.close()


def test_both_logs_are_bounded(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fireflyer.hai.dashboard")
    harness.fail(harness.made.token, refusal_log.LINES + 5)
    assert harness.lines() == refusal_log.LINES
    harness.fail("x", 7)
    harness.minute()
    harness.fail("x", 2)
    harness.fail(harness.made.token, 1)
    assert harness.lines() == refusal_log.LINES + 1
    harness.minute()
    harness.minute()
    assert harness.later == []
    harness.fail("x", 1)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"rejected sign-ins and forms: {count}, the last from 10.0.0.9: wrong"
        for count in (1, 11, 2, 1)
    ]
