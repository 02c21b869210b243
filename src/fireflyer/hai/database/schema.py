"""The platform's tables. `migrations/` creates them; a test compares the two.

A task's `user` is a name, not a reference: the history outlives accounts, and the owner of a home
has no account.
"""

import sqlalchemy as sa

PRODUCT = "fireflyer hai"
VERSION = 6
"""Number of the newest migration. An older program refuses to open a database with a larger
number."""

metadata = sa.MetaData()

_Big = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""Type of 64 bits. SQLite assigns row numbers only if the type is called INTEGER."""

schema_version = sa.Table(
    "schema_version",
    metadata,
    sa.Column("product", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
)

task = sa.Table(
    "task",
    metadata,
    sa.Column("id", _Big, primary_key=True),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("restarts", sa.Integer, nullable=False),
    sa.Column("stopping", sa.Boolean, nullable=False),
    sa.Column("warm", sa.Boolean, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("user", sa.Text, nullable=False, server_default=""),
    sa.Index("task_by_user", "user", "id"),
    sqlite_autoincrement=True,
)
"""`warm`: the engine may keep warm processes for the task, so `release` must still be called.
`user`: the submitter; empty: the home's owner, in rows from before tasks had users."""

attempt = sa.Table(
    "attempt",
    metadata,
    sa.Column("task", _Big, sa.ForeignKey("task.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("nodes", sa.Text, nullable=False),
    sa.Column("launched", sa.Boolean, nullable=False),
    sa.Column("outcome", sa.Text),
    sa.Column("devices", sa.Text, nullable=False, server_default="[]"),
)
"""`devices`: indexes of the GPUs on each node, as JSON. `launched`: the engine's launch call has
returned. `outcome` is null while the attempt is active."""

FAULTS = sa.text("kind IN ('observed', 'acted')")
"""Condition of the events about faults. A query that uses exactly this condition uses their
index."""

event = sa.Table(
    "event",
    metadata,
    sa.Column("seq", _Big, primary_key=True),
    sa.Column("task", _Big, sa.ForeignKey("task.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("monotonic_ns", _Big, nullable=False),
    sa.Column("wall", sa.Double, nullable=False),
    sa.Index("event_by_task", "task", "attempt", "seq"),
    sa.Index("event_by_fault", "seq", sqlite_where=FAULTS, postgresql_where=FAULTS),
    sqlite_autoincrement=True,
)

user_account = sa.Table(
    "user_account",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
)

user_group = sa.Table(
    "user_group",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("created", sa.Double, nullable=False),
)

membership = sa.Table(
    "membership",
    metadata,
    sa.Column("group", sa.Text, sa.ForeignKey("user_group.name"), primary_key=True),
    sa.Column("user", sa.Text, sa.ForeignKey("user_account.name"), primary_key=True),
)

access_token = sa.Table(
    "access_token",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("user", sa.Text, sa.ForeignKey("user_account.name"), nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Column("scope", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("expires", sa.Double),
    sa.Column("revoked", sa.Double),
)
"""`hash`: SHA-256 of the secret, in hex. The secret itself is not stored."""

quota = sa.Table(
    "quota",
    metadata,
    sa.Column("user", sa.Text, primary_key=True),
    sa.Column("group", sa.Text, primary_key=True),
    sa.Column("priority", sa.Text, primary_key=True),
    sa.Column("gpus", sa.Integer),
    sa.Column("nodes", sa.Integer),
)
"""Limits. If `user`, `group` or `priority` is empty, the row applies to each user, group or
priority without a row of its own. A null number means no limit."""

node_mark = sa.Table(
    "node_mark",
    metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("health", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("until", sa.Double),
)

window = sa.Table(
    "window",
    metadata,
    sa.Column("number", _Big, primary_key=True),
    sa.Column("content", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)
"""`content`: a Window as JSON."""

sample = sa.Table(
    "sample",
    metadata,
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("level", sa.Integer, primary_key=True),
    sa.Column("begin", _Big, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Index("sample_by_time", "level", "begin"),
)
"""`scope`: "cluster", "node:n0", "user:ada", "task:t7" or "rank:t7/0". `level`: seconds between
points. `data`: a chunk of points that starts at `begin` (`sampling/series.py`)."""

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("seq", _Big, primary_key=True),
    sa.Column("wall", sa.Double, nullable=False),
    sa.Column("user", sa.Text, nullable=False),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("address", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("object", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)

leader = sa.Table(
    "leader",
    metadata,
    sa.Column("term", _Big, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("expires", sa.Double, nullable=False),
)
"""One row. `term` is the key. A takeover changes the key, so it conflicts with the FOR KEY SHARE
lock that every transaction of the leader holds. A renewal keeps the key, so it does not conflict.
`expires`: seconds since 1970 by the database's clock."""
