"""Allreduce inside the node, by HFReduce."""

from fireflyer.validator.model import Check, Figure

CHECKS = (
    Check(
        name="allreduce",
        figures=(Figure("allreduce", "GB/s"),),
        needs="torch",
        duration_s=8.0,
        function="fireflyer.validator.allreduce:run",
    ),
)
