"""Goals of the benchmarks: required ratios by case; None if a case has no goal.

A goal "at most x times the peer's time" is a required ratio of at least 1/x. A pair of numbers is the
required value and the aim.
"""

K, M = 1 << 10, 1 << 20
SIZES = (64 * K, M, 16 * M, 128 * M)

# Required ratios to gloo by memory, one for each of SIZES: first for 2 or 4 ranks, then for 8.
_FEW_RANKS = {"zero-copy": (40, 22, 9, 8), "staged": (30, 12, 6, 5.5)}
_OVERSUBSCRIBED = {"zero-copy": (80, 28, 8, 8), "staged": (60, 14, 4.3, 4.3)}
_MPI_TIMES = (1.1, 0.9, 0.4, 0.2)  # maximum times relative to MPI's, one for each of SIZES

SYNC_CALL_US = 8.0
"""Maximum time of a synchronous allreduce of one element by a single rank."""
ASYNC_CALL_US = 20.0
"""Maximum time of an asynchronous allreduce of one element by a single rank, and the wait for it."""
NIC_BYTES = 1 / 1.02
"""Required ratio: the minimum bytes of an allreduce, relative to the bytes that a host sends."""
LINE_RATE = 1 / 1.06
"""Required ratio: the time of the minimum bytes at the line rate, relative to the time of an
allreduce."""
_WIRES = {"bf16": 1.9, "fp16": 1.9, "int8": 3.5}
_FLAT_GLOO = {"contiguous": 1.65, "round-robin": 6.5}


def _of_size(values: tuple[float, ...] | None, size: int) -> float | None:
    return values[SIZES.index(size)] if values is not None and size in SIZES else None


def against_gloo(collective: str, dtype: str, memory: str, ranks: int, size: int) -> float | None:
    """Returns the goal of an allreduce inside a host against gloo, for wall and CPU time."""
    if collective != "allreduce" or dtype not in ("float32", "bfloat16"):
        return None
    if ranks not in (2, 4, 8):
        return None
    table = _OVERSUBSCRIBED if ranks == 8 else _FEW_RANKS
    return _of_size(table.get(memory), size)


def against_mpi(collective: str, dtype: str, memory: str, ranks: int, size: int) -> float | None:
    """Returns the goal of an allreduce inside a host against MPI, for wall time.

    The goal is the same for zero-copy and staged memory.
    """
    asked = collective == "allreduce" and dtype == "float32" and ranks in (2, 4)
    if not asked or memory == "shared":
        return None
    return _of_size(tuple(1 / time for time in _MPI_TIMES), size)


def of_add_limit(collective: str, memory: str, ranks: int, size: int) -> float | None:
    """Returns the required ratio of bytes per second to the add limit.

    Only a zero-copy allreduce that exceeds the caches has this goal.
    """
    if collective != "allreduce" or memory != "zero-copy" or size < 128 * M:
        return None
    return {2: 0.9, 4: 0.9, 8: 0.75}.get(ranks)


def bfloat16_against_float32(collective: str, size: int) -> float | None:
    """Returns the goal of our bfloat16 against our float32 for the same bytes."""
    if collective != "allreduce" or size < M:
        return None
    return 1.0 if size >= 16 * M else 0.8


def wire(codec: str, size: int) -> float | None:
    """Returns the goal of a wire codec against the float32 wire."""
    return _WIRES.get(codec) if size in (16 * M, 64 * M) else None


def flat_gloo(hosts: int, ranks_per_host: int, order: str, size: int) -> float | None:
    """Returns the goal of our allreduce against gloo's flat ring over the same hosts."""
    if (hosts, ranks_per_host) != (2, 4) or size not in (16 * M, 64 * M):
        return None
    return _FLAT_GLOO[order]


OPENING_MS = 50.0
"""Maximum time to open a record file of 10 million samples and to read one batch."""
_RECORDS = {
    ("warm 64 KiB", "peer"): 3.0,
    ("warm 64 KiB", "memcpy"): 0.6,
    ("warm 64 KiB views", "peer"): 0.9,
    ("warm 1 KiB", "peer"): 1.3,
    ("cold 64 KiB", "fio"): 1.2,
    ("cold 64 KiB", "peer"): 1.8,
    ("DataLoader, in process", "one by one"): 5.0,
    ("DataLoader, 2 workers", "one by one"): 5.0,
    ("DataLoader 1 KiB, in process", "one by one"): 5.0,
    ("DataLoader 1 KiB, 2 workers", "one by one"): 5.0,
    ("small files", "files"): 3.0,
    ("packing", "cat"): 0.7,
}


