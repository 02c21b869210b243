"""Who is let in, how long, and what a page of another site can do: nothing."""

import http.client
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from starlette.responses import Response
from tests.hai.dashboard.conftest import Visitor
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import NoEngine, Somebody, ask
from tests.hai.server.http.test_public import public
from tests.ports import take_ports
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.dashboard import app as dashboard
from fireflyer.hai.dashboard.auth_middleware import HEADERS, OPEN, AuthMiddleware, next_page
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import Needs
from fireflyer.hai.http.responses import route_scopes
from fireflyer.hai.http.throttle import Throttle
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.identity import SCOPES, Scope

MakeSpec = Callable[..., TaskSpec]
MakeVisitor = Callable[..., Visitor]

PAGES: dict[str, Scope] = {
    "GET /dashboard": "read",
    "GET /dashboard/map": "read",
    "GET /dashboard/queue": "read",
    "GET /dashboard/tasks": "read",
    "GET /dashboard/tasks/{task}": "read",
    "GET /dashboard/tasks/{task}/stop": "submit",
    "GET /dashboard/tasks/{task}/log/{rank}/text": "read",
    "GET /dashboard/tasks/{task}/log/{rank}/stream": "read",
    "GET /dashboard/tasks/{task}/profile/{attempt}/{name}": "read",
    "GET /dashboard/changes/stream": "read",
    "GET /dashboard/nodes": "read",
    "GET /dashboard/nodes/{node}": "read",
    "GET /dashboard/validations": "read",
    "GET /dashboard/validations/{node}": "read",
    "GET /dashboard/ledger": "read",
    "GET /dashboard/use": "read",
    "GET /dashboard/users": "admin",
    "POST /dashboard/sign-out": "read",
    "POST /dashboard/tasks/{task}/stop": "submit",
    "POST /dashboard/tasks/{task}/suspend": "submit",
    "POST /dashboard/tasks/{task}/resume": "submit",
    "POST /dashboard/nodes/{node}/drain": "operate",
    "POST /dashboard/nodes/{node}/undrain": "operate",
}

WITHOUT_SESSION = {
    "GET /dashboard/sign-in",
    "POST /dashboard/sign-in",
    "GET /dashboard/static/dashboard.css",
    "GET /dashboard/static/dashboard.js",
}


def concrete(route: str) -> tuple[str, str]:
    method, path = route.split()
    values = {"task": "t1", "rank": "0", "node": "n0", "attempt": "1", "name": "report.html"}
    return method, re.sub(r"\{(\w+)\}", lambda found: values[found[1]], path)


# -- every route -------------------------------------------------------------------------------------


@pytest.fixture
def scopes(tmp_path: Path) -> Iterator[dict[str, Scope | None]]:
    """Of the application itself: "METHOD path" and the scope it needs; None: it says none."""
    home = Home(tmp_path / "routes")
    home.create()
    store = Store(home.database)
    controller = Controller(home, store, NoEngine())
    accounts = Accounts(store.database)
    app = dashboard.build(controller, store, accounts, Sessions(accounts), Throttle())
    found: dict[str, Scope | None] = {}
    for method, path, calls in route_scopes(app):
        needed = [call.scope for call in calls if isinstance(call, Needs)]
        found[f"{method} {path}"] = needed[0] if needed else None
    yield found
    store.close()


def test_every_route_says_which_scope_it_needs(scopes: dict[str, Scope | None]) -> None:
    assert scopes == {**PAGES, **dict.fromkeys(WITHOUT_SESSION)}
    assert {route.split()[1] for route in WITHOUT_SESSION} == OPEN


def test_no_page_without_a_session(server: Server) -> None:
    server.start()
    token = server.client.home.token.read_text()
    for cookie in ("", "fireflyer=x", f"fireflyer-{server.client.server().port}=x"):
        stranger = Visitor(server, cookie)
        for route in PAGES:
            method, path = concrete(route)
            for bearer in ("", f"Bearer {token}"):
                form: dict[str, str] | None = {} if method == "POST" else None
                answer = stranger.ask(method, path, form, authorization=bearer)
                if method == "POST" or path.endswith("/stream"):
                    assert (answer.status, answer.text) == (401, "sign in first"), route
                else:
                    assert answer.status == 303, route
                    assert answer.headers["Location"].startswith("/dashboard/sign-in")
        assert stranger.get("/dashboard/nothing").status == 303
        assert stranger.get("/dashboard/static/../tasks").status in (303, 404)
        assert stranger.get("/dashboardx").status == 401


