"""Shared control segment of a host's ranks, placed on NUMA nodes as the paper's rules require."""

import fcntl
import functools
import os
import socket
import struct

from fireflyer._native import hfreduce as native
from fireflyer.errors import NoSpace, StorageError
from fireflyer.log import get_logger

_SIOCGIFADDR = 0x8915


def create_control(members: int, address: str) -> int:
    """Creates the control segment of a host; returns its descriptor, which the caller closes.

    If the kernel forbids placement (often in containers without CAP_SYS_NICE), pages lie where they
    are first touched. One warning reports this.

    Args:
        members: number of ranks.
        address: IPv4 address of the network card that carries this host's payload.

    Raises:
        NoSpace: the system refused the shared memory.
    """
    name, size = "fireflyer-control", native.control_bytes(members)
    placement = native.control_placement(members, interface_with(address))
    try:
        return native.create_segment(name, size, placement)
    except NoSpace:
        raise
    except StorageError as error:
        if not placement:
            raise
        _warn(str(error))
        return native.create_segment(name, size)


def interface_with(address: str) -> str:
    """Returns FIREFLYER_IFNAME, else the network interface that has `address`, else ""."""
    if name := os.environ.get("FIREFLYER_IFNAME"):
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


@functools.cache
def _warn(reason: str) -> None:
    get_logger("hfreduce").warning("shared memory is not placed on NUMA nodes: %s", reason)
