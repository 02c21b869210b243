"""Renders templates into responses. Every value is escaped where a template inserts it."""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import HTMLResponse, Response

from fireflyer.charts.axes import number
from fireflyer.charts.page import environment, style_sheet
from fireflyer.hai.dashboard import text_filters
from fireflyer.hai.dashboard.event_text import entry_text, event_pieces
from fireflyer.hai.model.identity import Identity

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = "fireflyer.hai.dashboard"

TURN_S = 0.005

NAVIGATION = (
    ("overview", "Overview", "/dashboard"),
    ("map", "Map", "/dashboard/map"),
    ("queue", "Queue", "/dashboard/queue"),
    ("tasks", "Tasks", "/dashboard/tasks"),
    ("nodes", "Nodes", "/dashboard/nodes"),
    ("validations", "Checks", "/dashboard/validations"),
    ("use", "Use", "/dashboard/use"),
    ("ledger", "Ledger", "/dashboard/ledger"),
)


@cache
def templates() -> "Environment":
    """Returns the templates with the filters of the dashboard."""
    made = environment(PACKAGE)
    for call in (
        text_filters.short, text_filters.span, text_filters.ago, text_filters.stamp,
        text_filters.clock, text_filters.percent, text_filters.hours, text_filters.title, event_pieces,
        entry_text,
    ):  # fmt: skip
        made.filters[call.__name__] = call
    made.filters["figure"] = number
    return made


@cache
def static(name: str) -> bytes:
    """Returns a file that all pages share."""
    data = (resources.files(PACKAGE) / "static" / name).read_bytes()
    return style_sheet().encode() + data if name.endswith(".css") else data


@cache
def version(name: str) -> str:
    """Returns a tag that changes with the file, so that browsers may cache the file."""
    return hashlib.sha256(static(name)).hexdigest()[:12]


async def render(name: str, values: Mapping[str, Any]) -> str:
    """Renders a template. A large page yields to the event loop every TURN_S."""
    pieces = []
    begun = time.perf_counter()
    for piece in templates().get_template(name).generate(values):
        pieces.append(piece)
        if time.perf_counter() - begun > TURN_S:
            await asyncio.sleep(0)
            begun = time.perf_counter()
    return "".join(pieces)


async def page(request: Request, name: str, status: int = 200, **values: Any) -> Response:
    """Returns a page for the session of the request.

    Args:
        request: the request.
        name: template without ".html"; also the navigation entry to mark.
        status: HTTP status.
        values: values for the template.
    """
    who: Identity | None = getattr(request.state, "who", None)
    known = {
        "who": who,
        "csrf": getattr(request.state, "csrf", ""),
        "navigation": NAVIGATION if who is not None else (),
        "current": name,
        "now": time.time(),
        "style": version("dashboard.css"),
        "script": version("dashboard.js"),
    }
    return HTMLResponse(await render(f"{name}.html", known | values), status)
