"""Process of a mount: it mounts a directory and answers the kernel until it is unmounted."""

import ctypes
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fireflyer._native
from fireflyer._native.fs3.mount import Mount
from fireflyer.errors import ConfigError, StorageError, Unavailable
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Client, Settings, connect
from fireflyer.fs3.client.discovery import VARIABLE, Place, find
from fireflyer.fs3.mount.caller import Caller
from fireflyer.fs3.mount.requests import Requests
from fireflyer.log import get_logger
from fireflyer.program import user_directory

LIBRARY = "libff_fuse.so"
DEVICE = "/dev/fuse"
KIND = "fuse.fireflyer"
"""Type of the file system in /proc/mounts."""
THREADS = 16
"""Number of requests handled in parallel."""
DEADLINE_S = 300.0
"""Timeout in seconds after which a program gets EIO if services do not answer."""
READ_AHEAD_KIB = 4096
"""Size of the kernel's read-ahead for the mount, in KiB; the kernel's default is only 128 KiB."""
NICENESS = -10
"""Nice value of the mount's threads: a high priority, because programs wait for these threads."""
MNT_DETACH = 2
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 2, 4, 32, 4096


class MountPoint(NamedTuple):
    """Line of /proc/self/mountinfo."""

    directory: str
    kind: str
    device: str


def mounted_at(directory: str) -> MountPoint | None:
    """Returns the topmost mount at exactly this directory."""
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            own, _, rest = line.partition(" - ")
            fields = own.split()
            path = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
            path = path.encode("latin-1").decode("utf-8", "surrogateescape")
            if path == directory:
                found = MountPoint(path, rest.split()[0], fields[2])
    return found


def real(directory: str) -> str:
    """Returns the absolute path without symbolic links; the directory may be a dead mount."""
    if os.path.islink(directory):
        return os.path.realpath(directory)
    parent, name = os.path.split(os.path.abspath(directory))
    return os.path.join(os.path.realpath(parent), name)


def check(directory: str) -> None:
    """Checks that a directory can be mounted; first unmounts a mount whose process has died.

    Raises:
        ConfigError: the directory is missing, not empty or mounted; or there is no FUSE here.
    """
    there = mounted_at(directory)
    if there is not None and there.kind == KIND and _dead(directory):
        unmount(directory, lazy=True)
        there = mounted_at(directory)
    if there is not None:
        raise ConfigError(
            f"{directory} is mounted already ({there.kind}): `fireflyer fs umount` first"
        )
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory} is not a directory: make it first")
    if os.listdir(directory):
        raise ConfigError(f"{directory} is not empty: a mount would hide what it holds")
    if not library().exists():
        raise ConfigError(
            "this build of Fireflyer cannot mount, because libfuse3 was missing: "
            "apt-get install libfuse3-dev fuse3 (or fuse3-devel), then install Fireflyer again"
        )
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as error:
        raise ConfigError(
            f"{DEVICE} cannot be opened ({error.strerror}): load the kernel module `fuse`; in a "
            f"container, pass the device in"
        ) from None


def library() -> Path:
    """Returns the path of the library that needs libfuse; it may be missing."""
    return Path(fireflyer._native.__file__).parent / LIBRARY


def _dead(directory: str) -> bool:
    try:
        os.stat(directory)
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def unmount(directory: str, *, lazy: bool = False) -> None:
    """Unmounts a directory.

    Args:
        lazy: True to detach the mount now; programs can still use their open files.

    Raises:
        ConfigError: the directory is not a mount of Fireflyer.
        Unavailable: the mount is in use.
        StorageError: the kernel reported an error.
    """
    there = mounted_at(directory)
    if there is None or there.kind != KIND:
        raise ConfigError(f"{directory} is not a mount of Fireflyer")
    if os.getuid():
        flags = ["-u", "-z"] if lazy else ["-u"]
        done = subprocess.run(["fusermount3", *flags, directory], capture_output=True, text=True)
        number = errno.EBUSY if "busy" in done.stderr else errno.EPERM if done.returncode else 0
    else:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.umount2(os.fsencode(directory), MNT_DETACH if lazy else 0)
        number = ctypes.get_errno() if failed else 0
    if number == errno.EBUSY:
        raise Unavailable(f"{directory} is in use: end the programs there, or use --lazy")
    if number:
        raise StorageError(f"cannot unmount {directory}: {os.strerror(number)}")


