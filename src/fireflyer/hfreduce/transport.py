"""Transport of collectives between hosts: FIREFLYER_HFREDUCE_TRANSPORT, the same on all ranks.

    tcp    sockets; the default
    ucx    UCX, the way to RDMA networks; needs libucp.so.0 (Debian: libucx0)

Shared memory inside a host and point-to-point messages are the same with both.
"""

import os
from collections.abc import Sequence

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.hfreduce.topology import RankInfo

VARIABLE = "FIREFLYER_HFREDUCE_TRANSPORT"
_KINDS = {"tcp": native.Transport.TCP, "ucx": native.Transport.UCX}


def publish(info: RankInfo) -> RankInfo:
    """Returns the info of a rank of a new group, with the transport that the rank chose."""
    chosen = os.environ.get(VARIABLE) or "tcp"
    return msgspec.structs.replace(info, transport=chosen, lack=_lack(chosen))


def agree(infos: Sequence[RankInfo]) -> None:
    """Checks that all ranks chose the same transport, and can use it if there are several hosts.

    Raises the same error on every rank.

    Raises:
        ConfigError: the choices differ, a choice is unknown, or a rank lacks the chosen transport.
    """
    first = infos[0].transport
    for rank, info in enumerate(infos):
        if info.transport not in _KINDS:
            known = " or ".join(_KINDS)
            raise ConfigError(
                f"invalid {VARIABLE} '{info.transport}' on rank {rank}: expected {known}"
            )
        if info.transport != first:
            raise ConfigError(
                f"{VARIABLE} must be equal on all ranks: {first} on rank 0, "
                f"{info.transport} on rank {rank}"
            )
    if len({info.host for info in infos}) == 1:
        return
    for rank, info in enumerate(infos):
        if info.lack:
            raise ConfigError(f"{VARIABLE}={first} on rank {rank}: {info.lack}")


def _lack(chosen: str) -> str:
    if chosen == "ucx":
        try:
            native.load_ucx()
        except CollectiveError as error:
            return str(error)
    return ""


def unsettled(info: RankInfo) -> RankInfo:
    """Returns the info of a newcomer, which has chosen no transport."""
    return msgspec.structs.replace(info, transport="")


def spread(infos: Sequence[RankInfo]) -> list[RankInfo]:
    """Returns the infos of a group formed anew, with the group's transport also in newcomers'
    infos.

    This matters because a newcomer may become the first rank later.
    """
    ours = next(info.transport for info in infos if info.transport)
    return [msgspec.structs.replace(info, transport=info.transport or ours) for info in infos]


def follow(infos: Sequence[RankInfo]) -> None:
    """Checks a newcomer's settings against the group that it joined.

    Raises:
        ConfigError: this process is set to another transport than the group's, or cannot use the
        group's transport.
    """
    wanted, theirs = os.environ.get(VARIABLE), spread(infos)[0].transport
    if wanted and wanted != theirs:
        raise ConfigError(
            f"{VARIABLE} is {wanted!r}, but the group to join uses {theirs!r}: unset it or set {theirs}"
        )
    if lack := _lack(theirs):
        raise ConfigError(f"the group to join uses {theirs}: {lack}")


def kind_of(info: RankInfo) -> native.Transport:
    """Returns the transport of the group to which the info's rank belongs."""
    return _KINDS[info.transport]
