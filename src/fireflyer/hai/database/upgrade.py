"""Migration of a database to the newest version. Imported only if needed: Alembic takes time to
load."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from fireflyer.hai.database import migrations


def migrate(connection: sa.Connection, version: int, known_to_alembic: bool) -> None:
    """Runs the missing steps in the caller's transaction.

    Args:
        connection: to the database; a transaction has begun.
        version: of its tables; 0: there are none.
        known_to_alembic: whether it has Alembic's own table. Version 1 was made without it.
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
