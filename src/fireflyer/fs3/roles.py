"""Who is at an end of a connection; said in its handshake."""

import enum


class Role(enum.IntEnum):
    CLIENT = 1
    MANAGER = 2
    META = 3
    STORAGE = 4
