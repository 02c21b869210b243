"""What carries the bytes of collectives between hosts: FIREFLYER_HFREDUCE_TRANSPORT, alike on all
ranks.

    tcp    sockets; the default
    ucx    UCX, the way to RDMA networks; needs libucp.so.0 (Debian: libucx0)

Shared memory inside a host and point-to-point messages are the same with both.
"""

import os
from collections.abc import Sequence

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.hfreduce.topology import Card

VARIABLE = "FIREFLYER_HFREDUCE_TRANSPORT"
_KINDS = {"tcp": native.Transport.TCP, "ucx": native.Transport.UCX}


def publish(card: Card) -> Card:
    """The card of a rank that starts with its group, with its choice; `agree` judges it."""
    chosen = os.environ.get(VARIABLE) or "tcp"
    return msgspec.structs.replace(card, transport=chosen, lack=_lack(chosen))


def agree(cards: Sequence[Card]) -> None:
    """Makes sure that all ranks have chosen alike, and have what they have chosen where it is needed.
    Raises the same on every rank.

    Raises:
        ConfigError: they have not, or one has chosen what does not exist.
    """
    first = cards[0].transport
    for rank, card in enumerate(cards):
        if card.transport not in _KINDS:
            known = " or ".join(_KINDS)
            raise ConfigError(f"{VARIABLE}={card.transport} on rank {rank}: use {known}")
        if card.transport != first:
            raise ConfigError(
                f"{VARIABLE} must be alike on all ranks: {first} on rank 0, "
                f"{card.transport} on rank {rank}"
            )
    if len({card.host for card in cards}) == 1:
        return
    for rank, card in enumerate(cards):
        if card.lack:
            raise ConfigError(f"{VARIABLE}={first} on rank {rank}: {card.lack}")


def _lack(chosen: str) -> str:
    if chosen == "ucx":
        try:
            native.load_ucx()
        except CollectiveError as error:
            return str(error)
    return ""


def unsettled(card: Card) -> Card:
    """The card of a newcomer."""
    return msgspec.structs.replace(card, transport="")


def spread(cards: Sequence[Card]) -> list[Card]:
    """The cards of a group formed anew, with its transport in those of newcomers, too: one of them
    may be the first some day."""
    ours = next(card.transport for card in cards if card.transport)
    return [msgspec.structs.replace(card, transport=card.transport or ours) for card in cards]


def follow(cards: Sequence[Card]) -> None:
    """What a newcomer checks of the group that it has become a member of.

    Raises:
        ConfigError: this process wants another transport than the group has, or lacks that one.
    """
    wanted, theirs = os.environ.get(VARIABLE), spread(cards)[0].transport
    if wanted and wanted != theirs:
        raise ConfigError(f"{VARIABLE}={wanted}, but the group to join uses {theirs}")
    if lack := _lack(theirs):
        raise ConfigError(f"the group to join uses {theirs}: {lack}")


def kind_of(card: Card) -> native.Transport:
    """Of the group that the card's rank is a member of."""
    return _KINDS[card.transport]
