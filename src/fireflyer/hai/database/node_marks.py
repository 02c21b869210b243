"""Marks of drained and suspect nodes, and windows (maintenance or reservations), in the task
database."""

from typing import Literal

import msgspec
import sqlalchemy as sa

from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.schema import node_mark as _mark
from fireflyer.hai.database.schema import window as _window
from fireflyer.hai.model.windows import Window


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Mark of a node. A drained node accepts no new task. A suspect node accepts a new task only if
    no other node is free."""

    health: Literal["drained", "suspect"]
    reason: str
    until: float | None = None
    """Wall clock at which the mark ends; None: the mark stays until it is removed."""


class Marks:
    """Access to the tables of marks and windows.

    Args:
        database: an open database; the caller closes it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, Mark]:
        """Returns all marks by node."""
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_mark)).all()
        return {
            row.node: Mark(health=row.health, reason=row.reason, until=row.until) for row in rows
        }

    def put(self, node: str, mark: Mark | None) -> None:
        """Sets a node's mark; None removes it."""
        with self._database.writing() as connection:
            connection.execute(_mark.delete().where(_mark.c.node == node))
            if mark is not None:
                values = {"node": node, **msgspec.structs.asdict(mark)}
                connection.execute(_mark.insert().values(values))

    def windows(self) -> list[Window]:
        """Returns all windows that were added and not removed."""
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_window).order_by(_window.c.number)).all()
        return [msgspec.json.decode(row.content, type=Window) for row in rows]

    def add_window(self, window: Window) -> Window:
        """Writes a new window; returns it with its new id."""
        with self._database.writing() as connection:
            key = connection.execute(_window.insert().values(content="")).inserted_primary_key
            assert key is not None
            window = msgspec.structs.replace(window, id=f"w{key[0]}")
            self._database.name_object(f"window {window.id}")
            content = msgspec.json.encode(window).decode()
            at = _window.c.number == key[0]
            connection.execute(_window.update().where(at).values(content=content))
        return window

    def remove_window(self, name: str) -> None:
        """Removes a window by its id."""
        with self._database.writing() as connection:
            connection.execute(_window.delete().where(_window.c.number == int(name[1:])))
