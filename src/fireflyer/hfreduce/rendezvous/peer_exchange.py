"""First contact of a group's ranks through a store: infos, the key, and ranks that do not come."""

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
from fireflyer.hfreduce.topology import RankInfo
from fireflyer.log import get_logger

_LOOK_AROUND_S = 0.5
_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.02
_ASKED_A_SECOND = 20_000
"""Maximum number of store queries per second by all ranks together."""


class Store(Protocol):
    """Methods of a store that the rendezvous needs; `torch.distributed` stores have them."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class PeerExchange:
    """One rank's part in the rendezvous through a store.

    Args:
        store: store that exactly these ranks share, with no keys of an earlier group.
        timeout_s: limit for the whole exchange, from now on.
        still_useful: called while this rank waits; raises if no other rank can come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        timeout_s: float,
        still_useful: Callable[[], None] = lambda: None,
    ) -> None:
        self._still_useful = still_useful
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def publish(self, info: RankInfo) -> None:
        self._store.set(f"card/{self._rank}", msgspec.json.encode(info).decode())

    def refuse(self, reason: str) -> None:
        """Tells the other ranks that this rank does not take part, and the reason."""
        self.publish(RankInfo("", "", "", "", 0, refusal=reason))

    def info_of(self, rank: int, look_around: Callable[[], None] = lambda: None) -> RankInfo:
        """Waits for a rank's info and returns it. Calls `look_around` every 0.5 s while waiting.

        Raises:
            DeadlineExceeded: the rank did not publish its info in time.
            ConfigError: the rank cannot take part.
        """
        text = self._get(f"card/{rank}", rank, look_around)
        info = msgspec.json.decode(text, type=RankInfo)
        if info.refusal:
            raise ConfigError(f"rank {rank} cannot take part: {info.refusal}")
        return info

    def key(self, address: str) -> bytes:
        """Returns the job's secret, or a random key from the store.

        A key from the store is only as safe as the store.

        Args:
            address: address of this rank. If it is not loopback and there is no secret, rank 0 logs
                a warning.

        Raises:
            DeadlineExceeded: rank 0 published no key in time.
            ConfigError: rank 0 has a secret, this rank does not.
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
        raise ConfigError("rank 0 has FIREFLYER_SECRET, this rank does not: set it on all ranks")

    def _get(self, key: str, rank: int, look_around: Callable[[], None]) -> bytes:
        """Polls the store, because a blocking wait in the store would log each of its timeouts."""
        begun = looked = time.monotonic()
        while (now := time.monotonic()) < self._deadline:
            try:
                if self._store.check([key]):
                    return self._store.get(key)
            except RuntimeError as error:
                raise CollectiveError(f"the store of the rendezvous failed: {error}") from error
            if now - looked >= _LOOK_AROUND_S:
                self._still_useful()
                look_around()
                looked = now
            longest = max(_PAUSE_S, self._world / _ASKED_A_SECOND)
            time.sleep(min(max(_FIRST_PAUSE_S, now - begun), longest, self._deadline - now))
        late = f"rank {rank} did not arrive within {self._timeout_s:g} s"
        self._store.set("over", late)
        raise DeadlineExceeded(late)

    def judge(self, lost: RankFailed) -> FireflyerError:
        """Returns the error to raise for a lost rank.

        The lost rank may have ended because its own wait for another rank timed out. In that case
        the error is that timeout.
        """
        if self._store.check(["over"]):
            return DeadlineExceeded(self._store.get("over").decode())
        return lost


@functools.cache
def _warn_of_no_secret() -> None:
    get_logger("hfreduce").warning(
        "FIREFLYER_SECRET is not set: connections to other machines are only as safe as the store"
    )
