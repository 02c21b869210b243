"""File `identity` of a node's folder: the node and the file system that the folder belongs to."""

import secrets
from pathlib import Path

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.fs3.config import replace

FILE = "identity"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two random numbers of 128 bits, in hex.

    Attributes:
        node: number of the folder, drawn when a node first uses the folder.
        cluster: number of the file system whose chunks the folder holds; "" until a manager admits
            the node.
    """

    node: str
    cluster: str = ""


def of_folder(folder: Path) -> Identity:
    """Returns the identity of a node's folder; makes the file if there is none.

    Raises:
        ConfigError: the file cannot be read or written, or is damaged.
    """
    path = folder / FILE
    try:
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Identity)
        made = Identity(secrets.token_hex(16))
        keep(folder, made)
        return made
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError):
        raise ConfigError(
            f"{path} is damaged: restore it from a copy, or remove it, which makes a new identity"
        ) from None


def keep(folder: Path, identity: Identity) -> None:
    replace(folder / FILE, msgspec.json.encode(identity).decode() + "\n")


def holds_targets(folder: Path) -> bool:
    return any(folder.glob("target-*"))
