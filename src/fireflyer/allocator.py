"""glibc's malloc for training on CPUs: memory that was freed stays in the process.

By default a tensor of more than 32 MiB gets a mapping of its own, which the kernel zeroes page by page at
each first touch and takes back when the tensor is freed: a cheap operation on it then costs several times as
much (docs/haiscale.md has figures). `MALLOC_MMAP_MAX_=0` keeps tensors in the heap, and a huge
`MALLOC_TRIM_THRESHOLD_` keeps the heap. The price: what a process has used at its peak it never gives back.

Malloc reads its variables when a program starts. `follow` does it later, for a rank that was forked, and for
a script that nobody launched.
"""

import ctypes
from collections.abc import Mapping

KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""The variables, as the launcher sets them for ranks."""

_PARAMETERS = {"MALLOC_MMAP_MAX_": -4, "MALLOC_TRIM_THRESHOLD_": -1}
"""Their numbers for mallopt."""
_INT_MAX = (1 << 31) - 1


def follow(environment: Mapping[str, str]) -> bool:
    """Sets malloc as `environment` says, and as KEEP does where it says nothing.

    Returns:
        Whether it did: not with another malloc than glibc's, nor where the user tunes it by GLIBC_TUNABLES.
    """
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    done = True
    for name, parameter in _PARAMETERS.items():
        text = environment.get(name, KEEP[name])
        if text.isdecimal():
            number = int(text)
            value = number if number <= _INT_MAX else -1  # -1 is the largest there is
            done = bool(mallopt(parameter, value)) and done
    return done
