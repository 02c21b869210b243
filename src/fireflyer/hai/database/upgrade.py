"""Migration of a database to the newest version. This module is imported only if needed, because
Alembic takes time to load."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from fireflyer.hai.database import migrations


def migrate(connection: sa.Connection, version: int, known_to_alembic: bool) -> None:
    """Runs the missing steps in the caller's transaction.

    Args:
        connection: connection to the database, on which a transaction has begun.
        version: version of the database's tables; 0: it has no tables.
        known_to_alembic: whether the database has Alembic's own table, which version 1 lacked.
    """
    config = Config()
    config.set_main_option(
        "script_location", str(Path(migrations.__file__).parent).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    if version and not known_to_alembic:
        command.stamp(config, f"{version:04d}")
    command.upgrade(config, "head")
