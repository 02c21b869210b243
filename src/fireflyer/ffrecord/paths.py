"""Names of record files."""

import os

from fireflyer.errors import ConfigError, StorageError

SUFFIX = ".ffr"

PathName = str | os.PathLike[str]


def is_url(path: PathName) -> bool:
    """Returns whether `path` is a URL (scheme://...) and not a local path."""
    return "://" in os.fspath(path)


def record_path(path: PathName) -> str:
    """Returns `path` as text, checked against the rules of the format.

    Raises:
        ConfigError: the suffix is not `.ffr`, or the name is not UTF-8 or contains a zero byte.
    """
    text = os.fspath(path)
    if not text.endswith(SUFFIX):
        raise ConfigError(
            f"record file {text!r} does not end in '{SUFFIX}': "
            f"rename it, or pass a directory of '*{SUFFIX}' files to read them all"
        )
    if "\0" in text or text != text.encode(errors="replace").decode():
        raise ConfigError(f"record file {text!r}: the name must be UTF-8 without zero bytes")
    return text


def record_files(directory: PathName) -> list[str]:
    """Returns the record files directly in `directory`, sorted by name, without hidden files.

    Raises:
        ConfigError: the directory contains no record file.
        StorageError: the directory cannot be listed.
    """
    try:
        names = sorted(n for n in os.listdir(directory) if n.endswith(SUFFIX) and n[0] != ".")
    except OSError as error:
        raise StorageError(f"cannot list record files in {directory!s}: {error}") from error
    if not names:
        raise ConfigError(f"no '*{SUFFIX}' file in directory {directory!s}")
    return [os.path.join(directory, name) for name in names]