def test_a_smaller_scope_is_refused_and_the_log_knows(
    server: Server, visitor: MakeVisitor, spec: MakeSpec
) -> None:
    people = {scope: visitor("zoe", scope) for scope in SCOPES}
    for route, needed in PAGES.items():
        method, path = concrete(route)
        for scope, person in people.items():
            if SCOPES.index(scope) >= SCOPES.index(needed):
                continue
            form = {"csrf": person.get("/dashboard").csrf} if method == "POST" else None
            assert person.ask(method, path, form).status == 403, (route, scope)
    refused = [e for e in Administration(server.client).audit() if e.outcome == "PermissionDenied"]
    assert {e.action for e in refused} == {"stop", "suspend", "resume", "drain", "undrain"}


def test_a_session_opens_no_api(visitor: MakeVisitor) -> None:
    owner = visitor()
    for path in ("/tasks", "/nodes", "/metrics", "/openapi.json"):
        assert owner.get(path).status == 401
    assert owner.ask("POST", "/shutdown", {}).status == 401


def test_a_browser_at_the_root_is_led_to_the_pages(server: Server) -> None:
    server.start()
    answer = Visitor(server).get("/", accept="text/html,*/*")
    assert (answer.status, answer.headers["Location"]) == (303, "/dashboard")
    assert Visitor(server).get("/").status == 401


# -- signing in and out ------------------------------------------------------------------------------


def test_signing_in_by_token(server: Server, tmp_path: Path) -> None:
    server.start()
    token = Somebody(server, tmp_path, "ada", "submit").made.token
    visitor = Visitor(server)
    answer = visitor.ask(
        "POST", "/dashboard/sign-in", {"token": f" {token} ", "next": "/dashboard/tasks?state=over"}
    )
    assert (answer.status, answer.headers["Location"]) == (303, "/dashboard/tasks?state=over")
    flags = answer.headers["Set-Cookie"].lower().split("; ")
    assert {"httponly", "samesite=strict", "path=/dashboard"} <= set(flags)
    assert not {"secure", "domain"} & {flag.partition("=")[0] for flag in flags}
    assert token.rpartition("_")[2] not in answer.headers["Set-Cookie"]
    page = visitor.get("/dashboard")
    assert page.status == 200
    assert "ada" in page.text
    assert Administration(server.client).audit()[-1].action == "sign_in"


def test_behind_tls_the_cookie_is_secure(tmp_path: Path) -> None:
    store = Store(tmp_path / "hai.sqlite")
    sessions = Sessions(Accounts(store.database))
    answer = Response()
    scope: dict[str, Any] = {"type": "http", "server": ("10.0.0.5", 8443)}
    auth = AuthMiddleware(Response(), Response(), sessions, home=False, secure=True)
    auth.set_cookie(answer, scope, "x")
    text = answer.headers["set-cookie"]
    assert text.startswith("__Secure-fireflyer-8443=x; ")
    assert "; Secure" in text
    assert not auth.admits("home")
    assert auth.admits("0123456789ab")
    store.close()


def test_what_is_no_token_signs_nobody_in(server: Server) -> None:
    server.start()
    visitor = Visitor(server)
    for token in ("", "x", "hai_", f"hai_{'0' * 12}_{'A' * 43}", "é" * 100):
        answer = visitor.sign_in(token)
        assert answer.status == 401, token
        assert 'role="alert"' in answer.text, token
        assert visitor.cookie == "", token


def test_a_link_signs_in_once(server: Server) -> None:
    server.start()
    link = server.client.dashboard_link()
    address, _, code = link.partition("#code=")
    assert address == f"http://127.0.0.1:{server.client.server().port}/dashboard/sign-in"
    first, second = Visitor(server), Visitor(server)
    assert first.sign_in(code).status == 303
    assert second.sign_in(code).status == 401
    assert first.get("/dashboard").status == 200
    secret = first.cookie.partition("=")[2]
    kept = b"".join(path.read_bytes() for path in server.home.rglob("*") if path.is_file())
    kept += server.output().encode()
    assert code.encode() not in kept
    assert secret.encode() not in kept


def test_the_homes_code_is_refused_where_others_are_served_and_still_good(
    server: Server, tmp_path: Path
) -> None:
    server.start()
    Somebody(server, tmp_path, "ada", "submit")
    server.client.shutdown()
    port = take_ports(1)[0]
    server.start(public=public(port=port))
    code = server.client.dashboard_link().partition("#code=")[2]
    outside, inside = Visitor(server), Visitor(server)
    outside.port, outside.host = port, f"127.0.0.1:{port}"
    assert (outside.sign_in(code).status, outside.cookie) == (401, "")
    assert inside.sign_in(code).status == 303
    assert inside.get("/dashboard").status == 200


