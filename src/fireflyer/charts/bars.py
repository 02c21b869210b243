"""Bars: groups of bars side by side, and bars that are divided into parts."""

from collections.abc import Callable, Mapping, Sequence

from fireflyer.charts import axes, svg
from fireflyer.charts.axes import Axis, number
from fireflyer.charts.svg import Markup

WIDTH = 720
STACK = 28
"""Height of a divided bar."""


def bar_chart(
    title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]],
    across: str, up: Axis, size: tuple[int, int] = (axes.WIDTH, axes.HEIGHT),
) -> Markup:  # fmt: skip
    """Draws bars side by side, with a legend below the title.

    Args:
        title: text above the drawing.
        groups: name of each group of bars.
        series: one value per group; None: no bar.
        across: label of the horizontal axis.
        up: vertical axis. On a logarithmic axis, bars begin at half of the smallest value.
        size: width and height in units of the drawing.

    Returns:
        An `<svg>` element.
    """
    width, height = size
    values = [value for row in series.values() for value in row if value is not None]
    places = axes.legend_places(list(series), width)
    foot = height - axes.BOTTOM
    low = [min(values) / 2] if up.log else []
    y = axes.scale(up, [*values, *low], foot, places[-1][1] + 36)
    wide = (width - axes.LEFT - axes.RIGHT) / len(groups)
    each = wide * 0.8 / len(series)
    parts = [
        svg.text(title, axes.LEFT, 16, kind="title"),
        *axes.rows(y, axes.LEFT, width - axes.RIGHT), *axes.labels(across, up.label, size),
    ]  # fmt: skip
    for index, (name, row) in enumerate(series.items()):
        x, top = places[index]
        parts.append(svg.rect(x + 8, top + 2, 12, 12, class_=f"m{index % 6}"))
        parts.append(svg.text(name, x + 26, top + 12))
        for place, value in enumerate(row):
            if value is not None:
                left, at = axes.LEFT + (place + 0.1) * wide + index * each, y.at(value)
                tip = f"{name}, {groups[place]}: {number(float(f'{value:.3g}'))}"
                parts.append(svg.rect(left, at, each, foot - at, tip, class_=f"m{index % 6}"))
    for place, name in enumerate(groups):
        parts.append(svg.text(name, axes.LEFT + (place + 0.5) * wide, foot + 18, "middle"))
    return svg.drawing(title, width, height, parts)


def stacked_bars(
    title: str, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str],
    form: Callable[[float], str] = "{:.1%}".format,
) -> Markup:  # fmt: skip
    """Draws one horizontal bar of full width per row, divided in proportion to its values.

    Args:
        title: alternative text of the drawing.
        rows: for the text above each bar, the bar's values by the names of its parts.
        colours: colour of each part, in the order of the parts.
        form: formats a value.

    Returns:
        An `<svg>` element.
    """
    parts: list[Markup] = []
    for index, (row, values) in enumerate(rows.items()):
        top, x = index * (STACK + 24) + 18, 0.0
        whole = sum(values.values())
        parts.append(svg.text(row, 0, top - 5))
        for name, colour in colours.items():
            value = values.get(name, 0.0)
            width = value / whole * WIDTH if whole else 0.0
            if width > 0:
                tip = f"{row}: {name} {form(value)}"
                parts.append(svg.rect(x, top, width, STACK, tip, class_="part", fill=colour))
            if width > 60:
                parts.append(svg.text(form(value), x + width / 2, top + 18, "middle", "in"))
            x += width
    return svg.drawing(title, WIDTH, len(rows) * (STACK + 24), parts)
