"""Users, groups, tokens and quotas. Requests read them from memory; a change is on disk before its
response.

Only the leading server writes these tables, so memory and database agree. One thread uses this
module.
"""

import time
from typing import Any

import msgspec
import sqlalchemy as sa

from fireflyer.errors import ConfigError, PermissionDenied, Unauthenticated
from fireflyer.hai.database import schema
from fireflyer.hai.database.connection import Database
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.model.identity import (
    HOME_TOKEN,
    SCOPES,
    Group,
    Identity,
    NewToken,
    Quota,
    TokenRequest,
    TokenView,
    User,
    check_name,
    matches,
    new_token,
    split_token,
)
from fireflyer.program import plain


class _Token(msgspec.Struct, frozen=True):
    view: TokenView
    hash: str


class Accounts:
    """Users with their groups and tokens: authenticates tokens and authorizes requests.

    Args:
        database: an open database; the caller closes it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.reading() as connection:
            users = connection.execute(sa.select(schema.user_account)).all()
            groups = connection.execute(sa.select(schema.user_group)).all()
            members = connection.execute(sa.select(schema.membership)).all()
            tokens = connection.execute(sa.select(schema.access_token)).all()
        self._users = {row.name: User(groups=(), **row._mapping) for row in users}
        self._groups = {row.name: row.created for row in groups}
        self._members = {(row.group, row.user) for row in members}
        self._tokens: dict[str, _Token] = {}
        for row in tokens:
            fields = dict(row._mapping)
            hash = fields.pop("hash")
            self._tokens[row.id] = _Token(TokenView(**fields), hash)

    # -- queries -----------------------------------------------------------------------------------

    def identify(self, text: str, address: str) -> Identity:
        """Returns the identity of a token.

        Raises:
            Unauthenticated: the token is missing, wrong, expired or revoked, or its user is
                disabled.
        """
        parts = split_token(text)
        token = None if parts is None else self._tokens.get(parts[0])
        if parts is None or token is None or not matches(parts[1], token.hash):
            raise Unauthenticated("the token is missing or wrong")
        view = token.view
        if view.revoked is not None or self._users[view.user].disabled:
            raise Unauthenticated(f"token {view.id} of {view.user} was revoked")
        if view.expires is not None and view.expires <= time.time():
            raise Unauthenticated(
                f"token {view.id} of {view.user} has expired; `fireflyer token create` makes another"
            )
        return Identity(user=view.user, token=view.id, scope=view.scope, address=address)

    def valid(self, id: str) -> bool:
        """Returns whether the token with this id is valid now."""
        view = self._tokens[id].view
        expired = view.expires is not None and view.expires <= time.time()
        return not (expired or view.revoked is not None or self._users[view.user].disabled)

    def usable(self) -> bool:
        """Returns whether any user's token is valid now."""
        return any(self.valid(id) for id in self._tokens)

    def check_group(self, who: Identity, group: str) -> None:
        """Rejects a task in a group that its user is not a member of. The home's own user may name
        any existing group.

        Raises:
            PermissionDenied: the user is not a member.
            ConfigError: the home's own user names a group that does not exist.
        """
        if not group:
            return
        if who.token == HOME_TOKEN:
            self.group(group[:64])  # cut for the message: group names are shorter
        elif (group, who.user) not in self._members:
            raise PermissionDenied(
                f"{who.user} is not a member of the group {group[:63]!a}: "
                "an admin can add members (`fireflyer group join`)"
            )

    def check_whose(self, who: Identity, user: str, group: str) -> None:
        """Rejects unknown names. An empty name means all users or groups. The caller's own name is
        always accepted.

        Raises:
            ConfigError: no such user, or no such group.
        """
        if user and user != who.user:
            self.user(user)
        if group:
            self.group(group)

    def users(self) -> list[User]:
        return [self.user(name) for name in sorted(self._users)]

    def user(self, name: str) -> User:
        """Returns one user.

        Raises:
            ConfigError: no such user.
        """
        if name not in self._users:
            raise ConfigError(f"user {name!a} does not exist; create it with `fireflyer user add`")
        groups = tuple(sorted(group for group, user in self._members if user == name))
        return msgspec.structs.replace(self._users[name], groups=groups)

    def groups(self) -> list[Group]:
        return [self.group(name) for name in sorted(self._groups)]

    def group(self, name: str) -> Group:
        """Returns one group.

        Raises:
            ConfigError: no such group.
        """
        if name not in self._groups:
            raise ConfigError(
                f"group {name!a} does not exist; create it with `fireflyer group add`"
            )
        members = tuple(sorted(user for group, user in self._members if group == name))
        return Group(name=name, members=members, created=self._groups[name])

    def tokens(self, user: str | None) -> list[TokenView]:
        """Returns all tokens, or one user's, oldest first."""
        views = [token.view for token in self._tokens.values()]
        chosen = [view for view in views if user is None or view.user == user]
        return sorted(chosen, key=lambda view: (view.created, view.id))

    # -- changes -----------------------------------------------------------------------------------

    def add_user(self, name: str) -> User:
        """Creates a user.

        Raises:
            ConfigError: the name is invalid or taken.
        """
        check_name(name, "user")
        if name in self._users:
            raise ConfigError(f"user {name} exists already")
        made = User(name=name, disabled=False, groups=(), created=time.time())
        row = {"name": name, "disabled": False, "created": made.created}
        self._write(schema.user_account.insert().values(row))
        self._users[name] = made
        return made

    def disable_user(self, name: str, *, disabled: bool) -> User:
        """Disables a user, so that their tokens are rejected, or enables the user again."""
        self.user(name)
        at = schema.user_account.c.name == name
        self._write(schema.user_account.update().where(at).values(disabled=disabled))
        self._users[name] = msgspec.structs.replace(self._users[name], disabled=disabled)
        return self.user(name)

    def add_group(self, name: str) -> Group:
        """Creates a group.

        Raises:
            ConfigError: the name is invalid or taken.
        """
        check_name(name, "group")
        if name in self._groups:
            raise ConfigError(f"group {name} exists already")
        created = time.time()
        self._write(schema.user_group.insert().values(name=name, created=created))
        self._groups[name] = created
        return self.group(name)

    def join(self, group: str, user: str) -> Group:
        """Adds a user to a group; an existing membership stays."""
        self.group(group)
        self.user(user)
        if (group, user) not in self._members:
            self._write(schema.membership.insert().values(group=group, user=user))
            self._members.add((group, user))
        return self.group(group)

    def leave(self, group: str, user: str) -> Group:
        """Removes a user from a group, if the user is a member."""
        self.group(group)
        self.user(user)
        table = schema.membership
        self._write(table.delete().where(table.c.group == group, table.c.user == user))
        self._members.discard((group, user))
        return self.group(group)

    def create_token(self, asked: TokenRequest, who: Identity) -> NewToken:
        """Creates a token. A caller without the scope "admin" can create tokens only for the
        caller's own user, with at most the scope and lifetime of the caller's token.

        Raises:
            ConfigError: no such user, or the note has unprintable characters.
            PermissionDenied: the token is for another user, or its scope exceeds the caller's.
        """
        self.user(asked.user)
        if plain(asked.note) != asked.note:
            raise ConfigError("the token's note has characters that cannot be printed")
        created = time.time()
        expires = None if asked.days is None else created + asked.days * 86400
        if not who.allows("admin"):
            if asked.user != who.user or SCOPES.index(asked.scope) > SCOPES.index(who.scope):
                raise PermissionDenied(
                    "only an admin can create tokens for other users or with a scope beyond their own"
                )
            limit = self._tokens[who.token].view.expires
            if limit is not None:
                expires = limit if expires is None else min(limit, expires)
        id, text, hash = new_token()
        view = TokenView(
            id=id, user=asked.user, scope=asked.scope, note=asked.note, created=created,
            expires=expires, revoked=None,
        )  # fmt: skip
        row = msgspec.structs.asdict(view) | {"hash": hash}
        self._write(schema.access_token.insert().values(row))
        self._tokens[id] = _Token(view, hash)
        return NewToken(token=text, view=view)

    def revoke_token(self, id: str, who: Identity) -> TokenView:
        """Revokes a token immediately and permanently.

        Raises:
            ConfigError: no such token, or it belongs to another user.
        """
        token = self._tokens.get(id)
        if token is None or not (who.allows("admin") or token.view.user == who.user):
            raise ConfigError(f"no token {id!a} here; `fireflyer token list` lists them")
        if token.view.revoked is None:
            at, now = schema.access_token.c.id == id, time.time()
            self._write(schema.access_token.update().where(at).values(revoked=now))
            changed = msgspec.structs.replace(token.view, revoked=now)
            self._tokens[id] = _Token(changed, token.hash)
        return self._tokens[id].view

    def set_quota(self, quota: Quota) -> None:
        """Sets the limits of one user, group and priority. A quota without gpus and nodes is
        removed.

        Raises:
            ConfigError: no such user, group or priority.
        """
        if quota.user:
            self.user(quota.user)
        if quota.group:
            self.group(quota.group)
        if quota.priority:
            check_name(quota.priority, "priority")
            if quota.priority not in PRIORITIES:
                raise ConfigError(
                    f"invalid priority {quota.priority}: expected one of {', '.join(PRIORITIES)}"
                )
        table = schema.quota
        key = {"user": quota.user, "group": quota.group, "priority": quota.priority}
        at = [table.c[name] == value for name, value in key.items()]
        limits = {"gpus": quota.gpus, "nodes": quota.nodes}
        with self._database.writing() as connection:
            connection.execute(table.delete().where(*at))
            if quota.gpus is not None or quota.nodes is not None:
                connection.execute(table.insert().values(**key, **limits))

    def _write(self, statement: Any) -> None:
        with self._database.writing() as connection:
            connection.execute(statement)