def test_signing_out(visitor: MakeVisitor) -> None:
    ada, elsewhere = visitor("ada"), visitor("ada")
    before = ada.cookie
    assert ada.post("/dashboard/sign-out").status == 303
    assert ada.cookie == ""
    ada.cookie = before
    assert ada.get("/dashboard").status == 303
    assert elsewhere.get("/dashboard").status == 200


@pytest.mark.parametrize("ending", ["revoke", "disable"])
def test_a_session_ends_with_its_token_also_on_open_streams(
    server: Server, visitor: MakeVisitor, spec: MakeSpec, ending: str
) -> None:
    ada = visitor("ada")
    admin = Administration(server.client)
    (view,) = [token for token in admin.tokens() if token.user == "ada"]
    connection = http.client.HTTPConnection("127.0.0.1", ada.port, timeout=LIMIT_S)
    connection.request("GET", "/dashboard/changes/stream", headers={"Cookie": ada.cookie})
    answer = connection.getresponse()
    assert answer.readline() == b": open\n"
    if ending == "revoke":
        admin.revoke_token(view.id)
    else:
        admin.disable_user("ada")
    server.client.submit(spec("finish"))
    assert b"change" not in answer.read()
    connection.close()
    assert ada.get("/dashboard").status == 303
    assert ada.get("/dashboard/tasks/t1/log/0/stream").status == 401


def test_a_download_ends_with_the_token_and_does_not_look_whole(
    server: Server, visitor: MakeVisitor, spec: MakeSpec
) -> None:
    chief = visitor("eve", "operate")
    server.client.submit(spec("hold"))
    log = server.client.wait("t1", {"running"}, LIMIT_S).ranks[0].log
    size = 48 << 20  # more than the buffers of a connection hold
    Path(log).write_bytes(bytes(range(256)) * (size >> 8))
    admin = Administration(server.client)
    (view,) = [token for token in admin.tokens() if token.user == "eve"]
    connection = http.client.HTTPConnection("127.0.0.1", chief.port, timeout=LIMIT_S)
    connection.request("GET", "/dashboard/tasks/t1/log/0/text", headers={"Cookie": chief.cookie})
    answer = connection.getresponse()
    assert answer.read(1 << 16) == bytes(range(256)) * 256
    admin.revoke_token(view.id)
    with pytest.raises(http.client.IncompleteRead) as broken:
        answer.read()
    assert len(broken.value.partial) < size - (1 << 16)
    connection.close()
    Path(log).write_text("whole")
    assert visitor().get("/dashboard/tasks/t1/log/0/text").text == "whole"


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/", "//evil.example/dashboard", "/dashboard/../tasks", "/dashboard/%2e%2e/x",
        "/tasks", "/dashboard/..//evil.example",
        "/dashboard\\x", "/dashboard//evil", "/dashboardx", "javascript:x", "/dashboard/a b",
    ],
)  # fmt: skip
def test_nobody_is_led_elsewhere(wanted: str) -> None:
    assert next_page(wanted) == "/dashboard"


def test_a_link_of_another_site_asks_once_more(server: Server) -> None:
    server.start()
    stranger = Visitor(server)
    answer = stranger.get("/dashboard/tasks?state=over", sec_fetch_site="cross-site")
    assert answer.status == 200
    assert 'content="0;url=/dashboard/tasks?state=over"' in answer.text
    again = stranger.get("/dashboard/tasks?state=over", sec_fetch_site="same-origin")
    assert again.headers["Location"] == "/dashboard/sign-in?next=/dashboard/tasks%3Fstate%3Dover"
    wild = stranger.get("/dashboard/x%22%3E%3Cb%3E?y=<script>", sec_fetch_site="cross-site")
    assert 'content="0;url=/dashboard"' in wild.text


# -- forms -------------------------------------------------------------------------------------------


