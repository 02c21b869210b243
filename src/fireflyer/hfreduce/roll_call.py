"""The first meeting of a group's ranks: cards and a key through a store, and who does not come."""

import functools
import os
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    FireflyerError,
    RankFailed,
)
from fireflyer.hfreduce.topology import Card
from fireflyer.log import get_logger

_LOOK_AROUND_S = 0.5
_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.02
_ASKED_A_SECOND = 20_000
"""How often all ranks together may ask the store."""


class Store(Protocol):
    """What the rendezvous needs of a store; `torch.distributed` stores have it."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class RollCall:
    """One rank's part in it.

    Args:
        store: shared by exactly these ranks, with no keys of an earlier group.
        timeout_s: from now on, for all of it.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def publish(self, card: Card) -> None:
        self._store.set(f"card/{self._rank}", msgspec.json.encode(card).decode())

    def refuse(self, reason: str) -> None:
        """Tells the others that this rank will not come, and why."""
        self.publish(Card("", "", "", "", 0, refusal=reason))

    def card_of(self, rank: int, look_around: Callable[[], None] = lambda: None) -> Card:
        """That rank's card, once it has published it. `look_around` is called now and then.

        Raises:
            DeadlineExceeded: it did not, in time.
            ConfigError: it cannot take part.
        """
        text = self._get(f"card/{rank}", rank, look_around)
        card = msgspec.json.decode(text, type=Card)
        if card.refusal:
            raise ConfigError(f"rank {rank} cannot take part: {card.refusal}")
        return card

    def key(self, address: str) -> bytes:
        """The job's secret; without one, a random key through the store, which is only as safe as it.

        Args:
            address: of this rank; beyond loopback a key that comes from the store is warned of.

        Raises:
            DeadlineExceeded: rank 0 published none in time.
            ConfigError: rank 0 has a secret and this rank has none.
        """
        secret = os.environ.get("FIREFLYER_SECRET", "")
        if self._rank == 0:
            self._store.set("key", "" if secret else secrets.token_hex(32))
            if not secret and not address.startswith("127."):
                _warn_of_no_secret()
        if secret:
            return secret.encode()
        if key := self._get("key", 0, lambda: None):
            return key
        raise ConfigError("rank 0 has FIREFLYER_SECRET set, and this rank has not")

    def _get(self, key: str, rank: int, look_around: Callable[[], None]) -> bytes:
        """Asks again and again: a wait in the store would log each of its timeouts."""
        begun = looked = time.monotonic()
        while (now := time.monotonic()) < self._deadline:
            try:
                if self._store.check([key]):
                    return self._store.get(key)
            except RuntimeError as error:
                raise CollectiveError(f"the store of the rendezvous failed: {error}") from error
            if now - looked >= _LOOK_AROUND_S:
                look_around()
                looked = now
            longest = max(_PAUSE_S, self._world / _ASKED_A_SECOND)
            time.sleep(min(max(_FIRST_PAUSE_S, now - begun), longest, self._deadline - now))
        late = f"rank {rank} did not come within {self._timeout_s:g} s"
        self._store.set("over", late)
        raise DeadlineExceeded(late)

    def judge(self, lost: RankFailed) -> FireflyerError:
        """What to raise where a rank is gone: it may have given up waiting for another."""
        if self._store.check(["over"]):
            return DeadlineExceeded(self._store.get("over").decode())
        return lost


@functools.cache
def _warn_of_no_secret() -> None:
    get_logger("hfreduce").warning(
        "no FIREFLYER_SECRET: connections beyond this machine are only as safe as the store"
    )
