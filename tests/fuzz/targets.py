"""The parsers in Python that take bytes from outside, as functions of any bytes, for the fuzzer.

A target raises nothing: what its parser may raise (FireflyerError) it catches, all else is a finding.
Checksums are made right around the bytes, so that what lies behind them is reached.
"""

import json
import pickle
import struct
import tempfile
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
import zstandard
from tests.ffrecord.conftest import encode, encode_v2

from fireflyer.datasets import manifest
from fireflyer.errors import FireflyerError, StorageError
from fireflyer.ffrecord import FileReader, RemoteFiles
from fireflyer.ffrecord.folder import _load_tree, _names
from fireflyer.storage import DirectoryStorage, Range

Target = Callable[[bytes], None]

_PLACE = tempfile.TemporaryDirectory(prefix="ff-fuzz-", dir="/dev/shm")  # a disk would set the pace


class _Memory(DirectoryStorage):
    """A storage of one file, `a.ffr`."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __str__(self) -> str:
        return "memory"

    def size(self, name: str) -> int:
        return len(self.data)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        return [self.data[start:end] for _, start, end in ranges]


def tree(data: bytes) -> None:
    """The tree of names of a packed folder of five files."""
    with suppress(FireflyerError):
        found = _load_tree(data, 5, "a.ffr")
        list(_names(found, "", True, True, True))


def samples(data: bytes) -> None:
    """The schema and the samples of a v2 file, whose rest is sound: rows, columns, zstd frames.

    u16 size of the schema, schema, then samples: u8 codec, u32 raw size, u16 size, bytes.
    """
    size = int.from_bytes(data[:2], "little")
    schema, rest = data[2 : 2 + size], data[2 + size :]
    stored: list[bytes] = []
    kinds: list[tuple[int, int]] = []
    while len(rest) >= 7 and len(stored) < 20:
        codec, raw, size = struct.unpack_from("<BIH", rest)
        stored.append(rest[7 : 7 + size])
        kinds.append((codec % 2, raw if codec % 2 else len(stored[-1])))
        rest = rest[7 + size :]
    file = bytearray(encode_v2([stored], schema=schema))
    page = len(file) - 16 - (24 + 4096 if stored else 0)  # ahead of the footer of one run
    for number, (codec, raw) in enumerate(kinds):
        struct.pack_into("<Q", file, page + 32 + 32 * number + 16, raw)
        struct.pack_into("<I", file, page + 32 + 32 * number + 28, codec)
    if stored:
        struct.pack_into("<I", file, page, zlib.crc32(file[page + 4 : page + 4096]))
    path = Path(_PLACE.name, "a.ffr")
    path.write_bytes(file)
    with suppress(FireflyerError), FileReader(path) as reader:
        everything = range(reader.n)
        for use in (reader.read, reader.rows, reader.read_columns, reader.read_views):
            with suppress(FireflyerError):
                use(everything)
        for one in everything[:3]:
            with suppress(FireflyerError):
                reader.read_one(one)
        reader.validate()


def remote(data: bytes) -> None:
    """A v1 file that is read by ranges; the first byte says whether its metadata gets their checksum."""
    file = bytearray(data[1:])
    count = int.from_bytes(file[4:12], "little")
    if data[:1] != b"\0" and 0 <= count <= len(file) // 12:
        file[:4] = struct.pack("<I", zlib.crc32(file[4 : 12 + 12 * count]))
    with suppress(FireflyerError), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        files = RemoteFiles(["a.ffr"], storage=_Memory(bytes(file)), attempts=1)
        for one in range(min(files.n, 3)):
            with suppress(FireflyerError):
                files.read_one(one)
        files.read(range(files.n))


def dataset(data: bytes) -> None:
    """A manifest; the first byte says whether it comes in a sound envelope."""
    body = data[1:]
    if data[:1] != b"\0":
        body = b'{"sha256":"%s","body":%s}' % (sha256(body).hexdigest().encode(), body)
    with suppress(FireflyerError):
        found, _ = manifest.decode(body, "here", "a/b", 1)
        found.readable_by("somebody")
        again, _ = manifest.decode(manifest.encode(found), "here", "a/b", 1)
        if (again.files, again.bytes) != (found.files, found.bytes):
            raise AssertionError("a manifest changes when it is written again")


TARGETS: tuple[Target, ...] = (tree, samples, remote, dataset)


def run(data: bytes) -> None:
    """One input: the number of the target in the first byte, then its bytes."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def _sample(content: bytes, packed: bool = False) -> bytes:
    stored = zstandard.ZstdCompressor().compress(content) if packed else content
    return struct.pack("<BIH", packed, len(content), len(stored)) + stored


def _file(schema: object, *parts: bytes) -> bytes:
    text = json.dumps(schema).encode() if schema else b""
    return struct.pack("<H", len(text)) + text + b"".join(parts)


def seeds() -> list[tuple[Target, bytes]]:
    """Good inputs: nothing of them is refused."""
    names: OrderedDict[str, object] = OrderedDict(
        a=0, d=OrderedDict(b=1, c=2), e=OrderedDict(), f=4
    )
    columns = [
        ("x", "int32", [None, 2]),
        ("y", "float64", []),
        ("t", "str", []),
        ("r", "bytes", []),
        ("n", "int8?", []),
        ("m", "msgpack", []),
    ]
    schema = {"columns": [{"name": n, "dtype": d, "shape": s} for n, d, s in columns]}
    row = (
        struct.pack("<5Q2id", 1, 3, 5, 1, 3, 7, 8, 9.5)
        + b"abc".ljust(8, b"\0")
        + b"bytes".ljust(8, b"\0")
        + b"\x07".ljust(8, b"\0")
        + b"\x92\x01\xc0".ljust(8, b"\0")
    )
    good = manifest.Manifest(
        format=1,
        name="a/b",
        version=1,
        data=manifest.data_name(1_700_000_000, bytes(8)),
        created=1.5,
        owner="somebody",
        readers=("other",),
        licence="CC0",
        description="words",
        schema={"a": [1, 2.5, None]},
        files=(manifest.File(name="p.ffr", samples=3, bytes=99, sha256="0" * 64),),
    )
    return [
        *((tree, pickle.dumps(names, protocol)) for protocol in range(6)),
        (samples, _file(None, _sample(b""), _sample(b"plain"), _sample(b"packed" * 50, True))),
        (samples, _file(schema, _sample(row), _sample(row, True))),
        (
            samples,
            _file({"columns": [{"name": "a", "dtype": "uint8", "shape": [4]}]}, _sample(row[:8])),
        ),
        (remote, b"\1" + encode([])),
        (remote, b"\0" + encode([b"", b"some", b"", b"more bytes"])),
        (remote, b"\1" + encode([bytes([i]) * i for i in range(20)])),
        (dataset, b"\1" + msgspec.json.encode(good)),
        (dataset, b"\0" + manifest.encode(good)),
    ]


def whole(target: Target, data: bytes) -> bytes:
    """What `run` takes."""
    return bytes([TARGETS.index(target)]) + data