def test_a_form_of_another_site_changes_nothing(
    server: Server, visitor: MakeVisitor, spec: MakeSpec
) -> None:
    owner, eve = visitor(), visitor("eve")
    server.client.submit(spec("hold"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    csrf = owner.get("/dashboard").csrf
    path = "/dashboard/tasks/t1/stop"
    wrong = [
        ({"csrf": csrf}, {"origin": "https://evil.example"}),
        ({"csrf": csrf}, {"origin": "null"}),
        ({"csrf": csrf}, {"origin": f"http://127.0.0.1:{owner.port + 1}"}),
        ({"csrf": csrf}, {"origin": ""}),
        ({"csrf": csrf}, {"sec_fetch_site": "cross-site"}),
        ({"csrf": csrf}, {"sec_fetch_site": "same-site"}),
        ({}, {}),
        ({"csrf": ""}, {}),
        ({"csrf": csrf[:-1]}, {}),
        ({"csrf": eve.get("/dashboard").csrf}, {}),
        ({"csrf": "é"}, {}),
    ]
    for form, headers in wrong:
        assert owner.ask("POST", path, form, **headers).status == 403, (form, headers)
    for headers in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}):
        form = {"token": server.client.dashboard_link().partition("#code=")[2]}
        assert Visitor(server).ask("POST", "/dashboard/sign-in", form, **headers).status == 403
    assert owner.ask("GET", path).status == 200  # it asks, and does nothing
    assert server.client.task("t1").state == "running"
    assert owner.ask("POST", path, {"csrf": csrf}, sec_fetch_site="same-origin").status == 303
    server.client.wait("t1", {"stopped"}, LIMIT_S)


def test_what_is_no_form_is_refused(visitor: MakeVisitor, server: Server) -> None:
    owner = visitor()
    large = {"csrf": owner.get("/dashboard").csrf, "x": "y" * 20_000}
    assert owner.ask("POST", "/dashboard/nodes/n0/drain", large).status == 400
    many = {f"f{number}": "" for number in range(50)}
    assert owner.ask("POST", "/dashboard/nodes/n0/drain", many).status == 400
    token = server.client.home.token.read_text()
    assert ask(server, "POST", "/dashboard/sign-in", token, b"{}")[0] in (400, 403)
    assert server.client.nodes()[0].state == "ready"


def test_an_address_with_control_characters_is_refused_in_words(visitor: MakeVisitor) -> None:
    owner = visitor()
    for path in ("tasks?user=%00", "tasks?user=a%1Bb", "map?leaf=%0A", "map?leaf=%C2%85"):
        answer = owner.get(f"/dashboard/{path}")
        assert answer.status == 400, path
        assert "this text of the address has control characters" in answer.text, path
    assert owner.get("/dashboard/tasks?user=" + "a" * 201).status == 400
    assert owner.get("/dashboard/tasks?user=%C3%A9%20%F0%9F%9A%80").status == 200


def test_a_reason_is_a_line_as_the_api_has_it(server: Server, visitor: MakeVisitor) -> None:
    owner = visitor()
    for reason in ("a\0b", "a\x1b[31mb", "a\nb", "a\x9bb", "x" * 501):
        answer = owner.post("/dashboard/nodes/n0/drain", reason=reason)
        assert answer.status == 400, reason
        with pytest.raises(ConfigError) as refused:
            server.client.drain("n0", reason, None)
        assert escape(str(refused.value))[:200] in answer.text, reason
        assert server.client.nodes()[0].state == "ready", reason
    assert owner.post("/dashboard/nodes/n0/drain", reason="x" * 500).status == 303
    assert server.client.nodes()[0].reason == "x" * 500


# -- headers -----------------------------------------------------------------------------------------


def test_every_answer_has_the_policy(visitor: MakeVisitor, server: Server) -> None:
    owner, stranger = visitor(), Visitor(server)
    server.client.nodes()
    answers = [owner.get(path) for path in (
        "/dashboard", "/dashboard/map", "/dashboard/queue", "/dashboard/tasks", "/dashboard/nodes",
        "/dashboard/nodes/n0", "/dashboard/ledger", "/dashboard/users", "/dashboard/tasks/t9",
        "/dashboard/nothing", "/dashboard/tasks?before=x",
    )]  # fmt: skip
    assert [answer.status for answer in answers] == [200] * 8 + [404, 404, 400]
    answers += [stranger.get("/dashboard"), stranger.get("/dashboard/sign-in")]
    answers.append(stranger.ask("POST", "/dashboard/sign-out", {}))
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert answer.headers["Cache-Control"] == "no-store"
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    for name in ("dashboard.css", "dashboard.js"):
        answer = stranger.get(f"/dashboard/static/{name}?v=1")
        assert answer.status == 200
        assert "immutable" in answer.headers["Cache-Control"]
