"""Values that the benchmarks' command line accepts.

The module does not import torch, so that an invalid command line fails at once.
"""

from collections.abc import Iterable

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
MEMORY = ("zero-copy", "staged", "shared")
PEERS = ("gloo", "mpi")
TUNED = ("allreduce", "broadcast", "reduce")
RECORDS = ("warm", "views", "small", "cold", "loader", "files", "pack", "open")
CHECKPOINT = ("stall", "total", "load", "overlap", "one", "memory", "training")
CHECKPOINT_DEFAULT = CHECKPOINT[:-1]
FS = ("tcp", "local", "small", "write", "create", "one", "stat", "memory", "incast")
MOUNT = ("read", "create", "find")
FS_GROWTH = ("clients", "directory", "bytes", "total")
KV = ("ycsb", "pages", "far", "redis", "file", "exists", "memory", "open", "seen")
TRAIN = ("stub", "gpt", "vgg", "host", "memory")
TRAIN_FAMILIES = ("ddp", "fsdp")
TRAIN_SHAPES = ("even", "gpt")
NN = ("kept", "peak", "operators", "head", "bits", "digits", "characters")
NN_DEFAULT = NN[:-2]
SMALLEST_STATE = 4 << 20
ORDERS = ("contiguous", "round-robin")
WIRES = {"bf16": 2, "fp16": 2, "int8": 1}
"""Wire codecs, each with its bytes per element, without the scales of blocks."""


def parse_names(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in a comma-separated list, without duplicates.

    Raises:
        ValueError: a name is unknown.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"invalid name {name!r}: expected one of {', '.join(known)}")
    return names


def parse_layouts(text: str) -> tuple[tuple[int, int], ...]:
    """Parses the hosts and the ranks per host of each layout, for example "2x1,2x2,4x1".

    Raises:
        ValueError: the text is not such a list, or a layout has fewer than 2 or more than 32 hosts.
    """
    found = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        hosts, _, ranks = name.partition("x")
        if not (hosts.isdigit() and ranks.isdigit() and 2 <= int(hosts) <= 32 and int(ranks) >= 1):
            raise ValueError(
                f"invalid layout {name!r}: expected HOSTSxRANKS, HOSTS 2 to 32, e.g. 2x1"
            )
        found.append((int(hosts), int(ranks)))
    return tuple(found)


def size_text(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
