"""Page `demo-report.html`: self-contained, without scripts, for light and dark screens."""

import os
import tempfile
from datetime import datetime
from html import escape
from pathlib import Path

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
            "share of the steps that rank 0 waited for reductions",
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
            "until the training reached the same step again",
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
        f"A small GPT learnt from {escape(source)} on {ranks} rank{'s' if ranks > 1 else ''}. "
        "Half way one of them was killed. The platform noticed, returned to the newest checkpoint and "
        "continued. Later the task was suspended and resumed. Every number was measured in this run."
    )
    return _PAGE.format(
        style=_STYLE,
        when=when,
        lead=lead,
        cards="\n".join(_card(*card) for card in _cards(figures)),
        chart=chart.draw(story, figures),
        rows="\n".join(_row(row) for row in table(figures)),
        sample=escape(sample) or "The run ended before the model could write.",
        data=_pairs(data),
        machine=_pairs(machine),
    )


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


def _cards(f: Figures) -> list[tuple[str, str, str]]:
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


def _card(value: str, name: str, note: str) -> str:
    return (
        f'<li><strong>{escape(value)}</strong><span class="name">{escape(name)}</span>'
        f'<span class="note">{escape(note)}</span></li>'
    )


def _row(row: Row) -> str:
    name, value, meaning = map(escape, row)
    return f'<tr><th scope="row">{name}</th><td class="value">{value}</td><td>{meaning}</td></tr>'


def _pairs(pairs: dict[str, str]) -> str:
    return "\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs.items())


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Fireflyer demo report</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<p class="brand"><span class="spark"></span>Fireflyer <span class="when">demo, {when}</span></p>
<h1>Train, lose a worker, carry on</h1>
<p class="lead">{lead}</p>
</header>
<ul class="cards">
{cards}
</ul>
<section>
<h2>The run</h2>
<figure>
<div class="scroll">{chart}</div>
<figcaption><span class="key loss"></span>loss, smoothed over the raw steps
<span class="key save"></span>checkpoint <span class="key kill"></span>killed
<span class="key suspend"></span>suspended <span class="key back"></span>first step afterwards</figcaption>
</figure>
</section>
<section>
<h2>What the model writes now</h2>
<p>The model received the first word of each text and continued it.</p>
<pre>{sample}</pre>
</section>
<section>
<h2>All figures</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">figure</th><th scope="col">value</th><th scope="col">meaning</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
</section>
<section class="pair">
<div><h2>Task</h2><dl>
{data}
</dl></div>
<div><h2>Machine</h2><dl>
{machine}
</dl></div>
</section>
</main>
</body>
</html>
"""

_STYLE = """
:root { --paper: #fcfbf8; --card: #ffffff; --ink: #1d1b18; --soft: #66615a; --line: #e4dfd6; --glow: #c26a00;
  --kill: #c81e1e; --suspend: #6d3fc4; --back: #0b7a4b; --speed: #0f6c8c; --comm: #8a6d3b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --card: #1c1f25; --ink: #ece9e2;
  --soft: #a19c92; --line: #30343c; --glow: #ffb648; --kill: #ff7a70; --suspend: #b79bff; --back: #4fd39a;
  --speed: #62c3e6; --comm: #d9b778; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 72px; }
.brand { margin: 0; font-weight: 650; letter-spacing: .01em; }
.spark { display: inline-block; width: 10px; height: 10px; margin-right: 10px; border-radius: 50%;
  background: var(--glow); box-shadow: 0 0 12px 3px color-mix(in srgb, var(--glow) 55%, transparent); }
.when { margin-left: 6px; font-weight: 400; color: var(--soft); }
h1 { margin: 14px 0 10px; font-size: clamp(28px, 5vw, 42px); line-height: 1.12; letter-spacing: -.02em; }
h2 { margin: 48px 0 12px; font-size: 20px; letter-spacing: -.01em; }
.lead { max-width: 66ch; margin: 0; font-size: 17px; color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); gap: 12px;
  margin: 32px 0 0; padding: 0; list-style: none; }
.cards li { display: flex; flex-direction: column; padding: 18px 20px; border: 1px solid var(--line);
  border-radius: 12px; background: var(--card); }
.cards strong { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.cards .name { margin-top: 6px; font-weight: 600; }
.cards .note { font-size: 13px; line-height: 1.35; color: var(--soft); }
figure { margin: 0; padding: 20px 12px 14px; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); }
figcaption { padding: 6px 8px 0; font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 14px; height: 3px; margin: 0 6px 3px 14px; border-radius: 2px; }
.key:first-child { margin-left: 0; }
.key.save { width: 7px; height: 7px; margin-bottom: 0; border-radius: 50%; background: var(--soft); }
.key.loss { background: var(--glow); } .key.kill { background: var(--kill); }
.key.suspend { background: var(--suspend); } .key.back { background: var(--back); }
.scroll { overflow-x: auto; }
pre { overflow-x: auto; margin: 0; padding: 18px 20px; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); font: 13.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table { width: 100%; border-collapse: collapse; font-size: 15px; }
th, td { padding: 9px 12px 9px 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; }
thead th { font-size: 13px; font-weight: 500; color: var(--soft); }
tbody th { font-weight: 500; white-space: nowrap; }
td { color: var(--soft); }
td.value { color: var(--ink); font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 48px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 18px; margin: 0; font-size: 15px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
svg.chart { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg .grid { stroke: var(--line); }
svg .curve { fill: none; stroke-linejoin: round; stroke-width: 1.6; }
svg .curve.raw { stroke: var(--glow); stroke-width: 1; opacity: .3; }
svg .curve.loss { stroke: var(--glow); stroke-width: 2.4; }
svg .area { opacity: .16; } svg .area.speed { fill: var(--speed); } svg .area.comm { fill: var(--comm); }
svg .curve.speed { stroke: var(--speed); } svg .curve.comm { stroke: var(--comm); }
svg .save { fill: var(--soft); }
svg .gap { opacity: .14; } svg .gap.kill { fill: var(--kill); } svg .gap.suspend { fill: var(--suspend); }
svg .mark { stroke-width: 1.4; } svg .mark.kill { stroke: var(--kill); }
svg .mark.suspend { stroke: var(--suspend); }
svg .mark.back { stroke: var(--back); stroke-dasharray: 4 3; }
svg .label { font-size: 13px; } svg .label.kill, svg .label.suspend { font-weight: 600; }
svg .label.kill { fill: var(--kill); } svg .label.suspend { fill: var(--suspend); }
@media print { body { background: none; } figure, pre, .cards li { break-inside: avoid; } }
"""
