"""A report in the text format of Prometheus, for node_exporter's textfile collector."""

from typing import Any


def exposition(report: dict[str, Any]) -> str:
    """Returns gauges: steps, seconds a step by phase, and values of the recorders, by rank."""
    out = [
        "# HELP fireflyer_haiprof_phase_seconds Mean seconds of a step by phase.",
        "# TYPE fireflyer_haiprof_phase_seconds gauge",
    ]
    for rank in report["ranks"]:
        labels = f'rank="{rank["rank"]}",host="{_escaped(rank["host"])}"'
        out += [
            f'fireflyer_haiprof_phase_seconds{{{labels},phase="{name}"}} {seconds!r}'
            for name, seconds in rank["phases"].items()
        ]
    out += [
        "# HELP fireflyer_haiprof_steps Steps that were seen.",
        "# TYPE fireflyer_haiprof_steps gauge",
    ]
    out += [f'fireflyer_haiprof_steps{{rank="{r["rank"]}"}} {r["steps"]}' for r in report["ranks"]]
    out += [
        "# HELP fireflyer_haiprof_value Mean of a gauge or rate a second of a counter.",
        "# TYPE fireflyer_haiprof_value gauge",
    ]
    for rank in report["ranks"]:
        for recorder, values in rank["recorders"].items():
            out += [
                f'fireflyer_haiprof_value{{rank="{rank["rank"]}",recorder="{_escaped(recorder)}",'
                f'name="{_escaped(name)}"}} {value!r}'
                for name, value in values.items()
            ]
    return "\n".join(out) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
