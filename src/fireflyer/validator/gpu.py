"""Checks of GPUs with torch: memory, matrix products and transfers.

These checks run in a process of their own. In the validator, only this module and `allreduce.py`
import torch, and no other process of the platform imports these two modules.
"""

import time
from collections.abc import Iterator
from typing import Any

from fireflyer.validator.checks.nvidia import states
from fireflyer.validator.model import Measured, NotRun, Settings

SIZE = 4096
QUICK_S = 3.0
FULL_S = 60.0
QUICK_SHARE = 0.1
FULL_SHARE = 0.9
CHUNK_WORDS = 1 << 26
PATTERNS = (0x00000000, 0x55555555, 0x0F0F0F0F, 0x00FF00FF)
TRANSFER_BYTES = 256 << 20


def _torch() -> Any:
    """Returns torch if there is a GPU. Queries the driver first, because torch loads slowly."""
    import pynvml

    states(pynvml)
    try:
        import torch
    except ImportError:
        raise NotRun("torch is not installed") from None
    if not torch.cuda.is_available():
        raise NotRun("torch finds no GPU")
    return torch


def run_memory(settings: Settings) -> Iterator[Measured]:
    """Tests a share of the free memory of each GPU by moving inversions."""
    torch = _torch()
    tested, wrong = 0, []
    for device in range(torch.cuda.device_count()):
        free = torch.cuda.mem_get_info(device)[0]
        words = int(free * (QUICK_SHARE if settings.quick else FULL_SHARE)) // 4
        sizes = [min(CHUNK_WORDS, words - at) for at in range(0, words, CHUNK_WORDS)]
        chunks = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
        bad = verify_chunks(torch, chunks, flip=settings.drill == "gpu memory")
        tested += 4 * words
        if bad:
            wrong.append(f"GPU {device}: {bad} words did not keep their bits")
    yield Measured("gpu memory", tested / 1e9, "; ".join(wrong))


def verify_chunks(torch: Any, chunks: list[Any], *, flip: bool) -> int:
    """Returns the number of words that did not keep a pattern; `flip` injects one flipped bit."""
    bad = 0
    for pattern in PATTERNS:
        inverse = ~pattern
        for chunk in chunks:
            chunk.fill_(pattern)
        for chunk in chunks:
            if flip and pattern == PATTERNS[1] and chunk is chunks[-1]:
                chunk[len(chunk) // 2] ^= 1 << 9
            bad += int((chunk != pattern).sum())
            chunk.fill_(inverse)
        for chunk in reversed(chunks):
            bad += int((chunk != inverse).sum())
    del torch
    return bad


def run_gemm(settings: Settings) -> Iterator[Measured]:
    """Multiplies on each GPU with a known answer; measures transfers to and from each GPU."""
    torch = _torch()
    seconds = QUICK_S if settings.quick else FULL_S
    speeds, rates, wrong = [], [], []
    for device in range(torch.cuda.device_count()):
        speed, bad = products(torch, device, seconds, SIZE, flip=settings.drill == "gpu gemm")
        speeds.append(speed)
        if bad:
            wrong.append(f"GPU {device}: {bad} elements differ from the known answer")
        rates.append(_transfer(torch, device))
    yield Measured("gpu gemm", min(speeds), "; ".join(wrong), samples=tuple(speeds))
    yield Measured("gpu transfer", min(rates), samples=tuple(rates))


def products(
    torch: Any, device: Any, seconds: float, size: int, *, flip: bool
) -> tuple[float, int]:
    """Returns the TFLOP/s of float32 products of small integers and the number of wrong elements.

    The CPU computes the answer in float64; every partial sum is exact in both types.
    """
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randint(-15, 16, (size, size), generator=generator).double() for _ in range(2)
    )
    answer = (left @ right).float().to(device)
    a, b = left.float().to(device), right.float().to(device)
    out = torch.empty_like(answer)
    bad, rounds, spent = 0, 0, 0.0
    while rounds < 2 or spent < seconds:
        begin = time.perf_counter()
        torch.matmul(a, b, out=out)
        if answer.is_cuda:
            torch.cuda.synchronize(device)
        spent += time.perf_counter() - begin
        if flip and rounds == 1:
            out.view(torch.int32)[size // 2, size // 3] ^= 1
        bad += int((out != answer).sum())
        rounds += 1
    return 2 * size**3 * rounds / spent / 1e12, bad


def _transfer(torch: Any, device: int) -> float:
    """Returns the GB/s between pinned memory and the GPU in the slower direction."""
    host = torch.empty(TRANSFER_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    rates = []
    for to, of in ((there, host), (host, there)):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(TRANSFER_BYTES / (time.perf_counter() - begin) / 1e9)
    return min(rates)
