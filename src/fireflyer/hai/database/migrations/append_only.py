"""Append-only tables: triggers reject every change or removal of a row."""

from alembic import op

_SQLITE = """
CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table}
BEGIN SELECT RAISE(ABORT, 'the {what} is append-only'); END
"""

_FUNCTION = """
CREATE FUNCTION {table}_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the {what} is append-only'; END $$
"""

_POSTGRESQL = """
CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION {table}_append_only()
"""


def make_append_only(table: str, what: str) -> None:
    """Makes a table append-only. `what` names the table's content in the error message."""
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("update", "delete"):
            op.execute(_SQLITE.format(table=table, verb=verb, what=what))
    else:
        op.execute(_FUNCTION.format(table=table, what=what))
        op.execute(_POSTGRESQL.format(table=table))
