"""Charts as SVG text, and the HTML page around them: no scripts, no files beside it.

Charts stay readable without colour: series differ by dash and marker, cells print their value as
a tooltip. Pages follow the reader's light or dark theme.
"""

from fireflyer.charts.axes import Axis, Series, line_chart
from fireflyer.charts.cells import heat_map
from fireflyer.charts.page import Section, page, table
from fireflyer.charts.timeline import Box, timeline

__all__ = [
    "Axis",
    "Box",
    "Section",
    "Series",
    "heat_map",
    "line_chart",
    "page",
    "table",
    "timeline",
]
