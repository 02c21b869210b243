"""Who is at an end of a connection; said in its handshake."""

import enum


class Role(enum.IntEnum):
    CLIENT = 1
    MANAGER = 2
    META = 3
    STORAGE = 4


NO_MANAGER: dict[int, str] = {
    Role.STORAGE: "is the address of a storage node; the manager's is needed: `manager` in cluster.toml"
}
"""What to say of an address at which somebody else than a manager or metadata service answers, by role."""
