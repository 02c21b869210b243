"""Times of requests, for the metrics."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fireflyer.hai.controller.metrics import Metrics


class Timed:
    """Middleware that measures the time to the start of each response, by route; streams are
    excluded."""

    def __init__(self, app: ASGIApp, meters: Metrics) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                if not route.endswith("/stream"):
                    labels = self._meters.request_s.labels(route, str(message["status"]))
                    labels.observe(time.perf_counter() - begun)
            await send(message)

        await self._app(scope, receive, sending)
