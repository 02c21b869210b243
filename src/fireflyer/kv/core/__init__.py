"""Pure core of the key-value store: protocol steps as generators of storage operations.

A generator yields an operation, and gets its result or its StorageError. It has no clock, no thread
and no I/O of its own, so a shell (`fireflyer.kv.shell`) and the simulator of the tests run the same
code. Between two operations the state of a core is consistent.
"""
