"""`fireflyer bench`: the command line of the benchmarks."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench import options
from fireflyer.bench.report import Machine, NcclRow, Report, Row, emit
from fireflyer.errors import CollectiveError
from fireflyer.program import run_app

app = typer.Typer(
    name="fireflyer bench",
    help="Measure ours against a peer and against the machine's limit, interleaved in one run.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]", help="write the report as JSON; '-' or nothing: stdout"
    ),
]
Ranks = Annotated[int, typer.Option(min=1, max=64, help="processes on this host")]
Rounds = Annotated[int, typer.Option(min=1, help="interleaved rounds; medians are shown")]
Sizes = Annotated[str, typer.Option(help="bytes, e.g. 64K,1M,16M,128M")]
Dtypes = Annotated[
    str, typer.Option("--dtype", help="torch's names; several are measured in the same rounds")
]
Op = Annotated[str, typer.Option(help="sum, avg, min, max, product, band, bor or bxor")]
Memory = Annotated[str, typer.Option(help="of our tensors: zero-copy, staged")]
AnyMemory = Annotated[
    str, typer.Option("--memory", help="of our tensors: zero-copy, staged, shared (one result)")
]
Against = Annotated[str, typer.Option(help="peers: gloo, mpi (Open MPI, by mpicc and mpirun)")]

SIZES = "64K,1M,16M"
MEMORY = "zero-copy,staged"
TABLE = "hfreduce-table.toml"


@app.callback()
def main() -> None:
    """Measure ours against a peer and against the machine's limit, interleaved in one run."""


@app.command()
def allreduce(
    ranks: Ranks = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    op: Op = "sum",
    memory: AnyMemory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """Allreduce inside a host.

    \b
    fireflyer bench allreduce --ranks 4 --sizes 64K,1M,16M,128M --against gloo,mpi
    fireflyer bench allreduce --dtype float32,bfloat16 --memory zero-copy,shared
    """
    _collective("allreduce", ranks, sizes, dtype, op, memory, against, rounds, json_to)


@app.command()
def allgather(
    ranks: Ranks = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    memory: Memory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """All-gather inside a host; size: the result.

    \b
    fireflyer bench allgather --ranks 4 --sizes 1M,16M --against gloo,mpi
    """
    _collective("allgather", ranks, sizes, dtype, "sum", memory, against, rounds, json_to)


@app.command("reduce_scatter")
def reduce_scatter(
    ranks: Ranks = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    op: Op = "sum",
    memory: Memory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """Reduce-scatter inside a host; size: a rank's input.

    \b
    fireflyer bench reduce_scatter --ranks 4 --dtype bfloat16 --op avg
    """
    _collective("reduce_scatter", ranks, sizes, dtype, op, memory, against, rounds, json_to)


@app.command()
def broadcast(
    ranks: Ranks = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    memory: Memory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """Broadcast from rank 0 inside a host.

    \b
    fireflyer bench broadcast --ranks 4 --sizes 16M
    """
    _collective("broadcast", ranks, sizes, dtype, "sum", memory, against, rounds, json_to)


@app.command()
def reduce(
    ranks: Ranks = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    op: Op = "sum",
    memory: Memory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """Reduce to rank 0 inside a host.

    \b
    fireflyer bench reduce --ranks 4 --op max --dtype int64
    """
    _collective("reduce", ranks, sizes, dtype, op, memory, against, rounds, json_to)


@app.command()
def alltoall(
    ranks: Ranks = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    memory: Memory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """All-to-all with even splits inside a host.

    \b
    fireflyer bench alltoall --ranks 4 --sizes 64K,16M
    """
    _collective("alltoall", ranks, sizes, dtype, "sum", memory, against, rounds, json_to)


@app.command()
def sendrecv(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="processes on this host")] = 2,
    sizes: Sizes = SIZES,
    dtype: Dtypes = "float32",
    memory: Memory = MEMORY,
    against: Against = "gloo",
    rounds: Rounds = 7,
    json_to: JsonTo = None,
) -> None:
    """Each rank to the next, all at once, in a ring.

    \b
    fireflyer bench sendrecv --sizes 4K,1M --against gloo,mpi
    """
    _collective("sendrecv", ranks, sizes, dtype, "sum", memory, against, rounds, json_to)


@app.command()
def barrier(
    ranks: Ranks = 2, against: Against = "gloo", rounds: Rounds = 7, json_to: JsonTo = None
) -> None:
    """Barrier inside a host.

    \b
    fireflyer bench barrier --ranks 8 --against gloo,mpi
    """
    _collective("barrier", ranks, "1", "uint8", "sum", "staged", against, rounds, json_to)


@app.command()
def overhead(ranks: Ranks = 1, rounds: Rounds = 7, json_to: JsonTo = None) -> None:
    """What one call costs: an allreduce of one element.

    Synchronous, and asynchronous with its wait, against gloo.

    \b
    fireflyer bench overhead
    """
    machine = Machine.here()
    from fireflyer.bench import overhead as bench

    _report("overhead", machine, bench.run(ranks, rounds), [], json_to)


@app.command()
def network(
    hosts: Annotated[int, typer.Option(min=2, max=32, help="hosts of the lab")] = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, max=16, help="processes a host")] = 4,
    rate: Annotated[str, typer.Option(help="speed of each cable, e.g. 1gbit")] = "1gbit",
    sizes: Sizes = "16M,64M",
    wire: Annotated[
        str, typer.Option(help="codecs beside the float32 wire: bf16, fp16, int8")
    ] = "",
    orders: Annotated[
        str, typer.Option(help="how ranks lie on hosts: contiguous, round-robin")
    ] = "contiguous",
    rounds: Rounds = 5,
    json_to: JsonTo = None,
) -> None:
    """Allreduce between the hosts of a lab. Needs root.

    Bytes on the wire against the least possible, time against the line rate and flat gloo.

    \b
    fireflyer bench network --hosts 2 --ranks-per-host 4 --rate 1gbit --sizes 16M,64M
    fireflyer bench network --hosts 4 --ranks-per-host 2 --wire bf16,int8
    """
    machine = Machine.here()
    wanted = _sizes(sizes)
    wires = _names("--wire", wire, options.WIRES) if wire else ()
    orders_wanted = _names("--orders", orders, options.ORDERS)
    from fireflyer.bench import network as bench

    spec = bench.Spec(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate=rate,
        sizes=wanted,
        wires=wires,
        orders=orders_wanted,
        rounds=rounds,
    )
    _report("network", machine, bench.run(spec), [], json_to)


@app.command()
def tune(
    hosts: Annotated[
        int | None, typer.Option(min=2, max=32, help="hosts of a lab; needs root")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="speed of each cable of the lab, e.g. 1gbit")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=2, max=32, help="virtual nodes of this machine instead; default 3"),
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(min=1, max=16, help="processes a host")] = 1,
    kinds: Annotated[str, typer.Option(help="allreduce, broadcast, reduce")] = ",".join(
        options.TUNED
    ),
    sizes: Sizes = "1K,16K,64K,256K,1M,4M,16M",
    rounds: Rounds = 5,
    out: Annotated[str, typer.Option(metavar="FILE", help="where the table goes")] = TABLE,
    json_to: JsonTo = None,
) -> None:
    """Find the fastest algorithm between hosts for each size.

    Writes a table for FIREFLYER_HFREDUCE_TABLE; shows it, and what it changes.

    \b
    fireflyer bench tune --hosts 4 --rate 1gbit --ranks-per-host 2
    fireflyer bench tune --nodes 3 --sizes 64K,1M --out table.toml
    """
    machine = Machine.here()
    if hosts is not None and nodes is not None:
        raise typer.BadParameter("--hosts makes a lab, --nodes does without: choose one")
    if hosts is None and rate is not None:
        raise typer.BadParameter("--rate is of a lab's cables: add --hosts")
    if not Path(out).absolute().parent.is_dir():
        raise typer.BadParameter(f"--out: there is no folder for {out}")
    wanted = tuple(sorted(set(_sizes(sizes))))
    kinds_wanted = _names("--kinds", kinds, options.TUNED)
    from fireflyer.bench import tune as bench
    from fireflyer.hfreduce import rules

    spec = bench.Spec(
        hosts=hosts or nodes or 3,
        ranks_per_host=ranks_per_host,
        lab=hosts is not None,
        rate=rate,
        kinds=kinds_wanted,
        sizes=wanted,
        rounds=rounds,
    )
    tuned = bench.run(spec)
    Path(out).write_text(rules.dump(tuned.table))
    _report("tune", machine, tuned.rows, [], json_to)
    if json_to != "-":
        typer.echo("\n".join(bench.described(tuned.table.rules)))
        typer.echo("\n".join(["changes:", *tuned.changes] if tuned.changes else ["no changes"]))
        typer.echo(f"written to {out}; use it with {rules.VARIABLE}={out}")


