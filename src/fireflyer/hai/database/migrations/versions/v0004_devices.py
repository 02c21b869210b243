"""Devices of attempts."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("devices", sa.Text, nullable=False, server_default="[]"))
    op.execute("UPDATE schema_version SET version = 4")
