"""Terminal output of the demo; all of it goes to standard error."""

import signal
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fireflyer.demo.figures import Figures
from fireflyer.demo.report import table
from fireflyer.demo.story import Story

RECENT = 20
"""Number of steps over which displayed rates are averaged."""
PLAIN_EVERY_S = 10.0
"""Training time in seconds between two lines if standard error is not a terminal."""
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"running": "green", "finished": "green", "failed": "red", "stopped": "red"}


class TerminalScreen:
    """Live view on a terminal, plain lines elsewhere; a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._building: Progress | None = None
        self._stage = ""
        self._said = 0
        self._told_s = 0.0

    def __enter__(self) -> "TerminalScreen":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_building()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def building(self, stage: str, done: int, total: int) -> None:
        """Shows the progress of building the data set."""
        if not self.console.is_terminal:
            if stage != self._stage:
                self.console.print(f"data set: {stage}", highlight=False)
            self._stage = stage
            return
        if self._building is None:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
            )
            self._building = Progress(*columns, console=self.console, transient=True)
            self._building.start()
        if stage != self._stage:
            for earlier in self._building.task_ids:
                self._building.remove_task(earlier)
            self._building.add_task(stage, total=None)
            self._stage = stage
        self._building.update(self._building.task_ids[-1], completed=done, total=total or None)

    def note(self, text: str) -> None:
        """Prints a message, above the live view if there is one."""
        self._end_building()
        console = self._live.console if self._live is not None else self.console
        console.print(Text("• ", "dim") + Text(text), highlight=False, soft_wrap=True)

    def show(self, story: Story) -> None:
        """Updates the view."""
        self._end_building()
        self._tell_events(story)
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(view(story), refresh=True)
        elif story.lines and story.lines[-1].trained_s >= self._told_s:
            self._told_s = story.lines[-1].trained_s + PLAIN_EVERY_S
            self.console.print(plain(story), highlight=False, soft_wrap=True)

    def _tell_events(self, story: Story) -> None:
        for event in story.events[self._said :]:
            if event.kind == "rank_exited" and event.detail.get("signal"):
                name = signal.Signals(int(event.detail["signal"])).name
                self.note(f"platform: rank {event.detail['rank']} was ended by {name}")
            elif event.kind in (
                "restarting",
                "suspended",
                "resumed",
                "finished",
                "failed",
                "stopped",
            ):
                reason = event.detail.get("reason")
                self.note(f"platform: {event.kind}" + (f", {reason}" if reason else ""))
        self._said = len(story.events)

    def _end_building(self) -> None:
        if self._building is not None:
            self._building.stop()
            self._building = None


def rates(story: Story) -> tuple[float, float, float]:
    """Returns (loss, tokens/s, communication share) over the recent steps; zeros before the
    first step."""
    recent = story.lines[-RECENT:]
    if not recent:
        return 0.0, 0.0, 0.0
    spent = sum(line.step_s for line in recent)
    tokens = sum(line.tokens for line in recent)
    return (
        fmean(line.loss for line in recent),
        tokens / spent,
        sum(line.comm_s for line in recent) / spent,
    )


def plain(story: Story) -> str:
    """Formats the current state of the training as one line."""
    last = story.lines[-1]
    loss, speed, share = rates(story)
    saved = "none" if last.checkpoint_step is None else f"step {last.checkpoint_step}"
    return (
        f"{last.trained_s:6.1f} s  step {last.step}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
        f"communication {share:.0%}  checkpoint {saved}  attempt {last.attempt}  {story.state}"
    )


def spark(values: list[float], width: int = 48) -> str:
    """Draws `values` as a line of bars; each bar is the mean of an equal number of values."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [fmean(values[start : start + size]) for start in range(0, len(values), size)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[min(7, int((mean - low) / span * 8))] for mean in means)


def view(story: Story) -> RenderableType:
    """Builds the live view."""
    last = story.lines[-1] if story.lines else None
    loss, speed, share = rates(story)
    grid = Table.grid(padding=(0, 3), expand=True)
    for _ in range(3):
        grid.add_column(ratio=1)
    saved = (
        "none yet"
        if last is None or last.checkpoint_step is None
        else f"step {last.checkpoint_step}"
    )
    state = Text(story.state, _STATE_STYLES.get(story.state, "yellow"))
    grid.add_row(
        _cell("loss", f"{loss:.3f}" if last else "-"),
        _cell("tokens/s", f"{speed:,.0f}" if last else "-"),
        _cell("communication", f"{share:.1%} of a step" if last else "-"),
    )
    grid.add_row(
        _cell("last checkpoint", saved),
        _cell("attempt", str(last.attempt) if last else "-"),
        Text("state  ", "dim") + state,
    )
    done = last.trained_s if last else 0.0
    clock = Table.grid(padding=(0, 2), expand=True)
    clock.add_column(ratio=1)
    clock.add_column(justify="right")
    clock.add_row(
        ProgressBar(total=story.seconds, completed=min(done, story.seconds)),
        f"{done:.0f} of {story.seconds:.0f} s, step {last.step if last else 0}",
    )
    curve = Text(spark([line.loss for line in story.lines]), "yellow")
    title = Text("Fireflyer demo", "bold")
    return Panel(Group(clock, Text(), grid, Text(), curve), title=title, title_align="left")


def _cell(name: str, value: str) -> Text:
    return Text(f"{name}  ", "dim") + Text(value, "bold")


def summary(figures: Figures) -> Table:
    """Builds the final table of figures."""
    out = Table(title="What this run measured", title_justify="left", title_style="bold")
    out.add_column("figure")
    out.add_column("value", justify="right", style="bold", no_wrap=True)
    out.add_column("meaning", style="dim")
    for row in table(figures):
        out.add_row(*row)
    return out