def records(case: str, peer: str) -> float | None:
    """Returns the goal of random reads of record files.

    The peer "peer" means the fastest peer that the case allows.
    """
    return _RECORDS.get((case, peer))


BLOCKED_MS = 10.0
"""Maximum time for which an overlapped save blocks a training step."""
ONE_TENSOR_MS = 20.0
"""Maximum time to load one tensor of 1 MiB from a checkpoint in memory."""
SLOW_DOWN = 0.02
"""Maximum share of the training speed that saves may cost."""
STAGING = 1.05
"""Maximum memory that a save adds to the process, relative to the size of the state."""
BEYOND_MIB = 64.0
"""Maximum memory that load(into=) adds to the process."""
_CHECKPOINT = {
    ("stall", "memcpy"): 1 / 1.15,
    ("stall", "dcp.async_save"): 2.2,
    ("total", "raw"): 0.75,
    ("cold load", "raw"): 0.85,
    ("cold load", "dcp"): 1.6,
    ("warm load", "dcp"): 5.0,
    ("warm load", "safetensors"): 0.8,
}


def checkpoint(case: str, peer: str) -> float | None:
    """Returns the goal of saves and loads of a whole state; "raw" is O_DIRECT of the same bytes."""
    return _CHECKPOINT.get((case, peer))


INDEX_BYTES = 128.0
"""Maximum bytes of the index per chunk."""
MILLION_MIB = 200.0
"""Maximum memory of the process of manager and metadata with a million files."""
_FS = {
    ("tcp", "sendfile"): (0.8, 0.95),
    ("local", "pread"): (0.65, 0.8),
    ("small", "ring"): (0.6, 0.8),
    ("write", "raw"): (0.7, 0.85),
    ("create", "juicefs"): (8.0, 15.0),
    ("create", "moosefs"): (0.9, 1.5),
    ("one", "sqlite"): (0.8, 0.9),
    ("stat", "juicefs"): (5.0, 15.0),
}


def fs(case: str, peer: str) -> tuple[float, float]:
    """Returns the required ratio and the aim of a case of the file system."""
    return _FS[case, peer]


_MOUNT = {
    ("read", "passthrough_hp"): (0.8, 0.95),
    ("read", "client"): (0.4, 0.6),
    ("read", "juicefs"): (2.0, 2.0),
    ("create by 1", "juicefs"): (1.0, 3.0),
    ("create by 16", "juicefs"): (2.0, 5.0),
    ("find", "juicefs"): (2.0, 6.0),
}


def mount(case: str, peer: str) -> tuple[float, float]:
    """Returns the required ratio and the aim of a case of the mounted file system."""
    return _MOUNT[case, peer]


Shares = tuple[float, float] | None
"""Required maximum of a ratio, and the aim. None if there is no goal."""
_STEP = {
    ("0.45", "ddp"): (0.87, 0.80),
    ("0.45", "ddp, bf16"): (0.52, 0.42),
    ("0.45", "ddp, int8"): (0.44, 0.37),
    ("1", "ddp"): (0.70, 0.62),
    ("1", "ddp, bf16"): (0.64, 0.60),
    ("1", "ddp, int8"): (0.62, 0.59),
    ("0.45", "ZeRO-3"): (0.58, 0.50),
    ("0.45", "ZeRO-2"): (0.55, 0.47),
    ("0.45", "ZeRO-3, bf16 both ways"): (0.33, 0.26),
    ("vgg", "ddp"): (0.6, 0.5),
    ("vgg", "ddp, bf16"): (0.35, 0.28),
    ("host", "ddp"): (0.95, 0.85),
    ("host", "ZeRO-3"): (0.8, 0.65),
}
_OVER_IDEAL = {"ddp": (1.2, 1.08), "ZeRO-3": (1.3, 1.12), "ZeRO-2": (1.3, 1.12)}
_SENT = {"ddp": (1.02, 1.005), "ZeRO-3": (1.02, 1.005), "ZeRO-2": (1.02, 1.005)}
WIRE_LOSS_PERCENT = 0.5
"""Maximum difference between a loss with a wire codec and the loss with the float32 wire."""
MODEL_ERROR_PERCENT = 10.0
"""Maximum deviation of the predicted step time from the measured step time."""
SHARDED_MEMORY = 1.05
"""Maximum memory of a rank for parameters, gradients and optimizer states, relative to an equal
share of their total."""
_EXPOSED = {("1", "ddp"): (0.35, 0.1)}


