"""What clients did to one chunk, and whether a chunk that takes one operation at a time could answer
so."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tests.fs3.sim.history.linearize import UNKNOWN, Verdict, linearize


@dataclass(slots=True, eq=False)
class ChunkOp:
    """One operation of a client on one chunk.

    Attributes:
        kind: "write", "truncate", "extend", "remove" or "read".
        call, end: true virtual time in seconds; `end` is UNKNOWN where no answer was taken.
        offset, length: in bytes; of a read: what was asked; of truncate and extend: `length` alone.
        data: what a write wrote, or what a read got (b"" for a chunk that is not there).
        version: as answered; 0: none was named, or (of a read) there is no chunk.
        chunk: its index.
        whole: of a read: the chunk's length as answered; -1: there is no chunk.
    """

    client: int
    kind: str
    call: float
    end: float = UNKNOWN
    offset: int = 0
    length: int = 0
    data: bytes = b""
    version: int = 0
    whole: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        end = "?" if self.end == UNKNOWN else f"{self.end:.6f}"
        said = f"v{self.version}" if self.version else ""
        if self.kind == "read":
            said += " absent" if self.whole < 0 else f" of {self.whole}: {glimpse(self.data)}"
        if self.kind == "write":
            said += f" {glimpse(self.data)}"
        where = f"{self.offset}+{self.length or len(self.data)}"
        return f"[{self.call:.6f}, {end}] client {self.client} {self.kind} {where} {said}"


def glimpse(data: bytes) -> str:
    """Bytes as a short text: runs of one byte are counted."""
    runs: list[list[int]] = []
    for byte in data:
        if runs and runs[-1][0] == byte:
            runs[-1][1] += 1
        else:
            runs.append([byte, 1])
    return " ".join(f"{byte:02x}*{count}" for byte, count in runs[:8]) + (
        " ..." if len(runs) > 8 else ""
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A state of the model. `version` is the chunk's newest, or a bound below it where `exact` is
    false (the newest change is of unknown outcome, so that its version was never told)."""

    contents: bytes | None
    version: int
    exact: bool


ABSENT = Chunk(None, 0, True)


def changed(contents: bytes | None, op: ChunkOp) -> bytes | None:
    """The chunk's bytes after `op` (which is no read); None: no chunk."""
    before = contents or b""
    if op.kind == "write":
        head = before[: op.offset].ljust(op.offset, b"\0")
        return head + op.data + before[op.offset + len(op.data) :]
    if op.kind == "truncate":
        return before[: op.length]
    if op.kind == "extend":
        return before.ljust(op.length, b"\0")
    return None


def step(state: Chunk, op: ChunkOp) -> Chunk | None:
    """One operation on the model; None where the answer that was given is impossible in this state."""
    if op.kind != "read":
        after = changed(state.contents, op)
        if op.kind == "remove" and state.contents is None and not op.version:
            return state  # nothing was there: no version is used up
        if not op.version:
            return Chunk(after, state.version + 1, False) if op.end == UNKNOWN else None
        return Chunk(after, op.version, True) if op.version > state.version else None
    if state.contents is None or op.whole < 0:
        return state if state.contents is None and op.whole < 0 else None
    if op.version < state.version or (state.exact and op.version != state.version):
        return None
    if op.whole != len(state.contents):
        return None
    if state.contents[op.offset : op.offset + op.length] != op.data:
        return None
    return state if state.exact else Chunk(state.contents, op.version, True)


def check_chunk(operations: Sequence[ChunkOp], *, limit: int = 2_000_000) -> Verdict[ChunkOp]:
    """Whether the operations on one chunk, absent at first, are linearizable, with versions that grow."""
    known = [
        op for op in operations if op.kind != "read" or op.end != UNKNOWN
    ]  # other reads said nothing

    def guess(op: ChunkOp) -> float:
        # A read of a version comes after the write of it; one of an absent chunk as early as it can.
        return op.version + (0.5 if op.kind == "read" else 0.0)

    def doomed(state: Chunk, op: ChunkOp) -> bool:  # versions only grow
        return bool(op.version) and op.version < state.version + (op.kind != "read")

    def same(op: ChunkOp) -> tuple[str, int, int, bytes]:
        return op.kind, op.offset, op.length, op.data

    return linearize(known, ABSENT, step, key=guess, doomed=doomed, same=same, limit=limit)


def unwritten(operations: Sequence[ChunkOp]) -> ChunkOp | None:
    """A read whose bytes nobody wrote, if there is one: of a chunk that may have lost writes.

    Bytes are explained by writes laid one over the other, each whole where no later one covers it and no
    truncation can have cut it off; what is left must be zeros. Their order is not looked at.
    """
    writes = [op for op in operations if op.kind == "write"]
    cut = min((op.length for op in operations if op.kind == "truncate"), default=1 << 40)
    for read in operations:
        if read.kind != "read" or read.end == UNKNOWN or read.whole < 0:
            continue
        got = np.frombuffer(read.data, np.uint8)
        explained = np.zeros(len(got), bool)
        cuttable = (np.arange(read.offset, read.offset + len(got)) >= cut) & (got == 0)
        left = [write for write in writes if write.call <= read.end]
        while True:
            later = [w for w in left if not _explains(w, read.offset, got, cuttable, explained)]
            if len(later) == len(left):
                break
            left = later
        if got[~explained].any():
            return read
    return None


Bits = npt.NDArray[np.bool_]


def _explains(
    write: ChunkOp, start: int, got: npt.NDArray[np.uint8], cuttable: Bits, explained: Bits
) -> bool:
    """Whether what is not `explained` yet of `got` (from `start` on) can be this write's; marks it then."""
    first, end = max(write.offset, start), min(write.offset + len(write.data), start + len(got))
    if first >= end:
        return False
    there = slice(first - start, end - start)
    same = got[there] == np.frombuffer(write.data, np.uint8)[first - write.offset :][: end - first]
    if explained[there].all() or not (explained[there] | same | cuttable[there]).all():
        return False
    explained[there] |= same
    return bool(same.any())


def explain(verdict: Verdict[ChunkOp]) -> str:
    """Lines for people: the longest order found, and what could not come next."""
    lines = ["order found:", *(f"  {op}" for op in verdict.order)]
    if not verdict.ok:
        lines += ["none of these can come next:", *(f"  {op}" for op in verdict.stuck)]
    return "\n".join(lines)
