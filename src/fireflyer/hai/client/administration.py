"""Administration from Python: users, groups, tokens, quotas and the audit log, through the API."""

from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from fireflyer.hai.client import Client
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

T = TypeVar("T")


class Administration:
    """Administration of accounts. An admin may call all methods. A user with a smaller scope may
    call `whoami`, `quotas` and the methods for tokens, each for that user's own data.

    Every method raises PermissionDenied if the token's scope is too small, and otherwise the errors
    of `Client`.

    Args:
        client: a client of the server.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def whoami(self) -> Identity:
        return self._ask("GET", "/whoami", Identity)

    def users(self) -> list[User]:
        return self._ask("GET", "/users", list[User])

    def add_user(self, name: str) -> User:
        return self._ask("POST", "/users", User, UserRequest(name=name))

    def disable_user(self, name: str) -> User:
        """Disables a user: their tokens are rejected. Running tasks continue."""
        return self._ask("POST", f"/users/{_part(name)}/disable", User)

    def enable_user(self, name: str) -> User:
        return self._ask("POST", f"/users/{_part(name)}/enable", User)

    def groups(self) -> list[Group]:
        return self._ask("GET", "/groups", list[Group])

    def add_group(self, name: str) -> Group:
        return self._ask("POST", "/groups", Group, GroupRequest(name=name))

    def join(self, group: str, user: str) -> Group:
        return self._ask("POST", f"/groups/{_part(group)}/members/{_part(user)}", Group)

    def leave(self, group: str, user: str) -> Group:
        return self._ask("DELETE", f"/groups/{_part(group)}/members/{_part(user)}", Group)

    def tokens(self) -> list[TokenView]:
        """Returns all tokens for an admin, else the caller's own tokens."""
        return self._ask("GET", "/tokens", list[TokenView])

    def create_token(self, asked: TokenRequest) -> NewToken:
        """Creates a token. Only this call returns the token's text."""
        return self._ask("POST", "/tokens", NewToken, asked)

    def revoke_token(self, id: str) -> TokenView:
        return self._ask("DELETE", f"/tokens/{_part(id)}", TokenView)

    def quotas(self) -> list[Quota]:
        return self._ask("GET", "/quotas", list[Quota])

    def set_quota(self, quota: Quota) -> Quota:
        """Sets a quota; a quota without gpus and nodes is removed."""
        return self._ask("POST", "/quotas", Quota, quota)

    def audit(self, after: int = 0) -> list[AuditEntry]:
        """Returns up to 1000 audit lines with a seq above `after`, oldest first."""
        return self._ask("GET", f"/audit?after={after}", list[AuditEntry])

    def _ask(self, method: str, path: str, kind: type[T], body: Any = None) -> T:
        data, _ = self._client._ask(
            method, path, body=None if body is None else msgspec.json.encode(body)
        )
        return msgspec.json.decode(data, type=kind)


def _part(text: str) -> str:
    """Quotes one part of a path, so that an empty part or dots cannot name another path."""
    return quote(text, safe="").replace(".", "%2E") or "%00"
