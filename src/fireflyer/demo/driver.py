"""Driver of the demo: data set, platform, task and the actions of `story`; no process outlives
it."""

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

PROGRESS_TIMEOUT_S = 120.0
"""Timeout in seconds without a step or an event, after which the demo gives up."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line."""

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
    """Display for the user."""

    def building(self, stage: str, done: int, total: int) -> None:
        """Shows the progress of building the data set."""
        ...

    def note(self, text: str) -> None:
        """Shows a message."""
        ...

    def show(self, story: Story) -> None:
        """Shows the current state of the training; called several times a second."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a finished run."""

    figures: Figures | None
    problems: list[str]
    story: Story
    meta: dataset.Meta
    sample: str
    """Text written by the trained model; empty if the run did not get that far."""
    log: str
    """Most informative log file if there were problems, else empty."""
    folder: Path
    """Folder of the run; removed already, unless `keep` was set or there were problems."""


def run(options: Options, screen: Screen, interrupts: processes.Interrupts) -> Outcome:
    """Runs the whole demo.

    Raises:
        ConfigError: an option is invalid.
        FireflyerError: the platform did not start, or it ended early.
        KeyboardInterrupt: after every process that the run started has ended.
    """
    # One spelling of the path, because the path marks the run's processes.
    directory = options.directory.resolve()
    _make(directory)
    for stale in runs.sweep(directory):
        screen.note(f"removed {stale} of a demo that was killed, and ended its processes")
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
    """Runs the demo in `folder`. All processes of the run have ended when the call returns."""
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
            "the demo's server stopped responding, so the demo ended its task and all its processes; "
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
    """Runs the task to its end in its own platform, then ends that platform."""
    with _platform(folder, options.nodes, interrupts) as client:
        screen.note(f"platform started with {options.nodes} virtual nodes")
        view = client.submit(_spec(options, data, folder))
        story = Story(options.seconds)
        metrics = Tail(Path(view.directory, "output", "metrics.jsonl"))
        seq, progress_at = 0, time.monotonic()
        while story.phase != "over":
            events = client.events(view.id, after=seq, wait_s=0.1)
            lines = metrics.read()
            seq = events[-1].seq if events else seq
            progress_at = time.monotonic() if events or lines else progress_at
            if time.monotonic() - progress_at > PROGRESS_TIMEOUT_S:
                log = client.task(view.id).directory
                raise DeadlineExceeded(
                    f"no step for {PROGRESS_TIMEOUT_S:.0f} s; see the logs in {log}"
                )
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
    """Carries out an action.

    If the task is about to end, the action may come too late; the events then show this.
    """
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
    """Starts a server on `nodes` virtual nodes; at exit the server and its tasks have ended."""
    home = folder / "home"
    try:
        os.environ[processes.MARK] = str(folder)
        with interrupts.held():  # `processes.end` could not find a half-started server
            client = Client.connect(home, start=True, nodes=nodes)
        yield client
    finally:
        del os.environ[processes.MARK]
        with suppress(FireflyerError):  # the server has ended; `run` ends the marked processes
            Client(home).shutdown()


def _val_loss(path: Path) -> float | None:
    """Returns the validation loss that gpt.py wrote at its end; None if gpt.py did not get
    there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])["val_loss"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return None


def failing_log(story: Story, view: TaskView) -> str:
    """Returns the log of the first rank that failed in the last attempt, else rank 0's log.

    The other ranks of that attempt fail as a consequence. The result is empty if there are no
    ranks.
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
    """Returns the last lines of a log file; empty if the file does not exist."""
    try:
        text = Path(path).read_bytes()[-16384:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
