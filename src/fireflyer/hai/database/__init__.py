"""The platform's state in SQLite or PostgreSQL: its tables, their versions, who may write."""
