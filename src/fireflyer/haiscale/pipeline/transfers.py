"""Messages between stages; their shapes are learnt from the first micro-batch."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.errors import ConfigError

HEADER_BYTES = 1024
AHEAD = 2
"""Number of receives that are posted before they are needed, for each boundary between two
stages."""

Layout = list[tuple[tuple[int, ...], str, bool]]
"""Shape, dtype and requires_grad of each tensor of a message."""


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    return [(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors]


class Incoming:
    """Messages of one kind for one stage in a step, in the order in which the stage uses them.

    Args:
        post: starts the receive of tensors under a tag.
        tags: tags of the messages to receive.
        layout: shape and dtype of the tensors of each message.
    """

    def __init__(
        self,
        post: Callable[[torch.Tensor, int], dist.Work],
        tags: Iterator[int],
        layout: Layout,
    ) -> None:
        self._post, self._tags, self._layout = post, tags, layout
        self._posted: deque[tuple[list[torch.Tensor], list[dist.Work]]] = deque()
        for _ in range(AHEAD):
            self._post_next()

    def _post_next(self) -> None:
        tag = next(self._tags, None)
        if tag is None:
            return
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype, _ in self._layout
        ]
        works = [self._post(tensor, tag) for tensor in tensors]
        self._posted.append((tensors, works))

    def take(self) -> list[torch.Tensor]:
        """Waits for the next message."""
        tensors, works = self._posted.popleft()
        for work in works:
            work.wait()
        self._post_next()
        return tensors


class Mail:
    """Point-to-point messages between one rank and the other ranks of its pipeline.

    Attributes:
        sent_bytes: bytes of tensors sent since construction, without headers.
    """

    def __init__(self, group: hfreduce.ProcessGroupHFReduce) -> None:
        self._group = group
        self._under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.sent_bytes = 0

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> None:
        """Starts a send; the tensors must not change before it ends."""
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()[0].wait()
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self.sent_bytes += value.nbytes
            self._under_way.append((self._group.send([value], rank, tag), value))

    def post(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        return self._group.recv([tensor], rank, tag)

    def send_layout(self, layout: Layout, rank: int, tag: int) -> None:
        header = _written(layout)
        self._under_way.append((self._group.send([header], rank, tag), header))

    def receive_layout(self, rank: int, tag: int) -> Layout:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self.post(header, rank, tag).wait()
        return _read(header)

    def share(self, tensors: Sequence[torch.Tensor], source: int) -> list[torch.Tensor]:
        """Returns the tensors of rank `source` on every rank. Collective."""
        if self._group.size() == 1:
            return list(tensors)
        mine = self._group.rank() == source
        root = dist.get_global_rank(self._group, source)
        header = _written(layout_of(tensors)) if mine else _written([])
        dist.broadcast(header, root, self._group)
        found = (
            [tensor.contiguous() for tensor in tensors]
            if mine
            else [
                torch.empty(shape, dtype=getattr(torch, kind)) for shape, kind, _ in _read(header)
            ]
        )
        for tensor in found:
            dist.broadcast(tensor.view(-1).view(torch.uint8), root, self._group)
        return found

    def finish(self) -> None:
        """Waits until all sends have ended."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def exchange(self, tensor: torch.Tensor, ranks: Sequence[int], tag: int) -> None:
        """Sums `tensor` over `ranks` in place, in the order of `ranks`, so all these ranks get
        equal bits."""
        first, *others = ranks
        me = self._group.rank()
        if me == first:
            for rank in others:
                part: Any = torch.empty_like(tensor)
                self.post(part, rank, tag).wait()
                tensor.add_(part)
            for rank in others:
                self.send([tensor], rank, tag)
        else:
            self.send([tensor], first, tag)
            self.finish()
            self.post(tensor, first, tag).wait()
        self.finish()


def _written(layout: Layout) -> torch.Tensor:
    text = msgspec.json.encode(layout)
    if len(text) > HEADER_BYTES:
        raise ConfigError(
            f"the output of a stage has too many tensors or dimensions: {len(layout)} tensors"
        )
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return header


def _read(header: torch.Tensor) -> Layout:
    text = bytes(header.numpy()).rstrip(b"\0")
    return msgspec.json.decode(text, type=Layout)
