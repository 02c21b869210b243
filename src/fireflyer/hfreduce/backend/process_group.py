"""The torch process group: implements every collective of `torch.distributed` on the engine."""

# torch's stub declares overloads here that torch never calls on a group implemented in Python.
# mypy: disable-error-code="override, assignment"

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, RankFailed
from fireflyer.hfreduce.backend import devices, profiler_events
from fireflyer.hfreduce.backend.compiler_exclusion import uncompiled
from fireflyer.hfreduce.backend.engine_group import EngineGroup
from fireflyer.hfreduce.backend.tensors import (
    DTYPES,
    OPS,
    address_of,
    all_writable,
    averaged,
    buffers_of,
    check_dtypes,
    dtype_for,
    has_meaning,
    listed,
    op_of,
    options,
    premultiplier,
    readable,
    real,
    seconds_of,
    will_wait,
    writable,
    writable_on_host,
)
from fireflyer.hfreduce.backend.work import OVER, Joined, SharedWork, Work
from fireflyer.hfreduce.rendezvous.handshake import Purpose
from fireflyer.hfreduce.wire import Wire
from fireflyer.torch_internals.distributed import AllgatherOptions


def _dense(tensor: torch.Tensor, written: bool) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns contiguous memory; if it is a copy and `written`, also a callback to copy it back."""
    return writable(tensor) if written else (readable(tensor), None)


@uncompiled
class ProcessGroupHFReduce(EngineGroup):
    """A torch process group over the native engine.

    The engine takes dense CPU tensors and stages tensors of CUDA devices (see `devices`). Tensors
    that are not contiguous are copied. If a call has a separate output, its input is not modified.
    The group raises CollectiveError for tensors without strided memory of their own: DTensors and
    other wrappers, meta tensors, and sparse tensors. Sums of sparse COO tensors are the exception.

    Args:
        store: a `torch.distributed` store that exactly this group uses.
        rank, size: rank of this process, and number of ranks in the group.
        timeout: limit for each operation and for the rendezvous.
        still_useful: called while this rank waits for other ranks; raises if these can no longer join.

    Raises:
        DeadlineExceeded, ProtocolMismatch, NoSpace, CollectiveError: see `establish.connect`.
    """

    # Reductions.

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        """Reduces each tensor in place, with one operation per tensor."""
        opts = options(dist.AllreduceOptions, opts, timeout, op=op)
        seconds, waits = seconds_of(opts), will_wait(opts)
        if len(tensors) == 1 and waits and not seconds and self._allreduce_now(tensors[0], opts):
            return OVER
        reduction, factor = op_of(opts), premultiplier(opts)
        if factor is not None:
            self._multiply(listed(tensors), factor)
        works = [self.reduce_tensor(t, reduction, waits, seconds=seconds) for t in listed(tensors)]
        return self._over(works, listed(tensors))

    allreduce_coalesced = allreduce

    @staticmethod
    def _multiply(tensors: list[torch.Tensor], factor: Any) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(factor)

    def _allreduce_now(self, tensor: torch.Tensor, opts: Any) -> bool:
        """Runs a small operation on the fast path: one host, dense CPU memory, a caller that waits.

        Returns:
            False if the fast path does not apply; then nothing has run.
        """
        if profiler_events.enabled():
            return False
        dtype = DTYPES.get(tensor.dtype)
        if self._between_hosts or dtype is None or tensor.layout is not torch.strided:
            return False
        address = address_of(tensor)
        if not tensor.is_contiguous() or devices.context_of(tensor) is not None:
            return False
        op = OPS.get(opts.reduceOp.op)
        if op is None or (op is not native.ReduceOp.SUM and not has_meaning(tensor.dtype, op)):
            return False
        try:
            operation = self._engine.allreduce_now(
                address, tensor.nbytes, tensor.numel(), dtype, op
            )
        except CollectiveError as error:
            self.failed(error)
            raise
        if operation is not None:
            work = Work(self, [operation], [tensor])
            self._collectives.add(work)  # an interrupted wait leaves it in flight
            work.wait()
        return True

    def reduce_tensor(
        self,
        tensor: torch.Tensor,
        op: native.ReduceOp,
        inline: bool,
        priority: int = 0,
        wire: Wire | None = None,
        shared: bool = False,
        label: int = 0,
        seconds: float = 0.0,
    ) -> Work:
        """Starts the allreduce of one tensor; see `hfreduce.allreduce`."""
        if tensor.layout is torch.sparse_coo:
            return self._reduce_sparse(tensor, op)
        flat, finish = writable(tensor)
        data = real(flat)
        if not shared:
            op, finish = averaged(op, data.dtype, data, self._size, finish)
        dtype = dtype_for(data, op)
        buffers = [(data.data_ptr(), data.nbytes)]
        wire = wire or self.wire
        codec = self._wire_options(wire, data.dtype, data.numel(), op)
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
            data,
            op=op,
            priority=priority,
            shared=shared,
            label=label,
            timeout_s=seconds,
            **codec,
        )
        return SharedWork(work, tensor) if shared else work

    def _reduce_sparse(self, tensor: torch.Tensor, op: native.ReduceOp) -> Work:
        """Gathers all ranks' entries and adds them: a sparse sum's size is not known in advance."""
        if op not in (native.ReduceOp.SUM, native.ReduceOp.AVG):
            raise ValueError("sparse tensors can only be summed or averaged")
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

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: Any = None,
    ) -> Work:
        opts = options(dist.ReduceOptions, opts, timeout, op=op, root=root)
        (tensor,) = listed(tensors)
        reduction, factor = op_of(opts), premultiplier(opts)
        at_root = self._rank == opts.rootRank
        if factor is not None and at_root:
            self._multiply([tensor], factor)
        elif factor is not None:
            tensor = tensor * factor
        flat, finish = _dense(tensor, written=at_root)
        data = real(flat)
        reduction, finish = averaged(
            reduction, data.dtype, data if at_root else None, self._size, finish
        )
        buffers = buffers_of([data])
        return self._submit(
            native.Kind.REDUCE,
            buffers,
            buffers if at_root else [],
            data.numel(),
            dtype_for(data, reduction),
            will_wait(opts),
            [tensor],
            flat,
            finish,
            data,
            op=reduction,
            root=opts.rootRank,
            timeout_s=seconds_of(opts),
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        """Reduces lists of inputs, indexed by rank, with one operation per output."""
        opts = options(dist.ReduceScatterOptions, opts, timeout, op=op)
        return self._each(self._reduce_scatter, listed(outputs), map(list, inputs), opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._reduce_scatter(output, self._split(source), opts)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self._reduce_scatter_base, outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Work:
        if (factor := premultiplier(opts)) is not None:
            inputs = [piece * factor for piece in inputs]
            waits, opts = will_wait(opts), options(dist.ReduceScatterOptions, None, opts.timeout)
            opts.asyncOp = not waits  # the new options say SUM: the factor is already applied
        if any(piece.numel() != inputs[0].numel() for piece in inputs):
            return self._scatter_uneven(output, inputs, opts)
        return self._scatter_sums(
            output, inputs, op_of(opts), will_wait(opts), seconds=seconds_of(opts)
        )

    def _scatter_uneven(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Work:
        """Runs one reduce per rank, because the pieces differ in size.

        The sizes must be the same on all ranks.
        """
        if len(inputs) != self._size or inputs[self._rank].numel() != output.numel():
            raise ValueError(
                f"expected {self._size} tensors, of which number {self._rank} has {output.numel()} elements, "
                f"got {[piece.numel() for piece in inputs]}"
            )
        check_dtypes(output, inputs)
        flat, finish = writable(output)
        flat.view(-1).copy_(inputs[self._rank].reshape(-1))
        op, timeout = (opts.reduceOp, opts.timeout) if opts else (None, None)
        works = []
        for root, piece in enumerate(inputs):
            if piece.numel():
                call = options(dist.ReduceOptions, None, timeout, op=op, root=root)
                call.asyncOp = not will_wait(opts)
                works.append(self.reduce([flat if root == self._rank else piece], call))
        return Joined(self, works, [output], finish)

    def reduce_scatter_pieces(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        op: native.ReduceOp,
        inline: bool,
        priority: int,
        wire: Wire | None,
        label: int,
    ) -> Work:
        """Reduces equal pieces of `source`, one per rank; see `hfreduce.reduce_scatter`."""
        return self._scatter_sums(output, self._split(source), op, inline, priority, wire, label)

    def _scatter_sums(
        self,
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: native.ReduceOp,
        inline: bool,
        priority: int = 0,
        wire: Wire | None = None,
        label: int = 0,
        seconds: float = 0.0,
    ) -> Work:
        flat, finish = writable(output)
        target = real(flat)
        sources = [real(readable(piece)) for piece in inputs]
        op, finish = averaged(op, target.dtype, target, self._size, finish)
        self._check_pieces(sources, target)
        check_dtypes(target, sources)
        wire = wire or self.wire
        codec = self._wire_options(wire, target.dtype, target.numel() * len(sources), op)
        return self._submit(
            native.Kind.REDUCE_SCATTER,
            buffers_of(sources),
            buffers_of([target]),
            target.numel(),
            dtype_for(target, op),
            inline,
            [output],
            (flat, sources, wire),
            finish,
            target,
            op=op,
            priority=priority,
            label=label,
            timeout_s=seconds,
            **codec,
        )

    def _wire_options(
        self, wire: Wire | None, dtype: torch.dtype, count: int, op: native.ReduceOp
    ) -> dict[str, Any]:
        return wire.options(dtype, count, op, self._rank) if wire is not None else {}

    # Collectives that copy.

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        opts = options(dist.BroadcastOptions, opts, timeout, root=root)
        (tensor,) = listed(tensors)
        at_root = self._rank == opts.rootRank
        flat, finish = _dense(tensor, written=not at_root)
        buffers = buffers_of([flat])
        return self._copy(
            native.Kind.BROADCAST,
            buffers if at_root else [],
            [] if at_root else buffers,
            flat,
            opts,
            [tensor],
            flat,
            finish,
            root=opts.rootRank,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gathers each input into a list of outputs by rank; sizes may differ between ranks."""
        opts = options(AllgatherOptions, opts, timeout)
        works = [
            self._gather(native.Kind.ALL_GATHER, list(pieces), source, opts)
            for pieces, source in zip(outputs, listed(inputs), strict=True)
        ]
        return self._over(works, [t for pieces in outputs for t in pieces])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gathers all inputs; `outputs` holds a list like `inputs` for each rank."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self.gather_pieces(output, source, opts)

    def gather_pieces(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None, label: int = 0
    ) -> Work:
        """Gathers every rank's `source` into `output` in rank order; see `hfreduce.all_gather`."""
        flat, finish = writable(output)
        if output.numel() != source.numel() * self._size:
            raise ValueError(
                f"all_gather: the output needs {self._size} times the {source.numel()} elements of the "
                f"input, it has {output.numel()}"
            )
        pieces = self._split(flat)
        work = self._gather(native.Kind.ALL_GATHER, pieces, source, opts, label=label)
        return self._finish_with(work, [output], finish)

    all_gather_single = all_gather_into_tensor = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self._allgather_base, outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        opts = options(dist.GatherOptions, opts, timeout, root=root)
        (source,) = listed(inputs)
        pieces = list(outputs[0]) if outputs and self._rank == opts.rootRank else []
        return self._gather(native.Kind.GATHER, pieces, source, opts, root=opts.rootRank)

    def _gather(
        self,
        kind: native.Kind,
        outputs: list[torch.Tensor],
        source: torch.Tensor,
        opts: Any,
        root: int = -1,
        label: int = 0,
    ) -> Work:
        if outputs and len(outputs) != self._size:
            raise ValueError(f"expected one output per rank ({self._size}), got {len(outputs)}")
        check_dtypes(source, outputs)
        if outputs and outputs[self._rank].numel() != source.numel():
            raise ValueError(
                f"this rank's output has {outputs[self._rank].numel()} elements, its input {source.numel()}"
            )
        targets, finish = all_writable(outputs)
        flat = readable(source)
        return self._copy(
            kind,
            buffers_of([flat]),
            buffers_of(targets),
            flat,
            opts,
            outputs,
            (flat, targets),
            finish,
            root=root,
            label=label,
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        opts = options(dist.ScatterOptions, opts, timeout, root=root)
        (output,) = listed(outputs)
        sources = [readable(t) for t in inputs[0]] if self._rank == opts.rootRank else []
        flat, finish = writable(output)
        if sources:
            self._check_pieces(sources, flat)
            check_dtypes(output, sources)
        return self._copy(
            native.Kind.SCATTER,
            buffers_of(sources),
            buffers_of([flat]),
            flat,
            opts,
            [output],
            (flat, sources),
            finish,
            root=opts.rootRank,
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Exchanges lists of tensors indexed by rank; pieces may have any sizes."""
        opts = options(dist.AllToAllOptions, opts, timeout)
        if len(inputs) != self._size or len(outputs) != self._size:
            raise ValueError(f"all_to_all needs one tensor per rank ({self._size}) on both sides")
        check_dtypes(inputs[0], [*inputs, *outputs])
        sources = [readable(t) for t in inputs]
        targets, finish = all_writable(list(outputs))
        return self._copy(
            native.Kind.ALL_TO_ALL,
            buffers_of(sources),
            buffers_of(targets),
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
        timeout: Any = None,
    ) -> Work:
        """Exchanges rows of the first dimension.

        Args:
            output_splits, input_splits: number of rows for each rank; empty: equal numbers.
        """
        flat, finish = writable(output)
        sources = self._rows(readable(source), input_splits)
        work = self.alltoall(self._rows(flat, output_splits), sources, opts, timeout)
        return self._finish_with(work, [output], finish)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        opts = options(dist.BarrierOptions, opts, timeout)
        return self._submit(
            native.Kind.BARRIER,
            [],
            [],
            0,
            native.DType.UINT8,
            will_wait(opts),
            [],
            None,
            None,
            timeout_s=seconds_of(opts),
        )

    # Point-to-point messages; their order is independent of that of the collectives.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        (tensor,) = listed(tensors)
        flat = readable(tensor).cpu()  # waits for the device if the tensor lies on one
        self._connection.links.ensure([dst], Purpose.POST)
        operation = self._connection.p2p.send(
            to=dst,
            tag=tag,
            data=flat.data_ptr(),
            bytes=flat.nbytes,
            seconds=self._timeout_s,
            attended=False,
        )
        return self._message(operation, tensor, flat, None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        (tensor,) = listed(tensors)
        flat, finish = writable_on_host(tensor)
        others = [src] if src >= 0 else [r for r in range(self._size) if r != self._rank]
        self._connect_to(others)
        operation = self._connection.p2p.receive(
            source=src,
            tag=tag,
            data=flat.data_ptr(),
            bytes=flat.nbytes,
            seconds=self._timeout_s,
            attended=False,
        )
        return self._message(operation, tensor, flat, finish)

    def _connect_to(self, ranks: list[int]) -> None:
        """Connects to `ranks`, so that this rank detects the failure of any of them.

        A rank that has sent and then left is accepted, because its messages may still be queued
        here.

        Raises:
            RankFailed: a rank cannot be reached and has never sent anything.
        """
        for rank in ranks:
            try:
                self._connection.links.ensure([rank], Purpose.POST)
            except RankFailed:
                if not self._connection.p2p.heard_from(rank):
                    raise

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    # Calls over several tensors, and splitting into pieces.

    def _each(
        self,
        call: Callable[[torch.Tensor, Any, Any], Work],
        outputs: list[torch.Tensor],
        inputs: Iterable[Any],
        opts: Any,
    ) -> Work:
        works = [call(output, source, opts) for output, source in zip(outputs, inputs, strict=True)]
        return self._over(works, outputs)

    def _split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns equal flat pieces, one per rank."""
        if tensor.numel() % self._size != 0:
            raise ValueError(
                f"{tensor.numel()} elements cannot be divided among {self._size} ranks"
            )
        flat = readable(tensor).view(-1)
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
