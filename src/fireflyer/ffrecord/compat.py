"""Compatibility with High-Flyer's ffrecord: its import name, and its function `checkFsAlign`."""

import fcntl
import importlib
import struct
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import cast

from fireflyer.errors import ConfigError

_NAME = "ffrecord"
_CHECK_FS_ALIGN = 0x80046664
"""ioctl with which a file system of High-Flyer reports that it aligns direct reads itself."""


def checkFsAlign(fd: int) -> bool:  # noqa: N802  # the name in High-Flyer's ffrecord
    """Returns whether the file system of an open file says that it aligns direct reads itself."""
    try:
        (answer,) = struct.unpack("i", fcntl.ioctl(fd, _CHECK_FS_ALIGN, bytes(4)))
    except OSError:
        return False
    return bool(answer == 1)


class _Alias(MetaPathFinder, Loader):
    """Import finder: `ffrecord` and its submodules are the module objects of fireflyer.ffrecord."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == _NAME
        return spec_from_loader(fullname, self) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(f"fireflyer.{spec.name}")
        except ModuleNotFoundError as error:
            if error.name != f"fireflyer.{spec.name}":
                raise
            raise ModuleNotFoundError(
                f"fireflyer's ffrecord has no module {spec.name!r}", name=spec.name
            ) from error
        spec.loader_state = module.__spec__  # the import system overwrites __spec__ with `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = cast(ModuleSpec, module.__spec__).loader_state


def install_as_ffrecord() -> None:
    """Makes `import ffrecord` and its `torch` and `utils` mean fireflyer.ffrecord in this process.

    Call this function before the program imports `ffrecord`. Each spawned worker process must call
    it, too.

    Raises:
        ConfigError: another package named ffrecord is imported already.
    """
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    if _NAME in sys.modules:
        raise ConfigError(
            "another package ffrecord is already imported: call install_as_ffrecord() before that import"
        )
    sys.meta_path.insert(0, _Alias())
