"""The HTTP route of time series."""

import time
from typing import Annotated

from fastapi import FastAPI, Query, Response

from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.series import check_scope, select
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.responses import documented, json
from fireflyer.hai.model import SeriesView
from fireflyer.hai.model.identity import Identity

Wall = Annotated[float, Query(ge=0, le=253_370_764_800)]
Seconds = Annotated[float, Query(gt=0, le=10 * 365 * 86_400)]


def series_routes(app: FastAPI, controller: Controller, samples: Samples, trail: AuditLog) -> None:
    """Adds the route to the application."""
    needs = needing(trail)

    @app.get("/series", **documented(SeriesView))
    async def series(
        scope: str = "cluster", seconds: Seconds = 6 * 3600.0, until: Wall | None = None,
        who: Identity = needs("read"),
    ) -> Response:  # fmt: skip
        """Read the use of the cluster, a node, a user, a task or a rank over time, at most 500
        points. Only an operator may read the use of other users and their tasks."""
        check_scope(controller, scope, who)
        return json(select(samples, scope, seconds, time.time() if until is None else until))
