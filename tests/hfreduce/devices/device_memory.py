"""A rank's device for tests: marked CPU tensors are its memory, one stream is the caller's current one."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.hfreduce.collectives.cases import Call
from tests.hfreduce.conftest import raw

from fireflyer._native import hfreduce as native
from fireflyer.hfreduce.backend import devices


class FakeMemory:
    """A fake device and the tensors in its memory, for one rank.

    Attributes:
        device: the fake.
        stream: where this rank "computes".
    """

    def __init__(self, delay_us: int = 0) -> None:
        self.device = native.fake_device(delay_us)
        self.stream = self.device.make_stream()
        self._context = devices.DeviceContext(self.device, lambda: self.stream)
        self._mine: set[int] = set()
        devices.register("fake", self._find)

    def _find(self, tensor: torch.Tensor) -> devices.DeviceContext | None:
        return self._context if tensor.untyped_storage().data_ptr() in self._mine else None

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes the memory of a tensor this device's, for good."""
        self._mine.add(tensor.untyped_storage().data_ptr())
        return tensor

    def forget_all(self) -> None:
        self._mine.clear()

    def compute(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts `target.copy_(source)` into the stream."""
        self.device.copy(self.stream, target.data_ptr(), source.data_ptr(), source.nbytes)

    def stop(self) -> None:
        self.device.stop(self.stream)

    def go_on(self) -> None:
        self.device.go_on(self.stream)

    def synchronize(self) -> None:
        self.device.synchronize(self.stream)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing in the stream runs meanwhile: who waits for it on the host stands still for ever."""
        self.stop()
        yield
        self.go_on()
        self.synchronize()


class DeviceCall(Call):
    """A case on device memory: inputs are computed, and results read, in the order of the stream alone."""

    def __init__(self, memory: FakeMemory, *case: Any) -> None:
        super().__init__(*case)
        self._memory = memory
        self._sources: list[torch.Tensor] = []
        memory.stop()

    def put(self, source: torch.Tensor) -> torch.Tensor:
        tensor = self._memory.hold(torch.zeros(source.shape, dtype=source.dtype))
        self._memory.compute(tensor, source)
        self._sources += [source, tensor]  # they live until the stream has run
        return tensor

    def input(self, source: torch.Tensor) -> torch.Tensor:
        tensor = self.put(source)
        self._pristine.append((tensor, raw(source)))
        return tensor

    def finish(self, work: Any) -> None:
        if isinstance(work, torch._C.Future):
            self._memory.go_on()  # torch knows nothing of this stream: the future waits on the host
        super().finish(work)

    def expect(self, *arguments: Any, **options: Any) -> None:
        self._memory.go_on()
        self._memory.synchronize()
        super().expect(*arguments, **options)

    def close(self) -> None:
        self._memory.go_on()
        self._memory.synchronize()
        super().close()
        dist.barrier(group=self.group)
        self._memory.forget_all()


class Stub:
    """The CUDA runtime of `cudart_stub.cpp`, as the test sees it."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.stub_log.restype = ctypes.c_char_p
        self._library.stub_synchronize.argtypes = [ctypes.c_void_p]

    def make_stream(self) -> int:
        stream = ctypes.c_void_p()
        self._library.cudaStreamCreateWithFlags(ctypes.byref(stream), 0)
        return stream.value or 0

    def fail(self, function: str, code: int) -> None:
        self._library.stub_fail(function.encode(), code)

    def synchronize(self, stream: int) -> None:
        self._library.stub_synchronize(stream)

    def hold(self, stream: int, word: ctypes.c_uint32) -> None:
        """The stream stands still until the word is 1."""
        self._library.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream), ctypes.c_ulonglong(ctypes.addressof(word)), 1, 0
        )

    def log(self) -> list[str]:
        """All calls so far: "function arguments"."""
        text: bytes = self._library.stub_log()
        return text.decode().splitlines()


def build_stub(folder: Path) -> str:
    """Compiles the stub; its path."""
    library = folder / "libcudart_stub.so"
    source = Path(__file__).with_name("cudart_stub.cpp")
    compiler = shutil.which("c++") or "g++"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return str(library)


@contextmanager
def stubbed(path: str, index: int = 0) -> Iterator[tuple[Stub, int]]:
    """In a rank: all tensors of one dimension are on CUDA device `index`; gives the stub and the stream."""
    os.environ.update(FIREFLYER_CUDART=path, FIREFLYER_CUDA=path)
    stub = Stub(path)
    stream = stub.make_stream()
    context = devices.DeviceContext(native.cuda_device(index), lambda: stream)
    devices.register("stub", lambda tensor: context if tensor.dim() == 1 else None)
    yield stub, stream
    devices.unregister("stub")


def named(log: list[str], function: str) -> list[str]:
    """The arguments of all calls of a function."""
    return [line.removeprefix(function + " ") for line in log if line.startswith(function + " ")]


def has_gpu() -> bool:
    """Asked in another process: here it would start CUDA, and ranks of other tests are forked from here."""
    if not torch.backends.cuda.is_built():
        return False
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", question], check=False).returncode == 0
