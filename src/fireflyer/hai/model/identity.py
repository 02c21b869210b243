"""Identity data: users, groups, tokens, scopes, quotas, and audit log lines. Pure. The API sends
these structs as JSON.

A token is `hai_<id>_<secret>`. The id names its row; only the SHA-256 of the secret is stored. The
secret has 256 random bits, so a fast hash without salt is enough.
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
"""Scopes; each includes the scopes before it. read: see the user's own tasks and logs, and the
nodes. submit: submit and control the user's own tasks. operate: see and control all users' tasks.
admin: manage users, groups, tokens and quotas, read the audit log, shut down the server."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_TOKEN = re.compile(r"hai_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)

HOME_TOKEN = "home"
"""Id, in an Identity and the audit log, of the token that the home's file `token` contains."""

MASKED = "*"
"""Placeholder for another user's task."""

Name = Annotated[str, msgspec.Meta(max_length=63)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of a request."""

    user: str
    token: str
    """Id of the token."""
    scope: Scope
    address: str = ""

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(scope) <= SCOPES.index(self.scope)

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied if the token's scope is smaller than `scope`."""
        if not self.allows(scope):
            raise PermissionDenied(
                f"this request needs a token with scope {scope}; the token of {self.user} has {self.scope}"
            )

    @property
    def only(self) -> str | None:
        """Returns the only user whose tasks this identity may see; None: all users."""
        return None if self.allows("operate") else self.user


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One user."""

    name: str
    disabled: bool
    """True if the user's tokens are rejected; running tasks continue."""
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
    """A new token; its text is sent only once."""

    token: str
    view: TokenView


class SignInCode(msgspec.Struct, frozen=True, kw_only=True):
    """Code that signs one browser in to the dashboard as the user who requested it."""

    code: str
    seconds: float
    """Lifetime of the code in seconds; the code is valid for one use."""


class UserRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user to create."""

    name: Name


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group to create."""

    name: Name


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to create."""

    user: Name
    scope: Scope = "submit"
    days: Annotated[float, msgspec.Meta(gt=0, le=36_500)] | None = 90.0
    """Days until the token expires; null: never."""
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limit on the GPUs and nodes that the active tasks of one user, group and priority hold
    together.

    The most specific row applies: by user, then by group, then by priority.
    """

    user: Name = ""
    """Empty: the row applies separately to each user without a row of their own."""
    group: Name = ""
    """Empty: the row applies separately to each group without a row of its own, and to tasks
    without a group."""
    priority: Name = ""
    """A key of model.PRIORITIES; empty: the row applies separately to each priority without a row
    of its own."""
    gpus: Amount | None = None
    """None: no limit. A node without GPUs counts as one."""
    nodes: Amount | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log; never changed, never deleted."""

    seq: int
    wall: float
    user: str
    token: str
    """Id of the token; "home": the home's own token."""
    address: str
    action: str
    """For example submit, stop, token.create."""
    object: str
    """For example t17, user ada."""
    outcome: str
    """"ok", or the class of the error that rejected the request."""


def check_name(name: str, what: str) -> None:
    """Rejects text that is not a name of a user, group or priority.

    Raises:
        ConfigError: states the rules for a name.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid {what} {name!a}: expected 1 to 63 characters of a-z, 0-9, '.', '_', '-'; the first "
            "must be a letter or digit"
        )


def new_token() -> tuple[str, str, str]:
    """Returns a new token: its id, its complete text, and the hash of its secret."""
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return id, f"hai_{id}_{secret}", hash_secret(secret)


def split_token(text: str) -> tuple[str, str] | None:
    """Returns the id and the secret; None if the text is not a token."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1], found[2])


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, hash: str) -> bool:
    """Returns whether the secret has this hash; compares in constant time."""
    return hmac.compare_digest(hash_secret(secret), hash)
