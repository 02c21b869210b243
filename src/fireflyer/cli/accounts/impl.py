"""Implementation of `fireflyer user`, `group`, `token`, `quota` and `audit`."""

import os
import sys
import time
from pathlib import Path

from fireflyer.cli.printing import show_list, show_result
from fireflyer.errors import ConfigError
from fireflyer.hai.client import Client
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.model.identity import (
    SCOPES,
    AuditEntry,
    Group,
    Quota,
    TokenRequest,
    TokenView,
    User,
)
from fireflyer.program import plain


def api(home: Path | None) -> Administration:
    return Administration(Client(home))


def users(found: list[User], *, json: bool) -> None:
    def row(user: User) -> tuple[str, ...]:
        disabled = "disabled" if user.disabled else ""
        return (user.name, disabled, " ".join(user.groups), _day(user.created))

    show_list(found, ("USER", "", "GROUPS", "MADE"), row, json=json)


def groups(found: list[Group], *, json: bool) -> None:
    def row(group: Group) -> tuple[str, ...]:
        return (group.name, " ".join(group.members), _day(group.created))

    show_list(found, ("GROUP", "MEMBERS", "MADE"), row, json=json)


def tokens(found: list[TokenView], *, json: bool) -> None:
    def row(token: TokenView) -> tuple[str, ...]:
        until = "revoked" if token.revoked is not None else _day(token.expires)
        made = _day(token.created)
        return (token.id, token.user, token.scope, until, made, token.note)

    show_list(found, ("TOKEN", "USER", "SCOPE", "UNTIL", "MADE", "NOTE"), row, json=json)


def create_token(
    home: Path | None,
    user: str,
    scope: str,
    days: float,
    note: str,
    out: Path | None,
    *,
    json: bool,
) -> None:
    """Creates a token and writes it to a new file of mode 0600, or to stdout."""
    if scope not in SCOPES:
        raise ConfigError(f"invalid --scope {scope!r}: expected one of {', '.join(SCOPES)}")
    asked = TokenRequest(user=user, scope=scope, days=days or None, note=note)
    file = None
    if out is not None:  # first, so that no token is created without a file for it
        try:
            file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ConfigError(
                f"--out {out} exists already: name a new file, or remove it"
            ) from None
    try:
        made = api(home).create_token(asked)
    except BaseException:
        if out is not None:
            out.unlink()
        raise
    if file is not None:
        with os.fdopen(file, "w") as stream:
            stream.write(f"{made.token}\n")
    stored = f"token {made.view.id} of {user}, scope {scope}, is in {out}"
    text = made.token if file is None else plain(stored)
    found = made if file is None else made.view
    show_result(found, lambda: sys.stdout.write(f"{text}\n"), json=json)


def set_quota(
    home: Path | None, user: str, group: str, priority: str, gpus: int | None, nodes: int | None,
    *, json: bool,
) -> None:  # fmt: skip
    wanted = Quota(user=user, group=group, priority=priority, gpus=gpus, nodes=nodes)
    quotas([api(home).set_quota(wanted)], json=json)


def quotas(found: list[Quota], *, json: bool) -> None:
    def row(quota: Quota) -> tuple[str, ...]:
        owners = (quota.user, quota.group, quota.priority)
        limits = (quota.gpus, quota.nodes)
        return (*(owner or "each" for owner in owners), *map(_limit, limits))

    show_list(found, ("USER", "GROUP", "PRIORITY", "GPUS", "NODES"), row, json=json)


def audit(home: Path | None, after: int, *, json: bool) -> None:
    """Prints the audit log: `fireflyer audit`."""
    client = api(home)
    found: list[AuditEntry] = []
    while more := client.audit(after):
        found += more
        after = more[-1].seq
    heads = ("SEQ", "TIME", "USER", "TOKEN", "FROM", "ACTION", "ON", "OUTCOME")
    show_list(found, heads, _entry_row, json=json)


def _entry_row(e: AuditEntry) -> tuple[str, ...]:
    when = _second(e.wall)
    return (str(e.seq), when, e.user, e.token, e.address, e.action, e.object, e.outcome)


def _limit(number: int | None) -> str:
    return "-" if number is None else str(number)


def _day(wall: float | None) -> str:
    return "never" if wall is None else time.strftime("%Y-%m-%d", time.localtime(wall))


def _second(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
