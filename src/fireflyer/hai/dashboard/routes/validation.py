"""The pages about validations: the fleet, and one node's history."""

import time

from fastapi import FastAPI, Request, Response

from fireflyer.errors import ConfigError, NoSuchNode
from fireflyer.hai.dashboard import pages
from fireflyer.hai.dashboard.auth_middleware import ROOT
from fireflyer.hai.dashboard.charts import validation_charts as charts
from fireflyer.hai.dashboard.page_queries import PageQueries
from fireflyer.hai.dashboard.routes.parameters import Number, Text
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.http.auth import needing
from fireflyer.hai.model.identity import Identity
from fireflyer.hai.model.validations import Ended
from fireflyer.hai.validation.health import noteworthy

LISTED = 50
"""Maximum number of failed and slow cells in the list."""

COLUMNS = 40
"""Maximum number of validations, the newest, in the heat map of a node."""

# Charts are markup whose texts the chart functions escape, so templates insert them without
# escaping.


def validation_pages(app: FastAPI, queries: PageQueries, trail: AuditLog) -> None:
    """Adds these routes to the application."""
    needs = needing(trail)

    @app.get(f"{ROOT}/validations")
    async def validations(
        request: Request, part: Number | None = None, who: Identity = needs("read")
    ) -> Response:
        """Show the newest figures of all nodes as a heat map."""
        found, running = await queries.health(), queries.validating()
        drawing = ""
        if found.nodes and found.figures:
            try:
                drawing = charts.fleet_map(found, part)
            except IndexError:
                raise ConfigError(f"invalid part {part}: expected a column of the map") from None
        nodes = charts.groups(found.nodes)
        shown = found.nodes if part is None or not drawing else nodes[part]
        return await pages.page(
            request, "validations", found=found, drawing=drawing, part=part, shown=shown,
            cells=noteworthy(found, LISTED), most=LISTED, running=running, root=charts.ROOT,
            count=len(queries.nodes(who)), grouped=len(shown) > charts.MOST_COLUMNS,
        )  # fmt: skip

    @app.get(f"{ROOT}/validations/{{node}}")
    async def one(
        request: Request, node: str, figure: Text = "", who: Identity = needs("read")
    ) -> Response:
        """Show the validations of one node, and one of its figures over time."""
        del who
        entries, fleet = await queries.validations(node), await queries.health()
        if not entries and all(each != node for each in queries.node_names()):
            raise NoSuchNode(f"no node {node[:63]!a} here")
        ended = [e for e in entries if isinstance(e, Ended) and e.findings][-COLUMNS:]
        latest = ended[-1].findings if ended else ()
        names = [found.name for found in latest]
        if figure and figure not in names:
            raise ConfigError(f"invalid figure {figure!a}: expected one of {', '.join(names)}")
        cells = [fleet.cells[name][node] for name in names if node in fleet.cells.get(name, {})]
        chosen = figure or next(
            (c.figure for c in cells if c.standing in ("failed", "worse") and c.value is not None),
            next((found.name for found in latest if found.value is not None), ""),
        )
        drawing = charts.node_map(ended, fleet) if ended else ""
        chart = charts.figure_chart(ended, chosen, fleet, time.time()) if ended else ""
        return await pages.page(
            request, "validation", node=node, entries=entries[::-1], drawing=drawing,
            chart=chart, cells=cells, chosen=chosen, medians=fleet.medians,
            link=charts.figure_link, root=charts.ROOT,
        )  # fmt: skip
