"""Private names of torch that Fireflyer relies on, in one place.

Each entry states its purpose, and its replacement if torch drops it. An entry is torch's own object,
so a call costs as much as a call of torch. Importing this package imports nothing; its modules
import the parts of torch that they name.

Private members of torch's objects (FSDP's groups, a tensor's `_version`) are used where the objects
are. `tests/support/test_torch_internals.py` checks that the installed torch has all entries and
members, and that no other module uses a private name of torch.
"""
