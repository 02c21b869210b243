"""`haiprof enable`: a `.pth` file that makes every Python of an environment attachable."""

import sysconfig
from pathlib import Path

from fireflyer.errors import ProfileError

NAME = "fireflyer-haiprof.pth"
LINE = "import fireflyer.haiprof.inside.startup\n"


def pth_file() -> Path:
    """Returns the path of the file, in this Python's site-packages."""
    return Path(sysconfig.get_path("purelib")) / NAME


def enable() -> Path:
    """Writes the file.

    Raises:
        ProfileError: site-packages cannot be written to.
    """
    path = pth_file()
    try:
        path.write_text(LINE)
    except OSError as error:
        raise ProfileError(
            f"cannot write {path}: {error.strerror}; use an environment of your own"
        ) from None
    return path


def disable() -> bool:
    """Removes the file; returns whether it was there."""
    path = pth_file()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ProfileError(f"cannot remove {path}: {error.strerror}") from None
    return True
