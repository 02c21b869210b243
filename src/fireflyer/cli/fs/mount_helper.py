"""`mount.fireflyer`, the program that mount(8) runs for the type `fireflyer` of fstab.

mount(8) looks for this program in /sbin: see docs/operate/fs3-mount.md. mount(8) passes the
arguments `SPEC DIR [-sfnv] [-o OPTIONS]`; SPEC is the value of `fireflyer fs mount --dir`.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from fireflyer.errors import ConfigError
from fireflyer.program import in_one_line, open_standard_streams

FLAGS = {"ro": 1, "noexec": 8}
"""Options that mount(2) enforces."""
UNDONE = {"rw": "ro", "exec": "noexec"}
"""Options that undo an earlier option of `FLAGS`."""
IGNORED = {
    *("defaults", "auto", "noauto", "nofail", "_netdev", "nouser"),
    *("nosuid", "nodev", "noatime", "nodiratime", "relatime", "allow_other"),
}
"""Options that mount(8) and systemd read themselves, and options that are always in force."""


class Options(NamedTuple):
    """Options of an fstab line: bits of mount(2), seconds of `--cache`, file of `--log`."""

    flags: int = 0
    cache_s: float = 1.0
    log: Path | None = None


def parse_options(text: str, *, sloppy: bool = False) -> Options:
    """Parses the fourth field of an fstab line.

    Raises:
        ConfigError: an option is unknown (unless `sloppy`), or its value is invalid.
    """
    flags: dict[str, int] = {}
    cache_s, log = 1.0, None
    for option in filter(None, text.split(",")):
        name, _, value = option.partition("=")
        if option in FLAGS:
            flags[option] = FLAGS[option]
        elif option in UNDONE:
            flags.pop(UNDONE[option], None)
        elif name == "cache":
            cache_s = _seconds(value)
        elif name == "log" and value:
            log = Path(value)
        elif option not in IGNORED and not name.startswith(("x-", "comment")) and not sloppy:
            raise ConfigError(
                f"invalid mount option {option!r}: expected cache=SECONDS, log=FILE or one of "
                f"{', '.join([*FLAGS, *UNDONE, *sorted(IGNORED)])}"
            )
    return Options(sum(flags.values()), cache_s, log)


def _seconds(value: str) -> float:
    if not value.replace(".", "", 1).isdecimal():
        raise ConfigError(f"invalid mount option cache={value}: expected seconds, 0 or more")
    return float(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mount.fireflyer", description="Mount a file system of fs3.")
    parser.add_argument("spec", help="its folder, cluster.toml, or HOST:PORT[,HOST:PORT...]")
    parser.add_argument("directory", type=Path, help="empty directory to mount at")
    parser.add_argument("-o", dest="options", default="", help="mount options, as in fstab")
    parser.add_argument("-s", dest="sloppy", action="store_true", help="ignore unknown options")
    parser.add_argument("-f", dest="fake", action="store_true", help="mount nothing")
    for known in ("-n", "-v"):
        parser.add_argument(known, action="store_true", help="accepted, changes nothing")
    parser.add_argument("-t", dest="kind", help="accepted, changes nothing")
    return parser


def mount(arguments: list[str]) -> int:
    """Mounts as the arguments say; returns 0."""
    given = _parser().parse_args(arguments)
    options = parse_options(given.options, sloppy=given.sloppy)
    if not given.fake:
        from fireflyer.cli.fs import impl_mount

        impl_mount.mount(
            given.spec,
            given.directory,
            foreground=False,
            log_file=options.log,
            cache_s=options.cache_s,
            flags=options.flags,
        )
    return 0


def main() -> None:
    """Runs the program and exits: 0 ok, 1 failure, 2 usage. Errors are one line on stderr."""
    open_standard_streams()
    sys.exit(in_one_line(lambda: mount(sys.argv[1:])))


if __name__ == "__main__":
    main()
