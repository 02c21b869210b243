"""Errors that Fireflyer raises for reasons outside the caller's code.

    FireflyerError
    ├── ConfigError            a setting, option or argument that cannot work
    ├── WireError              communication between two processes failed
    │   ├── ProtocolMismatch   the peer speaks another version or fails the handshake
    │   ├── PeerLost           the peer closed the connection or died
    │   ├── NotPrimary         the process is not the leader; `address` is the leader's, if known
    │   ├── DeadlineExceeded   no answer before the deadline
    │   │   └── FileTimeout    a file operation timed out; also a TimeoutError (an OSError)
    │   └── Stale              another process has replaced the caller, which must stop
    ├── StorageError           a read or write of stored bytes failed
    │   ├── Corrupted          bytes do not match their checksum or structure
    │   │   └── CorruptedFile  Corrupted for a file of fs3; also an OSError with EIO
    │   ├── NoSpace            disk, quota or memory is full; also an OSError with ENOSPC
    │   └── Unavailable        the store does not answer, or only with transient errors;
    │                          also an OSError with EIO
    ├── CollectiveError        a collective operation cannot complete
    │   └── RankFailed         one rank is the cause; `rank` names it
    ├── ShardsLost             parts of a sharded model that no rank still holds
    ├── Cancelled              an operation withdrawn before it began
    ├── FileError              POSIX error of a file operation; also the matching Python OSError
    ├── KvError                the key-value store rejects or cannot serve a request
    │   ├── InvalidKey         a key is empty or too long; also a ValueError
    │   └── SnapshotGone       a snapshot or a part of the change feed was garbage-collected
    ├── CheckpointError        no usable checkpoint, or state that cannot be saved
    ├── DatasetError           the catalog rejects or cannot serve a request about a dataset
    │   ├── NoSuchDataset      the dataset or the version does not exist
    │   ├── VersionExists      the version is published, or was published once
    │   └── AccessDenied       the user may not use the dataset
    ├── TaskError              the platform rejects or cannot serve a request about a task
    │   ├── NoSuchTask         the task does not exist or belongs to another user
    │   └── NoSuchNode         the platform has no node of this name
    ├── AuthError              the platform does not serve this caller
    │   ├── Unauthenticated    the token is missing, wrong, expired or revoked
    │   ├── Throttled          too many requests without a valid token
    │   └── PermissionDenied   the token's scope or the user's groups do not allow the request
    ├── ExpertError            the store of experts rejects or cannot serve a request
    │   ├── NoSuchExpert       the store has no expert of this name
    │   ├── ExpertInUse        the expert is in use and can neither move nor be removed
    │   ├── ExpertTooLarge     the expert is larger than a tier
    │   └── DamagedExpert      the expert's bytes do not match its manifest; also Corrupted
    ├── WorkspaceError         a workspace or environment cannot be shipped, received or created
    ├── TraceError             a job trace that cannot be read or replayed
    ├── FabricError            a network that cannot be planned, read, routed or priced
    ├── ValidatorError         measurements or failure records that cannot be read or judged
    ├── ProfileError           a process that cannot be profiled, or a profile that cannot be read
    └── LabError               the lab cannot be set up on this machine

A message says what happened, to which object, and what to do. Programming errors stay ValueError
and TypeError.
`retryable` says whether the same call may succeed later without a change by the caller.
"""

import errno as numbers
import os
from collections.abc import Mapping, Sequence


class FireflyerError(Exception):
    """Base class of all errors of Fireflyer."""

    retryable = False

    def fields(self) -> dict[str, object]:
        """Returns the fields that are sent to another process with the message."""
        return dict(vars(self))

    @classmethod
    def rebuild(cls, message: str, fields: Mapping[str, object]) -> "FireflyerError":
        """Returns the error with this message and these `fields`.

        A subclass with other state overrides this method and `fields`.
        """
        error = cls.__new__(cls, message)
        Exception.__init__(error, message)
        vars(error).update(fields)
        return error


class ConfigError(FireflyerError):
    """A setting, option or argument that cannot work."""