def _collective(
    name: str,
    ranks: int,
    sizes: str,
    dtypes: str,
    op: str,
    memory: str,
    against: str,
    rounds: int,
    json_to: str | None,
) -> None:
    machine = Machine.here()
    kinds = options.MEMORY if name == "allreduce" else options.MEMORY[:2]
    wanted = _sizes(sizes)
    types = _names("--dtype", dtypes, options.DTYPES)
    memories = _names("--memory", memory, kinds)
    peers = _names("--against", against, options.PEERS)
    if op not in options.OPS:
        raise typer.BadParameter(f"--op: {op!r} is none of {', '.join(options.OPS)}")
    from fireflyer.bench import collectives

    spec = collectives.Spec(
        collective=name,
        ranks=ranks,
        sizes=wanted,
        dtypes=types,
        op=op,
        memory=memories,
        against=peers,
        rounds=rounds,
    )
    rows, nccl = collectives.run(spec)
    _report(name, machine, rows, nccl, json_to)
    if wrong := sum(row.wrong for row in nccl):
        raise CollectiveError(f"bench {name}: {wrong} elements came out wrong, see #wrong")


def _report(
    name: str, machine: Machine, rows: list[Row], nccl: list[NcclRow], json_to: str | None
) -> None:
    command = shlex.join(["fireflyer", "bench", *sys.argv[1:]])
    emit(Report(bench=name, command=command, machine=machine, rows=rows, nccl=nccl), json_to)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(options.parse_size(size.strip()) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    try:
        return options.parse_names(text, known)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def with_default_json(arguments: list[str]) -> list[str]:
    """`--json` without a file means standard output."""
    result: list[str] = []
    for index, argument in enumerate(arguments):
        result.append(argument)
        following = arguments[index + 1 : index + 2]
        if argument == "--json" and (not following or following[0].startswith("--")):
            result.append("-")
    return result


if __name__ == "__main__":
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(run_app(app, "fireflyer bench", with_default_json(sys.argv[1:]) or ["--help"]))
