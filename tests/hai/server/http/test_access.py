"""Who may call what: every route, users, groups, tokens, quotas, and the audit log."""

import http.client
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hai.server.conftest import Server
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError, NoSuchTask, PermissionDenied, Unauthenticated
from fireflyer.hai.client import Client
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import Needs, owner
from fireflyer.hai.http.responses import route_scopes
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.identity import (
    SCOPES,
    Identity,
    Quota,
    Scope,
    TokenRequest,
    hash_secret,
    split_token,
)
from fireflyer.hai.server import api

MakeSpec = Callable[..., TaskSpec]

ADMIN = Identity(user="root", token="home", scope="admin")

PUBLIC: dict[str, Scope] = {
    "GET /tasks": "read",
    "GET /task-lines": "read",
    "POST /tasks": "submit",
    "GET /tasks/{task}": "read",
    "POST /tasks/{task}/stop": "submit",
    "POST /tasks/{task}/suspend": "submit",
    "POST /tasks/{task}/resume": "submit",
    "POST /tasks/{task}/lease": "submit",
    "GET /tasks/{task}/log/{rank}": "read",
    "GET /tasks/{task}/log/{rank}/stream": "read",
    "GET /events": "read",
    "GET /events/stream": "read",
    "GET /nodes": "read",
    "POST /nodes/{node}/drain": "operate",
    "POST /nodes/{node}/undrain": "operate",
    "POST /nodes/{node}/validate": "operate",
    "GET /nodes/{node}/validations": "read",
    "GET /windows": "read",
    "POST /windows": "operate",
    "DELETE /windows/{window}": "operate",
    "GET /tasks/{task}/why": "read",
    "GET /faults": "read",
    "GET /ledger": "read",
    "GET /series": "read",
    "POST /observations": "operate",
    "GET /workspaces": "read",
    "POST /workspaces": "submit",
    "POST /workspaces/blobs": "submit",
    "POST /workspaces/prune": "operate",
    "GET /workspaces/{name}": "read",
    "GET /workspaces/{name}/blobs/{sha256}": "read",
    "POST /venvs": "submit",
    "GET /metrics": "operate",
    "POST /shutdown": "admin",
    "GET /users": "admin",
    "POST /users": "admin",
    "POST /users/{name}/disable": "admin",
    "POST /users/{name}/enable": "admin",
    "GET /groups": "admin",
    "POST /groups": "admin",
    "POST /groups/{group}/members/{user}": "admin",
    "DELETE /groups/{group}/members/{user}": "admin",
    "GET /tokens": "read",
    "POST /tokens": "read",
    "DELETE /tokens/{id}": "read",
    "GET /quotas": "read",
    "POST /quotas": "admin",
    "GET /audit": "admin",
    "GET /whoami": "read",
    "POST /sign-in-codes": "read",
}


class Somebody:
    """A user of a server with a token of a scope."""

    def __init__(self, server: Server, folder: Path, name: str, scope: Scope) -> None:
        admin = Administration(server.client)
        if name not in [user.name for user in admin.users()]:
            admin.add_user(name)
        self.made = admin.create_token(TokenRequest(user=name, scope=scope))
        self._server = server
        file = folder / f"{name}.{self.made.view.id}"
        file.write_text(self.made.token + "\n")
        file.chmod(0o600)
        port = server.client.server().port
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FIREFLYER_SERVER", f"http://127.0.0.1:{port}")
            patch.setenv("FIREFLYER_TOKEN_FILE", str(file))
            self.client = Client()
        self.admin = Administration(self.client)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        return ask(self._server, method, path, self.made.token, body)


def ask(
    server: Server, method: str, path: str, token: str | None, body: bytes | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.client.server().port, timeout=LIMIT_S
    )
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read() if "/stream" not in path else b""
    finally:
        connection.close()


@pytest.fixture
def somebody(server: Server, tmp_path: Path) -> Callable[[str, Scope], Somebody]:
    server.start()
    return lambda name, scope: Somebody(server, tmp_path, name, scope)


