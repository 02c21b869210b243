"""Scripts that tests attach to, and their processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import until

from fireflyer.errors import ProfileError
from fireflyer.haiprof.attach.target import Target

PREPARE = "from fireflyer.haiprof.inside.prepare import prepare; prepare()\n"

IDLE = (
    "import threading\n"
    + PREPARE
    + (
        "def outer(): inner()\n"
        "def inner():\n"
        "    while True: threading.Event().wait(0.001)\n"
        "outer()\n"
    )
)
"""Waits in `outer` and `inner`, without torch; once prepared it imports nothing."""

TRAINS = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1 << 30
    def __getitem__(self, n): return torch.ones(4)
for batch in torch.utils.data.DataLoader(Data(), batch_size=4):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@contextmanager
def running(
    text: str, *, prepared: bool = True, pipes: bool = False
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a script until the end of the block; waits until it is prepared."""
    pipe = subprocess.PIPE if pipes else None
    child = subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe)
    try:
        if prepared:
            until(lambda: is_prepared(child.pid))
        yield child
    finally:
        child.kill()
        child.communicate()


def is_prepared(pid: int) -> bool:
    with suppress(ProfileError), Target(pid) as target:
        target.signal_number()
        return True
    return False


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int) -> list[str]:
    return sorted(os.listdir(f"/proc/{pid}/fd"))


def timers(pid: int) -> str:
    return Path(f"/proc/{pid}/timers").read_text()
