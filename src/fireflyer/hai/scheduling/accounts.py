"""Attained service: the recent cluster use of each account, in discrete levels.

An account's service grows with the GPUs that it holds, and decays by half every half-life. The
thresholds of levels are powers: an account is at level 0 below a service of `unit`, and at level k
from `unit * ratio ** (k - 1)`. An account that holds no GPUs therefore falls level by level. Plans
depend only on the times at which a level changes. Discretised attained service follows Tiresias
(NSDI'19). Pure.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from fireflyer.hai.scheduling.jobs import Job


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Conversion of service to a level."""

    unit: float
    """Service up to which an account is at level 0, in GPU-seconds."""
    ratio: float = 2.0
    half_life_s: float = math.inf

    def level(self, service: float) -> int:
        """Returns the initial level of an account with this service."""
        if service < self.unit:
            return 0
        return 1 + int(math.log(service / self.unit, self.ratio) + 1e-9)

    def rises(self, level: int) -> float:
        """Returns the service at which an account moves from this level to the next higher one."""
        return self.unit * self.ratio**level

    def falls(self, level: int) -> float:
        """Returns the service at which an account moves from this level to the next lower one. The
        threshold is half a level below the entry into the level, to avoid flapping."""
        return self.unit * self.ratio ** (level - 1.5) if level else 0.0


class Account:
    """Service of one user, or of one job."""

    __slots__ = ("_at", "_limit", "_scale", "_service", "jobs", "level", "rate", "version")

    def __init__(self, scale: Scale, service: float, now: float) -> None:
        self._scale = scale
        self._service = service
        self._at = now
        self._limit = 0.0
        """Service to which the account converges at its current rate."""
        self.rate = 0.0
        """GPUs that the account holds now."""
        self.level = scale.level(service)
        self.jobs = 0
        """Number of the account's jobs that are not over."""
        self.version = 0
        """Number of changes; timers of an older version are void."""

    def service(self, now: float) -> float:
        """Returns the decayed service in GPU-seconds."""
        elapsed = now - self._at
        if self._scale.half_life_s == math.inf:
            return self._service + self.rate * elapsed
        kept: float = 0.5 ** (elapsed / self._scale.half_life_s)
        return self._limit + (self._service - self._limit) * kept

    def hold(self, gpus: float, now: float) -> None:
        """Makes the account hold `gpus` more GPUs (fewer, if negative) from now on."""
        self._service, self._at = self.service(now), now
        self.rate = max(0.0, self.rate + gpus)
        if self._scale.half_life_s != math.inf:
            self._limit = self.rate * self._scale.half_life_s / math.log(2)
        self.version += 1

    def credit(self, service: float, now: float) -> None:
        """Adds past service."""
        self._service, self._at = self.service(now) + service, now
        self.level = self._scale.level(self._service)
        self.version += 1

    def next_level(self, now: float) -> tuple[float, int]:
        """Returns the time of the next change of level (inf: never), and the new level. Assumes
        that the account holds the same GPUs until then."""
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


class Accounts:
    """Accounts of all jobs that are not over.

    Args:
        scale: conversion of service to levels; None: there are no accounts, and every job stays at
            level 0.
        by: owner of an account.
        expect: sets a timer for the next level of an account; the arguments are the time, the
            account's key and its version.
    """

    def __init__(
        self,
        scale: Scale | None,
        by: Literal["user", "job"],
        expect: Callable[[float, str, int], None],
    ) -> None:
        self._scale = scale
        self._by = by
        self._expect = expect
        self._accounts: dict[str, Account] = {}
        self._jobs: dict[str, dict[str, Job]] = {}

    def join(self, job: Job, now: float) -> None:
        """Adds a job to its account, and sets the job's level."""
        if self._scale is None:
            return
        key = self._key(job)
        self._jobs.setdefault(key, {})[job.id] = job
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(self._scale, 0.0, now)
        job.standing = account.level

    def leave(self, job: Job) -> None:
        """Removes a job that is over from its account."""
        key = self._key(job)
        mine = self._jobs.get(key)
        if mine is not None:
            del mine[job.id]
            if not mine:
                del self._jobs[key]
                if self._by == "job" or not self._accounts[key].level:
                    del self._accounts[key]

    def jobs(self, key: str) -> Iterable[Job]:
        """Returns a copy of the jobs of an account, so that the caller may change the account
        meanwhile."""
        return list(self._jobs.get(key, {}).values())

    def level(self, key: str) -> int:
        """Returns the level of a known account."""
        return self._accounts[key].level

    def charge(self, job: Job, gpus: float, now: float) -> None:
        """Makes the job's account hold `gpus` more GPUs (fewer, if negative) from now on."""
        key = self._key(job)
        account = self._accounts.get(key)
        if account is not None:
            account.hold(gpus, now)
            self._remind(key, account, now)

    def credit(self, job: Job, service: float, now: float) -> str | None:
        """Adds past service to the job's account; returns the account's key if its level
        changed."""
        key = self._key(job)
        account = self._accounts.get(key)
        if account is None or not service:
            return None
        before = account.level
        account.credit(service, now)
        self._remind(key, account, now)
        return key if account.level != before else None

    def cross(self, key: str, version: int, now: float) -> bool:
        """Moves an account to its next level, unless the timer is void. Returns whether the account
        has jobs whose level changed."""
        if self.void(key, version):
            return False
        account = self._accounts[key]
        _, account.level = account.next_level(now)
        account.version += 1
        if key not in self._jobs and not account.level:
            del self._accounts[key]
            return False
        self._remind(key, account, now)
        return key in self._jobs

    def void(self, key: str, version: float) -> bool:
        """Returns whether a timer of this version is void, because the account has changed
        since."""
        account = self._accounts.get(key)
        return account is None or account.version != version

    def _key(self, job: Job) -> str:
        return job.user if self._by == "user" else job.id

    def _remind(self, key: str, account: Account, now: float) -> None:
        when, _ = account.next_level(now)
        if when != math.inf:
            self._expect(when, key, account.version)
