"""Adapters of the page cache for LLM engines; each adapter imports its engine.

See docs/guide/data/kv-cache.md.
"""

import ctypes
from typing import Any

from fireflyer import kv
from fireflyer.errors import ConfigError
from fireflyer.kv.pages.cache import PageCache
from fireflyer.units import parse_bytes


def memory_of(tensor: Any) -> memoryview:
    """Returns the bytes of a contiguous tensor in host memory, without a copy.

    Raises:
        ValueError: the tensor is not contiguous, or not in host memory.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("a page is a contiguous tensor in host memory")
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def open_cache(options: dict[str, Any], where: str) -> PageCache:
    """Opens the cache with the "url" and "capacity" in an engine's configuration.

    Raises:
        ConfigError: an option is missing or invalid.
    """
    url, capacity = options.get("url"), options.get("capacity")
    if not url or capacity is None:
        raise ConfigError(f'{where} must name "url" and "capacity", for example "1TiB"')
    size = capacity if isinstance(capacity, int) else parse_bytes(str(capacity), where)
    return kv.cache(str(url), size)
