"""Open MPI as a peer: compiled once, driven by pipes, and honest about what it lacks."""

import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fireflyer.bench.collectives import mpi, one_host
from fireflyer.bench.collectives.cases import ACCOUNTS
from fireflyer.bench.collectives.mpi import Mpi
from fireflyer.errors import ConfigError, PeerLost

READ = {"x86_64": "0", "aarch64": "63"}[platform.machine()]  # the system call's number

needs_mpi = pytest.mark.skipif(
    shutil.which("mpicc") is None or shutil.which("mpirun") is None,
    reason="needs Open MPI: apt-get install openmpi-bin libopenmpi-dev",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of these tests alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@needs_mpi
def test_it_is_compiled_once(cache: Path) -> None:
    program = mpi.compiled()
    made = program.stat().st_mtime_ns
    assert mpi.compiled() == program
    assert program.stat().st_mtime_ns == made
    assert os.listdir(cache / "fireflyer") == [program.name]


@needs_mpi
def test_every_collective_comes_out_right(cache: Path) -> None:
    with Mpi(3) as peer:
        for name, account in ACCOUNTS.items():
            for op in ("sum", "max", "product", "bxor") if account.reduces else ("sum",):
                case = (name, "int32" if op == "bxor" else "float32", op, 12_000)
                timing = peer.run(*case, calls=3)
                assert timing.wall > 0
                assert peer.wrong(*case) == 0


@needs_mpi
def test_between_commands_the_ranks_sleep_in_read(cache: Path) -> None:
    with Mpi(2) as peer:
        peer.run("allreduce", "float32", "sum", 4096, calls=1)
        pids = ranks_of(peer)
        assert len(pids) == 2
        for pid in pids:
            # Rank 0 has answered and the others come to their pipe without waiting for anybody.
            call = ""
            while call != READ:
                call = Path(f"/proc/{pid}/syscall").read_text().split()[0]


@needs_mpi
def test_a_dead_peer_is_an_error(cache: Path) -> None:
    with Mpi(2) as peer:
        pids = ranks_of(peer)
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"Open MPI \S+ ended: "):
            peer.run("allreduce", "float32", "sum", 4096, calls=1)


def ranks_of(peer: Mpi) -> list[int]:
    """Pids of the processes that run the compiled program."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "exe").readlink() == peer.program:
                found.append(int(entry.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


@needs_mpi
def test_ours_and_gloo_and_mpi_in_one_run(cache: Path) -> None:
    spec = one_host.Spec(
        collective="allreduce",
        ranks=2,
        sizes=(4096,),
        dtypes=("float32", "bfloat16"),
        op="sum",
        memory=("staged",),
        against=("gloo", "mpi"),
        rounds=2,
    )
    rows, nccl = one_host.run(spec)
    (name,) = {row.who for row in nccl} - {"staged", "gloo"}
    assert name.startswith("Open MPI ")
    assert [row.wrong for row in nccl] == [0] * 5  # MPI has float32 alone
    compared = [row for row in rows if row.peer == name]
    assert [row.case[-4:] for row in compared] == ["wall", " CPU"]
    assert all(row.ratio is not None and row.rounds == 2 for row in compared)
    (note,) = [row for row in rows if row.peer == f"{name} does not support bfloat16"]
    assert (note.peer_value, note.ratio, note.goal) == (None, None, None)


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for start in (mpi.compiled, lambda: Mpi(2)):
        with pytest.raises(
            ConfigError, match="needs mpicc and mpirun: apt-get install openmpi-bin"
        ):
            start()


def test_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "mpirun"
    other.write_text(f"#!{sys.executable}\nprint('HYDRA build details:')\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs Open MPI's mpirun, but this one is 'HYDRA"):
        Mpi(2)
