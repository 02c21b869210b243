"""The file system (3FS) against raw reads and writes of the same bytes, bare SQLite, JuiceFS and MooseFS.

In each round every candidate does the same once, one after the other, in an order that turns. The services
are processes of their own, started by `fireflyer fs up`.
"""

from collections.abc import Callable

from fireflyer.bench import fs_data as data
from fireflyer.bench import fs_names as names
from fireflyer.bench.fs_growth import grow
from fireflyer.bench.fs_incast import incast
from fireflyer.bench.fs_memory import memory
from fireflyer.bench.fs_setting import QUICK, WHOLE, Say, Setting, Sizes, Spec
from fireflyer.bench.report import Row

__all__ = ["CASES", "QUICK", "WHOLE", "Sizes", "Spec", "grow", "run"]

CASES: dict[str, Callable[[Setting], list[Row]]] = {
    "tcp": data.tcp,
    "local": data.local,
    "small": data.small,
    "write": data.write,
    "create": names.create,
    "one": names.one,
    "stat": names.stat,
    "memory": memory,
    "incast": incast,
}


def run(spec: Spec, say: Say) -> list[Row]:
    """All cases of `spec.only`, in the order of CASES.

    Raises:
        FireflyerError: a service or a client failed.
    """
    with Setting(spec, say) as setting:
        return [row for name, case in CASES.items() if name in spec.only for row in case(setting)]
