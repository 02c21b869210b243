"""Charts as SVG text, and the HTML page around them, which needs no script and no other file.

Charts stay readable without colour: series differ by dash and marker, and cells have their value as
a tooltip. Pages follow the reader's light or dark theme.
"""

from fireflyer.charts.axes import Axis, Series, line_chart
from fireflyer.charts.bars import bar_chart, stacked_bars
from fireflyer.charts.cells import heat_map
from fireflyer.charts.page import Note, Section, key, page, render, style_sheet, table
from fireflyer.charts.svg import Markup
from fireflyer.charts.timeline import Box, timeline

__all__ = [
    "Axis",
    "Box",
    "Markup",
    "Note",
    "Section",
    "Series",
    "bar_chart",
    "heat_map",
    "key",
    "line_chart",
    "page",
    "render",
    "stacked_bars",
    "style_sheet",
    "table",
    "timeline",
]
