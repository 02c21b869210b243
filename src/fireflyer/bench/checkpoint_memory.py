"""What a save and a load add to the memory of a process; the checkpoint benchmark runs one for it.

`python -m fireflyer.bench.checkpoint_memory FOLDER BYTES ROUNDS` prints a `Measured` as JSON.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from fireflyer.bench.checkpoint_state import bytes_of, erase, gpt_state
from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes; one value a round."""

    state: int
    saving: list[int]
    """Most that the process held during a save, less what it held before the first one."""
    loading: list[int]
    """Most that it held during load(into=), less what it held before that load."""


def measure(folder: Path, size: int, rounds: int) -> Measured:
    """In this process, which must be new: what was used once is memory that a peak does not show."""
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
    """
    Raises:
        CheckpointError: the process failed; with its last words.
    """
    command = [sys.executable, "-m", __name__, str(folder), str(size), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(f"bench checkpoint: memory: {done.stderr.strip()[-400:]}")
    return msgspec.json.decode(done.stdout, type=Measured)


def _status(field: str) -> int:
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise CheckpointError(f"bench checkpoint: this kernel does not tell {field}")


def _forget_peak() -> None:
    """VmHWM starts again from what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    found = measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(found).decode())
