"""Memory that a save and a load add to a process; the benchmark runs this module as that process.

`python -m fireflyer.bench.checkpoint.memory FOLDER BYTES ROUNDS` prints a `Measured` as JSON.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from fireflyer.bench.checkpoint.state import bytes_of, erase, gpt_state
from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes; one value per round."""

    state: int
    saving: list[int]
    """Peak memory of the process during a save, minus its memory before the first save."""
    loading: list[int]
    """Peak memory of the process during load(into=), minus its memory before that load."""


def measure(folder: Path, size: int, rounds: int) -> Measured:
    """Measures in this process, which must be new.

    In an older process, a save could reuse memory that earlier work freed, and the peak would not
    rise.
    """
    manager = CheckpointManager(folder, keep=1)
    state = gpt_state(size)
    before = _status("VmRSS")
    saving, loading = [], []
    for step in range(rounds):
        _forget_peak()
        manager.save(step, state).wait()
        saving.append(_status("VmHWM") - before)
    del manager
    for _ in range(rounds):
        erase(state)
        manager = CheckpointManager(folder)
        held = _status("VmRSS")
        _forget_peak()
        manager.load(into=state)
        loading.append(_status("VmHWM") - held)
    return Measured(state=bytes_of(state), saving=saving, loading=loading)


def in_a_new_process(folder: Path, size: int, rounds: int) -> Measured:
    """Runs `measure` in a new process.

    Raises:
        CheckpointError: the process failed; the message holds its last output.
    """
    command = [sys.executable, "-m", __name__, str(folder), str(size), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(f"bench checkpoint: memory: {done.stderr.strip()[-400:]}")
    return msgspec.json.decode(done.stdout, type=Measured)


def _status(field: str) -> int:
    """Returns a memory size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise CheckpointError(f"bench checkpoint: this kernel does not report {field}")


def _forget_peak() -> None:
    """Resets VmHWM to the memory held at present."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    found = measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(found).decode())
