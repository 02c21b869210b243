"""Who asks: users, groups, tokens, scopes, quotas, and lines of the audit log. Pure; cross the API as JSON.

A token is `hai_<id>_<secret>`: the id names its row, of the secret only the SHA-256 is stored. The secret has
256 random bits, so a fast hash without salt is enough.
"""

import hashlib
import hmac
import re
import secrets
from typing import Annotated, Literal

import msgspec

from fireflyer.errors import ConfigError, PermissionDenied

Scope = Literal["read", "submit", "operate", "admin"]

SCOPES: tuple[Scope, ...] = ("read", "submit", "operate", "admin")
"""Each includes those before it: see own tasks, logs and nodes; submit and steer own tasks; see and steer
everybody's; users, groups, tokens, quotas, the audit log, the end of the server."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_TOKEN = re.compile(r"hai_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)

HOME_TOKEN = "home"
"""Stands in the audit log for the token in the home's file."""

MASKED = "*"
"""Stands for another user's task."""

Name = Annotated[str, msgspec.Meta(max_length=63)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request."""

    user: str
    token: str
    """Id of the token."""
    scope: Scope
    address: str = ""

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(scope) <= SCOPES.index(self.scope)

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied where the token's scope is smaller."""
        if not self.allows(scope):
            raise PermissionDenied(
                f"this needs a token with scope {scope}; this one of {self.user} has {self.scope}"
            )

    @property
    def only(self) -> str | None:
        """The user whose tasks alone it sees; None: everybody's."""
        return None if self.allows("operate") else self.user


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One user."""

    name: str
    disabled: bool
    """None of the user's tokens is taken; tasks run on."""
    groups: tuple[str, ...]
    created: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group."""

    name: str
    members: tuple[str, ...]
    created: float


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    id: str
    user: str
    scope: Scope
    note: str
    created: float
    expires: float | None
    revoked: float | None


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was just made: the only time that its text is told."""

    token: str
    view: TokenView


class SignInCode(msgspec.Struct, frozen=True, kw_only=True):
    """Signs one browser in to the dashboard as the user who asked for it."""

    code: str
    seconds: float
    """For so long it is taken, once."""


class UserRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user to make."""

    name: Name


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group to make."""

    name: Name


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to make."""

    user: Name
    scope: Scope = "submit"
    days: Annotated[float, msgspec.Meta(gt=0, le=36_500)] | None = 90.0
    """Until it expires; null: never."""
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much the active tasks of one user, group and priority may hold together.

    The most particular row counts: by user, then by group, then by priority.
    """

    user: Name = ""
    """Empty: each user by himself who has no row of his own."""
    group: Name = ""
    """Empty: each group by itself, and none, without a row of its own."""
    priority: Name = ""
    """A key of model.PRIORITIES; empty: each priority by itself without a row of its own."""
    gpus: Amount | None = None
    """None: no limit. A node without GPUs counts as one."""
    nodes: Amount | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log; never changed, never deleted."""

    seq: int
    wall: float
    user: str
    token: str
    """Id of the token; "home": the home's own."""
    address: str
    action: str
    """e.g. submit, stop, token.create."""
    object: str
    """e.g. t17, user ada."""
    outcome: str
    """ok, or the class of the refusal."""


def check_name(name: str, what: str) -> None:
    """Refuses what is no name of a user, group or priority.

    Raises:
        ConfigError: says what a name is.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name!a}: a name is up to 63 of a-z, 0-9, '.', '_', '-', first a letter or digit"
        )


def new_token() -> tuple[str, str, str]:
    """A fresh token: its id, its whole text, the hash of its secret."""
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return id, f"hai_{id}_{secret}", hash_secret(secret)


def split_token(text: str) -> tuple[str, str] | None:
    """Id and secret; None where it is no token."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1], found[2])


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, hash: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(hash_secret(secret), hash)
