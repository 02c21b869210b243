"""Options of `fireflyer up` that are recorded in the home, and the inventory (GPUs and virtual
nodes) that follows from them."""

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.hai.engines.inventory import (
    Device,
    default_nodes,
    discover,
    divide,
    parse_inventory,
)
from fireflyer.hai.home import Home, Settings, write_private

DEFAULT_NODES = 2
"""Virtual nodes of a machine without GPUs."""

DRIVER = "driver"
"""Value of --gpus for the GPUs that the driver reports; it replaces a list of GPUs in the recorded
options."""


def read_settings(home: Home) -> Settings:
    """Returns the options recorded in the home.

    Raises:
        Corrupted: the file is damaged.
    """
    try:
        return msgspec.json.decode(home.settings.read_bytes(), type=Settings)
    except FileNotFoundError:
        return Settings()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupted(
            f"cannot read {home.settings} ({error}); remove it, then give the options to `fireflyer up`"
        ) from None


def settle(home: Home, given: Settings) -> Settings:
    """Returns the given options, completed by the options recorded in the home.

    Raises:
        ConfigError: an option is invalid.
        Corrupted: the home's file is damaged.
    """
    if given.gpus not in (None, DRIVER):
        parse_inventory(given.gpus)
    changes = msgspec.structs.asdict(given)
    changes = {name: value for name, value in changes.items() if value is not None}
    return msgspec.structs.replace(read_settings(home), **changes)


def remember(home: Home, settings: Settings) -> None:
    """Writes the options to the home."""
    write_private(home.settings, msgspec.json.encode(settings) + b"\n")


def inventory(settings: Settings, nodes: int | None = None) -> tuple[tuple[Device, ...], int]:
    """Returns this machine's GPUs and the number of virtual nodes.

    Args:
        settings: recorded options.
        nodes: number of nodes if the options set none.

    Raises:
        ConfigError: a node would have GPUs of two types, or the list of GPUs is invalid.
    """
    by_hand = settings.gpus is not None and settings.gpus != DRIVER
    devices = parse_inventory(settings.gpus or "") if by_hand else discover()
    count = settings.nodes or nodes or default_nodes(devices, DEFAULT_NODES)
    divide(devices, count)
    return devices, count
