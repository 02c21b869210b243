"""Charts of the use of a cluster, a node, a user or a task over time, from its series. Pure.

Lines differ by dash, and the caption of each chart gives its newest value, mean and maximum, so no
information depends on colour.
"""

import math
from collections.abc import Sequence

import msgspec

from fireflyer.charts import Axis, Series, line_chart
from fireflyer.charts.axes import number
from fireflyer.hai.model import SeriesView

SIZE = (360, 230)
"""Width and height of a drawing in units. A desktop shows three drawings side by side. A phone
shows one, with a unit of slightly less than a pixel."""

FEW = 12
"""Maximum number of points of a line whose points get markers. Without a marker, a line of one
point is invisible."""

SPANS = (
    ("minutes", 60.0, 2 * 3600.0),
    ("hours", 3600.0, 3 * 86_400.0),
    ("days", 86_400.0, math.inf),
)
"""Units of the time axis: name, seconds, and the longest time for which the unit is used."""


class Graph(msgspec.Struct, frozen=True):
    """Metrics that share a pair of axes."""

    title: str
    unit: str
    """Unit of the vertical axis; "" for the unit of the cluster's capacity."""
    metrics: tuple[tuple[str, str], ...]
    """Each metric (`sampling/series.py`), and the name of its line in the chart."""
    factor: float = 1.0
    """Factor by which the metric's values are multiplied to get `unit`."""


_MIB, _GIB = 2.0**-20, 2.0**-30

GRAPHS = (
    Graph("Occupancy", "", (("held", "held"), ("capacity", "usable"))),
    Graph("Queue", "tasks", (("queued", "waiting"), ("running", "running"))),
    Graph("Goodput", "% of the held time", (("useful", "useful"),), 100.0),
    Graph("GPU load", "% of the held GPUs", (("gpu", "load"),), 100.0),
    Graph("GPU memory", "GiB", (("gpu_memory", "used"),), _GIB),
    Graph("CPU", "cores", (("cpu", "used"),)),
    Graph("Memory", "GiB", (("memory", "used"),), _GIB),
    Graph("Files", "MiB/s", (("read", "read"), ("written", "written")), _MIB),
    Graph("Network", "MiB/s", (("received", "received"), ("sent", "sent")), _MIB),
    Graph("Step", "steps", (("step", "step"),)),
    Graph("Loss", "loss", (("loss", "rank 0"),)),
    Graph("Speed", "steps/s", (("speed", "rank 0"),)),
)  # fmt: skip


class Drawn(msgspec.Struct, frozen=True):
    """A chart."""

    title: str
    svg: str
    """An `<svg>` element, safe to insert."""
    words: str
    """Newest value, mean and maximum of each line."""


def draw(view: SeriesView, unit: str, now: float | None, only: Sequence[str] = ()) -> list[Drawn]:
    """Returns the charts of the metrics that a scope has.

    Args:
        view: the series.
        unit: unit of the cluster's capacity: "GPU" or "node".
        now: wall clock at the right end; None: count from the first point on.
        only: titles of the charts to draw; empty: all.
    """
    count = max(map(len, view.metrics.values()), default=0)
    length = count * view.step_s
    name, seconds, _ = next(span for span in SPANS if length <= span[2])
    if now is None:
        across, zero = Axis(f"{name} since the start"), view.begin
    else:
        across, zero = Axis(f"{name} from now", low=None), now
    found = []
    for graph in GRAPHS:
        there = [(metric, text) for metric, text in graph.metrics if metric in view.metrics]
        if not there or (only and graph.title not in only):
            continue
        series = []
        for metric, text in there:
            values = [
                math.nan if value is None else value * graph.factor
                for value in view.metrics[metric]
            ]
            times = [(view.begin + at * view.step_s - zero) / seconds for at in range(count)]
            few = sum(not math.isnan(value) for value in values) <= FEW
            series.append(Series(text, list(zip(times, values, strict=True)), marks=few))
        up = Axis(graph.unit or f"{unit}s", low=None if graph.title == "Loss" else 0.0)
        svg = line_chart(graph.title, across, up, series, SIZE)
        found.append(Drawn(graph.title, svg, "; ".join(map(_words, series))))
    return found


def _words(series: Series) -> str:
    known = [value for _, value in series.points if not math.isnan(value)]
    mean = math.fsum(known) / len(known)
    newest, most = _short(known[-1]), _short(max(known))
    return f"{series.name}: last {newest}, mean {_short(mean)}, most {most}"


def _short(value: float) -> str:
    return number(float(f"{value:.3g}"))
