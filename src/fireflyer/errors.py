"""Every error that Fireflyer raises for a reason outside the caller's code.

    FireflyerError
    ├── ConfigError            a setting, option or argument that cannot work
    ├── WireError              between processes
    │   ├── ProtocolMismatch   the other side speaks another version or is not who it should be
    │   ├── PeerLost           the other side went away
    │   ├── NotPrimary         it is not the one in charge; `address` says who is, if it knows
    │   ├── DeadlineExceeded   no answer in time
    │   └── Stale              another process has taken the caller's place: it must stop
    ├── StorageError           bytes at rest
    │   ├── Corrupted          a checksum or a structure does not hold
    │   ├── NoSpace            disk, quota or memory is full
    │   └── Unavailable        the place does not answer, or with transient errors only
    ├── CollectiveError        a collective operation cannot complete
    │   └── RankFailed         because of one rank; `rank` names it
    ├── ShardsLost             parts of a sharded model that no rank holds any more
    ├── FileError              a POSIX error number of a file operation; also Python's OSError of its kind
    ├── CheckpointError        no checkpoint that can be used, or state that cannot be saved
    ├── DatasetError           the catalog refuses or cannot do what was asked of a dataset
    │   ├── NoSuchDataset      it, or this version of it, is not there
    │   ├── VersionExists      the version is published, or was once
    │   └── AccessDenied       it is not for this user
    ├── TaskError              the platform refuses or cannot do what was asked of a task
    │   └── NoSuchTask         it is not there, or not for this user
    ├── AuthError              the platform does not do this for who asks
    │   ├── Unauthenticated    the token is missing, wrong, expired or revoked
    │   └── PermissionDenied   the token's scope does not allow it
    ├── WorkspaceError         a workspace or environment that cannot be shipped, taken in or made
    ├── TraceError             a trace of jobs that cannot be read or replayed
    └── LabError               the lab cannot be set up on this machine

A message says what happened, to which object, and what to do. Programming errors stay
ValueError and TypeError.
`retryable` says whether the same call may succeed later without a change by the caller.
"""

import errno as numbers
import os
from collections.abc import Mapping, Sequence


class FireflyerError(Exception):
    """Root of the tree."""

    retryable = False

    def fields(self) -> dict[str, object]:
        """What crosses to another process beside the message."""
        return dict(vars(self))

    @classmethod
    def rebuild(cls, message: str, fields: Mapping[str, object]) -> "FireflyerError":
        """The error with this message and these `fields`; a kind with other state overrides both."""
        error = cls.__new__(cls, message)
        Exception.__init__(error, message)
        vars(error).update(fields)
        return error


class ConfigError(FireflyerError):
    """A setting, option or argument that cannot work."""


class WireError(FireflyerError):
    """Something between two processes went wrong."""


class ProtocolMismatch(WireError):
    """The other side speaks another protocol version, or failed to prove the shared secret."""


class PeerLost(WireError):
    """The other side closed the connection or died."""

    retryable = True


class NotPrimary(WireError):
    """The process asked is not the one in charge.

    Attributes:
        address: of the one in charge, or "".
    """

    retryable = True

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address

    def __reduce__(self) -> tuple[type["NotPrimary"], tuple[str, str]]:
        return type(self), (str(self), self.address)


class DeadlineExceeded(WireError, RuntimeError):
    """No answer within the deadline. A RuntimeError, too, as torch has it for a collective that timed out."""

    retryable = True


class Stale(WireError):
    """Another process has taken the place of the caller, which must stop."""


class StorageError(FireflyerError):
    """Reading or writing stored bytes failed.

    Attributes:
        segment: of an error of `Storage.read_checked`: the index of the segment that it is about.
    """

    segment: int | None = None


class Corrupted(StorageError):
    """Stored bytes do not match their checksum or their structure."""


class NoSpace(StorageError):
    """A disk, quota or memory reservation is full."""

    retryable = True


class Unavailable(StorageError):
    """A place does not answer, or only with errors that come and go."""

    retryable = True


class FileError(FireflyerError, OSError):
    """A file operation cannot be done; `errno` says why, as in POSIX.

    `FileError(errno, path)` makes an object that is also of Python's class for that number
    (FileNotFoundError, PermissionError, ...), so that either can be caught.

    Attributes:
        detail: what the number does not say, or "".
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
        """The fields are set by __new__."""

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
    """A collective operation cannot complete. A RuntimeError, too, as torch's own are."""


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
    """Parts of a sharded model are in no rank's memory any more: load a checkpoint.

    Attributes:
        parameters: names of those of which something is lost, in the model's order.
        ranks: of the former layout, that held it.
    """

    def __init__(self, message: str, parameters: Sequence[str], ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.parameters, self.ranks = tuple(parameters), tuple(ranks)

    def __reduce__(self) -> tuple[type["ShardsLost"], tuple[str, tuple[str, ...], tuple[int, ...]]]:
        return type(self), (str(self), self.parameters, self.ranks)


class Cancelled(FireflyerError):
    """An operation was withdrawn before it began: nothing of it has happened."""


class CheckpointError(FireflyerError):
    """No usable checkpoint exists, or a state cannot be saved."""


class DatasetError(FireflyerError):
    """The catalog refuses, or cannot do, what was asked of a dataset."""


class NoSuchDataset(DatasetError):
    """A dataset, or a version of it, is not there."""


class VersionExists(DatasetError):
    """A version number is taken: published versions never change, removed ones never return."""


class AccessDenied(DatasetError):
    """A dataset is not for this user."""


class TaskError(FireflyerError):
    """The platform refuses, or cannot do, what was asked of a task."""


class NoSuchTask(TaskError):
    """A task is not there, or belongs to another user."""


class AuthError(FireflyerError):
    """The platform does not do this for who asks."""


class Unauthenticated(AuthError):
    """The token is missing, wrong, expired or revoked."""


class PermissionDenied(AuthError):
    """The token's scope, or the user's groups, do not allow it."""


class WorkspaceError(FireflyerError):
    """A workspace or an environment cannot be shipped, taken in or made."""


class TraceError(FireflyerError):
    """A trace of jobs cannot be read, or not be replayed on the cluster that was asked for."""


class LabError(FireflyerError):
    """The lab cannot be set up on this machine."""
