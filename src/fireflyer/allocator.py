"""Settings of glibc's malloc for training on CPUs: freed memory stays in the process.

By default malloc maps every tensor above 32 MiB separately. The kernel zeroes such a mapping page
by page at first touch and takes it back when the tensor is freed. A cheap operation on the tensor
then costs several times as much (docs/guide/haiscale.md has figures). `MALLOC_MMAP_MAX_=0` keeps tensors
in the heap, and a huge `MALLOC_TRIM_THRESHOLD_` keeps the heap. The cost: a process never returns
its peak memory to the kernel.

Malloc reads these variables at program start. `follow` applies them later, in a forked rank or in a
script that no launcher started.
"""

import ctypes
from collections.abc import Mapping

KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment variables that the launcher sets for ranks."""

_PARAMETERS = {"MALLOC_MMAP_MAX_": -4, "MALLOC_TRIM_THRESHOLD_": -1}
"""Parameter of mallopt for each variable."""
_INT_MAX = (1 << 31) - 1


def follow(environment: Mapping[str, str]) -> bool:
    """Configures malloc from `environment`; KEEP gives the value of an unset variable.

    Returns:
        True if all settings took effect. False if malloc is not glibc's, or if GLIBC_TUNABLES tunes
        it.
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
            value = number if number <= _INT_MAX else -1  # mallopt reads -1 as the largest value
            done = bool(mallopt(parameter, value)) and done
    return done
