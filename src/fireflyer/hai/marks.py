"""What the server remembers of nodes: drained or suspect, and why; and windows. In the task database."""

from typing import Literal

import msgspec
import sqlalchemy as sa

from fireflyer.hai.cluster import Window
from fireflyer.hai.store import Store

metadata = sa.MetaData()

_mark = sa.Table(
    "node_mark",
    metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("health", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("until", sa.Float),
)

_window = sa.Table(
    "window",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("content", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)
"""`content`: a Window as JSON."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is not to be used, or only where nothing else is free."""

    health: Literal["drained", "suspect"]
    reason: str
    until: float | None = None
    """Wall clock; None: until it is taken off."""


class Marks:
    """The two tables."""

    def __init__(self, store: Store) -> None:
        self._store = store
        with store.transaction() as connection:
            metadata.create_all(connection)

    def all(self) -> dict[str, Mark]:
        """By node."""
        with self._store.transaction() as connection:
            rows = connection.execute(sa.select(_mark)).all()
        return {
            row.node: Mark(health=row.health, reason=row.reason, until=row.until) for row in rows
        }

    def put(self, node: str, mark: Mark | None) -> None:
        """Sets a node's mark; None takes it off."""
        with self._store.transaction() as connection:
            connection.execute(_mark.delete().where(_mark.c.node == node))
            if mark is not None:
                values = {"node": node, **msgspec.structs.asdict(mark)}
                connection.execute(_mark.insert().values(values))

    def windows(self) -> list[Window]:
        """All that were added and not removed."""
        with self._store.transaction() as connection:
            rows = connection.execute(sa.select(_window).order_by(_window.c.number)).all()
        return [msgspec.json.decode(row.content, type=Window) for row in rows]

    def add_window(self, window: Window) -> Window:
        """Writes a new one; returns it with the id that it gets."""
        with self._store.transaction() as connection:
            key = connection.execute(_window.insert().values(content="")).inserted_primary_key
            assert key is not None
            window = msgspec.structs.replace(window, id=f"w{key[0]}")
            content = msgspec.json.encode(window).decode()
            at = _window.c.number == key[0]
            connection.execute(_window.update().where(at).values(content=content))
        return window

    def remove_window(self, name: str) -> None:
        """By its id."""
        with self._store.transaction() as connection:
            connection.execute(_window.delete().where(_window.c.number == int(name[1:])))
