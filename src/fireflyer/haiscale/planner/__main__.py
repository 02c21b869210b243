"""`fireflyer plan`: the command line of the planner."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fireflyer.charts import Section, page, table
from fireflyer.haiscale.planner.costs import Plan, calibrated, drawing, plan
from fireflyer.haiscale.planner.page import Drawing, chart
from fireflyer.haiscale.planner.presets import CLUSTERS, MODELS, Cluster, Model, layout_of, read
from fireflyer.haiscale.planner.search import reason, search
from fireflyer.program import json_option, run_app, write_json

SHOWN = 10

app = typer.Typer(
    name="fireflyer plan",
    help="Predict runs before they start.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Predict runs before they start."""


@app.command()
def train(
    preset: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"Model: {', '.join(MODELS)}, or a TOML file.")
    ],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")],
    cluster: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help=f"Nodes: {', '.join(CLUSTERS)}, or a TOML file."),
    ] = "fire-flyer",
    layout: Annotated[
        str,
        typer.Option(
            help="Division of the run, e.g. pp=4,dp=16,micro=1,schedule=1f1b. [default: the model's pp]"
        ),
    ] = "",
    find: Annotated[
        bool, typer.Option("--search", help="Rank all layouts that fit the memory, best first.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the schedule's timeline as an HTML page."),
    ] = None,
    json: Annotated[bool, json_option()] = False,
) -> None:
    """Predict the step time, the memory of a rank and the bytes on a card of a training run.

    \b
      fireflyer plan train --preset llama-13b --gpus 64 --layout pp=4,dp=16
      fireflyer plan train --preset llama-13b --gpus 64 --search --html plan.html
    """
    nodes = read("--cluster", cluster, CLUSTERS, Cluster)
    model = calibrated(preset) if preset in MODELS else read("--preset", preset, MODELS, Model)
    why = ""
    if find and not layout:
        plans, others = search(model, nodes, gpus)
        why = reason(plans, others)
    else:
        plans = [plan(model, nodes, layout_of(layout, model, gpus))]
        if find:
            ranked, others = search(model, nodes, gpus)
            why, plans = reason(ranked, others), plans + ranked
    found = described(plans[0])
    if find:
        found["layouts"] = [described(one) for one in (plans[1:] if layout else plans)]
        found["why"] = why
    if html is not None:
        html.write_text(_page(preset, model, nodes, plans, why))
    if json:
        write_json(msgspec.json.encode(found))
        return
    for one in plans[:SHOWN]:
        sys.stdout.write(f"{one.layout.text()}: {_told(one)}\n")
    if why:
        sys.stdout.write(why + "\n")


def _told(one: Plan) -> str:
    parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in one.memory_bytes.items())
    return (
        f"{one.step_s:.4g} s a step, {one.bubble:.1%} bubble, {one.memory / 1e9:.1f} GB a rank "
        f"({parts}), {one.bytes_per_nic / 1e9:.1f} GB a card"
    )


def _page(name: str, model: Model, cluster: Cluster, plans: Sequence[Plan], why: str) -> str:
    """Returns the page of the first plan, with a table of the best plans."""
    layout = plans[0].layout
    spans, drawn, batches = drawing(model, cluster, layout)
    title = f"{layout.text()}: all {batches} micro-batches"
    if drawn < batches:
        title = f"{layout.text()}: {drawn} of {batches} micro-batches; the middle repeats"
    rows = [(one.layout.text(), _told(one)) for one in plans[:SHOWN]]
    facts = Section(
        "Layouts", [why] if why else [], [table(["layout", "prediction"], rows, "words")]
    )
    drawn_plan = chart(Drawing(title, {"planned": spans}))
    return page(f"A step of {name}", [facts, Section("Timeline", parts=[drawn_plan])])


def described(one: Plan) -> dict[str, Any]:
    """Returns a plan as JSON types."""
    found = asdict(one)
    found["layout"] = msgspec.to_builtins(one.layout)
    return found


if __name__ == "__main__":
    sys.exit(run_app(app, "fireflyer plan", sys.argv[1:]))
