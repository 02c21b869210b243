"""The audit log: each change with its user, time, address and outcome. Append-only."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from fireflyer.errors import FireflyerError
from fireflyer.hai.database import schema
from fireflyer.hai.database.connection import Database
from fireflyer.hai.model.identity import AuditEntry, Identity
from fireflyer.program import plain


class AuditLog:
    """The audit log of one database.

    Args:
        database: an open database; the caller closes it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def change(self, who: Identity, action: str, object: str) -> Iterator[None]:
        """Wraps a change. The audit line joins the transaction of the change's first write. If the
        change wrote no row or was refused, the line is written alone. The wrapped code must not
        await."""
        row = _line(who, action, object)
        with self._database.along(schema.audit, row) as written:
            try:
                yield
            except FireflyerError as error:
                row["outcome"] = type(error).__name__
                if not written():
                    self._flush()
                raise
            if not written():
                self._flush()

    @contextmanager
    def refusals(self, who: Identity, action: str) -> Iterator[dict[str, Any]]:
        """Wraps a change that writes the yielded line itself, after it has set the line's `object`.
        If the change is refused, this context manager writes the line. The wrapped code may
        await."""
        line = _line(who, action, "")
        try:
            yield line
        except FireflyerError as error:
            refused = {**line, "outcome": type(error).__name__}
            with self._database.writing() as connection:
                connection.execute(schema.audit.insert(), refused)
            raise

    def _flush(self) -> None:
        with self._database.writing():
            """Any transaction, also an empty one, writes the pending line."""

    def entries(self, after: int, limit: int) -> list[AuditEntry]:
        """Returns at most `limit` lines with a seq above `after`, oldest first."""
        table = schema.audit
        query = sa.select(table).where(table.c.seq > after).order_by(table.c.seq).limit(limit)
        with self._database.reading() as connection:
            return [AuditEntry(**row._mapping) for row in connection.execute(query)]


def _line(who: Identity, action: str, object: str) -> dict[str, Any]:
    return {
        "wall": time.time(),
        "user": who.user,
        "token": who.token,
        "address": who.address,
        "action": action,
        "object": plain(object)[:200],
        "outcome": "ok",
    }
