"""Users, groups, tokens and quotas: in memory for every request, on disk before a change is answered.

Only the leading server writes them, so what is in memory is what is true. One thread uses it.
"""

import time
from typing import Any

import msgspec
import sqlalchemy as sa

from fireflyer.errors import ConfigError, PermissionDenied, Unauthenticated
from fireflyer.hai.database import schema
from fireflyer.hai.database.connection import Database
from fireflyer.hai.identity import (
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
from fireflyer.hai.model import PRIORITIES
from fireflyer.program import plain


class _Token(msgspec.Struct, frozen=True):
    view: TokenView
    hash: str


class Accounts:
    """Who may do what.

    Args:
        database: open; the caller closes it.
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

    # -- asking ------------------------------------------------------------------------------------

    def identify(self, text: str, address: str) -> Identity:
        """Whose token this is.

        Raises:
            Unauthenticated: it is none, wrong, expired or revoked, or its user is disabled.
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

    def taken(self, id: str) -> bool:
        """Whether the token with this id would be taken now."""
        view = self._tokens[id].view
        expired = view.expires is not None and view.expires <= time.time()
        return not (expired or view.revoked is not None or self._users[view.user].disabled)

    def usable(self) -> bool:
        """Whether any token of a user would be taken."""
        return any(self.taken(id) for id in self._tokens)

    def check_group(self, who: Identity, group: str) -> None:
        """Refuses a task in a group that its user is not a member of; the home's own user may name any that
        there is.

        Raises:
            PermissionDenied: not a member.
            ConfigError: the home's own user names a group that there is not.
        """
        if not group:
            return
        if who.token == HOME_TOKEN:
            self.group(group[:64])  # no name is that long
        elif (group, who.user) not in self._members:
            raise PermissionDenied(
                f"{who.user} is no member of the group {group[:63]!a}: "
                "an admin adds members (`fireflyer group join`)"
            )

    def check_whose(self, who: Identity, user: str, group: str) -> None:
        """Refuses names of nobody; empty ones are of everybody, and who asks may name itself.

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
        """One user.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._users:
            raise ConfigError(f"no user {name!a}; `fireflyer user add` makes one")
        groups = tuple(sorted(group for group, user in self._members if user == name))
        return msgspec.structs.replace(self._users[name], groups=groups)

    def groups(self) -> list[Group]:
        return [self.group(name) for name in sorted(self._groups)]

    def group(self, name: str) -> Group:
        """One group.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._groups:
            raise ConfigError(f"no group {name!a}; `fireflyer group add` makes one")
        members = tuple(sorted(user for group, user in self._members if group == name))
        return Group(name=name, members=members, created=self._groups[name])

    def tokens(self, user: str | None) -> list[TokenView]:
        """All tokens, or one user's, oldest first."""
        views = [token.view for token in self._tokens.values()]
        chosen = [view for view in views if user is None or view.user == user]
        return sorted(chosen, key=lambda view: (view.created, view.id))

    # -- changing ----------------------------------------------------------------------------------

    def add_user(self, name: str) -> User:
        """Makes a user.

        Raises:
            ConfigError: no usable name, or taken.
        """
        check_name(name, "user")
        if name in self._users:
            raise ConfigError(f"there is a user {name} already")
        made = User(name=name, disabled=False, groups=(), created=time.time())
        row = {"name": name, "disabled": False, "created": made.created}
        self._write(schema.user_account.insert().values(row))
        self._users[name] = made
        return made

    def disable_user(self, name: str, *, disabled: bool) -> User:
        """Refuses, or takes again, whatever comes with a token of this user."""
        self.user(name)
        at = schema.user_account.c.name == name
        self._write(schema.user_account.update().where(at).values(disabled=disabled))
        self._users[name] = msgspec.structs.replace(self._users[name], disabled=disabled)
        return self.user(name)

    def add_group(self, name: str) -> Group:
        """Makes a group.

        Raises:
            ConfigError: no usable name, or taken.
        """
        check_name(name, "group")
        if name in self._groups:
            raise ConfigError(f"there is a group {name} already")
        created = time.time()
        self._write(schema.user_group.insert().values(name=name, created=created))
        self._groups[name] = created
        return self.group(name)

    def join(self, group: str, user: str) -> Group:
        """Makes a user a member; one that is a member stays one."""
        self.group(group)
        self.user(user)
        if (group, user) not in self._members:
            self._write(schema.membership.insert().values(group=group, user=user))
            self._members.add((group, user))
        return self.group(group)

    def leave(self, group: str, user: str) -> Group:
        """Ends a membership, if there is one."""
        self.group(group)
        self.user(user)
        table = schema.membership
        self._write(table.delete().where(table.c.group == group, table.c.user == user))
        self._members.discard((group, user))
        return self.group(group)

    def create_token(self, asked: TokenRequest, who: Identity) -> NewToken:
        """Makes a token; who is no admin makes them for himself, with no more than his own may do.

        Raises:
            ConfigError: no such user, or no usable note.
            PermissionDenied: it would be able to do, or last, more than the asking one.
        """
        self.user(asked.user)
        if plain(asked.note) != asked.note:
            raise ConfigError("the token's note has characters that cannot be printed")
        created = time.time()
        expires = None if asked.days is None else created + asked.days * 86400
        if not who.allows("admin"):
            if asked.user != who.user or SCOPES.index(asked.scope) > SCOPES.index(who.scope):
                raise PermissionDenied(
                    "only an admin makes tokens for others, or with a larger scope than his own"
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
        """Takes a token out of use, at once and for ever.

        Raises:
            ConfigError: no such token, or not of this user.
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
        """Sets the limits of one user, group and priority; with neither gpus nor nodes: removes them.

        Raises:
            ConfigError: no such user or group, or no usable priority.
        """
        if quota.user:
            self.user(quota.user)
        if quota.group:
            self.group(quota.group)
        if quota.priority:
            check_name(quota.priority, "priority")
            if quota.priority not in PRIORITIES:
                raise ConfigError(
                    f"no priority {quota.priority}; there are {', '.join(PRIORITIES)}"
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
