"""Attained service: who has had how much of the cluster lately, in discrete levels.

An account's service grows with the GPUs that it holds and is forgotten by half every half-life. Levels are
powers: level 0 below `unit`, level k from `unit * ratio ** (k - 1)`. So an account that holds nothing falls
level by level, and all that plans care about are the moments at which a level changes. The idea of
discretised attained service: Tiresias (NSDI'19). Pure.
"""

import math

import msgspec


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How service becomes a level."""

    unit: float
    """Service up to which an account is at level 0, in GPU-seconds."""
    ratio: float = 2.0
    half_life_s: float = math.inf

    def level(self, service: float) -> int:
        """The level of an account that was at another one for no time yet."""
        if service < self.unit:
            return 0
        return 1 + int(math.log(service / self.unit, self.ratio) + 1e-9)

    def rises(self, level: int) -> float:
        """The service at which an account leaves this level upwards."""
        return self.unit * self.ratio**level

    def falls(self, level: int) -> float:
        """Where it leaves it downwards: half a level below where it came in, so that it does not flap."""
        return self.unit * self.ratio ** (level - 1.5) if level else 0.0


class Account:
    """The service of one user, or of one job."""

    __slots__ = ("_at", "_limit", "_scale", "_service", "jobs", "level", "rate", "version")

    def __init__(self, scale: Scale, service: float, now: float) -> None:
        self._scale = scale
        self._service = service
        self._at = now
        self._limit = 0.0
        """What the service tends to."""
        self.rate = 0.0
        """GPUs held now."""
        self.level = scale.level(service)
        self.jobs = 0
        """Of the account's jobs that are not over."""
        self.version = 0
        """Counts changes, so that the planned moment of an older one is known to be void."""

    def service(self, now: float) -> float:
        """GPU-seconds, less what is forgotten."""
        elapsed = now - self._at
        if self._scale.half_life_s == math.inf:
            return self._service + self.rate * elapsed
        kept: float = 0.5 ** (elapsed / self._scale.half_life_s)
        return self._limit + (self._service - self._limit) * kept

    def hold(self, gpus: float, now: float) -> None:
        """It holds so many GPUs more (less, if negative) from now on."""
        self._service, self._at = self.service(now), now
        self.rate = max(0.0, self.rate + gpus)
        if self._scale.half_life_s != math.inf:
            self._limit = self.rate * self._scale.half_life_s / math.log(2)
        self.version += 1

    def credit(self, service: float, now: float) -> None:
        """Adds service of before."""
        self._service, self._at = self.service(now) + service, now
        self.level = self._scale.level(self._service)
        self.version += 1

    def next_level(self, now: float) -> tuple[float, int]:
        """When the level changes if nothing else does (inf: never), and to what."""
        service, scale = self.service(now), self._scale
        if scale.half_life_s == math.inf:
            if not self.rate:
                return math.inf, 0
            left = scale.rises(self.level) - service
            return now + max(0.0, left) / self.rate, self.level + 1
        up, down = scale.rises(self.level), scale.falls(self.level)
        if self._limit > up:
            return now + self._until(service, up), self.level + 1
        if self._limit < down:
            return now + self._until(service, down), self.level - 1
        return math.inf, 0

    def _until(self, service: float, threshold: float) -> float:
        share = (service - self._limit) / (threshold - self._limit)
        return self._scale.half_life_s * max(0.0, math.log2(share)) if share > 0 else 0.0
