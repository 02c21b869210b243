"""Candidates of the checkpoint benchmark: ours, dcp, torch.save and safetensors.

Each candidate has its own folder. The total time of a save ends when the save is durable: if a peer
does not sync its files, the benchmark syncs them within that time. Every load returns its tensors
for comparison.
"""

import importlib
import importlib.metadata
import itertools
import os
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fireflyer.bench.checkpoint.state import State, flat
from fireflyer.checkpoint import CheckpointManager, SaveHandle
from fireflyer.errors import ConfigError

PAGE_FLOATS = 1024


class Saved(NamedTuple):
    """Durations of one save, in seconds."""

    stall: float
    """Time for which the caller was blocked."""
    total: float
    """Time until the save was durable, including the stall."""


class Loaded(NamedTuple):
    seconds: float
    tree: Any
    """Tree that holds the loaded tensors."""


class Saver(ABC):
    """Saver of states into its own folder, one at a time.

    Attributes:
        title: name in the tables.
        folder: holds no other files; the first save creates it.
    """

    title: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def save(self, state: State) -> Saved:
        """Saves the state. The folder must not hold an earlier save."""

    def clear(self) -> None:
        """Removes the saved files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Ours(Saver):
    """CheckpointManager; every load uses a new manager, as after a restart."""

    title = "ours"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._manager: CheckpointManager | None = None
        self._steps = itertools.count()

    def begin(self, state: State) -> SaveHandle:
        """Starts a save, which completes in the background."""
        if self._manager is None:
            self._manager = CheckpointManager(self.folder, keep=1)
        return self._manager.save(next(self._steps), state)

    def save(self, state: State) -> Saved:
        began = time.perf_counter()
        handle = self.begin(state)
        stall = time.perf_counter() - began
        handle.wait()
        return Saved(stall, time.perf_counter() - began)

    def clear(self) -> None:
        for saved in self.folder.glob("step-*"):
            shutil.rmtree(saved)

    def release(self) -> None:
        """Releases the arena; the saved files stay."""
        if self._manager is not None:
            self._manager.wait()
        self._manager = None

    def close(self) -> None:
        """Releases the arena and removes the saved files."""
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def load_into(self, state: State) -> Loaded:
        """Fills the tensors of `state`."""
        began = time.perf_counter()
        CheckpointManager(self.folder).load(into=state)
        return Loaded(time.perf_counter() - began, state)

    def load(self) -> Loaded:
        """Loads into new tensors."""
        began = time.perf_counter()
        tree = CheckpointManager(self.folder).load()
        return Loaded(time.perf_counter() - began, tree)

    def load_one(self, name: str) -> Loaded:
        """Loads one tensor of the state."""
        began = time.perf_counter()
        manager: Any = CheckpointManager(self.folder)
        tree = manager.load_tensors([name])
        return Loaded(time.perf_counter() - began, tree)


class Dcp(Saver):
    """dcp.save and dcp.load with their defaults; dcp syncs its own files."""

    title = "dcp.save"

    def save(self, state: State) -> Saved:
        began = time.perf_counter()
        with _alone():
            dcp.save(state, checkpoint_id=self.folder)
        taken = time.perf_counter() - began
        return Saved(taken, taken)

    def load_into(self, state: State) -> Loaded:
        began = time.perf_counter()
        with _alone():
            dcp.load(state, checkpoint_id=self.folder)
        return Loaded(time.perf_counter() - began, state)


class DcpAsync(Dcp):
    """dcp.async_save with one stager for all saves, so that only the first save allocates
    memory."""

    title = "dcp.async_save, reused stager"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # All features of StagingOptions are off: each needs an accelerator, or a second process
        # with shared memory.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, state: State) -> Saved:
        began = time.perf_counter()
        with _alone():
            future: Any = dcp.async_save(
                state, checkpoint_id=self.folder, async_stager=self._stager
            )
            stall = time.perf_counter() - began
            future.result()
        return Saved(stall, time.perf_counter() - began)

    def close(self) -> None:
        self._stager.close()


class TorchSave(Saver):
    """torch.save and torch.load."""

    title = "torch.save and fsync"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / "state.pt"

    def save(self, state: State) -> Saved:
        self.folder.mkdir(exist_ok=True)
        began = time.perf_counter()
        torch.save(state, self._file)
        _sync(self._file)
        taken = time.perf_counter() - began
        return Saved(taken, taken)

    def load(self) -> Loaded:
        began = time.perf_counter()
        tree = torch.load(self._file)
        return Loaded(time.perf_counter() - began, tree)


class Safetensors(Saver):
    """save_file and load_file of safetensors.

    By default load_file only maps the file and reads nothing. The time of `load_mapped` ends when
    one value of every page has been touched. `load` makes load_file read the file. `load_into`
    copies from the mapping.

    Raises:
        ConfigError: safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            self._module: Any = importlib.import_module("safetensors.torch")
        except ImportError:
            raise ConfigError("safetensors is not installed") from None
        self.title = f"safetensors {importlib.metadata.version('safetensors')} and fsync"
        self._file = folder / "state.safetensors"

    def save(self, state: State) -> Saved:
        self.folder.mkdir(exist_ok=True)
        began = time.perf_counter()
        self._module.save_file(dict(flat(state)), self._file)
        _sync(self._file)
        taken = time.perf_counter() - began
        return Saved(taken, taken)

    def load_into(self, state: State) -> Loaded:
        began = time.perf_counter()
        loaded = self._module.load_file(self._file)
        for name, tensor in flat(state):
            tensor.copy_(loaded[name])
        return Loaded(time.perf_counter() - began, state)

    def load(self) -> Loaded:
        began = time.perf_counter()
        tree = self._module.load_file(self._file, backend="pread")
        return Loaded(time.perf_counter() - began, tree)

    def load_mapped(self) -> Loaded:
        began = time.perf_counter()
        tree = self._module.load_file(self._file)
        for tensor in tree.values():
            tensor.view(-1)[::PAGE_FLOATS].sum()
        return Loaded(time.perf_counter() - began, tree)


def _sync(file: Path) -> None:
    """Syncs a file and its directory entry to storage."""
    for path in (file, file.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _alone() -> Iterator[None]:
    """Suppresses dcp's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
