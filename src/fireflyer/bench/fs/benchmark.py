"""Benchmark of the file system (3FS) against raw I/O, bare SQLite, JuiceFS and MooseFS.

In each round every candidate runs once, one after the other, in rotating order. Raw reads and
writes move the same bytes. `fireflyer fs up` starts the services as separate processes.
"""

from collections.abc import Callable

from fireflyer.bench.fs import data, names
from fireflyer.bench.fs.context import QUICK, WHOLE, Say, Setting, Sizes, Spec
from fireflyer.bench.fs.growth import grow
from fireflyer.bench.fs.incast import incast
from fireflyer.bench.fs.memory import memory
from fireflyer.bench.harness.report import Row

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
    """Runs all cases of `spec.only`, in the order of CASES, and returns their rows.

    Raises:
        FireflyerError: a service or a client failed.
    """
    with Setting(spec, say) as setting:
        return [row for name, case in CASES.items() if name in spec.only for row in case(setting)]
