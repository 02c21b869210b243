"""Authentication of the dashboard, and the headers of all its responses.

A browser sends a cookie, which is valid under /dashboard only. The API accepts no cookie and the
pages accept no bearer token, so no page of another site can make a browser use the API.
"""

import re
from collections.abc import Iterable
from html import escape
from urllib.parse import quote

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fireflyer.hai.dashboard.sessions import LONGEST_S, Sessions
from fireflyer.hai.model.identity import HOME_TOKEN, Identity

ROOT = "/dashboard"
SIGN_IN = f"{ROOT}/sign-in"

OPEN = frozenset({SIGN_IN, f"{ROOT}/static/dashboard.css", f"{ROOT}/static/dashboard.js"})
"""Paths that need no session; a test enumerates the other paths."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response; a route may set a policy of its own. The referrer policy is not
`no-referrer`, because browsers would then send `Origin: null` with a form, and the check of the
form's origin would fail."""

_NEXT = re.compile(
    rf"{ROOT}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*(?:\?[A-Za-z0-9._~*%&=-]*)?", re.ASCII
)


_AGAIN = '<!doctype html><title>Fireflyer</title><meta http-equiv="refresh" content="0;url={0}">\n'
"""Page that answers a link from another site: the page requests the same address again. The browser
sends the cookie only with a request from a page of this server."""


class AuthMiddleware:
    """Routes requests under /dashboard to the pages, all others to the API.

    Args:
        api: the API with its authentication.
        pages: the pages; `request.state` has `who`, `csrf`, `secret` of the session, and `auth`.
        sessions: sessions of this server.
        home: True on a loopback listener, which also admits the home's own user.
        secure: True if browsers connect with TLS.
    """

    def __init__(
        self, api: ASGIApp, pages: ASGIApp, sessions: Sessions, *, home: bool, secure: bool
    ) -> None:
        self._api = api
        self._pages = pages
        self._sessions = sessions
        self._home = home
        self._secure = secure
        self._cookie = "__Secure-fireflyer" if secure else "fireflyer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
        elif scope["path"] == ROOT or scope["path"].startswith(f"{ROOT}/"):
            await self._enter(scope, receive, _headed(send))
        elif scope["path"] == "/" and _from_a_browser(scope["headers"]):
            await RedirectResponse(ROOT, 303)(scope, receive, _headed(send))
        else:
            await self._api(scope, receive, send)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["auth"] = self
        secret = self._secret(scope)
        session = None if secret is None else self._sessions.find(secret)
        if session is not None and (self._home or session.who.token != HOME_TOKEN):
            address = scope["client"][0] if scope.get("client") else ""
            state["who"] = _at(session.who, address)
            state["csrf"], state["secret"] = session.csrf, secret
        elif scope["path"] not in OPEN:
            await _refusal(scope)(scope, receive, send)
            return
        await self._pages(scope, receive, send)

    def _secret(self, scope: Scope) -> str | None:
        name = f"{self._cookie}{_port(scope)}"
        for text in _values(scope["headers"], b"cookie"):
            found = cookie_parser(text.decode("latin-1")).get(name)
            if found is not None:
                return found
        return None

    # -- called by the pages -----------------------------------------------------------------------

    def admits(self, token: str) -> bool:
        """Returns whether this listener admits a session of this token."""
        return self._home or token != HOME_TOKEN

    def set_cookie(self, response: Response, scope: Scope, secret: str) -> None:
        """Sets the cookie of a new session; "" removes the cookie."""
        response.set_cookie(
            f"{self._cookie}{_port(scope)}", secret, max_age=int(LONGEST_S) if secret else 0,
            path=ROOT, secure=self._secure, httponly=True, samesite="strict",
        )  # fmt: skip


def next_page(wanted: str) -> str:
    """Returns the page to open after signing in: the wanted page if it is in the dashboard, else
    ROOT."""
    return wanted if len(wanted) < 500 and _NEXT.fullmatch(wanted) else ROOT


def _refusal(scope: Scope) -> Response:
    path: str = scope["path"]
    if scope["method"] == "GET" and not path.endswith("/stream"):
        query = scope["query_string"].decode("latin-1")
        wanted = next_page(path + (f"?{query}" if query else ""))
        if b"cross-site" in _values(scope["headers"], b"sec-fetch-site"):
            return HTMLResponse(_AGAIN.format(escape(wanted)))
        target = SIGN_IN if wanted == ROOT else f"{SIGN_IN}?next={quote(wanted, safe='/')}"
        return RedirectResponse(target, 303)
    return PlainTextResponse("sign in first", 401)


def _headed(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sending


def _port(scope: Scope) -> str:
    """Returns a suffix of the cookie's name. Browsers ignore ports when they send cookies, so
    without the suffix two servers of a machine would receive each other's cookies."""
    server = scope.get("server")
    return f"-{server[1]}" if server and server[1] else ""


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _from_a_browser(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(b"text/html" in value for value in _values(headers, b"accept"))


def _at(who: Identity, address: str) -> Identity:
    return msgspec.structs.replace(who, address=address)