def train_step(case: str, candidate: str) -> Shares:
    """Returns the required maximum ratio of a step's time to the peer's, and the aim."""
    return _STEP.get((case, candidate))


def train_exposed(case: str, candidate: str) -> Shares:
    """Returns the required maximum ratio of exposed communication to the peer's, and the aim."""
    return _EXPOSED.get((case, candidate))


def train_over_ideal(case: str, candidate: str) -> Shares:
    """Returns the required maximum ratio of a step's time to its ideal, and the aim.

    The ideal is the longer of two times: the work alone, and the minimum bytes at the line rate.
    """
    return _OVER_IDEAL.get(candidate) if case in ("0.45", "1", "gpt") else None


def train_sent(case: str, candidate: str) -> Shares:
    """Returns the required maximum ratio of sent bytes to the minimum, and the aim."""
    return _SENT.get(candidate) if case else None


API_RATE = 100.0
"""Required submissions per second to the platform; the aim is twice as many."""
API_P99_S = 0.25
"""Maximum 99th percentile of a submission's time."""

HAI_START_MS = 500.0
"""Maximum time to start the local engine and a rank on it."""
HAI_MEMORY_MB = 25.0
"""Maximum memory of an attempt's supervisor."""
HAI_DEATH_MS = 100.0
"""Maximum time until a dead rank is detected."""
HAI_SUSPEND_MS = {"local": 1000.0, "slurm": 2000.0}
"""Maximum time from a suspend request until the nodes are free, without the task's own save."""

EXPERT_BYTES = (1 / 1.02, 1 / 1.005)
"""Required ratio and aim: the bytes of one copy of each token per host, relative to the bytes that
a host sends."""
EXPERT_TIME = (2.0, 2.5)
"""Required ratio and aim: dispatch and combine against all_to_all_single on gloo."""
EXPERT_LOAD = (1 / 1.1, 1 / 1.05)
"""Required ratio and aim: a lower bound of the busiest device's load, relative to that load."""
TENSOR_SAVED = 1.0
"""Required ratio: the bytes that a host no longer sends, relative to those of the naive form's
gather."""
TENSOR_TIME = (1.5, 1.8)
"""Required ratio and aim: a pair of 4-bit layers against the naive form."""
PIPELINE_PREDICTED = (1 / 1.05, 1 / 1.02)
"""Required ratio and aim: the schedule's prediction relative to a step's time."""
PIPELINE_TORCH = {"compute-bound": (1 / 1.02, 1.0), "communication-bound": (1 / 0.95, 1 / 0.8)}
"""Required ratio and aim: a step against torch's pipelining over gloo."""
PLANNER_ERROR_PERCENT = (10.0, 5.0)
"""Allowed deviation of the planner from the paper's step times, and the aim."""
PIPELINE_BYTES = (1.0, 1.0)
"""Required ratio and aim: the bytes that the planner computes, relative to the bytes that a host
sends."""

FLOWS_SPEED = (10.0, 20.0)
"""Required ratio and aim for the speed at which the end times of flows are computed: our solver
against SimGrid."""
FLOWS_SECONDS = ((3.0, 1.0), (0.5, 0.2))
"""Allowed seconds and aim to compute the end times of 15,000 flows. The first pair is for exact
times, the second for a solver that merges ends within 1 % of each other."""

ENVS = {
    (False, "PyPI envpool"): (1.0, 1.5),
    (False, "SyncVectorEnv"): (2.0, 4.0),
    (False, "AsyncVectorEnv"): (20.0, 40.0),
    (True, "AsyncVectorEnv"): (1.5, 2.8),
    (True, "ale-py"): (1.0, 1.2),
}
"""Required ratio and aim for steps of environments against peers; True: Atari games."""

EXPERTS = {
    "raw": (0.85, 0.95),
    "torch.load": (1.8, 2.5),
    "safetensors": (1.3, 1.6),
    "warm": (10.0, 15.0),
}
"""Required ratio and aim for the time of a switch to another expert. The key is the peer of a
switch to a cold expert. "warm" is a switch to a warm expert, against torch.load."""

PROF_FIRST_ROW_S = (1.0, 0.3)
"""Allowed seconds between the attach and the row of the first step, and the aim."""
PROF_PHASES_US = (50.0, 20.0)
"""Allowed microseconds that phases add to a step, and the aim."""
PROF_SAMPLING_PERCENT = (2.0, 1.0)
"""Allowed percentage of a processor for 100 stack samples a second, and the aim."""
