"""Executor of the protocol steps of `kv.core`: performs their operations on a storage."""

import threading
import time
from typing import Any, TypeVar

from fireflyer.errors import Corrupted, FireflyerError, StorageError, Unavailable
from fireflyer.kv.core.operations import (
    Compute,
    Create,
    Delete,
    ListNames,
    Operation,
    Pause,
    Read,
    Steps,
    Write,
)
from fireflyer.storage import Storage

T = TypeVar("T")

_REPEATS = 5
"""Maximum attempts of an idempotent operation, with a backoff from 0.05 s."""


def perform(storage: Storage, operation: Operation) -> Any:
    """Performs one operation and returns its result. Raises StorageError."""
    match operation:
        case Create(name, data):
            return storage.create(name, data)
        case Write(name, data):
            return storage.write(name, [data])
        case Read():
            return read(storage, operation)
        case ListNames(folder):
            return storage.list(folder)
        case Delete(name):
            return storage.delete(name)
        case Pause(seconds):
            return time.sleep(seconds)
        case Compute(function):
            return function()


def read(storage: Storage, wanted: Read) -> bytes | None:
    """Reads an object or a range of it; None if it does not exist."""
    if storage.size(wanted.name) is None:
        return None
    try:
        data = storage.read(wanted.name, wanted.offset, wanted.length)
    except StorageError:
        if storage.size(wanted.name) is None:  # the object was deleted meanwhile
            return None
        raise
    if wanted.length is not None and len(data) < wanted.length:
        raise Corrupted(
            f"{storage}/{wanted.name} ends inside a needed range: restore it from a replica"
        )
    return data


def run(storage: Storage, steps: Steps[T], lock: "threading.Lock | None" = None) -> T:
    """Runs a protocol step to its end and returns its result.

    Args:
        lock: lock that is held while the core runs, and released during its operations. Steps of
            several threads interleave only at operations.
    """
    result: Any = None
    failure: FireflyerError | None = None
    while True:
        if lock is not None:
            lock.acquire()
        try:
            operation = steps.send(result) if failure is None else steps.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            if lock is not None:
                lock.release()
        result, failure = None, None
        try:
            result = _persistent(storage, operation)
        except FireflyerError as error:
            failure = error


def _persistent(storage: Storage, operation: Operation) -> Any:
    """Retries an idempotent operation while the store is unavailable.

    A create is not retried, because its caller must check which writer succeeded.
    """
    for attempt in range(_REPEATS):
        try:
            return perform(storage, operation)
        except Unavailable:
            if isinstance(operation, Create | Compute) or attempt == _REPEATS - 1:
                raise
        time.sleep(0.05 * 2**attempt)
    raise AssertionError
