"""Ordered key-value store with serializable transactions, and its engines. See docs/internals/fs3-meta.md."""

from fireflyer.fs3.kv.memory import MemoryEngine
from fireflyer.fs3.kv.run import Job, run, run_many
from fireflyer.fs3.kv.sqlite import SqliteEngine
from fireflyer.fs3.kv.transaction import Engine, Outcome, Transaction

__all__ = [
    "Engine",
    "Job",
    "MemoryEngine",
    "Outcome",
    "SqliteEngine",
    "Transaction",
    "run",
    "run_many",
]
