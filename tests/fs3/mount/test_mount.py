"""A mounted file system does what programs expect of a directory; needs /dev/fuse and libfuse3."""

import contextlib
import errno
import fcntl
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import fork_child
from tests.fs3.client.conftest import CHUNK, Cluster
from tests.fs3.mount.conftest import Mounted, mount
from tests.fs3.soak.cluster import small_disk
from tests.plugins import guard
from tests.waiting import LIMIT_S, until

from fireflyer.cli.fs.mount_helper import parse_options
from fireflyer.errors import ConfigError, Unavailable
from fireflyer.fs3.client import Client
from fireflyer.fs3.mount import program
from fireflyer.rpc.loop import LoopThread

SHARED = ("st_mode", "st_nlink", "st_size", "st_atime_ns", "st_mtime_ns", "st_ctime_ns")


@pytest.fixture
def second(mounted: Mounted, calm: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Another mount of the same file system, whose kernel keeps nothing."""
    one = Mounted(calm, tmp_path / "second", "--cache", "0")
    yield one.directory
    one.close()


def test_programs_see_what_the_client_wrote_and_the_other_way(place: Path, fs: Client) -> None:
    data = random.Random(1).randbytes(5 * CHUNK + 77)
    (place / "deep/er").mkdir(parents=True)
    (place / "deep/er/file").write_bytes(data)
    with fs.open("/deep/er/file") as file:
        assert file.read() == data
    with fs.open("/deep/other", "wb") as file:
        file.write(data[::-1])
    assert (place / "deep/other").read_bytes() == data[::-1]
    assert sorted(p.name for p in (place / "deep").iterdir()) == ["er", "other"]
    assert [f.name for _, _, names in os.walk(place) for f in map(Path, names)] == ["other", "file"]


def test_a_mount_goes_before_the_programs_that_wait_for_it(mounted: Mounted) -> None:
    threads = os.listdir(f"/proc/{mounted.process.pid}/task")
    assert len(threads) > program.THREADS
    niceness = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads]
    assert set(niceness) == {program.NICENESS}


def test_names_links_and_attributes(place: Path) -> None:
    (place / "a").write_bytes(b"one")
    os.link(place / "a", place / "b")
    os.symlink("a", place / "c")
    assert os.stat(place / "b").st_nlink == 2
    assert (os.readlink(place / "c"), (place / "c").read_bytes()) == ("a", b"one")
    os.rename(place / "a", place / "d")
    assert sorted(os.listdir(place)) == ["b", "c", "d"]
    os.chmod(place / "d", 0o4751)
    os.chown(place / "d", 12, 34)
    os.utime(place / "d", ns=(5_000_000_001, 6_000_000_002))
    found = os.stat(place / "b")
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o751, 12, 34)  # not setuid
    assert (found.st_atime_ns, found.st_mtime_ns) == (5_000_000_001, 6_000_000_002)
    os.setxattr(place / "d", "user.key", b"value")
    assert os.listxattr(place / "d") == ["user.key"]
    assert os.getxattr(place / "d", "user.key") == b"value"
    os.removexattr(place / "d", "user.key")
    with pytest.raises(OSError, match="No data"):
        os.getxattr(place / "d", "user.key")
    os.mkdir(place / ("n" * 255))
    (place / ("é" * 127)).write_bytes(b"254 bytes")
    for make in (os.mkdir, os.mkfifo, os.stat, lambda path: open(path, "wb").close()):
        with pytest.raises(OSError, match="too long"):
            make(place / ("n" * 256))
    (place / "e/f").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        os.rmdir(place / "e")
    assert os.statvfs(place).f_bavail > 0


def test_programs_meet_at_fifos_and_sockets(place: Path) -> None:
    os.mkfifo(place / "fifo", 0o640)
    os.mknod(place / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(place / "socket"))
        kinds = {p.name: stat.filemode(p.stat().st_mode) for p in place.iterdir()}
        assert kinds["fifo"] == "prw-r-----"
        assert (kinds["null"], kinds["socket"][0]) == ("crw-------", "s")
        assert os.stat(place / "null").st_rdev == os.makedev(1, 3)
        listener.listen()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(os.path.relpath(place / "socket"))
    writer = subprocess.Popen(["sh", "-c", "echo hello > fifo"], cwd=place)
    assert (place / "fifo").read_text() == "hello\n"
    assert writer.wait(LIMIT_S) == 0


def test_a_directory_shows_changes_of_its_names_at_once(place: Path, second: Path) -> None:
    (place / "d").mkdir()
    for change in (
        lambda: (place / "d/f").write_bytes(b"1"),
        lambda: os.symlink("f", place / "d/s"),
        lambda: os.link(place / "d/f", place / "d/g"),
        lambda: (place / "d/sub").mkdir(),
        lambda: (place / "d/f").unlink(),
        lambda: os.rename(place / "d/g", place / "d/h"),
        lambda: os.utime(place / "d", (5, 6)),
    ):
        before = os.stat(place / "d")
        change()
        after, elsewhere = os.stat(place / "d"), os.stat(second / "d")
        assert after.st_ctime_ns > before.st_ctime_ns
        assert [getattr(after, name) for name in SHARED] == [
            getattr(elsewhere, name) for name in SHARED
        ]


WRITTEN_LATE = """
import mmap, os, sys
file = open(sys.argv[1], "r+b", buffering=0)
os.close(os.dup(file.fileno()))
os.unlink(sys.argv[1])
os.pwrite(file.fileno(), b"x", 0)
memory = mmap.mmap(file.fileno(), 0)
os.close(os.dup(file.fileno()))
memory[1:3] = b"yz"
memory.flush()
assert os.pread(file.fileno(), 4, 0) == b"xyz0"
"""


def test_a_file_written_after_a_copy_of_it_was_closed_keeps_all(place: Path, second: Path) -> None:
    with open(place / "f", "w+b", buffering=0) as file:
        for at in range(3):
            file.write(b"%d" % at * CHUNK)
            os.close(os.dup(file.fileno()))
            assert os.stat(second / "f").st_size == (at + 1) * CHUNK
    program = [sys.executable, "-c", WRITTEN_LATE, str(place / "f")]
    subprocess.run(program, check=True, timeout=LIMIT_S)
    assert not (place / "f").exists()


def test_times_that_a_program_sets_survive_its_close(place: Path) -> None:
    with open(place / "f", "wb", buffering=0) as file:
        file.write(b"bytes")
        os.utime(file.fileno(), ns=(1, 2))
    assert os.stat(place / "f").st_mtime_ns == 2


def rename(old: Path, new: Path, flags: int) -> int:
    """renameat2; Python has none."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags)
    return ctypes.get_errno() if failed else 0


def test_rename_flags(place: Path) -> None:
    (place / "a").write_bytes(b"a")
    (place / "b").write_bytes(b"b")
    assert rename(place / "a", place / "b", 1) == errno.EEXIST
    assert rename(place / "a", place / "b", 2) == 0
    assert (place / "a").read_bytes() == b"b"
    assert rename(place / "a", place / "b", 4) == errno.EINVAL


def test_a_file_without_a_name_lives_until_it_is_closed(place: Path) -> None:
    data = os.urandom(3 * CHUNK)
    for gone in ("unlink", "replace"):
        (place / "f").write_bytes(data)
        with open(place / "f", "rb") as file:
            if gone == "unlink":
                os.unlink(place / "f")
            else:
                (place / "g").write_bytes(b"new")
                os.rename(place / "g", place / "f")
            assert file.read() == data
            assert os.fstat(file.fileno()).st_nlink == 0


def test_append_truncate_and_holes(place: Path) -> None:
    with open(place / "log", "ab") as one, open(place / "log", "ab") as two:
        for n in range(20):
            (one, two)[n % 2].write(b"%02d\n" % n)
            (one, two)[n % 2].flush()
    assert (place / "log").read_bytes() == b"".join(b"%02d\n" % n for n in range(20))
    os.truncate(place / "log", 4)
    os.truncate(place / "log", 3 * CHUNK)
    assert (place / "log").read_bytes() == b"00\n0".ljust(3 * CHUNK, b"\0")
    with open(place / "log", "r+b", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 4 * CHUNK)
        assert os.fstat(file.fileno()).st_size == 4 * CHUNK
        file.seek(10 * CHUNK)
        file.write(b"end")
        assert os.pread(file.fileno(), 5, 10 * CHUNK - 2) == b"\0\0end"
    with open(place / "log", "wb"):
        pass
    assert os.stat(place / "log").st_size == 0


MAPPED = """
import mmap, sys
with open(sys.argv[1], "w+b", buffering=0) as file:
    file.truncate(40005)
    with mmap.mmap(file.fileno(), 40005) as memory:
        memory[16382:16386] = b"abcd"
        memory.flush()
        file.seek(0)
        assert file.read()[16382:16386] == b"abcd"
        memory[0:1] = b"!"
"""


def test_mapped_memory_is_the_file(place: Path, fs: Client) -> None:
    """A page fault holds the interpreter's lock, which the services here need: another process."""
    subprocess.run([sys.executable, "-c", MAPPED, str(place / "f")], check=True, timeout=LIMIT_S)
    with fs.open("/f") as kept:
        data = kept.read()
    assert (data[:1], data[16382:16386], len(data)) == (b"!", b"abcd", 40005)
    assert data.count(0) == 40000


def test_another_mount_sees_a_file_once_it_is_closed(place: Path, second: Path) -> None:
    for n in range(5):
        (place / "f").write_bytes(b"%d" % n * (n + 1))
        assert (second / "f").read_bytes() == b"%d" % n * (n + 1)
        with open(second / "f", "ab", buffering=0) as file:
            file.write(b"!")
            os.fsync(file.fileno())
            with open(place / "f", "rb") as other:
                assert other.read() == b"%d" % n * (n + 1) + b"!"
        (second / "g").write_bytes(b"same size %d" % n)
        assert (place / "g").read_bytes() == b"same size %d" % n


def test_locks_hold_between_processes_of_one_mount(place: Path) -> None:
    with open(place / "f", "w+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)

        def child() -> None:
            with open(place / "f", "r+b") as its:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(its, fcntl.LOCK_SH | fcntl.LOCK_NB)
                with pytest.raises(BlockingIOError):
                    fcntl.lockf(its, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 14)
                fcntl.lockf(its, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 15)

        _, status = os.waitpid(fork_child(child), 0)
        assert status == 0


def test_many_threads_write_and_read_back(place: Path) -> None:
    wrong: list[int] = []

    def work(n: int) -> None:
        rng = random.Random(n)
        for turn in range(10):
            data = rng.randbytes(rng.choice((10, 5000, 3 * CHUNK)))
            (place / f"{n}-{turn % 3}").write_bytes(data)
            if (place / f"{n}-{turn % 3}").read_bytes() != data:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not wrong
    assert len(os.listdir(place)) == 24


def test_a_large_directory_is_listed_whole_while_it_shrinks(place: Path, fs: Client) -> None:
    fs.mkdir("/d")
    names = [f"file-{n:05}" for n in range(2500)]
    for begin in range(0, 2500, 500):
        fs.create_many("/d", names[begin : begin + 500])
    assert sorted(os.listdir(place / "d")) == names
    for entry in os.scandir(place / "d"):
        os.unlink(entry.path)
    assert os.listdir(place / "d") == []


def test_the_kernel_checks_permissions_and_files_belong_to_their_maker(place: Path) -> None:
    (place / "secret").write_bytes(b"x")
    os.chmod(place / "secret", 0o600)
    os.chmod(place, 0o777)
    os.mkdir(place / "team")
    os.chmod(place / "team", 0o770)
    os.chown(place / "team", 0, 777)

    def child() -> None:
        os.chdir(place)  # the folders above are not for others
        os.setgroups([777])
        os.setgid(1234)
        os.setuid(1234)
        with pytest.raises(PermissionError):
            os.open("secret", os.O_RDONLY)
        Path("mine").write_bytes(b"mine")
        Path("team/ours").mkdir()
        with pytest.raises(PermissionError):
            os.chown("mine", 0, 0)

    _, status = os.waitpid(fork_child(child), 0)
    assert status == 0
    found = os.stat(place / "mine")
    assert (found.st_uid, found.st_gid, found.st_size) == (1234, 1234, 4)


def test_a_killed_mount_leaves_a_directory_that_can_be_mounted_again(
    mounted: Mounted, calm: Cluster, fs: Client, tmp_path: Path
) -> None:
    one = Mounted(calm, tmp_path / "m")
    file = os.open(one.directory / "f", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"kept")
    os.fsync(file)
    one.kill()
    with pytest.raises(OSError, match="not connected"):
        os.stat(one.directory / "f")
    with pytest.raises(OSError, match="not connected"):
        os.close(file)
    two = Mounted(calm, tmp_path / "m")
    assert (two.directory / "f").read_bytes() == b"kept"
    two.process.send_signal(signal.SIGTERM)
    assert two.wait() == 0
    assert os.listdir(two.directory) == []
    three = Mounted(calm, tmp_path / "m")
    with open(three.directory / "f", "rb"), pytest.raises(Unavailable, match="in use"):
        program.unmount(str(three.directory))
    os.symlink("m", tmp_path / "link")
    program.unmount(program.real(str(tmp_path / "link")))
    assert three.wait() == 0


def test_a_mount_that_does_not_answer_can_be_unmounted(
    calm: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with mount(calm, tmp_path_factory, "--cache", "0") as one:
        one.process.send_signal(signal.SIGSTOP)
        try:
            command = [sys.executable, "-m", "fireflyer.cli", "fs", "umount", str(one.directory)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
            assert program.mounted_at(str(one.directory)) is None
        finally:
            one.process.send_signal(signal.SIGCONT)


def test_programs_that_wait_for_services_can_be_killed(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with mount(cluster, tmp_path_factory, "--cache", "0") as one:
        try:
            with open(one.directory / "file", "wb") as file:
                for name in list(cluster.running):
                    cluster.stop(name)
                assert killed_in_a_wait("os.write(1, b'bytes')", stdout=file)
            cluster.refuse_metadata()
            assert killed_in_a_wait(f"os.stat('{one.directory}/other')")
        finally:
            one.kill()  # it would wait for the services, to report the file's length


def killed_in_a_wait(statement: str, **options: Any) -> bool:
    """Kills a program once its statement waits for the mount; returns whether it has ended."""
    command = [sys.executable, "-I", "-S", "-c", f"import os; {statement}"]
    with subprocess.Popen(command, **options) as program:
        wait = Path(f"/proc/{program.pid}/wchan")
        until(lambda: wait.read_text() == "request_wait_answer", wait.read_text)
        program.kill()
        return program.wait(LIMIT_S) == -signal.SIGKILL


def test_the_end_of_a_run_of_the_tests_leaves_no_mount(
    mounted: Mounted, calm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.VARIABLE, "a run of its own")
    one = Mounted(calm, tmp_path / "m")
    guard.end_marked("a run of its own")
    assert one.wait() == -signal.SIGKILL
    assert program.mounted_at(str(one.directory)) is None
    assert program.mounted_at(str(mounted.directory)) is not None


def test_a_machine_without_fuse_is_told_so(
    mounted: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "DEVICE", str(tmp_path / "fuse"))
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"fuse cannot be opened .*: load the kernel module"):
        program.check(str(tmp_path / "m"))
    monkeypatch.setattr(program, "LIBRARY", "none.so")
    with pytest.raises(ConfigError, match="apt-get install libfuse3-dev"):
        program.check(str(tmp_path / "m"))


def write_until_refused(path: Path, piece: bytes) -> tuple[int, int]:
    """Returns how many bytes were acknowledged, and the number of the error."""
    acknowledged = 0
    with open(path, "wb", buffering=0) as file:
        while True:
            at = acknowledged % len(piece)
            try:
                acknowledged += file.write(piece[at:])
            except OSError as error:
                return acknowledged, error.errno or 0


def test_a_disk_that_fills_in_a_write_loses_nothing(mounted: Mounted, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(tmp_path / "disk", 304))  # of which a node keeps 256
        loop = stack.enter_context(LoopThread("manager"))
        cluster = Cluster(loop, tmp_path / "disk", nodes=1, replicas=1)
        stack.callback(cluster.close)
        one = Mounted(cluster, tmp_path / "m")
        stack.callback(one.close)
        piece = os.urandom(1 << 20)
        (one.directory / "kept").write_bytes(piece)
        acknowledged, error = write_until_refused(one.directory / "big", piece)
        assert error == errno.ENOSPC
        assert acknowledged > 0
        assert (one.directory / "kept").read_bytes() == piece
        big = (one.directory / "big").read_bytes()
        assert len(big) >= acknowledged
        assert big[:acknowledged] == (piece * 304)[:acknowledged]
        os.rename(one.directory / "big", one.directory / "name")
        os.unlink(one.directory / "name")
        assert os.listdir(one.directory) == ["kept"]


def test_mount_fireflyer_mounts_a_line_of_fstab(
    mounted: Mounted, calm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    command = [sys.executable, "-m", "fireflyer.cli.fs.mount_helper", calm.address]
    command += [str(tmp_path / "m"), "-o", f"ro,_netdev,cache=0,log={tmp_path}/log"]
    env = {**os.environ, "FIREFLYER_FS_SECRET_FILE": str(calm.secret_file)}
    subprocess.run(command, check=True, env=env, timeout=LIMIT_S)
    try:
        line = next(
            row for row in Path("/proc/mounts").read_text().splitlines() if f"{tmp_path}/m" in row
        )
        assert line.split()[0] == calm.address
        assert {"ro", "nosuid", "nodev"} <= set(line.split()[3].split(","))
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "m/f").touch()
        again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert again.returncode == 1
        assert "mounted already" in again.stderr
    finally:
        subprocess.run(["umount", tmp_path / "m"], check=True)


def test_options_of_fstab() -> None:
    text = "defaults,ro,noexec,nosuid,exec,x-systemd.automount,cache=2.5,log=/var/log/fs"
    assert parse_options(text) == (1, 2.5, Path("/var/log/fs"))
    for wrong in ("cache=soon", "quota", "log="):
        with pytest.raises(ConfigError, match="invalid mount option"):
            parse_options(wrong)
    assert parse_options("quota", sloppy=True).flags == 0


def test_what_cannot_be_mounted_is_refused(mounted: Mounted, calm: Cluster, tmp_path: Path) -> None:
    full = tmp_path / "full"
    (full / "something").mkdir(parents=True)
    for directory, why in (
        (mounted.directory, "mounted already"),
        (full, "not empty"),
        (tmp_path / "none", "not a directory"),
    ):
        with pytest.raises(ConfigError, match=why):
            program.check(str(directory))
    with pytest.raises(ConfigError, match="not a mount"):
        program.unmount(str(full))
    (tmp_path / "wrong").write_bytes(b"another secret than the cluster's")
    (tmp_path / "wrong").chmod(0o600)
    (tmp_path / "m").mkdir()
    command = [sys.executable, "-m", "fireflyer.cli", "fs", "mount", str(tmp_path / "m")]
    command += ["--dir", calm.address, "--log", str(tmp_path / "log")]
    env = {**os.environ, "FIREFLYER_FS_SECRET_FILE": str(tmp_path / "wrong")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "secret" in done.stderr
    assert program.mounted_at(str(tmp_path / "m")) is None
