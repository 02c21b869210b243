"""`fireflyer bench`: the command line of the benchmarks."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fireflyer.bench.envs import commands as envs_commands
from fireflyer.bench.experts import commands as experts_commands
from fireflyer.bench.harness import options
from fireflyer.bench.harness.command_line import (
    FileSystemsAt,
    JsonOption,
    OutputOption,
    PeerPrograms,
    Quick,
    Rounds,
    names_of,
    progress,
    report,
    say,
    sizes_of,
)
from fireflyer.bench.harness.report import Machine
from fireflyer.bench.kv import commands as kv_commands
from fireflyer.bench.mount import commands as mount_commands
from fireflyer.bench.network import commands as network_commands
from fireflyer.bench.nn import commands as nn_commands
from fireflyer.bench.parallel import commands as parallel_commands
from fireflyer.bench.prof import commands as prof_commands
from fireflyer.bench.train import commands as train_commands
from fireflyer.bench.validator import commands as validator_commands
from fireflyer.errors import CollectiveError
from fireflyer.program import current_json_form, run_app

app = typer.Typer(
    name="fireflyer bench",
    help="Measure Fireflyer, peers and the machine's limit, interleaved in one run.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

Ranks = Annotated[int, typer.Option(min=1, max=64, help="Number of processes on this host.")]
SeveralRanks = Annotated[int, typer.Option(min=2, max=64, help="Number of processes on this host.")]
RanksPerHost = Annotated[int, typer.Option(min=1, max=16, help="Processes per host.")]
Sizes = Annotated[str, typer.Option(help="Sizes in bytes, e.g. 64K,1M,16M,128M.")]
Dtypes = Annotated[
    str, typer.Option("--dtype", help="Names of torch dtypes; all are measured in the same rounds.")
]
Op = Annotated[str, typer.Option(help="Reduction: sum, avg, min, max, product, band, bor or bxor.")]
Memory = Annotated[str, typer.Option(help="Memory of Fireflyer's tensors: zero-copy, staged.")]
AnyMemory = Annotated[
    str,
    typer.Option(
        "--memory",
        help="Memory of Fireflyer's tensors: zero-copy, staged, shared (ranks share one result).",
    ),
]
Against = Annotated[str, typer.Option(help="Peers: gloo, mpi (Open MPI; needs mpicc and mpirun).")]

TABLE = "hfreduce-table.toml"
CHECKPOINT_WORK = [Path("/dev/shm/bench-checkpoint"), Path("bench-checkpoint")]


@app.callback()
def main() -> None:
    """Measure Fireflyer, peers and the machine's limit, interleaved in one run."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of a command line. The annotation of a field declares its option. A command passes
    the names of its options to `_command`."""

    ranks: Ranks = 2
    sizes: Sizes = "64K,1M,16M"
    dtype: Dtypes = "float32"
    op: Op = "sum"
    memory: Memory = "zero-copy,staged"
    against: Against = "gloo"
    rounds: Rounds = 7
    json: JsonOption = False
    output: OutputOption = None


_DEFAULTS = CommandOptions()
_REDUCES = tuple(inspect.signature(CommandOptions).parameters)
_MOVES = tuple(field for field in _REDUCES if field != "op")

_Act = Callable[[CommandOptions], None]


def _command(
    *fields: str, defaults: CommandOptions = _DEFAULTS, **declared: object
) -> Callable[[_Act], _Act]:
    """Turns a function into a command, with the function's name and its docstring as help.

    Args:
        fields: fields of `CommandOptions` that have an option here, in this order.
        defaults: default values of the options, and values of all fields without an option here.
        declared: options whose declarations differ from those in `CommandOptions`.
    """
    known = inspect.signature(CommandOptions).parameters

    def add(act: _Act) -> _Act:
        def run(**given: Any) -> None:
            act(replace(defaults, **given))

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
            [
                known[field].replace(
                    default=getattr(defaults, field),
                    annotation=declared.get(field, known[field].annotation),
                )
                for field in fields
            ]
        )
        app.command(act.__name__, help=act.__doc__)(run)
        return act

    return add


@_command(*_REDUCES, memory=AnyMemory)
def allreduce(chosen: CommandOptions) -> None:
    """Measure allreduce inside a host.

    \b
    fireflyer bench allreduce --ranks 4 --sizes 64K,1M,16M,128M --against gloo,mpi
    fireflyer bench allreduce --dtype float32,bfloat16 --memory zero-copy,shared
    """
    _collective("allreduce", chosen)


@_command(*_MOVES)
def allgather(chosen: CommandOptions) -> None:
    """Measure all-gather inside a host; the size is that of the whole result.

    \b
    fireflyer bench allgather --ranks 4 --sizes 1M,16M --against gloo,mpi
    """
    _collective("allgather", chosen)


@_command(*_REDUCES)
def reduce_scatter(chosen: CommandOptions) -> None:
    """Measure reduce-scatter inside a host; the size is that of each rank's input.

    \b
    fireflyer bench reduce_scatter --ranks 4 --dtype bfloat16 --op avg
    """
    _collective("reduce_scatter", chosen)


@_command(*_MOVES)
def broadcast(chosen: CommandOptions) -> None:
    """Measure broadcast from rank 0 inside a host.

    \b
    fireflyer bench broadcast --ranks 4 --sizes 16M
    """
    _collective("broadcast", chosen)


@_command(*_REDUCES)
def reduce(chosen: CommandOptions) -> None:
    """Measure reduce to rank 0 inside a host.

    \b
    fireflyer bench reduce --ranks 4 --op max --dtype int64
    """
    _collective("reduce", chosen)


@_command(*_MOVES)
def alltoall(chosen: CommandOptions) -> None:
    """Measure all-to-all with equal splits inside a host.

    \b
    fireflyer bench alltoall --ranks 4 --sizes 64K,16M
    """
    _collective("alltoall", chosen)


@_command(*_MOVES, ranks=SeveralRanks)
def sendrecv(chosen: CommandOptions) -> None:
    """Measure simultaneous sends from each rank to the next, in a ring.

    \b
    fireflyer bench sendrecv --sizes 4K,1M --against gloo,mpi
    """
    _collective("sendrecv", chosen)


@_command(
    *("ranks", "against", "rounds", "json", "output"),
    defaults=CommandOptions(sizes="1", dtype="uint8", memory="staged"),
)
def barrier(chosen: CommandOptions) -> None:
    """Measure barrier inside a host.

    \b
    fireflyer bench barrier --ranks 8 --against gloo,mpi
    """
    _collective("barrier", chosen)


@_command("ranks", "rounds", "json", "output", defaults=CommandOptions(ranks=1))
def overhead(chosen: CommandOptions) -> None:
    """Measure the cost of one call: an allreduce of one element.

    The call is either synchronous, or asynchronous and then waited for; the peer is gloo.

    \b
    fireflyer bench overhead
    """
    machine = Machine.here()
    from fireflyer.bench.collectives import overhead as bench

    report(
        "overhead",
        machine,
        bench.run(chosen.ranks, chosen.rounds),
        [],
        json=chosen.json,
        output=chosen.output,
    )


@app.command()
def network(
    hosts: Annotated[int, typer.Option(min=2, max=32, help="Number of hosts of the lab.")] = 2,
    ranks_per_host: RanksPerHost = 4,
    rate: Annotated[str, typer.Option(help="Speed of each cable, e.g. 1gbit.")] = "1gbit",
    sizes: Sizes = "16M,64M",
    wire: Annotated[
        str,
        typer.Option(help="Codecs to measure in addition to the float32 wire: bf16, fp16, int8."),
    ] = "",
    orders: Annotated[
        str, typer.Option(help="Order of the ranks on the hosts: contiguous, round-robin.")
    ] = "contiguous",
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure allreduce between the hosts of a lab. Needs root.

    Compares the bytes on the wire with the minimum, and the time with the line rate and flat gloo.

    \b
    fireflyer bench network --hosts 2 --ranks-per-host 4 --rate 1gbit --sizes 16M,64M
    fireflyer bench network --hosts 4 --ranks-per-host 2 --wire bf16,int8
    """
    machine = Machine.here()
    wanted = sizes_of(sizes)
    wires = names_of("--wire", wire, options.WIRES) if wire else ()
    orders_wanted = names_of("--orders", orders, options.ORDERS)
    from fireflyer.bench.collectives import network as bench

    spec = bench.Spec(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate=rate,
        sizes=wanted,
        wires=wires,
        orders=orders_wanted,
        rounds=rounds,
    )
    report("network", machine, bench.run(spec), [], json=json, output=output)


