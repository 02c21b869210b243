"""Index of the events about faults, so that queries need not scan all events."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    faults = sa.text("kind IN ('observed', 'acted')")
    op.create_index(
        "event_by_fault", "event", ["seq"], sqlite_where=faults, postgresql_where=faults
    )
    op.execute("UPDATE schema_version SET version = 6")
