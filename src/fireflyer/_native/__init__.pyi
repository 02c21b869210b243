from typing_extensions import Buffer

from fireflyer._native import (
    checkpoint as checkpoint,
    envpool as envpool,
    fabric as fabric,
    ffrecord as ffrecord,
    fs3 as fs3,
    hai as hai,
    haiprof as haiprof,
    hfreduce as hfreduce,
    kv as kv,
    nn as nn,
    storage as storage
)


def crc32(data: Buffer, value: int = 0) -> int:
    """
    CRC32 of zlib's polynomial over any contiguous buffer, continuing `value`; releases the GIL.
    """

def crc32c(data: Buffer, start: int = 0) -> int:
    """
    CRC32C (Castagnoli) over any contiguous buffer, continuing `start`; releases the GIL for long buffers.
    """

def crc32c_combine(a: int, b: int, bytes_b: int) -> int:
    """
    CRC32C of A followed by B, from the CRC32C of each and B's length in bytes.
    """

def isa() -> str:
    """
    Instruction set in use: 'base', 'v3' or 'v4' (the environment's FIREFLYER_ISA forces one).
    """

def crc_width() -> int:
    """
    Bits of the carry-less products in use for CRCs: 512, 256 (v3, with VPCLMULQDQ) or 128.
    """