# -- every route -------------------------------------------------------------------------------------


@pytest.fixture
def routes(tmp_path: Path) -> Iterator[dict[str, Scope]]:
    """Of the application itself: "METHOD path" and the scope it needs."""
    home = Home(tmp_path / "routes")
    home.create()
    store = Store(home.database)
    controller = Controller(home, store, NoEngine())
    accounts = Accounts(store.database)
    app = api.build(controller, store, accounts, Sessions(accounts), lambda _keep: None)
    found = {}
    for method, path, calls in route_scopes(app):
        (scope,) = [call.scope for call in calls if isinstance(call, Needs)]
        found[f"{method} {path}"] = scope
    yield found
    store.close()


class NoEngine:
    def nodes(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody calls {name}")


def test_every_route_says_which_scope_it_needs(routes: dict[str, Scope]) -> None:
    assert routes == PUBLIC


def concrete(route: str) -> tuple[str, str]:
    method, path = route.split()
    values = {"task": "t1", "rank": "0", "name": "ada", "user": "ada", "group": "g", "id": "0" * 12}
    values |= {"node": "n0", "window": "w1", "sha256": "0" * 64}
    return method, re.sub(r"\{(\w+)\}", lambda found: values[found[1]], path)


def test_no_route_answers_without_a_token_or_with_a_smaller_scope(
    server: Server, somebody: Callable[[str, Scope], Somebody], spec: MakeSpec
) -> None:
    people = {scope: somebody("zoe", scope) for scope in SCOPES}
    people["submit"].client.submit(spec("hold"))
    id, secret = split_token(people["admin"].made.token) or ("", "")
    wrong = f"hai_{id}_{secret[:-1]}{'A' if secret[-1] != 'A' else 'B'}"
    for route, needed in PUBLIC.items():
        method, path = concrete(route)
        for token in (None, "", "hai_", wrong, f"hai_{'0' * 12}_{secret}", secret):
            status, body = ask(server, method, path, token, b"{}")
            assert (status, b"Unauthenticated" in body) == (401, "/stream" not in path), route
        for scope, person in people.items():
            if SCOPES.index(scope) < SCOPES.index(needed):
                assert person.ask(method, path, b"{}")[0] == 403, (route, scope)
            elif route not in ("POST /shutdown", "GET /events/stream"):
                assert person.ask(method, path, b"{}")[0] not in (401, 403), (route, scope)
    for path in ("/", "/docs", "/openapi.json", "/nothing", "/tasks/"):
        assert ask(server, "GET", path, None)[0] == 401
        assert people["read"].ask("GET", path)[0] == (200 if path == "/openapi.json" else 404)


def test_another_users_task_is_as_if_it_were_not_there(
    server: Server, somebody: Callable[[str, Scope], Somebody], spec: MakeSpec
) -> None:
    ada, bob = somebody("ada", "submit"), somebody("bob", "submit")
    chief = somebody("eve", "operate")
    assert ada.client.submit(spec("say", "mine")).user == "ada"
    ada.client.wait("t1", {"running"}, LIMIT_S)
    bob.client.submit(spec("hold"))
    routes = [concrete(route) for route in PUBLIC if "{task}" in route]
    assert len(routes) == 8
    lease = {"attempt": 1, "held": 0, "lease": {"generation": 1, "members": ["m"], "token": "x"}}
    queries = ("/events?task=t1", "/events/stream?task=t1", "/ledger?task=t1")
    for method, path in [*routes, *(("GET", path) for path in queries)]:
        body = msgspec.json.encode(lease) if "lease" in path else None
        status, text = bob.ask(method, path, body)
        missing, other = bob.ask(method, path.replace("t1", "t77"), body)
        assert (status, missing) == (404, 404), path
        assert text.replace(b"t1", b"t77") == other
    assert ada.client.task("t1").state == "running"
    assert [view.id for view in bob.client.tasks()] == ["t2"]
    assert {event.task for event in bob.client.events()} == {"t2"}
    assert [node.task for node in bob.client.nodes()] == ["*", "t2"]
    assert [view.id for view in chief.client.tasks()] == ["t1", "t2"]
    assert chief.client.read_log("t1", 0)[0] == b"mine"
    assert chief.client.stop("t1").reason == "stop requested"
    with pytest.raises(NoSuchTask, match="no task 't1' here"):
        bob.client.stop("t1")


def test_the_ledger_of_others_is_an_operators(
    server: Server, somebody: Callable[[str, Scope], Somebody], spec: MakeSpec
) -> None:
    ada, bob = somebody("ada", "submit"), somebody("bob", "read")
    chief = somebody("eve", "operate")
    admin = Administration(server.client)
    admin.add_group("vision")
    admin.join("vision", "ada")
    for group in ("", "vision"):
        made = ada.client.submit(spec("finish", group=group))
        ada.client.wait(made.id, {"finished"}, LIMIT_S)
    server.client.submit(spec("hold"))
    assert ada.client.ledger().tasks.keys() == {"t1", "t2"}
    assert ada.client.ledger(user="ada", group="vision").tasks.keys() == {"t2"}
    assert bob.client.ledger().tasks == {}
    for asked in ({"user": "ada"}, {"cluster": True}):
        with pytest.raises(PermissionDenied, match="needs a token with scope operate"):
            bob.client.ledger(**asked)
    with pytest.raises(NoSuchTask, match="no task 't1' here"):
        bob.client.ledger("t1")
    books = chief.client.ledger(user="ada")
    assert books.tasks.keys() == {"t1", "t2"}
    assert books.total.whole == sum(one.whole for one in books.tasks.values())
    with pytest.raises(ConfigError, match="user 'nobody' does not exist"):
        chief.client.ledger(user="nobody")
    with pytest.raises(ConfigError, match="group 'none' does not exist"):
        chief.client.ledger(group="none")
    with pytest.raises(ConfigError, match="expected a time later than since"):
        chief.client.ledger(since=1e11)
    everybody = chief.client.ledger(cluster=True)
    assert everybody.tasks.keys() == {"t1", "t2", "t3"}
    assert everybody.cluster is not None
    assert everybody.cluster.whole == sum(everybody.cluster.parts.values())
    assert chief.client.ledger("t3", until=1.0).total.whole == 0
    with pytest.raises(ConfigError, match="expected a time later than since"):
        chief.client.ledger(since=2.0, until=1.0)


def test_the_homes_own_user_needs_no_account(server: Server, spec: MakeSpec) -> None:
    server.start()
    assert server.client.submit(spec("finish")).user == owner()
    who = Administration(server.client).whoami()
    assert (who.user, who.token, who.scope) == (owner(), "home", "admin")


# -- tokens ------------------------------------------------------------------------------------------


def test_a_revoked_or_expired_token_or_a_disabled_user_is_out_at_once(
    server: Server, somebody: Callable[[str, Scope], Somebody], monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, again = somebody("ada", "submit"), somebody("ada", "submit")
    admin = Administration(server.client)
    assert ada.client.tasks() == []
    admin.revoke_token(ada.made.view.id)
    with pytest.raises(Unauthenticated, match=f"token {ada.made.view.id} of ada was revoked"):
        ada.client.tasks()
    assert again.client.tasks() == []
    admin.disable_user("ada")
    with pytest.raises(Unauthenticated, match="was revoked"):
        again.client.tasks()
    admin.enable_user("ada")
    assert again.client.tasks() == []
    server.kill()
    server.start()
    assert [token.revoked is None for token in admin.tokens()] == [False, True]


def test_a_token_expires(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = Accounts(database)
    accounts.add_user("ada")
    made = accounts.create_token(TokenRequest(user="ada", days=2), ADMIN)
    forever = accounts.create_token(TokenRequest(user="ada", days=None), ADMIN)
    assert accounts.identify(made.token, "").user == "ada"
    later = made.view.created + 2 * 86400
    monkeypatch.setattr("fireflyer.hai.http.access.time.time", lambda: later)
    with pytest.raises(Unauthenticated, match="has expired"):
        accounts.identify(made.token, "")
    assert accounts.identify(forever.token, "").user == "ada"
    assert (accounts.valid(made.view.id), accounts.valid(forever.view.id)) == (False, True)


def test_a_user_makes_and_revokes_own_tokens_that_may_no_more(
    somebody: Callable[[str, Scope], Somebody],
) -> None:
    ada, bob = somebody("ada", "submit"), somebody("bob", "read")
    made = ada.admin.create_token(TokenRequest(user="ada", scope="read", days=None, note="ci"))
    assert made.view.expires == ada.made.view.expires
    for asked in (
        TokenRequest(user="ada", scope="operate"),
        TokenRequest(user="bob", scope="read"),
    ):
        with pytest.raises(PermissionDenied, match="only an admin"):
            ada.admin.create_token(asked)
    assert {token.user for token in ada.admin.tokens()} == {"ada"}
    with pytest.raises(ConfigError, match="no token"):
        bob.admin.revoke_token(made.view.id)
    assert ada.admin.revoke_token(made.view.id).revoked is not None


def test_only_the_hash_of_a_token_is_kept(
    server: Server, somebody: Callable[[str, Scope], Somebody], spec: MakeSpec
) -> None:
    ada = somebody("ada", "admin")
    ada.client.submit(spec("finish"))
    ada.ask("GET", "/tasks?token=" + ada.made.token)
    parts = split_token(ada.made.token)
    assert parts is not None
    ask(server, "GET", "/tasks", f"hai_{'0' * 12}_{parts[1]}")
    kept = b"".join(path.read_bytes() for path in server.home.rglob("*") if path.is_file())
    kept += server.output().encode()
    assert parts[1].encode() not in kept
    server.client.shutdown()
    home = (server.home / "hai.sqlite").read_bytes()
    assert hash_secret(parts[1]).encode() in home
    assert parts[1].encode() not in home + server.output().encode()


# -- accounts ----------------------------------------------------------------------------------------


def test_accounts_are_the_same_after_a_restart(database: Database) -> None:
    first = Accounts(database)
    for name in ("ada", "bob"):
        first.add_user(name)
    first.add_group("vision")
    first.join("vision", "ada")
    first.join("vision", "ada")
    first.join("vision", "bob")
    first.leave("vision", "bob")
    first.disable_user("bob", disabled=True)
    made = first.create_token(TokenRequest(user="ada", scope="operate"), ADMIN)
    first.set_quota(Quota(user="ada", priority="high", gpus=8))
    first.set_quota(Quota(user="ada", priority="high", gpus=16, nodes=2))
    first.set_quota(Quota(group="vision", nodes=4))
    first.set_quota(Quota(group="vision"))
    second = Accounts(database)
    assert second.users() == first.users()
    assert [(user.name, user.disabled, user.groups) for user in second.users()] == [
        ("ada", False, ("vision",)),
        ("bob", True, ()),
    ]
    assert second.groups() == first.groups()
    assert second.tokens(None) == [made.view]
    assert second.identify(made.token, "") == first.identify(made.token, "")
    assert Store(database).quotas() == [Quota(user="ada", priority="high", gpus=16, nodes=2)]


@pytest.mark.parametrize("name", ["", "Ada", "a b", "../x", "a/b", "-a", "a" * 64, "é", "a\n"])
def test_names_that_are_none(database: Database, name: str) -> None:
    accounts = Accounts(database)
    for act in (accounts.add_user, accounts.add_group):
        with pytest.raises(ConfigError, match="expected 1 to 63 characters"):
            act(name)
    assert accounts.users() == []


def test_what_is_not_there_is_named(database: Database) -> None:
    accounts = Accounts(database)
    accounts.add_user("ada")
    for act, message in (
        (lambda: accounts.add_user("ada"), "user ada exists already"),
        (lambda: accounts.disable_user("bob", disabled=True), "user 'bob' does not exist"),
        (lambda: accounts.join("g", "ada"), "group 'g' does not exist"),
        (lambda: accounts.set_quota(Quota(user="bob", gpus=1)), "user 'bob' does not exist"),
        (lambda: accounts.set_quota(Quota(priority="A B", gpus=1)), "expected 1 to 63"),
        (
            lambda: accounts.create_token(TokenRequest(user="bob"), ADMIN),
            "user 'bob' does not exist",
        ),
        (lambda: accounts.revoke_token("x", ADMIN), "no token 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            act()


def test_quotas_are_shown_to_those_whom_they_concern(
    server: Server, somebody: Callable[[str, Scope], Somebody]
) -> None:
    ada, bob = somebody("ada", "read"), somebody("bob", "read")
    admin = Administration(server.client)
    for group in ("a", "b"):
        admin.add_group(group)
    admin.join("a", "ada")
    limits = [
        Quota(nodes=9), Quota(group="a", nodes=5), Quota(group="b", nodes=6), Quota(user="ada", gpus=1),
    ]  # fmt: skip
    for quota in limits:
        admin.set_quota(quota)
    assert admin.quotas() == limits
    assert ada.admin.quotas() == [limits[0], limits[1], limits[3]]
    assert bob.admin.quotas() == [limits[0]]


# -- the audit log -----------------------------------------------------------------------------------


def test_the_audit_log_has_who_did_what_and_what_was_refused(
    server: Server, somebody: Callable[[str, Scope], Somebody], spec: MakeSpec
) -> None:
    ada, bob = somebody("ada", "submit"), somebody("bob", "submit")
    ada.client.submit(spec("hold"))
    with pytest.raises(NoSuchTask):
        bob.client.stop("t1")
    with pytest.raises(PermissionDenied):
        bob.admin.add_user("eve")
    ada.client.wait("t1", {"running"}, LIMIT_S)
    ada.client.stop("t1")
    with pytest.raises(ConfigError):
        ada.client.submit(spec(script="/nowhere"))
    ada.client.tasks()
    found = Administration(server.client).audit()
    own = [(e.user, e.action, e.object, e.outcome) for e in found if e.token != "home"]
    assert own == [
        ("ada", "submit", "t1", "ok"),
        ("bob", "stop", "t1", "NoSuchTask"),
        ("bob", "add_user", "/users", "PermissionDenied"),
        ("ada", "stop", "t1", "ok"),
        ("ada", "submit", "", "ConfigError"),
    ]
    assert [(e.user, e.action, e.object) for e in found if e.token == "home"] == [
        (owner(), "user.add", "user ada"),
        (owner(), "token.create", "user ada scope submit"),
        (owner(), "user.add", "user bob"),
        (owner(), "token.create", "user bob scope submit"),
    ]
    assert {e.address for e in found} == {"127.0.0.1"}
    assert [e.seq for e in found] == list(range(1, len(found) + 1))
    assert Administration(server.client).audit(after=found[-1].seq) == []


def test_a_change_and_its_line_are_one_transaction(database: Database) -> None:
    accounts, trail = Accounts(database), AuditLog(database)

    class Crash(Exception):
        """Stands for a kill before the commit."""

    def die(_connection: object) -> None:
        raise Crash

    database.fence = die
    with pytest.raises(Crash), trail.change(ADMIN, "user.add", "user ada"):
        accounts.add_user("ada")
    database.fence = lambda _connection: None
    assert (Accounts(database).users(), trail.entries(0, 10)) == ([], [])
    with trail.change(ADMIN, "user.add", "user ada"):
        accounts.add_user("ada")
        accounts.add_user("bob")
    assert [entry.object for entry in trail.entries(0, 10)] == ["user ada"]
