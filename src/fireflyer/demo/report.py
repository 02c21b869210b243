"""Page `demo-report.html`: self-contained, without scripts, for light and dark screens."""

import os
import tempfile
from datetime import datetime
from pathlib import Path

from fireflyer.charts import render as render_page
from fireflyer.demo import chart
from fireflyer.demo.dataset import Meta
from fireflyer.demo.driver import Options
from fireflyer.demo.figures import Figures
from fireflyer.demo.story import Story
from fireflyer.errors import ConfigError, StorageError
from fireflyer.storage.targets import final_path

Row = tuple[str, str, str]
"""Table row (name, value, meaning)."""


def table(figures: Figures) -> list[Row]:
    """Describes the figures, for the page and the terminal."""
    f = figures
    return [
        ("Steps", f"{f.steps:,}", "optimizer steps, over all attempts"),
        ("Training time", f"{f.trained_s:.1f} s", "without the time undone by the kill"),
        (
            "Tokens per second",
            f"{f.tokens_per_s:,.0f}",
            "tokens of all steps divided by the time of all steps",
        ),
        (
            "Communication",
            f"{f.comm_share:.1%}",
            "share of the steps' time in which rank 0 waited for reductions",
        ),
        ("Loss at start", f"{f.loss_start:.3f}", "first step, in nats per token"),
        (
            "Loss at kill",
            number(f.loss_at_kill, "{:.3f}"),
            "mean of the last 20 steps before the kill",
        ),
        ("Loss at end", f"{f.loss_end:.3f}", "mean of the last 20 steps"),
        ("Validation loss", number(f.val_loss, "{:.3f}"), "samples held out from training"),
        ("Kill detected", seconds(f.kill_detected_s), "from SIGKILL to the supervisor's event"),
        (
            "Restart",
            seconds(f.restart_s),
            "from SIGKILL to the first finished step of the new attempt",
        ),
        (
            "Steps lost",
            number(f.steps_lost, "{}"),
            "last step before the kill, less the step resumed from",
        ),
        (
            "Time lost to the kill",
            seconds(f.lost_s),
            "from the last step before the kill until that step was reached again",
        ),
        (
            "Suspend",
            seconds(f.suspend_s),
            "from the request to the exit of the last rank, with a checkpoint",
        ),
        ("Resume", seconds(f.resume_s), "from the request to the first finished step"),
        (
            "Checkpoint stall",
            number(f.checkpoint_stall_ms, "{:.1f} ms"),
            f"median time that a save blocks a step, {f.checkpoints} saves",
        ),
        ("Attempts", str(f.attempts), "the first start, the restart after the kill, the resume"),
        ("Orphans", str(f.orphans), "processes left behind at the end"),
    ]


def number(value: float | None, form: str) -> str:
    """Formats a value, which may be unobserved."""
    return "not seen" if value is None else form.format(value)


def seconds(value: float | None) -> str:
    """Formats seconds, or milliseconds below one second."""
    if value is not None and value < 1:
        return f"{value * 1e3:.0f} ms"
    return number(value, "{:.2f} s")


def render(
    figures: Figures,
    story: Story,
    meta: Meta,
    sample: str,
    options: Options,
    machine: dict[str, str],
) -> str:
    """Builds the page."""
    when = datetime.fromtimestamp(story.lines[-1].wall).strftime("%Y-%m-%d %H:%M")
    ranks = options.nodes * options.ranks
    source = "the standard library's sources" if options.text is None else meta.source
    data = {
        "Text": f"{source}: {meta.files} files, {meta.text_bytes / 1e6:.1f} MB",
        "Tokens": f"{'BPE' if meta.tokens == 'bpe' else 'raw bytes'}, {meta.vocabulary} entries",
        "Records": f"{meta.train_samples:,} samples of {meta.context} tokens",
        "Model": f"GPT, width {options.width}, {options.layers} layers",
        "Ranks": f"{options.nodes} virtual nodes x {options.ranks}",
        "Batch": f"{options.batch} samples a rank",
    }
    lead = (
        f"A small GPT learnt from {source} on {ranks} rank{'s' if ranks > 1 else ''}. "
        "Half way one of them was killed. The platform noticed, returned to the newest checkpoint and "
        "continued. Later the task was suspended and resumed. Every number was measured in this run."
    )
    return render_page(
        "report.html", "fireflyer.demo", when=when, lead=lead, tiles=_tiles(figures),
        chart=chart.draw(story, figures), rows=table(figures), sample=sample, data=data, machine=machine,
    )  # fmt: skip


def check(path: Path) -> None:
    """Checks that the page can be written to `path`; called before any other work.

    Raises:
        ConfigError: `path` is a folder, or its folder is missing or not writable.
    """
    if path.is_dir():
        raise ConfigError(f"--report: {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--report: the folder of {path} does not exist; make it or name another")
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise ConfigError(
            f"--report: cannot write into the folder of {path}: {error.strerror}; name another"
        ) from error


def save(page: str, path: Path) -> None:
    """Writes the page atomically.

    Raises:
        ConfigError: `path` is a pipe or a device.
        StorageError: the page cannot be written.
    """
    partial, place = None, Path(final_path(path))
    try:
        descriptor, partial = tempfile.mkstemp(dir=place.parent, prefix=".demo-report-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
            os.fchmod(descriptor, 0o644)
        os.replace(partial, place)
    except OSError as error:
        if partial:
            Path(partial).unlink(missing_ok=True)
        raise StorageError(
            f"cannot write the report {path}: {error.strerror}; name another --report"
        ) from error


def _tiles(f: Figures) -> list[tuple[str, str, str]]:
    lost = number(f.steps_lost, "{} steps")
    return [
        (f"{f.loss_start:.2f} → {f.loss_end:.2f}", "loss", "start to end, nats a token"),
        (seconds(f.kill_detected_s), "kill seen", "by the supervisor"),
        (seconds(f.restart_s), "training again", f"after the kill, {lost} repeated"),
        (seconds(f.suspend_s), "suspended", "request to last exit"),
        (f"{f.tokens_per_s:,.0f}", "tokens/s", f"{f.comm_share:.1%} in communication"),
        (
            number(f.checkpoint_stall_ms, "{:.1f} ms"),
            "checkpoint stall",
            f"median of {f.checkpoints} saves",
        ),
    ]
