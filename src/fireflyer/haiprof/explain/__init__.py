"""Findings: causes that slow a training run, computed from its records. Pure."""

from fireflyer.haiprof.explain.findings import Finding, explain, verdict

__all__ = ["Finding", "explain", "verdict"]
