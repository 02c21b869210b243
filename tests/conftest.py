"""Share what several parts' tests need: tiers, load groups, and gangs of ranks forked from this process."""

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from tests import draws, hugepages, waiting
from tests.plugins import guard

pytest_plugins = [
    "tests.plugins.costs",
    "tests.plugins.hangs",
    "tests.plugins.second_look",
    "tests.plugins.workers",
]

# Forked children hang in torch's thread pool if the parent ever used one.
os.environ["OMP_NUM_THREADS"] = "1"

# What this machine's kernel says is no part of a test.
os.environ["FIREFLYER_KERNEL_LOG"] = "off"

# A shell's background jobs ignore it, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SERVICES = {
    "cluster_of_session": "slurm",
    "own_cluster": "slurm",
    "postgres_of_session": "postgresql",
    "own_postgres": "postgresql",
    "chromium": "chromium",
}
"""Load group of the tests that want a fixture: one worker runs them; they belong to the full tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fireflyer")
    group.addoption(
        "--full", action="store_true", help="also the tests marked full; all random cases"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected: tests are kept, and a search among them finds nothing to free
    guard.start()
    os.environ[draws.FULL] = "1" if config.option.full else "0"
    # The gate shows a failure as it was found, at once; shrinking takes minutes.
    phases = [*Phase] if config.option.full else [Phase.explicit, Phase.generate]
    settings.register_profile(
        "fireflyer", max_examples=draws.cases(100), deadline=None, phases=phases
    )
    settings.load_profile("fireflyer")
    draws.draw_no_constants()
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(draws.seed())


def pytest_report_header(config: pytest.Config) -> str:
    tier = "full" if config.option.full else "quick (--full: all)"
    return f"tier: {tier}; SEED={draws.seed()} draws the same random cases again"


def _place(item: pytest.Item) -> None:
    """Puts a test into a load group: its service's, or its module's if it has a fixture of a module."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    services = [SERVICES[name] for name in definitions if name in SERVICES]
    if services:
        if not item.get_closest_marker("quick"):
            item.add_marker("full")
        item.add_marker(pytest.mark.xdist_group(services[0]))
    elif any(found[-1].scope == "module" for found in definitions.values()):
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _place_in_queue(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    name = group.args[0] if group else ""
    return 0 if name == "sanitizers" else 1 if name in SERVICES.values() else 2


def _chosen(items: list[pytest.Item], full: bool) -> list[pytest.Item]:
    """The tests of a tier: those marked full or not, and a sample of the cases where one is asked for."""
    wanted, cases = set(), defaultdict(list)
    for item in items:
        if item.get_closest_marker("full") and not full:
            continue
        sample = item.get_closest_marker("sample")
        if sample and full < len(sample.args):
            cases[item.nodeid.partition("[")[0], sample.args[full]].append(item)
        else:
            wanted.add(item)
    for (name, count), found in cases.items():
        wanted.update(draws.drawn(name).sample(found, min(count, len(found))))
    return [item for item in items if item in wanted]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            _place(item)
    if hasattr(config, "workerinput"):  # the longest first, so that no worker ends alone with them
        items.sort(key=_place_in_queue)
    named = any("::" in argument for argument in config.args)
    if not named:
        chosen = _chosen(items, config.option.full)
        left_out = set(items).difference(chosen)
        items[:] = chosen
        if left_out:
            config.hook.pytest_deselected(items=[*left_out])


def pytest_collection_finish() -> None:
    """Keeps the garbage collector, here and in forked children, away from the thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test runs in this process may send the log to its standard error; the next test has another."""
    log = logging.getLogger("fireflyer")
    handlers, level = log.handlers[:], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


def leave_group(result: object) -> None:
    """A rank that has done its part says goodbye: a process that merely ends has died."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or isinstance(result, BaseException) or not distributed.is_initialized():
        return
    distributed.destroy_process_group()


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that other users of the machine may enter.

    It lies outside pytest's folders, which each run of pytest closes to other users.
    """
    with tempfile.TemporaryDirectory(prefix="fireflyer-public-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def fork() -> int:
    """Forks; a worker, which will do so often, first puts its memory into huge pages."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "PYTEST_XDIST_WORKER" in os.environ:
        hugepages.collapse()
    return os.fork()


def fork_child(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child, which exits 1 where it raises; returns the child's number."""
    pid = fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:  # noqa: BLE001  # the parent asserts on the status
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def die_at_call(names: Sequence[str], call: int) -> None:
    """From now on this process kills itself at its `call`-th call of these (in `os`); a write is halved."""
    count = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if name in ("write", "pwrite"):
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return called

    for name in names:
        setattr(os, name, wrap(name, getattr(os, name)))


SHOW_STACKS = signal.SIGUSR2
"""Upon this signal a rank writes the stacks of its threads to standard error, wherever it is."""


class Gang:
    """Forked ranks, each running `body(rank, world)`; the result or the exception comes back by a pipe."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._pipes: list[int] = []

    def start(self, body: Callable[[int, int], Any], world: int, nodes: int) -> None:
        for rank in range(world):
            read, write = os.pipe()
            pid = fork()
            if pid == 0:
                status = 1
                try:
                    faulthandler.register(SHOW_STACKS, file=2)
                    os.environ.update(
                        RANK=str(rank),
                        WORLD_SIZE=str(world),
                        MASTER_ADDR="127.0.0.1",
                        FIREFLYER_NODE=f"n{rank * nodes // world}",
                    )
                    if (torch := sys.modules.get("torch")) is not None:
                        # After a fork torch makes its pool of threads anew: with a race, if two threads do.
                        torch.set_num_threads(torch.get_num_threads())
                    try:
                        result: Any = body(rank, world)
                    except BaseException as error:  # noqa: BLE001  # carried to the parent
                        traceback.print_exc()
                        result = error
                    leave_group(result)
                    with os.fdopen(write, "wb") as pipe:
                        pickle.dump(result, pipe)
                    status = 0
                finally:
                    os._exit(status)
            os.close(write)
            self.pids.append(pid)
            self._pipes.append(read)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def result(self, rank: int, limit_s: float = waiting.LIMIT_S) -> Any:
        """What the rank returned, the exception it ended with, or None if it was killed."""
        data = b""
        deadline = time.monotonic() + limit_s
        while True:
            ready, _, _ = select.select([self._pipes[rank]], [], [], deadline - time.monotonic())
            if not ready:
                self.kill(rank, SHOW_STACKS)
                time.sleep(1)  # the rank writes them
                raise TimeoutError(f"rank {rank} did not end within {limit_s:.0f} s")
            if not (more := os.read(self._pipes[rank], 1 << 16)):
                return pickle.loads(data) if data else None
            data += more

    def results(self, limit_s: float = waiting.LIMIT_S) -> list[Any]:
        """Every rank's result; the first exception among them is raised."""
        results = [self.result(rank, limit_s) for rank in range(len(self.pids))]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            os.close(pipe)
        self.pids.clear()
        self._pipes.clear()


StartGang = Callable[..., Gang]


@pytest.fixture
def start_gang() -> Iterator[StartGang]:
    """start_gang(body, world, nodes=1): ranks spread over `nodes` virtual nodes; killed at the end."""
    gangs: list[Gang] = []

    def start(body: Callable[[int, int], Any], world: int, nodes: int = 1) -> Gang:
        gang = Gang()
        gangs.append(gang)
        gang.start(body, world, nodes)
        return gang

    yield start
    for gang in gangs:
        gang.close()


@pytest.fixture(scope="session")
def compiler() -> None:
    """torch.compile, loaded before ranks are forked: each would take a second to import its backends."""
    import torch._dynamo

    torch._dynamo.list_backends()


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    """A path for one torch FileStore."""
    return str(tmp_path / "store")


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 1 MiB, or of the size that the parameter names, e.g. "12m"."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={getattr(request, 'param', '1m')}",
        "tmpfs",
        str(folder),
    ]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
