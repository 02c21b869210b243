"""Users, groups, tokens, quotas, the audit log, and the lease of the leader."""

import sqlalchemy as sa
from alembic import op

from fireflyer.hai.database.migrations.append_only import make_append_only

revision = "0002"
down_revision = "0001"

_Big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("task", sa.Column("user", sa.Text, nullable=False, server_default=""))
    op.create_index("task_by_user", "task", ["user", "id"])
    op.create_table(
        "user_account",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_table(
        "user_group",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_table(
        "membership",
        sa.Column("group", sa.Text, sa.ForeignKey("user_group.name"), primary_key=True),
        sa.Column("user", sa.Text, sa.ForeignKey("user_account.name"), primary_key=True),
    )
    op.create_table(
        "access_token",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, sa.ForeignKey("user_account.name"), nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("expires", sa.Double),
        sa.Column("revoked", sa.Double),
    )
    op.create_table(
        "quota",
        sa.Column("user", sa.Text, primary_key=True),
        sa.Column("group", sa.Text, primary_key=True),
        sa.Column("priority", sa.Text, primary_key=True),
        sa.Column("gpus", sa.Integer),
        sa.Column("nodes", sa.Integer),
    )
    op.create_table(
        "audit",
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
    make_append_only("audit", "audit log")
    op.create_table(
        "leader",
        sa.Column("term", _Big, primary_key=True, autoincrement=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
    )
    op.execute("INSERT INTO leader VALUES (0, '', 0)")
    op.execute("UPDATE schema_version SET version = 2")
