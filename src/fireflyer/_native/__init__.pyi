from typing_extensions import Buffer

from fireflyer._native import (
    ffrecord as ffrecord,
    hai as hai,
    hfreduce as hfreduce
)


def crc32(data: Buffer, value: int = 0) -> int:
    """
    CRC32 of zlib's polynomial over any contiguous buffer, continuing `value`; releases the GIL.
    """

def isa() -> str:
    """
    Instruction set of the kernels in use: 'base', 'v3' or 'v4' (FIREFLYER_ISA forces one).
    """