def serve(
    where: str | None,
    directory: str,
    *,
    cache_s: float,
    ready: Callable[[], None],
    flags: int = 0,
) -> None:
    """Mounts a file system at a directory; returns when it is unmounted or SIGTERM arrives.

    Args:
        cache_s: seconds for which the kernel may cache names and attributes.
        ready: callback that is called once programs can use the directory.
        flags: MS_RDONLY, MS_NOEXEC of mount(2); needs root.

    Raises:
        ConfigError: the errors of `check`.
        WireError: no manager answers, or the manager has another secret.
    """
    check(directory)
    place = find(where)
    _raise_priority()  # first, because other threads inherit the priority
    caller = Caller()
    settings = Settings(deadline_s=DEADLINE_S, lanes=THREADS, before_retry=caller.check)
    with connect(place.addresses, secret_file=place.secret_file, settings=settings) as client:
        requests = Requests(client, caller, lambda: space_of(place), cache_s)
        mount = Mount(
            *(client.parts.engine, requests.call, requests.finish),
            *(settings.attempt_s, settings.slowest),
        )
        mount.mount(str(library()), directory, _source(where), cache_s, os.getuid() == 0)
        restrict(directory, flags)
        get_logger("fs3.mount").info("%s is mounted", directory)
        _answer(mount, requests, client, directory, ready)


def _source(where: str | None) -> str:
    """Returns the name of the file system for /proc/mounts, the same as in fstab."""
    named = where or os.environ.get(VARIABLE, "")
    return os.path.abspath(named) if os.path.exists(named) else named


def restrict(directory: str, flags: int) -> None:
    """Restricts a mount by flags of mount(2); raises StorageError."""
    libc = ctypes.CDLL(None, use_errno=True)
    bits = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | flags  # libfuse sets NOSUID and NODEV, too
    if flags and libc.mount(None, os.fsencode(directory), None, ctypes.c_ulong(bits), None):
        reason = os.strerror(ctypes.get_errno())
        unmount(directory, lazy=True)
        raise StorageError(f"cannot restrict the mount at {directory}: {reason}")


def _answer(
    mount: Mount, requests: Requests, client: Client, directory: str, ready: Callable[[], None]
) -> None:
    _read_ahead(directory)
    threads = [threading.Thread(target=mount.work, daemon=True) for _ in range(THREADS)]
    with _Signals() as signals:
        for thread in threads:
            thread.start()
        ready()
        for thread in threads:
            while thread.is_alive() and not signals.arrived:
                thread.join(1.0)
    if signals.arrived and mounted_at(directory) is not None:
        get_logger("fs3.mount").info("%s: a signal ends the mount", directory)
        requests.sync()
        unmount(directory, lazy=True)
        client.close()
        os._exit(0)  # ends threads that serve open files; these files get ENOTCONN
    requests.sync()
    mount.close()
    get_logger("fs3.mount").info("%s was unmounted", directory)


class _Signals:
    """Records SIGTERM and SIGINT during a block of the main thread."""

    def __init__(self) -> None:
        self.arrived = False

    def __enter__(self) -> "_Signals":
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, *_: object) -> None:
        self.arrived = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _raise_priority() -> None:
    """Raises the priority of this thread; ignores failures, because only root may do this."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    except OSError as error:
        get_logger("fs3.mount").debug("the priority stays as it is: %s", error)


def _read_ahead(directory: str) -> None:
    """Enlarges the kernel's read-ahead; ignores failures, because only root may do this."""
    there = mounted_at(directory)
    try:
        if there is not None:
            path = Path(f"/sys/class/bdi/{there.device}/read_ahead_kb")
            path.write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        get_logger("fs3.mount").debug("read-ahead of %s stays small: %s", directory, error)


def space_of(place: Place) -> tuple[int, int]:
    """Returns total and free bytes of all disks, divided by the number of replicas."""
    found = survey.health(place)
    copies = max((len(chain.targets) for chain in found.chains), default=1)
    size = sum(node.disk_bytes for node in found.nodes)
    return size // copies, sum(node.free_bytes for node in found.nodes) // copies


def detach(log: Path, work: Callable[[Callable[[], None]], None]) -> None:
    """Runs `work(ready)` in a child process; returns when the child calls `ready`.

    The child's output goes to the log.

    Raises:
        StorageError: the child failed before that; the message has its error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _become_daemon(log)
        try:
            work(lambda: _close_with(writer, b"+"))
            os._exit(0)
        except Exception as error:  # noqa: BLE001  # the parent raises it
            _close_with(writer, str(error).encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()
    if message != b"+":
        raise StorageError(message.decode() or f"the mount ended at once: {log} says why")


def _close_with(pipe: int, message: bytes) -> None:
    with os.fdopen(pipe, "wb") as file:
        file.write(message)


def _become_daemon(log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)


def default_log(directory: str) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or user_directory() / ".local/state")
    return state / "fireflyer" / f"mount{directory.replace('/', '-')}.log"
