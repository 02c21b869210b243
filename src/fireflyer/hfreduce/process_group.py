"""The torch process group: every collective of `torch.distributed`, served by the native engine."""

import collections
import datetime
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError
from fireflyer.hfreduce import flight, rendezvous
from fireflyer.hfreduce.handshake import Purpose
from fireflyer.hfreduce.wire import Wire
from fireflyer.hfreduce.work import OVER, Message, SharedWork, Work

DTYPES = {
    torch.float32: native.DType.FLOAT32,
    torch.float64: native.DType.FLOAT64,
    torch.float16: native.DType.FLOAT16,
    torch.bfloat16: native.DType.BFLOAT16,
    torch.float8_e4m3fn: native.DType.FLOAT8_E4M3FN,
    torch.float8_e5m2: native.DType.FLOAT8_E5M2,
    torch.int64: native.DType.INT64,
    torch.int32: native.DType.INT32,
    torch.int16: native.DType.INT16,
    torch.int8: native.DType.INT8,
    torch.uint8: native.DType.UINT8,
    torch.bool: native.DType.BOOL,
}
OPS = {
    ReduceOp.SUM: native.ReduceOp.SUM,
    ReduceOp.AVG: native.ReduceOp.AVG,
    ReduceOp.MIN: native.ReduceOp.MIN,
    ReduceOp.MAX: native.ReduceOp.MAX,
    ReduceOp.PRODUCT: native.ReduceOp.PRODUCT,
    ReduceOp.BAND: native.ReduceOp.BAND,
    ReduceOp.BOR: native.ReduceOp.BOR,
    ReduceOp.BXOR: native.ReduceOp.BXOR,
}
_BITWISE = (native.ReduceOp.BAND, native.ReduceOp.BOR, native.ReduceOp.BXOR)
_Buffers = list[tuple[int, int]]


