"""The platform's state in SQLite or PostgreSQL: its tables, their versions, and the right to
write."""
