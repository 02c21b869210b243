"""Clock and kernel log."""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings

CHECKS = (
    Check(
        name="clock",
        figures=(Figure("clock skew", "ms", "less"),),
        needs="a clock synchronized by NTP or PTP",
        duration_s=0.2,
        function="fireflyer.validator.checks.system:run_clock",
    ),
    Check(
        name="kernel log",
        figures=(Figure("kernel log", "errors", "less"),),
        needs="/dev/kmsg: root, or kernel.dmesg_restrict=0",
        duration_s=0.3,
        function="fireflyer.validator.checks.system:run_kernel_log",
    ),
)

MOST_SKEW_MS = 100.0
UNSYNCHRONISED = 0x40
FAILED_CUTS = 3
"""Number of link losses since the node's boot at which the check fails."""

RECORD_BYTES = 8192

PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("uncorrected machine check", re.compile(r"\[Hardware Error\].*\bUncorrected\b", re.I)),
    ("uncorrected memory error", re.compile(r"\bEDAC (?:\w+ )?MC\d+: \d+ UE\b")),
    ("Xid of failed hardware", re.compile(r"NVRM: Xid \([^)]{1,80}\): (?:4[48]|6[1249]|74|79|95|119)\b")),
    ("disk error", re.compile(
        r"\b(?:blk_update_request: )?(?:critical medium|I/O) error, dev |"
        r"\bmedium error\b|\bnvme\S* .*\b(?:I/O .* timeout|controller is down)", re.I)),
    ("file system error", re.compile(r"\b(?:EXT4-fs|XFS|BTRFS) (?:\([\w-]+\): )?error\b", re.I)),
    ("overheated core", re.compile(r"\bCPU\d+: (?:Core|Package) temperature above threshold")),
    ("PCIe error", re.compile(r"\bAER: .*\b(?:Uncorrected|Fatal)\b", re.I)),
)  # fmt: skip

CUT = re.compile(
    r"\b(?:mlx5_core|mlx4_en|ice|i40e|ixgbe|igb|bnxt_en|tg3)\b.*\blink (?:is )?down\b", re.I
)


class _Timex(ctypes.Structure):
    """struct timex of Linux."""

    _fields_ = [  # ctypes wants a list
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long), ("esterror", ctypes.c_long), ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]  # fmt: skip


def run_clock(settings: Settings) -> Iterator[Measured]:
    """Reads the kernel's estimate of the clock's error."""
    del settings
    timex = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        raise NotRun(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    yield skew(timex.status, timex.maxerror / 1e3)


def skew(status: int, most_ms: float) -> Measured:
    """Judges the status and the largest possible error of a clock."""
    if status & UNSYNCHRONISED:
        return Measured(
            "clock skew", skipped="no NTP or PTP synchronizes the clock, so its error is unknown"
        )
    failed = ""
    if most_ms > MOST_SKEW_MS:
        failed = f"the clock may be wrong by {most_ms:.0f} ms, more than {MOST_SKEW_MS:.0f}"
    return Measured("clock skew", most_ms, failed)


def run_kernel_log(settings: Settings) -> Iterator[Measured]:
    """Reads the kernel's messages since the start of the node."""
    del settings
    try:
        file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotRun(f"/dev/kmsg: {error.strerror}; needs root") from None
    try:
        yield kernel_log(_records(file))
    except PermissionError:
        raise NotRun("/dev/kmsg: needs root, or kernel.dmesg_restrict=0") from None
    finally:
        os.close(file)


def _records(file: int) -> Iterator[str]:
    while True:
        try:
            record = os.read(file, RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the log overwrote records; the next read returns the oldest left
            continue
        if not record:
            return
        yield record.partition(b";")[2].decode("utf-8", "replace")


def kernel_log(lines: Iterable[str]) -> Measured:
    """Counts the lines of a kernel log that report failed hardware."""
    found: Counter[str] = Counter()
    cuts = 0
    for line in lines:
        cuts += bool(CUT.search(line))
        for name, pattern in PATTERNS:
            if pattern.search(line):
                found[name] += 1
    if cuts >= FAILED_CUTS:
        found["link lost"] = cuts
    total = sum(found.values())
    failed = ", ".join(f"{name}: {count}" for name, count in found.most_common())
    return Measured("kernel log", float(total), failed)
