"""The HTTP routes of users, groups, tokens, quotas and the audit log."""

from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.store import Store
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.responses import documented, json, read
from fireflyer.hai.http.streams import Number
from fireflyer.hai.model.identity import (
    AuditEntry,
    Group,
    GroupRequest,
    Identity,
    NewToken,
    Quota,
    TokenRequest,
    TokenView,
    User,
    UserRequest,
)

ENTRIES_PER_ANSWER = 1000


def account_routes(
    app: FastAPI,
    accounts: Accounts,
    store: Store,
    trail: AuditLog,
    quotas_changed: Callable[[], None],
) -> None:
    """Adds these routes to the application. Admins may change all accounts. Other users see their
    own data, and create and revoke their own tokens."""
    needs = needing(trail)
    _user_routes(app, accounts, trail)
    _token_routes(app, accounts, trail)

    @app.get("/quotas", **documented(list[Quota]))
    async def quotas(who: Identity = needs("read")) -> Response:
        """List quotas: all quotas for an operator, else the quotas that apply to you."""
        mine = {""} if who.only else set()
        if who.only:
            known = [user for user in accounts.users() if user.name == who.user]
            mine |= {who.user, *(group for user in known for group in user.groups)}
        return json([q for q in store.quotas() if not mine or (q.user in mine and q.group in mine)])

    @app.post("/quotas", **documented(Quota, Quota))
    async def set_quota(request: Request, who: Identity = needs("admin")) -> Response:
        """Set the quota of a user, group and priority. A quota without gpus and nodes is
        removed."""
        quota = await read(request, Quota, "quota")
        about = " ".join(f"{name} {value}" for name, value in _parts(quota))
        with trail.change(who, "quota.set", about):
            accounts.set_quota(quota)
        quotas_changed()
        return json(quota)

    @app.get("/audit", **documented(list[AuditEntry]))
    async def audit(after: Number = 0, who: Identity = needs("admin")) -> Response:
        """Read at most 1000 lines of the audit log, oldest first."""
        del who
        return json(trail.entries(after, ENTRIES_PER_ANSWER))

    @app.get("/whoami", **documented(Identity))
    async def whoami(who: Identity = needs("read")) -> Response:
        """Show the user and the scope of the request's token."""
        return json(who)


def _parts(quota: Quota) -> list[tuple[str, object]]:
    fields = [(name, getattr(quota, name)) for name in quota.__struct_fields__]
    return [(name, value) for name, value in fields if value not in ("", None)]


def _user_routes(app: FastAPI, accounts: Accounts, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get("/users", **documented(list[User]))
    async def users(who: Identity = needs("admin")) -> Response:
        del who
        return json(accounts.users())

    @app.post("/users", **documented(User, UserRequest))
    async def add_user(request: Request, who: Identity = needs("admin")) -> Response:
        asked = await read(request, UserRequest, "user")
        with trail.change(who, "user.add", f"user {asked.name}"):
            return json(accounts.add_user(asked.name))

    @app.post("/users/{name}/disable", **documented(User))
    async def disable_user(name: str, who: Identity = needs("admin")) -> Response:
        """Disable a user: reject their tokens. Running tasks continue."""
        with trail.change(who, "user.disable", f"user {name[:63]}"):
            return json(accounts.disable_user(name, disabled=True))

    @app.post("/users/{name}/enable", **documented(User))
    async def enable_user(name: str, who: Identity = needs("admin")) -> Response:
        with trail.change(who, "user.enable", f"user {name[:63]}"):
            return json(accounts.disable_user(name, disabled=False))

    @app.get("/groups", **documented(list[Group]))
    async def groups(who: Identity = needs("admin")) -> Response:
        del who
        return json(accounts.groups())

    @app.post("/groups", **documented(Group, GroupRequest))
    async def add_group(request: Request, who: Identity = needs("admin")) -> Response:
        asked = await read(request, GroupRequest, "group")
        with trail.change(who, "group.add", f"group {asked.name}"):
            return json(accounts.add_group(asked.name))

    @app.post("/groups/{group}/members/{user}", **documented(Group))
    async def join(group: str, user: str, who: Identity = needs("admin")) -> Response:
        with trail.change(who, "group.join", f"group {group[:63]} user {user[:63]}"):
            return json(accounts.join(group, user))

    @app.delete("/groups/{group}/members/{user}", **documented(Group))
    async def leave(group: str, user: str, who: Identity = needs("admin")) -> Response:
        with trail.change(who, "group.leave", f"group {group[:63]} user {user[:63]}"):
            return json(accounts.leave(group, user))


def _token_routes(app: FastAPI, accounts: Accounts, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get("/tokens", **documented(list[TokenView]))
    async def tokens(who: Identity = needs("read")) -> Response:
        """List tokens without their secrets: all tokens for an admin, else your own."""
        return json(accounts.tokens(None if who.allows("admin") else who.user))

    @app.post("/tokens", **documented(NewToken, TokenRequest))
    async def create_token(request: Request, who: Identity = needs("read")) -> Response:
        """Create a token; only this response contains its text."""
        asked = await read(request, TokenRequest, "token")
        with trail.change(who, "token.create", f"user {asked.user} scope {asked.scope}"):
            return json(accounts.create_token(asked, who))

    @app.delete("/tokens/{id}", **documented(TokenView))
    async def revoke_token(id: str, who: Identity = needs("read")) -> Response:
        with trail.change(who, "token.revoke", f"token {id[:12]}"):
            return json(accounts.revoke_token(id, who))
