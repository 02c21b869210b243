"""A visitor: what a browser does with the pages, over plain HTTP."""

import http.client
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest
from tests.hai.server.conftest import (
    Server,
    database,
    forks,
    opened,
    place,
    postgres_of_session,
    postgresql,
    server,
    spec,
)
from tests.hai.server.http.test_access import Somebody
from tests.waiting import LIMIT_S

from fireflyer.hai.model.identity import Scope

__all__ = [
    "database", "forks", "opened", "place", "postgres_of_session", "postgresql", "server", "spec",
]  # fmt: skip


class Answer(msgspec.Struct, frozen=True):
    """Of the server."""

    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.text)
        return "" if found is None else found[1]


class Visitor:
    """Keeps cookies, follows no redirect."""

    def __init__(self, server: Server, cookie: str = "") -> None:
        self.port = server.client.server().port
        self.host = f"127.0.0.1:{self.port}"
        self.cookie = cookie

    def ask(
        self, method: str, path: str, form: Mapping[str, str] | None = None, **headers: str
    ) -> Answer:
        """One request. A form comes with the Origin of this server, unless `origin` says another."""
        sent = {name.replace("_", "-"): value for name, value in headers.items() if value}
        if self.cookie:
            sent["Cookie"] = self.cookie
        body = None
        if form is not None:
            body = urlencode(form)
            sent["Content-Type"] = "application/x-www-form-urlencoded"
            if "origin" not in headers and "sec_fetch_site" not in headers:
                sent["Origin"] = f"http://{self.host}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            if header := answer.headers["Set-Cookie"]:
                ((name, morsel),) = SimpleCookie(header).items()
                self.cookie = f"{name}={morsel.value}" if morsel.value else ""
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, **headers)

    def post(self, path: str, **fields: str) -> Answer:
        """A form of this visitor's own page."""
        return self.ask("POST", path, {"csrf": self.get("/dashboard").csrf, **fields})

    def sign_in(self, token: str) -> Answer:
        return self.ask("POST", "/dashboard/sign-in", {"token": token})


@pytest.fixture
def visitor(server: Server, tmp_path: Path) -> Callable[..., Visitor]:
    """Makes visitors that are signed in: as a user with a scope, or as the home's own user."""

    def make(name: str = "", scope: Scope = "submit") -> Visitor:
        if not server.pid:
            server.start()
        found = Visitor(server)
        if name:
            token = Somebody(server, tmp_path, name, scope).made.token
        else:
            token = server.client.dashboard_link().partition("#code=")[2]
        assert found.sign_in(token).status == 303
        return found

    return make


class Tags(HTMLParser):
    """Every tag of a page, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
