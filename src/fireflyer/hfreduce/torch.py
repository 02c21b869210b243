"""HFReduce for torch: the process group, its Work, and zero-copy tensors.

Served by the native engine: allreduce with SUM and AVG of dense float32, float64 and bfloat16 tensors.
Every other call goes to a gloo backend over the same ranks.
"""

import collections
import datetime
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer._native import hfreduce as native
from fireflyer.errors import DeadlineExceeded
from fireflyer.hfreduce import register_backend, rendezvous

_DTYPES = {
    torch.float32: native.DType.FLOAT32,
    torch.float64: native.DType.FLOAT64,
    torch.bfloat16: native.DType.BFLOAT16,
}
_OPS = {ReduceOp.SUM: native.ReduceOp.SUM, ReduceOp.AVG: native.ReduceOp.AVG}


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in zero-copy memory: collectives reduce it where it lies.

    Local, not collective: peers map the memory when they first meet it. It is given back when the tensor
    dies.

    Args:
        shape: sizes of the dimensions, as for `torch.empty`.
        dtype: default `torch.get_default_dtype()`.

    Raises:
        NoSpace: shared memory was refused.
    """
    dtype = dtype or torch.get_default_dtype()
    count = 1
    for size in shape:
        count *= size
    block = torch.from_numpy(native.arena_block(count * dtype.itemsize))
    return block.view(dtype).view(shape)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """`empty` with the shape and dtype of `tensor`."""
    return empty(*tensor.shape, dtype=tensor.dtype)


def allreduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.all_reduce`, in place, over a group of this backend or any other.

    Args:
        tensor: any shape; zero-copy if it came from `empty`, staged otherwise.
        op: ReduceOp.SUM or AVG (others through gloo).
        async_op: return a Work at once instead of waiting.

    Raises:
        RankFailed: a rank died or did not join within the timeout.
        CollectiveError: the ranks do not call the same thing, or the group is broken.
    """
    work: dist.Work | None = dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    return work


class Work(dist.Work):
    """One allreduce under way. Keeps its tensors alive until it is done."""

    def __init__(
        self,
        group: "ProcessGroupHFReduce",
        operations: list[native.Operation],
        tensors: list[torch.Tensor],
        dense: list[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._group = group
        self._operations = operations
        self._tensors = tensors
        self._dense = (
            dense  # what the engine works on; the tensors themselves where they are contiguous
        )
        self._finish = finish
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def is_completed(self) -> bool:
        return all(operation.done() for operation in self._operations)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Blocks until the result is in the tensors.

        Raises:
            DeadlineExceeded: after `timeout` (0: none beyond the group's own).
            RankFailed, CollectiveError: see `allreduce`.
        """
        seconds = timeout.total_seconds()
        for operation in self._operations:
            if not operation.wait(seconds if seconds > 0 else -1.0):
                raise DeadlineExceeded(f"the collective did not finish within {seconds:g} s")
            operation.rethrow()
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
        return True

    def settle_silently(self) -> None:
        """Waits until it is over, however it ends."""
        for operation in self._operations:
            operation.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors, completed by the group's own thread."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.is_completed():
                self.settle()
            else:
                self._group.settle_later(self)
        return self._future

    def settle(self) -> None:
        """Waits and completes the future, with the error if there is one."""
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  # handed to whoever waits for the future
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
        else:
            self._future.set_result(self._tensors)


class ProcessGroupHFReduce(ProcessGroup):
    """A torch process group over the native engine.

    Args:
        store: a `torch.distributed` store for exactly this group.
        rank, size: of this process in the group.
        timeout: for each operation and for the rendezvous.

    Raises:
        DeadlineExceeded, ProtocolMismatch, NoSpace, CollectiveError: see `rendezvous.connect`.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # missing in torch's stub
        self._connection = rendezvous.connect(
            dist.PrefixStore("hfreduce", store),
            rank,
            size,
            timeout.total_seconds(),
            _master(),
        )
        self._engine = self._connection.group
        gloo = _make_gloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._rest: Any = ProcessGroup(store, rank, size)
        for group in (self, self._rest):
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self._under_way: collections.deque[Work] = collections.deque()
        self._settler: ThreadPoolExecutor | None = None

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "hfreduce"

    @property
    def network_bytes_sent(self) -> int:
        """Bytes that this rank has sent to other hosts so far."""
        return self._engine.network_bytes_sent

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Limits the operations that start from now on."""
        self._engine.set_timeout(timeout.total_seconds())

    def abort(self) -> None:
        """Ends what runs here and on all peers with an error; the group is unusable afterwards."""
        self._engine.abort()

    def shutdown(self) -> None:
        """Waits for what is under way, then lets go of the threads."""
        while self._under_way:
            self._under_way.popleft().settle_silently()
        if self._settler is not None:
            self._settler.shutdown()
        self._connection.close()

    def allreduce(  # type: ignore[override]  # torch's C++ calls this form alone
        self, tensors: list[torch.Tensor] | torch.Tensor, opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = _OPS.get(opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp)
        if op is None or not all(map(_is_native, tensors)):
            delegated: dist.Work = self._rest.allreduce(tensors, opts)
            return delegated
        run_here = not getattr(opts, "asyncOp", True)
        return self._reduce(tensors, op, run_here)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def _reduce(
        self, tensors: list[torch.Tensor], op: native.ReduceOp, run_here: bool
    ) -> dist.Work:
        dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]

        def copy_back() -> None:
            for tensor, copy in zip(tensors, dense, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)

        operations = [
            self._engine.allreduce(d.data_ptr(), d.numel(), _DTYPES[d.dtype], op, run_here)
            for d in dense
        ]
        copied = any(d is not t for d, t in zip(dense, tensors, strict=True))
        work = Work(self, operations, tensors, dense, copy_back if copied else None)
        if not work.is_completed():
            self._keep_alive(work)
        return work

    def _keep_alive(self, work: Work) -> None:
        """The engine has bare addresses: whoever drops his Work and tensors must not free them under it.
        Operations end in order, so what is over stands in front."""
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(work)

    def settle_later(self, work: Work) -> None:
        """Completes the work's future from a thread of the group: operations end in order.

        An executor's threads are joined before the interpreter ends: one that came back from the engine after
        that would take the process down.
        """
        if self._settler is None:
            self._settler = ThreadPoolExecutor(1, "hfreduce-futures")
        self._settler.submit(work.settle)


def _is_native(tensor: torch.Tensor) -> bool:
    dense = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return dense and tensor.dtype in _DTYPES


def _make_gloo(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Gloo over the same ranks and the same interface; connections are opened when first used."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._timeout = timeout
    address = rendezvous.interface_address(_master())
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _master() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: ProcessGroupHFReduce, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rest, name)(*args, **kwargs)

    call.__name__ = name
    return call


# What torch's C++ asks a Python subclass for: without an answer of ours it would call its own method with the
# interpreter lock held, for which gloo's thread may wait while it holds gloo's. The methods that are
# not listed go from torch straight to the registered backend.
for _name in (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "alltoall_base",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "send",
):
    setattr(ProcessGroupHFReduce, _name, _delegated(_name))

register_backend()
