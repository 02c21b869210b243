"""Drained and suspect nodes, and windows."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_Big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "node_mark",
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("health", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("until", sa.Double),
    )
    op.create_table(
        "window",
        sa.Column("number", _Big, primary_key=True),
        sa.Column("content", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.execute("UPDATE schema_version SET version = 3")
