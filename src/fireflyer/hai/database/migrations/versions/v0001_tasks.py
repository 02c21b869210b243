"""Tasks, their attempts and the history."""

import sqlalchemy as sa
from alembic import op

from fireflyer.hai.database.migrations.append_only import make_append_only

revision = "0001"
down_revision = None

_Big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "schema_version",
        sa.Column("product", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.execute("INSERT INTO schema_version VALUES ('fireflyer hai', 1)")
    op.create_table(
        "task",
        sa.Column("id", _Big, primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("stopping", sa.Boolean, nullable=False),
        sa.Column("warm", sa.Boolean, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_task_state", "task", ["state"])
    op.create_table(
        "attempt",
        sa.Column("task", _Big, sa.ForeignKey("task.id"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("nodes", sa.Text, nullable=False),
        sa.Column("launched", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.Text),
    )
    op.create_table(
        "event",
        sa.Column("seq", _Big, primary_key=True),
        sa.Column("task", _Big, sa.ForeignKey("task.id"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("monotonic_ns", _Big, nullable=False),
        sa.Column("wall", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("event_by_task", "event", ["task", "attempt", "seq"])
    make_append_only("event", "history")
