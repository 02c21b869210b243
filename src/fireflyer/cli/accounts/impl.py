"""Implementation of `fireflyer user`, `group`, `token`, `quota` and `audit`."""

import os
import sys
import time
from pathlib import Path

from fireflyer.cli.printing import as_json, table
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


def api(home: Path | None) -> Administration:
    return Administration(Client(home))


def users(found: list[User], *, json: bool) -> None:
    if json:
        as_json(found)
        return
    rows = [
        (user.name, "disabled" if user.disabled else "", " ".join(user.groups), _day(user.created))
        for user in found
    ]
    table(("USER", "", "GROUPS", "MADE"), rows)


def groups(found: list[Group], *, json: bool) -> None:
    if json:
        as_json(found)
        return
    rows = [(group.name, " ".join(group.members), _day(group.created)) for group in found]
    table(("GROUP", "MEMBERS", "MADE"), rows)


def tokens(found: list[TokenView], *, json: bool) -> None:
    if json:
        as_json(found)
        return
    rows = [
        (
            token.id,
            token.user,
            token.scope,
            "revoked" if token.revoked is not None else _day(token.expires),
            _day(token.created),
            token.note,
        )
        for token in found
    ]
    table(("TOKEN", "USER", "SCOPE", "UNTIL", "MADE", "NOTE"), rows)


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
        raise ConfigError(f"--scope must be one of {', '.join(SCOPES)}, not {scope!r}")
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
    if json:
        as_json(made.view if file is not None else made)
    elif file is not None:
        sys.stdout.write(f"token {made.view.id} of {user}, scope {scope}, is in {out}\n")
    else:
        sys.stdout.write(f"{made.token}\n")


def set_quota(
    home: Path | None, user: str, group: str, priority: str, gpus: int | None, nodes: int | None,
    *, json: bool,
) -> None:  # fmt: skip
    wanted = Quota(user=user, group=group, priority=priority, gpus=gpus, nodes=nodes)
    quotas([api(home).set_quota(wanted)], json=json)


def quotas(found: list[Quota], *, json: bool) -> None:
    if json:
        as_json(found)
        return
    rows = [
        (q.user or "each", q.group or "each", q.priority or "each", _limit(q.gpus), _limit(q.nodes))
        for q in found
    ]
    table(("USER", "GROUP", "PRIORITY", "GPUS", "NODES"), rows)


def audit(home: Path | None, after: int, *, json: bool) -> None:
    """Prints the audit log: `fireflyer audit`."""
    client = api(home)
    found: list[AuditEntry] = []
    while more := client.audit(after):
        found += more
        after = more[-1].seq
    if json:
        as_json(found)
        return
    rows = [
        (str(e.seq), _second(e.wall), e.user, e.token, e.address, e.action, e.object, e.outcome)
        for e in found
    ]
    table(("SEQ", "TIME", "USER", "TOKEN", "FROM", "ACTION", "ON", "OUTCOME"), rows)


def _limit(number: int | None) -> str:
    return "-" if number is None else str(number)


def _day(wall: float | None) -> str:
    return "never" if wall is None else time.strftime("%Y-%m-%d", time.localtime(wall))


def _second(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
