"""Alembic's entry point: runs the steps on the caller's connection, in the caller's transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