@app.command()
def tune(
    hosts: Annotated[
        int | None, typer.Option(min=2, max=32, help="Number of hosts of a lab; needs root.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Speed of each cable of the lab, e.g. 1gbit.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2, max=32, help="Virtual nodes on this machine instead of a lab; default 3."
        ),
    ] = None,
    ranks_per_host: RanksPerHost = 1,
    kinds: Annotated[
        str, typer.Option(help="Collectives to tune: allreduce, broadcast, reduce.")
    ] = ",".join(options.TUNED),
    sizes: Sizes = "1K,16K,64K,256K,1M,4M,16M",
    rounds: Rounds = 5,
    out: Annotated[str, typer.Option(metavar="FILE", help="Write the table to FILE.")] = TABLE,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Find the fastest algorithm between hosts for each size.

    Writes a table for FIREFLYER_HFREDUCE_TABLE, and shows the table and its differences from the
    default.

    \b
    fireflyer bench tune --hosts 4 --rate 1gbit --ranks-per-host 2
    fireflyer bench tune --nodes 3 --sizes 64K,1M --out table.toml
    """
    machine = Machine.here()
    if hosts is not None and nodes is not None:
        raise typer.BadParameter("--hosts and --nodes exclude each other")
    if hosts is None and rate is not None:
        raise typer.BadParameter("--rate needs --hosts: it sets the cables of a lab")
    if not Path(out).absolute().parent.is_dir():
        raise typer.BadParameter(f"invalid --out {out!r}: its folder does not exist")
    wanted = tuple(sorted(set(sizes_of(sizes))))
    kinds_wanted = names_of("--kinds", kinds, options.TUNED)
    from fireflyer.bench.collectives import tune as bench
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
    report("tune", machine, tuned.rows, [], json=json, output=output)
    if not json:
        typer.echo("\n".join(bench.described(tuned.table.rules)))
        typer.echo("\n".join(["changes:", *tuned.changes] if tuned.changes else ["no changes"]))
        typer.echo(f"written to {out}; to use it, set {rules.VARIABLE}={out}")


@app.command()
def records(
    peers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with a Python environment for each peer."),
    ] = None,
    install_peers: Annotated[
        bool,
        typer.Option("--install-peers", help="Install missing environments of --peers from PyPI."),
    ] = False,
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the data; made once, then reused.")
    ] = Path("bench-records"),
    scale: Annotated[
        float,
        typer.Option(min=0.0001, max=10, help="Scale of the data sets; the goals hold for 1."),
    ] = 1.0,
    only: Annotated[
        str, typer.Option(help="Cases: warm, views, small, cold, loader, files, pack, open.")
    ] = ",".join(options.RECORDS),
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure random batch reads of record files.

    The peers are array_record, LMDB, mosaicml-streaming, pylance, webdataset, loose files, memcpy,
    fio and cat. At scale 1 the benchmark writes about 15 GB into --work.

    \b
    fireflyer bench records --peers peers --install-peers
    fireflyer bench records --peers peers --scale 0.05 --only warm,cold
    """
    machine = Machine.here()
    groups = names_of("--only", only, options.RECORDS)
    if install_peers and peers is None:
        raise typer.BadParameter("--install-peers needs --peers DIR")
    from fireflyer.bench.records import benchmark as bench
    from fireflyer.bench.records import peers as records_peers

    if install_peers and peers is not None:
        records_peers.install(peers, say)
    spec = bench.Spec(peers=peers, work=work, scale=scale, rounds=rounds, only=groups)
    rows = bench.run(spec, say)
    say("")
    report("records", machine, rows, [], json=json, output=output)


@app.command()
def checkpoint(
    size: Annotated[str, typer.Option(help="Size of the state, e.g. 1GiB, 512M.")] = "1GiB",
    work: Annotated[
        list[Path],
        typer.Option(
            metavar="DIR", help="Folder to save to; may be repeated, e.g. tmpfs and a disk."
        ),
    ] = CHECKPOINT_WORK,
    only: Annotated[
        str,
        typer.Option(help="Cases: stall, total, load, overlap, one, memory, training (minutes)."),
    ] = ",".join(options.CHECKPOINT_DEFAULT),
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure saves and loads of a training state.

    The peers are dcp.save, dcp.async_save, torch.save, safetensors (if installed), memcpy and
    O_DIRECT by fio. Needs memory of 5 times --size, including files on tmpfs.

    \b
    fireflyer bench checkpoint
    fireflyer bench checkpoint --size 4GiB --work /mnt/nvme/bench --only stall,total
    """
    machine = Machine.here()
    groups = names_of("--only", only, options.CHECKPOINT)
    wanted = sizes_of(size)
    if len(wanted) > 1 or wanted[0] < options.SMALLEST_STATE:
        raise typer.BadParameter(f"invalid --size {size!r}: expected one size of at least 4M")
    from fireflyer.bench.checkpoint import benchmark as bench

    spec = bench.Spec(size=wanted[0], work=tuple(work), only=groups, rounds=rounds)
    rows = bench.run(spec, say)
    say("")
    report("checkpoint", machine, rows, [], json=json, output=output)


@app.command()
def fs(
    work: FileSystemsAt = Path("bench-fs"),
    peers: PeerPrograms = None,
    only: Annotated[
        str,
        typer.Option(help="Cases: tcp, local, small, write, create, one, stat, memory, incast."),
    ] = ",".join(options.FS),
    growth: Annotated[
        bool,
        typer.Option("--growth", help="Measure curves of cost against size instead (minutes)."),
    ] = False,
    curves: Annotated[
        str, typer.Option(help="Curves of --growth: clients, directory, bytes, total.")
    ] = ",".join(options.FS_GROWTH),
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --growth: write the SVG files to DIR.")
    ] = None,
    quick: Quick = False,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the file system (fs3).

    The peers are raw reads and writes, a shared-memory ring, SQLite, JuiceFS and MooseFS. One case
    runs in a lab (root).

    \b
    fireflyer bench fs
    fireflyer bench fs --only tcp,local,small,write --output fs.json
    fireflyer bench fs --growth --plots docs/benchmarks
    """
    machine = Machine.here()
    cases = names_of("--only", only, options.FS)
    wanted = names_of("--curves", curves, options.FS_GROWTH)
    if plots is not None and not growth:
        raise typer.BadParameter("--plots needs --growth")
    from fireflyer.bench.fs import benchmark as bench

    spec = bench.Spec(
        work=work,
        peers=peers or work / "peers",
        only=cases,
        rounds=rounds,
        sizes=bench.QUICK if quick else bench.WHOLE,
    )
    tell = progress()
    rows = bench.grow(spec, wanted, plots, tell) if growth else bench.run(spec, tell)
    say("")
    report("fs", machine, rows, [], json=json, output=output)


@app.command()
def api(
    followers: Annotated[
        int, typer.Option(min=1, max=20_000, help="Number of clients, each following a live log.")
    ] = 1000,
    lines: Annotated[
        float, typer.Option(min=0.1, max=1000, help="Lines per second written to each log.")
    ] = 1.0,
    rates: Annotated[
        str, typer.Option(help="Submissions per second to try.")
    ] = "50,100,150,200,300",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds at each rate.")] = 10.0,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure submissions to the platform while many clients follow logs.

    Stops at the first rate with a p99 of 250 ms or more, or with less than 98 % answered.

    \b
    fireflyer bench api
    fireflyer bench api --followers 100 --rates 100,400
    """
    machine = Machine.here()
    wanted = sizes_of(rates)
    from fireflyer.bench.hai import api as bench

    spec = bench.Spec(followers=followers, lines=lines, rates=wanted, seconds=seconds)
    rows = bench.run(spec, progress())
    say("")
    report("api", machine, rows, [], json=json, output=output)


@app.command()
def hai(
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of rounds of each figure; the report shows medians.")
    ] = 20,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Use the Slurm cluster that is configured on this machine."),
    ] = False,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the platform's task starts, memory, death detection and suspends.

    Compares the figures with their limits; with at least 100 rounds, also the 99th percentiles.

    \b
    fireflyer bench hai
    fireflyer bench hai --rounds 100
    """
    machine = Machine.here()
    from fireflyer.bench.hai import benchmark as bench

    rows = bench.run(bench.Spec(rounds=rounds, slurm=slurm), progress())
    say("")
    report("hai", machine, rows, [], json=json, output=output)


def _collective(name: str, chosen: CommandOptions) -> None:
    machine = Machine.here()
    kinds = options.MEMORY if name == "allreduce" else options.MEMORY[:2]
    wanted = sizes_of(chosen.sizes)
    types = names_of("--dtype", chosen.dtype, options.DTYPES)
    memories = names_of("--memory", chosen.memory, kinds)
    peers = names_of("--against", chosen.against, options.PEERS)
    if chosen.op not in options.OPS:
        raise typer.BadParameter(
            f"invalid --op {chosen.op!r}: expected one of {', '.join(options.OPS)}"
        )
    from fireflyer.bench.collectives import one_host

    spec = one_host.Spec(
        collective=name,
        ranks=chosen.ranks,
        sizes=wanted,
        dtypes=types,
        op=chosen.op,
        memory=memories,
        against=peers,
        rounds=chosen.rounds,
    )
    rows, nccl = one_host.run(spec)
    report(name, machine, rows, nccl, json=chosen.json, output=chosen.output)
    if wrong := sum(row.wrong for row in nccl):
        raise CollectiveError(f"bench {name}: {wrong} elements are wrong; see column #wrong")


for _command_function in (
    train_commands.train,
    train_commands.wire,
    train_commands.scaling,
    kv_commands.kv,
    network_commands.net,
    envs_commands.envs,
    experts_commands.experts_store,
    validator_commands.validator,
    nn_commands.nn,
    mount_commands.mount,
    parallel_commands.experts,
    parallel_commands.pipeline,
    parallel_commands.tensor,
    prof_commands.prof,
):
    app.command()(_command_function)


if __name__ == "__main__":
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(run_app(app, "fireflyer bench", current_json_form(sys.argv[1:]) or ["--help"]))
