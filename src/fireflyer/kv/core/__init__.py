"""Core of the key-value store: protocol steps as generators of storage operations.

A generator yields an operation, and receives its result or its StorageError. It has no clock, no
thread and no I/O, so `fireflyer.kv.shell` and the simulator of the tests run the same code. Between
two operations the state of a core is consistent.
"""
