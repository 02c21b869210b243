"""Damaged frames for the ports of a file system, from seeds. Real files are kept out of their reach.

Who has proved the secret is trusted: a frame that is a valid write of a real file's chunk would be done. So
the frames name inodes, paths, nodes and users of their own, and messages of replicas that could change a
chunk name chain versions that no chain has.
"""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from tests.fs3.frames import GO_KIND, HEAD, HOLD, MAGIC, READ, READY_KIND, WRITE, pieces

from fireflyer.errors import FireflyerError
from fireflyer.fs3.manager.admission import Registration
from fireflyer.fs3.manager.chains import Local, LocalState
from fireflyer.fs3.manager.core import Beat
from fireflyer.fs3.manager.service import LayOut, Restart
from fireflyer.fs3.meta import Layout
from fireflyer.fs3.meta import messages as meta
from fireflyer.rpc.address import Address
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.messages import framed, parse_reply
from fireflyer.rpc.proof import Secret

ANSWER_S = 30.0
INODE = 0xF0F0_F0F0_F0F0
NOBODY = meta.User(65534, 65534, (65534,))
BATCH = 64
"""Frames of one connection before one that ends it."""
PROBE = 1 << 20
"""Number of a request that is in order."""
TEMPTING = (0, 1, 127, 128, 255, 256, 4095, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


class Dice(random.Random):
    """Chance, and what it makes of bytes."""

    def damaged(self, data: bytes, most: int = 3) -> bytes:
        """Some bits flipped, bytes replaced, or a piece cut out."""
        out = bytearray(data)
        for _ in range(self.randrange(1, most + 1)):
            if not out:
                break
            at = self.randrange(len(out))
            what = self.randrange(4)
            if what < 2:
                out[at] ^= 1 << self.randrange(8)
            elif what == 2:
                out[at] = self.randrange(256)
            else:
                del out[at : at + self.randrange(1, 9)]
        return bytes(out)


def connect(address: str) -> socket.socket:
    """Not proved."""
    return Address.parse(address).connect(ANSWER_S)


def proved(address: str, secret: Secret, role: int = 1) -> socket.socket:
    line = connect(address)
    handshake = Handshake("client", secret, role)
    line.sendall(handshake.opening)
    while not handshake.done:
        data = line.recv(4096)
        assert data, "the service closed the connection in the handshake"
        line.sendall(handshake.feed(data))
    return line


class Stream:
    """Bytes of a connection until it ends."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self._data = line, bytearray()

    def take(self, count: int) -> bytes | None:
        """None: the connection has ended."""
        while len(self._data) < count:
            with contextlib.suppress(ConnectionError):
                if more := self.line.recv(1 << 18):
                    self._data += more
                    continue
            return None
        out = bytes(self._data[:count])
        del self._data[:count]
        return out


def send(line: socket.socket, data: bytes) -> bool:
    """False: the other side has closed."""
    try:
        line.sendall(data)
    except ConnectionError:
        return False
    return True


def before_proof(address: str, dice: Dice, count: int) -> None:
    """As many callers that do not get through the handshake; each must be answered or turned away."""
    for _ in range(count):
        handshake = Handshake("client", Secret(dice.randbytes(32)), 1)
        what = dice.randrange(5)
        with connect(address) as line:
            if what == 0:
                send(line, dice.randbytes(dice.randrange(1, 200)))
            elif what == 1:
                send(line, dice.damaged(handshake.opening))
            elif what == 2:
                send(line, handshake.opening[: dice.randrange(40)])
                line.shutdown(socket.SHUT_WR)
            elif what == 3:  # a wrong proof
                send(line, handshake.opening + dice.randbytes(dice.choice((32, 32, 32, 5, 100))))
            else:
                send(line, b"FFS3" + dice.randbytes(1 << 14))
            if what in (2, 3):
                line.settimeout(0.01 if what == 3 else ANSWER_S)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    while line.recv(4096):
                        pass


# Control connections


def _calls() -> list[Any]:
    path, name = b"fuzz/a", b"user.a"
    return [
        *(meta.Stat(1, path), meta.StatMany([(1, path), (1, b"fuzz/b")]), meta.Statfs()),
        *(meta.ReadDirectory(1, b"fuzz", b"", 64, True), meta.ReadLink(1, b"fuzz/l")),
        *(meta.Names(INODE), meta.GetXattr(1, path, name), meta.ListXattrs(1, path)),
        *(meta.Collect(0, 16), meta.Open(1, path), meta.Close(INODE, 1, 5, 0)),
        *(meta.ReportLength(INODE, 1, 5, 0), meta.ExtendStripe(INODE, 1, 5)),
        meta.Append(INODE, 1),
        *(meta.Settle(INODE, 9, 5, 0, 10**12), meta.Collected([INODE]), meta.KeepAlive()),
        meta.EndClient(),
    ]


def _changes() -> list[Any]:
    path, name = b"fuzz/a", b"user.a"
    return [
        *(meta.Create(1, path), meta.CreateMany(1, [b"x", b"y"]), meta.Truncate(1, path, 9)),
        *(meta.MakeDirectory(1, b"fuzz/d"), meta.RemoveDirectory(1, b"fuzz/d")),
        *(meta.Unlink(1, path), meta.Rename(1, path, 1, b"fuzz/b", 0)),
        *(meta.Link(1, path, 1, b"fuzz/c"), meta.Symlink(1, b"fuzz/l", b"a")),
        meta.MakeNode(1, b"fuzz/p", 4),
        *(meta.ChangeMode(1, path, 0o600), meta.ChangeOwner(1, path, 65534, 65534)),
        *(meta.SetTimes(1, path, 1, 2), meta.SetXattr(1, path, name, b"v")),
        *(meta.RemoveXattr(1, path, name), meta.SetLayout(1, path, Layout(1, 1, 4096, 2, 0))),
    ]


class Control:
    """Requests of control connections: damaged bodies, and frames that end the connection."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice
        encode = msgspec.msgpack.encode
        beat = Beat(77, 0x5555, 3, {77 * 256: Local(5, LocalState.ONLINE, 1, 9)}, 2)
        self._quick = [
            *(("status", encode(None)), ("heartbeat", encode(beat)), ("routing", encode(3))),
            *(("lay_out", encode(LayOut(9, 5))), ("restart_chain", encode(Restart(77, 5)))),
            *(("register", encode(Registration("", "a:1", 999))), ("incarnation", encode(None))),
            *(("meta", encode(meta.Request(NOBODY, 9, call))) for call in _calls()),
        ]
        self._slow = [
            ("meta", encode(meta.Request(NOBODY, 9, call, number)))
            for number, call in enumerate(_changes())
        ]

    def _call(self, number: int, body: bytes, method: str) -> bytes:
        return bytes(framed([number, method, 5000, msgspec.Raw(body)]))

    def good(self, number: int) -> tuple[bytes, bool]:
        """A frame that is a request, whatever is in it; whether it is answered: it is."""
        dice = self.dice
        method, body = dice.choice(self._slow if dice.randrange(20) == 0 else self._quick)
        what = dice.randrange(8)
        if what == 0:
            method = dice.choice(("", "meta\0", "__init__", "status" * 50, "push"))
        body = dice.randbytes(dice.randrange(1, 60)) if what == 1 else dice.damaged(body)
        try:
            msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            body = msgspec.msgpack.encode(body)  # as bytes: another type than the method wants
        return self._call(number, body, method), True

    def bad(self) -> tuple[bytes, bool]:
        """Any bytes; whether they may be the beginning of a frame that never ends."""
        dice = self.dice
        method, body = dice.choice(self._quick)
        frame = self._call(1, body, method)
        what = dice.randrange(5)
        if what == 0:
            return dice.randbytes(dice.randrange(4, 300)), True
        if what == 1:  # oversized
            return dice.choice(((1 << 24) + 1, (1 << 32) - 1)).to_bytes(4, "little") + frame, False
        if what == 2:
            return frame[: dice.randrange(1, len(frame))], True
        if what == 3:
            return dice.damaged(frame, 8), True
        payload = dice.randbytes(dice.randrange(1, 100))
        return len(payload).to_bytes(4, "little") + payload, False

    def probe(self, number: int) -> bytes:
        return self._call(number, msgspec.msgpack.encode(None), "status")

    def answers(self, stream: Stream) -> Iterator[int]:
        """The numbers of the answers that come, until the connection ends."""
        while (prefix := stream.take(4)) is not None:
            payload = stream.take(int.from_bytes(prefix, "little"))
            if payload is None:
                return
            reply = parse_reply(payload)
            if reply.id:
                yield reply.id


# Data connections


class Frames:
    """Frames of data connections.

    Args:
        chains: (number, version) of chains that the node serves.
        targets: numbers of targets.
    """

    def __init__(self, dice: Dice, chains: list[tuple[int, int]], targets: list[int]) -> None:
        self.dice, self._chains, self._targets = dice, chains, targets
        self._seq = dice.randrange(1 << 40)

    def _frame(
        self, kind: int, count: int, table: bytes, number: int, payload: bytes = b"", flags: int = 0
    ) -> bytes:
        head = HEAD.pack(MAGIC, kind, flags, count, len(table), 0, len(payload), number)
        return head + table + payload

    def _chain(self) -> tuple[int, int]:
        dice = self.dice
        chain, version = dice.choice(self._chains)
        what = dice.randrange(4)
        if what == 0:
            return dice.choice((0, 99, (1 << 32) - 1)), version
        return chain, dice.choice(TEMPTING) if what == 1 else version

    def _number(self) -> int:
        return self.dice.choice((*TEMPTING, self.dice.randrange(1 << 32)))

    def good(self, number: int) -> tuple[bytes, bool]:
        """A frame within the rules, whatever is in it; whether it is answered on its connection."""
        make, answered = self.dice.choices(
            (
                *((self._read, True), (self._write, True), (self._query, True)),
                *((self._report, False), (self._message, False)),
            ),
            (8, 2, 2, 1, 4),
        )[0]
        return make(number), answered

    def _read(self, number: int) -> bytes:
        dice, rows = self.dice, b""
        count = dice.choice((1, 1, 2, 7, 128))
        for _ in range(count):
            length = dice.choice((0, 1, 4095, 4096, 30_000, 200_000 if count < 9 else 5))
            offset = min(self._number(), (64 << 20) - length)
            inode = dice.choice((INODE, 1, dice.randrange(1 << 64)))
            rows += READ.pack(
                inode, self._number(), *self._chain(), offset, length, dice.randrange(2)
            )
        return self._frame(1, count, rows, number, flags=dice.choice((0, 0, HOLD)))

    def _write(self, number: int) -> bytes:
        dice = self.dice
        kind = dice.choice((0, 0, 1, 2, 3))
        data = dice.randbytes(dice.choice((1, 500, 4096, 9000))) if kind == 0 else b""
        offset = dice.choice((0, 1, 4095, 4096, 100_000))
        length = len(data) if kind == 0 else dice.choice((0, 1, 5000))
        self._seq += 1
        seq, channel = dice.choice((self._seq, 0, 1, (1 << 64) - 1)), dice.randrange(4)
        crcs = pieces(offset, data)
        row = WRITE.pack(
            *(INODE + dice.randrange(4), 9, seq, channel, dice.randrange(4), *self._chain()),
            *(offset, length, len(crcs), kind),
        )
        return self._frame(3, 1, row + struct.pack(f"<{len(crcs)}I", *crcs), number, data)

    def _query(self, number: int) -> bytes:
        rows = [
            struct.pack("<QIIII", INODE + at, *self._chain(), self._number(), self._number())
            for at in range(3)
        ]
        return self._frame(6, len(rows), b"".join(rows), number)

    def _report(self, number: int) -> bytes:
        row = READ.pack(INODE, self._number(), *self._chain(), 0, 4096, 0)
        return self._frame(8, 1, row, number)

    def _message(self, number: int) -> bytes:
        """Of one replica to another: asked of by targets that there are, changed by none."""
        dice = self.dice
        to = dice.choice((*self._targets, self._number()))
        sender = dice.choice((self._number(), 77 * 256))
        op, inode = dice.randrange(1 << 64), INODE
        _, version = dice.choice(self._chains)
        what, unknown = dice.randrange(9), (version + 1000 + dice.randrange(1 << 20)) & 0xFFFFFFFF
        begin = (op, sender, unknown)
        asking = (op, sender, version)
        crcs: bytes = b""
        data = b""
        if what == 0:
            data = dice.randbytes(dice.choice((0, 1, 4096, 5000)))
            crcs = b"".join(crc.to_bytes(4, "little") for crc in pieces(0, data))
            update = (op, op, sender, unknown, inode, 0, self._number(), self._number())
            kind = dice.randrange(5)
            tag = (9, 1, self._seq)
            body = struct.pack("<QQIIQIQQ", *update) + struct.pack("<BII", kind, 0, len(data))
            body += struct.pack("<QIQ?", *tag, False)
        elif what == 1:
            body = struct.pack("<QIIB", *begin, dice.randrange(9))
        elif what == 2:
            body = struct.pack("<QIIQI", *asking, inode, 0)
        elif what == 3:
            entry = struct.pack("<QIQIIQ?I", inode, 0, 5, 1, 1, 0, False, 0)
            body = struct.pack("<QII?QI", *begin, False, 7, 1) + entry
        elif what == 4:
            body = struct.pack("<QIIQ", *begin, self._number())
        elif what == 5:
            body = struct.pack("<QIIQIQ?", *asking, inode, 0, 5, False)
        elif what == 6:
            body = struct.pack("<QIIQIQBI", *begin, inode, 0, 5, dice.randrange(9), 0)
        elif what == 7:
            body = struct.pack("<QII", *asking)
        else:
            body = struct.pack("<QIIQ", *begin, self._number())
        table = struct.pack("<II", to & 0xFFFFFFFF, what) + body + crcs
        return self._frame(5, 1, table, number, data, dice.choice((0, 1, 2, 3, 0x7F)))

    def bad(self) -> tuple[bytes, bool]:
        """Any bytes; whether they may be the beginning of a frame that never ends."""
        dice, (frame, _) = self.dice, self.good(1)
        what = dice.randrange(7)
        if what == 6:  # nothing is held for it
            return self._frame(dice.choice((GO_KIND, READY_KIND)), 1, b"", 1 << 30), False
        if what == 0:
            return dice.randbytes(dice.randrange(32, 400)), True
        if what == 1:
            return frame[: dice.randrange(1, len(frame))], True
        if what == 2:  # sizes that lie
            head = list(HEAD.unpack(frame[:32]))
            at = dice.choice((1, 3, 4, 6))
            head[at] = self._number() & (0xFF if at == 1 else 0xFFFF if at == 3 else 0xFFFFFFFF)
            return HEAD.pack(*head) + frame[32:], True
        if what == 3:
            return frame[:32] + dice.damaged(frame[32:], 6), True
        if what == 4:
            return dice.damaged(frame[:32]) + frame[32:], True
        return dice.damaged(frame, 8), True

    def probe(self, number: int) -> bytes:
        row = READ.pack(INODE, 0, *self._chains[0], 0, 1, 0)
        return self._frame(1, 1, row, number)

    def answers(self, stream: Stream) -> Iterator[int]:
        while (head := stream.take(HEAD.size)) is not None:
            magic, _, _, _, table, _, payload, number = HEAD.unpack(head)
            assert magic == MAGIC
            if stream.take(table + payload) is None:
                return
            yield number


def after_proof(open_line: Callable[[], socket.socket], frames: Any, count: int) -> None:
    """As many frames on proved connections: many that keep to the rules, all of which must be answered, then
    one that does not, after which the connection ends or goes on."""
    sent = 0
    while sent < count:
        good = min(BATCH, count - sent)
        bad, endless = frames.bad()
        with open_line() as line:
            line.settimeout(ANSWER_S)
            answers = frames.answers(Stream(line))
            batch = [frames.good(at + 1) for at in range(good)]
            owed = {PROBE, *(at + 1 for at, (_, answered) in enumerate(batch) if answered)}
            assert send(line, b"".join(frame for frame, _ in batch) + frames.probe(PROBE))
            for number in answers:
                owed.discard(number)
                if not owed:
                    break
            assert not owed, "a connection ended that kept to the rules"
            sent += good + 1
            if not send(line, bad if endless else bad + frames.probe(PROBE)):
                continue
            if endless:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_WR)
            for number in answers:  # until it is closed, or the probe is answered
                if number == PROBE:
                    break


def settled(ready: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(FireflyerError):
            if ready():
                return
        assert time.monotonic() < end, what
        time.sleep(0.05)
