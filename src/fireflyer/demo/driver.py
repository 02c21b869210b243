"""Runs the demo: data set, platform, task, and what `story` asks for; nothing is left running."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from fireflyer.demo import dataset, processes, runs
from fireflyer.demo.figures import Figures, compute, problems
from fireflyer.demo.metrics import Tail
from fireflyer.demo.story import Action, Kill, Story, Suspend
from fireflyer.errors import ConfigError, DeadlineExceeded, FireflyerError, PeerLost, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import TaskSpec, TaskView

SILENCE_S = 120.0
"""Without a step or an event for this long the demo gives up."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    nodes: int = 2
    ranks: int = 1
    seconds: float = 130.0
    width: int = 128
    layers: int = 4
    batch: int = 8
    text: Path | None = None
    tokens: Literal["bpe", "bytes"] = "bpe"
    directory: Path = Path("fireflyer-demo")
    keep: bool = False


class Screen(Protocol):
    """Where a person watches."""

    def building(self, stage: str, done: int, total: int) -> None:
        """The data set is being built."""
        ...

    def note(self, text: str) -> None:
        """Something happened."""
        ...

    def show(self, story: Story) -> None:
        """The training as of now; called several times a second."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run that came to its end."""

    figures: Figures | None
    problems: list[str]
    story: Story
    meta: dataset.Meta
    sample: str
    """Text written by the trained model; empty when it did not get there."""
    log: str
    """When there were problems, the log file that tells most about them; else empty."""
    folder: Path
    """The run's folder; gone unless it was kept or there were problems."""


def run(options: Options, screen: Screen, interrupts: processes.Interrupts) -> Outcome:
    """The whole demo.

    Raises:
        ConfigError: an option that cannot work.
        FireflyerError: the platform could not be started or went away.
        KeyboardInterrupt: after everything that was started has ended.
    """
    directory = options.directory.resolve()  # one name for one folder: it marks the processes
    _make(directory)
    for stale in runs.sweep(directory):
        screen.note(f"ended and removed {stale}: the demo that ran there was killed")
    data, meta = _data(options, directory, screen)
    with runs.new(directory) as folder:
        return _run(options, data, meta, folder, screen, interrupts)


def _run(
    options: Options,
    data: Path,
    meta: dataset.Meta,
    folder: Path,
    screen: Screen,
    interrupts: processes.Interrupts,
) -> Outcome:
    """A run in its folder; its processes have ended at the return."""
    keep = True
    try:
        story, view = _train(options, data, folder, screen, interrupts)
        left = processes.outliving(processes.marked(str(folder)), processes.GOING_S)
        output = Path(view.directory, "output")
        figures = compute(story, len(left), _val_loss(output / "result.json"))
        found = problems(figures, story)
        sample = output / "sample.txt"
        text = sample.read_text() if sample.exists() else ""
        keep = options.keep or bool(found)
        return Outcome(
            figures=figures,
            problems=found,
            story=story,
            meta=meta,
            sample=text,
            log=failing_log(story, view) if found else "",
            folder=folder,
        )
    except KeyboardInterrupt:
        keep = options.keep
        raise
    except PeerLost as error:
        raise PeerLost(
            "the demo's server went away, so the demo ended its task and everything else it had started; "
            f"see {Client(folder / 'home').home.log} and run the demo again"
        ) from error
    finally:
        processes.end(str(folder))
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(f"--dir: cannot write into {directory}: {error.strerror}") from error


def _data(options: Options, directory: Path, screen: Screen) -> tuple[Path, dataset.Meta]:
    text = dataset.read_text(options.text)
    if text.left_out:
        limit = dataset.TEXT_LIMIT >> 20
        screen.note(f"using {limit} MiB of {text.source}: {text.left_out} files left out")
    settings = dataset.Settings(tokens=options.tokens)
    data = dataset.prepare(text, directory / "data", settings, screen.building, screen.note)
    return data, dataset.load_meta(data)


