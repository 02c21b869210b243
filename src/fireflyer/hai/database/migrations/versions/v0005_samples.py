"""Use of the hardware over time."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "sample",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("level", sa.Integer, primary_key=True),
        sa.Column("begin", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("sample_by_time", "sample", ["level", "begin"])
    op.execute("UPDATE schema_version SET version = 5")
