"""Command of `fireflyer bench` for the key-value store and the page cache."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench.harness.command_line import (
    JsonOption,
    OutputOption,
    Rounds,
    names_of,
    progress,
    report,
)
from fireflyer.bench.harness.options import KV
from fireflyer.bench.harness.report import Machine, Row
from fireflyer.units import parse_size


def kv(
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for stores and file systems.")
    ] = Path("/var/tmp/fireflyer-bench-kv"),
    peers: Annotated[
        Path, typer.Option(metavar="DIR", help="Environments of peers: DIR/rocksdict.")
    ] = Path("benchmarks/.venv"),
    only: Annotated[str, typer.Option(metavar="CASES", help="Cases to run.")] = ",".join(KV),
    store: Annotated[str, typer.Option(help="Size of the store that `open` opens.")] = "1GiB",
    scale: Annotated[float, typer.Option(min=0.01, max=10, help="Share of the work.")] = 1.0,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the key-value store and the page cache.

    The peers are RocksDB (PyPI: rocksdict, in an environment DIR/rocksdict of --peers),
    redis-server on a Unix socket, SGLang's layout with one file per page, and fs3's `read_many`.

    \b
    fireflyer bench kv --only ycsb --peers peers
    fireflyer bench kv --only pages,file,redis,exists,memory
    """
    machine = Machine.here()
    wanted = names_of("--only", only, KV)
    try:
        size = parse_size(store)
    except ValueError as error:
        raise typer.BadParameter(f"--store: {error}") from None
    from fireflyer.bench.fs.context import Setting, Spec
    from fireflyer.bench.kv import page_cases, store_cases

    def scaled(number: int, least: int) -> int:
        return max(least, int(number * scale))

    pages, calls = scaled(page_cases.PAGES, 2), scaled(4, 1)
    cases: dict[str, Callable[[Setting], list[Row]]] = {
        "ycsb": partial(
            store_cases.workloads, records=scaled(10_000, 100), operations=scaled(20_000, 128)
        ),
        "pages": partial(page_cases.over_fs3, count=pages, calls=calls, far=False),
        "far": partial(page_cases.over_fs3, count=pages, calls=calls, far=True),
        "redis": partial(page_cases.over_redis, count=pages, calls=calls),
        "file": partial(page_cases.over_files, count=pages, calls=calls),
        "exists": partial(page_cases.exists, count=scaled(50_000, 200)),
        "memory": partial(page_cases.memory, count=scaled(1_000_000, 10_000)),
        "open": partial(store_cases.opening, size=size),
        "seen": partial(store_cases.visible, writes=scaled(500, 20)),
    }
    say = progress()
    spec = Spec(work=work, peers=peers, only=(), rounds=rounds)
    with Setting(spec, say) as setting:
        rows = [row for name in wanted for row in cases[name](setting)]
    say("")
    report("kv", machine, rows, [], json=json, output=output)