class WireError(FireflyerError):
    """Communication between two processes failed."""


class ProtocolMismatch(WireError):
    """The peer speaks another protocol version, or failed to prove the shared secret."""


class PeerLost(WireError):
    """The peer closed the connection or died."""

    retryable = True


class NotPrimary(WireError):
    """The addressed process is not the leader.

    Attributes:
        address: address of the leader, or "" if unknown.
    """

    retryable = True

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address

    def __reduce__(self) -> tuple[type["NotPrimary"], tuple[str, str]]:
        return type(self), (str(self), self.address)


class DeadlineExceeded(WireError, RuntimeError):
    """No answer arrived before the deadline.

    Also a RuntimeError, as torch raises for a collective that timed out.
    """

    retryable = True


class FileTimeout(DeadlineExceeded, TimeoutError):
    """A file operation got no answer before the deadline.

    Also an OSError with ETIMEDOUT, for programs that read through file objects.
    """

    errno = numbers.ETIMEDOUT

    def __new__(cls, *args: object) -> "FileTimeout":
        return OSError.__new__(cls, *args)  # RuntimeError.__new__ would not make an OSError


class Stale(WireError):
    """Another process has replaced the caller, which must stop."""


class StorageError(FireflyerError):
    """A read or write of stored bytes failed.

    Attributes:
        segment: index of the segment that failed; set by `Storage.read_checked`.
    """

    segment: int | None = None


class Corrupted(StorageError):
    """Stored bytes do not match their checksum or their structure."""


class CorruptedFile(Corrupted, OSError):
    """Bytes of a file do not match their checksum.

    Also an OSError with EIO, for programs that read through file objects.
    """

    errno = numbers.EIO


class NoSpace(StorageError, OSError):
    """A disk, quota or memory reservation is full.

    Also an OSError with ENOSPC, so programs that handle a full disk need no change.
    """

    retryable = True
    errno = numbers.ENOSPC


class Unavailable(StorageError, OSError):
    """The store does not answer, or only with transient errors.

    Also an OSError with EIO, the error of a disk that fails.
    """

    retryable = True
    errno = numbers.EIO


class FileError(FireflyerError, OSError):
    """A file operation failed; `errno` is the POSIX error number.

    `FileError(errno, path)` creates an object that is also of Python's class for that number
    (FileNotFoundError, PermissionError, ...), so callers can catch either class.

    Attributes:
        detail: information beyond the error number, or "".
    """

    detail: str

    def __new__(cls, number: int, path: str | bytes = "", detail: str = "") -> "FileError":
        kind = _KINDS.get(number, FileError) if cls is FileError else cls
        text = os.strerror(number) + (f": {detail}" if detail else "")
        made = OSError.__new__(kind, number, text, os.fsdecode(path))
        assert isinstance(made, FileError)
        made.detail = detail
        return made

    def __init__(self, number: int, path: str | bytes = "", detail: str = "") -> None:
        """Does nothing: `__new__` sets the fields."""

    def fields(self) -> dict[str, object]:
        path = os.fsencode(self.filename or "")
        return {"errno": self.errno or 0, "path": path, "detail": self.detail}

    @classmethod
    def rebuild(cls, message: str, fields: Mapping[str, object]) -> "FileError":
        number, path, detail = fields["errno"], fields["path"], fields.get("detail", "")
        if not (isinstance(number, int) and isinstance(path, bytes) and isinstance(detail, str)):
            raise TypeError("a FileError has a number, a path and a detail")
        return FileError(number, path, detail)

    def __reduce__(self) -> tuple[type["FileError"], tuple[int, str, str]]:
        return FileError, (self.errno or 0, self.filename, self.detail)


class _NotFound(FileError, FileNotFoundError):
    """ENOENT."""


class _Exists(FileError, FileExistsError):
    """EEXIST."""


class _Permission(FileError, PermissionError):
    """EACCES, EPERM."""


class _IsADirectory(FileError, IsADirectoryError):
    """EISDIR."""


class _NotADirectory(FileError, NotADirectoryError):
    """ENOTDIR."""


