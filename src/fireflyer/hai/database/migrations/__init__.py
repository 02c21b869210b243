"""Steps from each version of the tables to the next, run by Alembic when a server opens its database."""