def _train(
    options: Options, data: Path, folder: Path, screen: Screen, interrupts: processes.Interrupts
) -> tuple[Story, TaskView]:
    """Runs the task to its end in a platform of its own, and ends that platform."""
    with _platform(folder, options.nodes, interrupts) as client:
        screen.note(f"platform started with {options.nodes} virtual nodes")
        view = client.submit(_spec(options, data, folder))
        story = Story(options.seconds)
        metrics = Tail(Path(view.directory, "output", "metrics.jsonl"))
        seq, heard = 0, time.monotonic()
        while story.phase != "over":
            events = client.events(view.id, after=seq, wait_s=0.1)
            lines = metrics.read()
            seq = events[-1].seq if events else seq
            heard = time.monotonic() if events or lines else heard
            if time.monotonic() - heard > SILENCE_S:
                log = client.task(view.id).directory
                raise DeadlineExceeded(f"no step for {SILENCE_S:.0f} s; see the logs in {log}")
            story.observe(lines, events)
            screen.show(story)
            if (action := story.next_action()) is not None:
                _do(action, client, view.id, story, screen)
        story.observe(metrics.read(), [])
        screen.show(story)
        return story, client.task(view.id)


def _spec(options: Options, data: Path, folder: Path) -> TaskSpec:
    given = {
        "data": data,
        "seconds": options.seconds,
        "width": options.width,
        "layers": options.layers,
        "heads": max(1, options.width // 32),
        "batch": options.batch,
        "save-every": f"{max(1.0, min(5.0, options.seconds / 15)):.1f}s",
    }
    return TaskSpec(
        script=str(Path(__file__).with_name("gpt.py")),
        args=tuple(part for name, value in given.items() for part in (f"--{name}", str(value))),
        name="demo",
        cwd=str(folder),
        nodes=options.nodes,
        ranks_per_node=options.ranks,
        grace_s=15.0,  # a save takes well below a second
    )


def _do(action: Action, client: Client, task: str, story: Story, screen: Screen) -> None:
    """Carries out an action. A task that is just ending may make it moot; the events then say so."""
    at = time.monotonic()
    with suppress(ProcessLookupError, TaskError):
        if isinstance(action, Kill):
            processes.kill(action.pid)
            screen.note(f"SIGKILL sent to rank {action.rank} (pid {action.pid})")
        elif isinstance(action, Suspend):
            client.suspend(task)
            screen.note("suspend requested")
        else:
            client.resume(task)
            screen.note("resume requested")
        story.did(action, at)


@contextmanager
def _platform(folder: Path, nodes: int, interrupts: processes.Interrupts) -> Iterator[Client]:
    """A server of its own on `nodes` virtual nodes; it has ended, with its tasks, at the exit."""
    home = folder / "home"
    try:
        os.environ[processes.MARK] = str(folder)
        with interrupts.held():  # a server that is half started could not be found again
            client = Client.connect(home, start=True, nodes=nodes)
        yield client
    finally:
        del os.environ[processes.MARK]
        with suppress(FireflyerError):  # it went away by itself; what is left is ended by name
            Client(home).shutdown()


def _val_loss(path: Path) -> float | None:
    """What gpt.py wrote at its end; None when it did not get there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])["val_loss"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return None


def failing_log(story: Story, view: TaskView) -> str:
    """The log of the rank that failed first in the last attempt, else rank 0's; empty without ranks.

    The others of its attempt end because of it.
    """
    failed = (
        event.detail["rank"]
        for event in story.events
        if event.kind == "rank_exited"
        and event.attempt == view.attempt
        and (event.detail.get("code") or event.detail.get("signal"))
    )
    first = next(failed, 0)
    return next((rank.log for rank in view.ranks if rank.rank == first), "")


def tail(path: str, lines: int = 3) -> str:
    """The last lines of a log file; empty when there is none."""
    try:
        text = Path(path).read_bytes()[-16384:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