_KINDS: dict[int, type[FileError]] = {
    numbers.ENOENT: _NotFound,
    numbers.EEXIST: _Exists,
    numbers.EACCES: _Permission,
    numbers.EPERM: _Permission,
    numbers.EISDIR: _IsADirectory,
    numbers.ENOTDIR: _NotADirectory,
}


class CollectiveError(FireflyerError, RuntimeError):
    """A collective operation cannot complete. Also a RuntimeError, like torch's own errors."""


class RankFailed(CollectiveError):
    """A collective cannot complete because of one rank.

    Attributes:
        rank: the rank that died, froze or left, in the group of the operation.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type["RankFailed"], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class ShardsLost(FireflyerError):
    """Some parts of a sharded model are no longer on any rank: load a checkpoint.

    Attributes:
        parameters: names of the parameters that are incomplete, in the model's order.
        ranks: ranks of the former layout that held the lost parts.
    """

    def __init__(self, message: str, parameters: Sequence[str], ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.parameters, self.ranks = tuple(parameters), tuple(ranks)

    def __reduce__(self) -> tuple[type["ShardsLost"], tuple[str, tuple[str, ...], tuple[int, ...]]]:
        return type(self), (str(self), self.parameters, self.ranks)


class Cancelled(FireflyerError):
    """An operation was withdrawn before it began; it had no effect."""


class KvError(FireflyerError):
    """The key-value store rejects or cannot serve a request."""


class InvalidKey(KvError, ValueError):
    """A key is empty or too long."""


class SnapshotGone(KvError):
    """A snapshot, or a part of the change feed, expired and was garbage-collected."""


class CheckpointError(FireflyerError):
    """No usable checkpoint exists, or a state cannot be saved."""


class DatasetError(FireflyerError):
    """The catalog rejects or cannot serve a request about a dataset."""


class NoSuchDataset(DatasetError):
    """A dataset or a version of it does not exist."""


class VersionExists(DatasetError):
    """A version number is taken: published versions never change, removed ones never return."""


class AccessDenied(DatasetError):
    """The user may not use this dataset."""


class TaskError(FireflyerError):
    """The platform rejects or cannot serve a request about a task."""


class NoSuchTask(TaskError):
    """A task does not exist, or belongs to another user."""


class NoSuchNode(TaskError):
    """The platform has no node of this name."""


class AuthError(FireflyerError):
    """The platform does not serve this caller."""


class Unauthenticated(AuthError):
    """The token is missing, wrong, expired or revoked."""


class Throttled(AuthError):
    """The caller's address sends too many requests without a valid token."""


class PermissionDenied(AuthError):
    """The token's scope, or the user's groups, do not allow the request."""


class ExpertError(FireflyerError):
    """The store of experts rejects or cannot serve a request.

    Attributes:
        expert: name of the expert, or "".
    """

    def __init__(self, message: str, expert: str = "") -> None:
        super().__init__(message)
        self.expert = expert

    def __reduce__(self) -> tuple[type["ExpertError"], tuple[str, str]]:
        return type(self), (str(self), self.expert)


class NoSuchExpert(ExpertError):
    """The store has no expert of this name."""


class ExpertInUse(ExpertError):
    """The expert is in use, so it can neither leave memory nor be removed."""

    retryable = True


class ExpertTooLarge(ExpertError):
    """The expert is larger than a tier of the store."""


class DamagedExpert(ExpertError, Corrupted):
    """The bytes of an expert do not match its manifest."""


class WorkspaceError(FireflyerError):
    """A workspace or an environment cannot be shipped, received or created."""


class TraceError(FireflyerError):
    """A job trace cannot be read, or cannot be replayed on the requested cluster."""


class FabricError(FireflyerError):
    """A network cannot be planned, read, routed or priced as requested."""


class ValidatorError(FireflyerError):
    """Measurements or failure records cannot be read or judged, or a check cannot be chosen."""


class ProfileError(FireflyerError):
    """A process cannot be profiled as requested, or a profile cannot be read."""


class LabError(FireflyerError):
    """The lab cannot be set up on this machine."""
