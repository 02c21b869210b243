"""Steps from each version of the tables to the next; Alembic runs them when a server opens its
database."""
