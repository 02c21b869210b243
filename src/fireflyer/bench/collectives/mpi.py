"""Open MPI as a peer: a C program that runs during all rounds and sleeps between its commands.

The program is benchmarks/mpi_collectives.c of the source tree. At the first use it is compiled into
$XDG_CACHE_HOME/fireflyer (default ~/.cache/fireflyer), under the hash of its source and compiler.
"""

import contextlib
import hashlib
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from fireflyer.bench.collectives.cases import ACCOUNTS
from fireflyer.bench.harness.ranks import Timing
from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost

SOURCE = Path(__file__).parents[4] / "benchmarks" / "mpi_collectives.c"
DTYPES = ("float32", "float64", "int64", "int32", "uint8")
START_S = 60.0
ANSWER_S = 300.0


class Mpi:
    """MPI ranks on this host, as a context manager.

    Only one process sends commands: this process, or one forked from it.

    Attributes:
        name: name with the version, e.g. "Open MPI 4.1.4".
        program: path of the compiled program.
    """

    def __init__(self, ranks: int) -> None:
        """Finds Open MPI and compiles the program.

        Raises:
            ConfigError: mpicc, mpirun or the source is missing, the MPI is not Open MPI, or the
                compilation fails.
        """
        self._ranks = ranks
        self._owner = os.getpid()
        self._pipes: list[int] = []
        self._answer = -1
        self._process: subprocess.Popen[bytes] | None = None
        self.name = _version()
        self.program = compiled()

    def __enter__(self) -> "Mpi":
        self._folder = tempfile.TemporaryDirectory(prefix="fireflyer-bench-")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuses(self, collective: str, dtype: str, op: str) -> str | None:
        """Returns the reason why MPI cannot run a case; None if it can.

        Collectives that only move data take any dtype.
        """
        if not ACCOUNTS[collective].reduces:
            return None
        if dtype not in DTYPES:
            return f"{self.name} does not support {dtype}"
        return f"{self.name} has no {op}" if op == "avg" else None

    def run(self, collective: str, dtype: str, op: str, size: int, calls: int) -> Timing:
        """Times `calls` calls on `size` bytes, as `Session.time` does for torch."""
        words = self._ask(f"run {self._case(collective, dtype, op)} {size} {calls}").split()
        wall, cpu = map(float, words)
        return Timing(wall / calls * 1e6, cpu / calls * 1e6)

    def wrong(self, collective: str, dtype: str, op: str, size: int) -> int:
        """Counts the wrong elements of all ranks after one call on known values."""
        return int(self._ask(f"check {self._case(collective, dtype, op)} {size} 1"))

    def close(self) -> None:
        """Closes the ranks' pipes, so the ranks exit. Terminates a launcher that does not exit
        within 5 s."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()
            self._process = None
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1
        self._folder.cleanup()

    def _start(self) -> None:
        folder = Path(self._folder.name)
        for name in [*map(str, range(self._ranks)), "answer"]:
            os.mkfifo(folder / name)
        # O_RDWR, although this process only writes: opening must not wait for the ranks, and
        # writing must not fail if they die.
        self._pipes = [os.open(folder / str(r), os.O_RDWR) for r in range(self._ranks)]
        self._answer = os.open(folder / "answer", os.O_RDONLY | os.O_NONBLOCK)
        command = ["mpirun", "-n", str(self._ranks), "--oversubscribe"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        with open(folder / "errors", "wb") as errors:
            self._process = subprocess.Popen(
                [*command, self.program, folder],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        self._ask("hello", START_S)

    def _case(self, collective: str, dtype: str, op: str) -> str:
        if ACCOUNTS[collective].reduces:
            return f"{collective} {dtype} {op}"
        return f"{collective} uint8 sum"

    def _ask(self, command: str, seconds: float = ANSWER_S) -> str:
        """Sends one command to every rank and returns the answer, one line.

        Raises:
            PeerLost: the program ended; the message quotes its output.
            DeadlineExceeded: there was no answer in time.
        """
        for pipe in self._pipes:
            os.write(pipe, f"{command}\n".encode())
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            # Until rank 0 opens the pipe for writing, select reports no hang-up. A failed start then
            # shows only in the launcher's exit.
            ready, _, _ = select.select([self._answer], [], [], 0.2)
            more = os.read(self._answer, 4096) if ready else b""
            line += more
            if not more and (ready or self._launcher_is_gone()):
                raise PeerLost(f"{self.name} ended: {self._errors()}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self.name} did not answer {command!r}: {self._errors()}")
        return line.decode()

    def _launcher_is_gone(self) -> bool:
        """Returns True if the launcher has exited, which only its parent can tell.

        Other processes see that the ranks close their end of the answer pipe.
        """
        process = self._process
        return process is not None and os.getpid() == self._owner and process.poll() is not None

    def _errors(self) -> str:
        text = (Path(self._folder.name) / "errors").read_text(errors="replace")
        return " ".join(text.split())[-400:] or "it printed nothing"


def compiled() -> Path:
    """Returns the path of the program, compiled on first use.

    Raises:
        ConfigError: mpicc or the source is missing, or the compilation fails.
    """
    compiler = shutil.which("mpicc")
    if compiler is None:
        raise ConfigError(
            "--against mpi needs mpicc and mpirun: apt-get install openmpi-bin libopenmpi-dev"
        )
    if not SOURCE.is_file():
        raise ConfigError(f"--against mpi needs the source tree: {SOURCE} does not exist")
    command = [compiler, "-O2", "-std=c11"]
    shown = subprocess.run([compiler, "-show"], capture_output=True, check=False).stdout
    key = hashlib.sha256(SOURCE.read_bytes() + shown + repr(command).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fireflyer"
    program = cache / f"mpi_collectives-{key}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "program"
            done = subprocess.run(
                [*command, SOURCE, "-o", made], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise ConfigError(f"{compiler} cannot compile {SOURCE}: {done.stderr[-400:]}")
            made.rename(program)
    return program


def _version() -> str:
    """Returns the name with the version, e.g. "Open MPI 4.1.4".

    Raises:
        ConfigError: mpirun is missing or belongs to another MPI.
    """
    if shutil.which("mpirun") is None:
        raise ConfigError(
            "--against mpi needs mpicc and mpirun: apt-get install openmpi-bin libopenmpi-dev"
        )
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    first = done.stdout.partition("\n")[0]
    if "(Open MPI)" not in first:
        raise ConfigError(f"--against mpi needs Open MPI's mpirun, but this one is {first!r}")
    return "Open MPI " + first.split()[-1]