class ProcessGroupHFReduce(ProcessGroup):
    """A torch process group over the native engine.

    The engine takes dense CPU tensors. Tensors that are not contiguous pass through a copy. Inputs are never
    modified where torch has a separate output.

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
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
        )
        self._engine = self._connection.group
        self._rank, self._size = rank, size
        self._between_hosts = len(self._connection.topology.hosts) > 1
        self._linked: set[tuple[Any, ...]] = set()
        self._group_name = ""
        self._group_description = ""
        self._recorded = False
        self._timeout_s = timeout.total_seconds()
        self._messages: list[Work] = []  # kept alive as `_under_way` is, but they end in any order
        self._under_way: collections.deque[Work] = collections.deque()
        self._settler: ThreadPoolExecutor | None = None

    # What torch asks of a group and of its backend: this object is both.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "hfreduce"

    def name(self) -> str:
        return "hfreduce"

    # torch keeps both in the backends of a group, of which this one has none beside itself.

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "ProcessGroupHFReduce":
        return self

    wire: Wire | None = None
    """The wire codec of sums that name none themselves; alike on all ranks."""

    supports_splitting = False
    supports_coalescing = False
    bound_device_id = None

    @property
    def network_bytes_sent(self) -> int:
        """Bytes that this rank has sent to other hosts so far."""
        return self._engine.network_bytes_sent

    def flight_records(self) -> list[dict[str, Any]]:
        """The group's last operations on this rank, oldest first; see `flight`."""
        return self._engine.records()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Limits the operations that start from now on."""
        self._timeout_s = timeout.total_seconds()
        self._engine.set_timeout(self._timeout_s)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Ends what runs here and on all peers with an error; the group is unusable afterwards."""
        self._recorded = True  # an end that was wanted needs no explanation
        self._engine.abort()
        self._connection.post.fail("the group was aborted")

    def shutdown(self) -> None:
        """Waits for what is under way, then lets go of the threads."""
        while self._under_way:
            self._under_way.popleft().settle_silently()
        self._messages.clear()
        if self._settler is not None:
            self._settler.shutdown()
        self._connection.close()

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """In place, one operation a tensor."""
        if len(tensors) == 1 and _inline(opts) and self._allreduce_now(tensors[0], opts):
            return OVER
        op = _op_of(opts)
        return self._over(
            [self.reduce_tensor(t, op, _inline(opts)) for t in _listed(tensors)], _listed(tensors)
        )

    allreduce_coalesced = allreduce

    def _allreduce_now(self, tensor: torch.Tensor, opts: Any) -> bool:
        """What small operations are made of: one host, dense memory, a caller who waits. False: not so."""
        dtype = DTYPES.get(tensor.dtype)
        plain = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
        if self._between_hosts or dtype is None or not plain:
            return False
        op = OPS.get(opts.reduceOp.op)
        if op is None or (op is not native.ReduceOp.SUM and not _has_meaning(tensor.dtype, op)):
            return False
        try:
            operation = self._engine.allreduce_now(
                tensor.data_ptr(), tensor.nbytes, tensor.numel(), dtype, op
            )
        except CollectiveError as error:
            self.failed(error)
            raise
        if operation is not None:
            Work(self, [operation], [tensor]).wait()
        return True

    def reduce_tensor(
        self,
        tensor: torch.Tensor,
        op: native.ReduceOp,
        inline: bool,
        priority: int = 0,
        wire: Wire | None = None,
        shared: bool = False,
    ) -> Work:
        """Allreduce of one tensor; see `hfreduce.allreduce`."""
        if tensor.layout is not torch.strided:
            return self._reduce_sparse(tensor, op)
        flat, finish = _writable(tensor)
        data = _real(flat)
        dtype = _dtype_for(data, op)
        buffers = [(data.data_ptr(), data.nbytes)]
        wire = wire or self.wire
        options = wire.options(data, op, self._rank) if wire is not None else {}
        work = self._submit(
            native.Kind.ALLREDUCE,
            buffers,
            [] if shared else buffers,
            data.numel(),
            dtype,
            inline,
            [tensor],
            (flat, wire),
            None if shared else finish,
            op=op,
            priority=priority,
            shared=shared,
            **options,
        )
        return SharedWork(work, tensor) if shared else work

    def _reduce_sparse(self, tensor: torch.Tensor, op: native.ReduceOp) -> Work:
        """Gathers everybody's entries and adds them: sparse sums have no fixed size to reduce in place."""
        if op not in (native.ReduceOp.SUM, native.ReduceOp.AVG):
            raise ValueError("sparse tensors can be summed or averaged only")
        own = tensor.coalesce()
        indices, values = own.indices().contiguous(), own.values().contiguous()
        count = torch.tensor([indices.shape[1]])
        counts = [torch.zeros_like(count) for _ in range(self._size)]
        self.allgather([counts], [count]).wait()
        sizes = [int(c) for c in counts]
        all_indices = [indices.new_empty(indices.shape[0], n) for n in sizes]
        all_values = [values.new_empty(n, *values.shape[1:]) for n in sizes]
        self.allgather([all_indices], [indices]).wait()
        self.allgather([all_values], [values]).wait()
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, 1),
            torch.cat(all_values),
            tensor.shape,
            check_invariants=True,
        ).coalesce()
        if op == native.ReduceOp.AVG:
            total = total / self._size
        tensor.copy_(total)
        return Work(self, [], [tensor])

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        (tensor,) = _listed(tensors)
        op = _op_of(opts)
        root = opts.rootRank
        if self._rank == root:
            flat, finish = _writable(tensor)
        else:
            flat, finish = tensor.contiguous(), None
        data = _real(flat)
        buffers = [(data.data_ptr(), data.nbytes)]
        return self._submit(
            native.Kind.REDUCE,
            buffers,
            buffers if self._rank == root else [],
            data.numel(),
            _dtype_for(data, op),
            _inline(opts),
            [tensor],
            flat,
            finish,
            op=op,
            root=root,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Lists of inputs by rank; one operation an output."""
        works = [
            self._reduce_scatter(output, list(pieces), opts)
            for output, pieces in zip(_listed(outputs), inputs, strict=True)
        ]
        return self._over(works, _listed(outputs))

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._reduce_scatter(output, self._split(source), opts)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        works = [
            self._reduce_scatter_base(output, source, opts)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self._over(works, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Work:
        op = _op_of(opts)
        flat, finish = _writable(output)
        target = _real(flat)
        sources = [_real(piece.contiguous()) for piece in inputs]
        self._check_pieces(sources, target)
        _check_dtypes(target, sources)
        return self._submit(
            native.Kind.REDUCE_SCATTER,
            _buffers(sources),
            _buffers([target]),
            target.numel(),
            _dtype_for(target, op),
            _inline(opts),
            [output],
            (flat, sources),
            finish,
            op=op,
        )

    # Copies.

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        (tensor,) = _listed(tensors)
        root = opts.rootRank
        if self._rank == root:
            flat, finish = tensor.contiguous(), None
        else:
            flat, finish = _writable(tensor)
        buffers = _buffers([flat])
        return self._copy(
            native.Kind.BROADCAST,
            buffers if self._rank == root else [],
            buffers if self._rank != root else [],
            flat,
            opts,
            [tensor],
            flat,
            finish,
            root=root,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Outputs: for each input a list by rank; pieces may differ in size between ranks."""
        works = [
            self._gather(native.Kind.ALL_GATHER, list(pieces), source, opts)
            for pieces, source in zip(outputs, _listed(inputs), strict=True)
        ]
        return self._over(works, [t for pieces in outputs for t in pieces])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Outputs: for each rank a list like the inputs."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        flat, finish = _writable(output)
        if output.numel() != source.numel() * self._size:
            raise ValueError(
                f"all_gather: the output needs {self._size} times the {source.numel()} elements of the "
                f"input, it has {output.numel()}"
            )
        work = self._gather(native.Kind.ALL_GATHER, self._split(flat), source, opts)
        return self._finish_with(work, [output], finish)

    all_gather_single = all_gather_into_tensor = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        works = [
            self._allgather_base(output, source, opts)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self._over(works, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        (source,) = _listed(inputs)
        pieces = list(outputs[0]) if outputs and self._rank == opts.rootRank else []
        return self._gather(native.Kind.GATHER, pieces, source, opts, root=opts.rootRank)

    def _gather(
        self,
        kind: native.Kind,
        outputs: list[torch.Tensor],
        source: torch.Tensor,
        opts: Any,
        root: int = -1,
    ) -> Work:
        if outputs and len(outputs) != self._size:
            raise ValueError(f"expected an output a rank ({self._size}), got {len(outputs)}")
        _check_dtypes(source, outputs)
        if outputs and outputs[self._rank].numel() != source.numel():
            raise ValueError(
                f"this rank's output has {outputs[self._rank].numel()} elements, its input {source.numel()}"
            )
        targets, finish = _all_writable(outputs)
        flat = source.contiguous()
        return self._copy(
            kind,
            _buffers([flat]),
            _buffers(targets),
            flat,
            opts,
            outputs,
            (flat, targets),
            finish,
            root=root,
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        (output,) = _listed(outputs)
        sources = [t.contiguous() for t in inputs[0]] if self._rank == opts.rootRank else []
        flat, finish = _writable(output)
        if sources:
            self._check_pieces(sources, flat)
            _check_dtypes(output, sources)
        return self._copy(
            native.Kind.SCATTER,
            _buffers(sources),
            _buffers([flat]),
            flat,
            opts,
            [output],
            (flat, sources),
            finish,
            root=opts.rootRank,
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Lists by rank; pieces may have any sizes."""
        if len(inputs) != self._size or len(outputs) != self._size:
            raise ValueError(f"all_to_all needs a tensor a rank ({self._size}) on both sides")
        _check_dtypes(inputs[0], [*inputs, *outputs])
        sources = [t.contiguous() for t in inputs]
        targets, finish = _all_writable(list(outputs))
        return self._copy(
            native.Kind.ALL_TO_ALL,
            _buffers(sources),
            _buffers(targets),
            sources[0],
            opts,
            list(outputs),
            (sources, targets),
            finish,
            even=False,
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        """Splits are rows of the first dimension for each rank; empty: equal ones."""
        flat, finish = _writable(output)
        sources = self._rows(source.contiguous(), input_splits)
        work = self.alltoall(self._rows(flat, output_splits), sources, opts)
        return self._finish_with(work, [output], finish)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Work:
        empty: list[torch.Tensor] = []
        return self._submit(
            native.Kind.BARRIER, [], [], 0, native.DType.UINT8, _inline(opts), empty, None, None
        )

    # Point to point, apart from the order of the collectives.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        (tensor,) = _listed(tensors)
        flat = tensor.contiguous()
        self._connection.links.ensure([dst], Purpose.POST)
        operation = self._connection.post.send(
            to=dst,
            tag=tag,
            data=flat.data_ptr(),
            bytes=flat.nbytes,
            seconds=self._timeout_s,
            attended=False,
        )
        return self._message(operation, tensor, flat, None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        (tensor,) = _listed(tensors)
        flat, finish = _writable(tensor)
        others = [src] if src >= 0 else [r for r in range(self._size) if r != self._rank]
        self._connection.links.ensure(others, Purpose.POST)
        operation = self._connection.post.receive(
            source=src,
            tag=tag,
            data=flat.data_ptr(),
            bytes=flat.nbytes,
            seconds=self._timeout_s,
            attended=False,
        )
        return self._message(operation, tensor, flat, finish)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    def _message(
        self,
        operation: native.Operation,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        finish: Callable[[], None] | None,
    ) -> Work:
        _check_device(tensor)
        work = Message(self, self._connection.post, operation, [tensor], flat, finish)
        self._messages = [m for m in self._messages if not m.is_completed()]
        self._messages.append(work)
        return work

    # How all of them reach the engine.

    def _copy(
        self,
        kind: native.Kind,
        inputs: _Buffers,
        outputs: _Buffers,
        like: torch.Tensor,
        opts: Any,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        root: int = -1,
        even: bool = True,
    ) -> Work:
        """A collective that only moves bytes: any dtype."""
        _check_device(like)
        dtype = DTYPES.get(like.dtype, native.DType.UINT8)
        uneven = not even or kind in (native.Kind.ALL_GATHER, native.Kind.GATHER)
        return self._submit(
            kind,
            inputs,
            outputs,
            0 if uneven else like.numel(),
            dtype,
            _inline(opts),
            result,
            held,
            finish,
            root=root,
        )

    def _submit(
        self,
        kind: native.Kind,
        inputs: _Buffers,
        outputs: _Buffers,
        count: int,
        dtype: native.DType,
        inline: bool,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        **options: Any,
    ) -> Work:
        if self._between_hosts:
            self._link(kind, count, dtype, options)
        operation = self._engine.submit(
            kind=kind,
            inputs=inputs,
            outputs=outputs,
            count=count,
            dtype=dtype,
            run_here=inline,
            **options,
        )
        work = Work(self, [operation], result, held, finish)
        if not operation.done():
            self._keep_alive(work)
        return work

    def _link(
        self, kind: native.Kind, count: int, dtype: native.DType, options: dict[str, Any]
    ) -> None:
        """Makes the connections that such a call sends over, at the first one of its shape."""
        named = {key: options[key] for key in ("root", "wire", "priority") if key in options}
        shape = (kind, count, dtype, *named.values())
        if shape in self._linked:
            return
        peers = self._engine.peers(kind=kind, count=count, dtype=dtype, **named)
        self._connection.links.ensure(peers, Purpose.DATA)
        self._linked.add(shape)

    def _over(self, works: list[Work], result: list[torch.Tensor]) -> Work:
        """One work for several."""
        if len(works) == 1:
            return works[0]

        def finish() -> None:
            for work in works:
                work.wait()

        operations = [operation for work in works for operation in work._operations]
        return Work(self, operations, list(result), works, finish)

    def _finish_with(
        self, work: Work, result: list[torch.Tensor], finish: Callable[[], None] | None
    ) -> Work:
        """The same work with another result, and one more thing to do at its end."""
        if finish is None:
            work._result = result
            return work

        def both() -> None:
            work.wait()
            finish()

        return Work(self, work._operations, result, work, both)

    def _split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Equal flat pieces, one a rank."""
        if tensor.numel() % self._size != 0:
            raise ValueError(
                f"{tensor.numel()} elements cannot be divided among {self._size} ranks"
            )
        flat = tensor.contiguous().view(-1)
        piece = flat.numel() // self._size
        return [flat[r * piece : (r + 1) * piece] for r in range(self._size)]

    def _rows(self, tensor: torch.Tensor, splits: list[int]) -> list[torch.Tensor]:
        if splits:
            if len(splits) != self._size or sum(splits) != tensor.shape[0]:
                raise ValueError(
                    f"splits {splits} do not divide {tensor.shape[0]} rows among {self._size} ranks"
                )
            return list(tensor.split(splits))
        if tensor.shape[0] % self._size != 0:
            raise ValueError(f"{tensor.shape[0]} rows cannot be divided among {self._size} ranks")
        rows = tensor.shape[0] // self._size
        return list(tensor.split(rows)) if rows > 0 else [tensor] * self._size

    def _check_pieces(self, pieces: list[torch.Tensor], like: torch.Tensor) -> None:
        if len(pieces) != self._size or any(p.numel() != like.numel() for p in pieces):
            raise ValueError(
                f"expected {self._size} tensors of {like.numel()} elements, got {[p.numel() for p in pieces]}"
            )

    def _keep_alive(self, work: Work) -> None:
        """The engine has bare addresses: whoever drops his Work and tensors must not free them under it.
        Operations end in order, so what is over stands in front."""
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(work)

    def failed(self, error: BaseException) -> None:
        """Writes the flight record of a broken group, once."""
        if not self._recorded:
            self._recorded = True
            flight.dump(self._engine, self._rank, self._size, error)

    def settle_later(self, work: Work) -> None:
        """Completes the work's future from a thread of the group: operations end in order.

        An executor's threads are joined before the interpreter ends: one that came back from the engine after
        that would take the process down.
        """
        if self._settler is None:
            self._settler = ThreadPoolExecutor(1, "hfreduce-futures")
        self._settler.submit(work.settle)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _inline(opts: Any) -> bool:
    """Will the caller wait at once?"""
    return opts is not None and not getattr(opts, "asyncOp", True)


def _op_of(opts: Any) -> native.ReduceOp:
    if opts is None:
        return native.ReduceOp.SUM
    return op_named(opts.reduceOp)


def op_named(op: Any) -> native.ReduceOp:
    """The engine's operation for a `torch.distributed.ReduceOp`.

    Raises:
        ValueError: the operation is not supported.
    """
    found = OPS.get(getattr(op, "op", op))
    if found is None:
        raise ValueError(f"hfreduce does not have the reduction {op}")
    return found


def _dtype_for(tensor: torch.Tensor, op: native.ReduceOp) -> native.DType:
    _check_device(tensor)
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"hfreduce cannot reduce {tensor.dtype}")
    if not _has_meaning(tensor.dtype, op):
        raise TypeError(f"{op.name} has no meaning for {tensor.dtype}")
    return dtype


def _has_meaning(dtype: torch.dtype, op: native.ReduceOp) -> bool:
    return op not in _BITWISE if dtype.is_floating_point else op != native.ReduceOp.AVG


def _check_dtypes(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
    for other in others:
        if other.dtype != tensor.dtype:
            raise TypeError(
                f"tensors of one call differ in dtype: {tensor.dtype} and {other.dtype}"
            )


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise CollectiveError(f"hfreduce reduces on the CPU; the tensor is on {tensor.device}")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _buffers(tensors: Iterable[torch.Tensor]) -> _Buffers:
    return [(t.data_ptr(), t.nbytes) for t in tensors]


def _writable(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Contiguous memory with the tensor's values, and what brings results back to it if it is a copy."""
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous()
    return flat, lambda: _store(tensor, flat)


def _store(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(flat)


def _all_writable(
    tensors: list[torch.Tensor],
) -> tuple[list[torch.Tensor], Callable[[], None] | None]:
    pairs = [_writable(t) for t in tensors]
    finishes = [finish for _, finish in pairs if finish is not None]

    def finish_all() -> None:
        for finish in finishes:
            finish()

    return [flat for flat, _ in pairs], finish_all if finishes else None
