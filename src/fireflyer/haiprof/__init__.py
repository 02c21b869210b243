"""Profiler of training processes, from outside and without a change of their code.

`inside/` runs in the process that is profiled, `attach/` in the profiler. `phases.py`, `summary.py`,
`explain/` and `trace_file.py` are pure: they turn records into rows, findings and files.
"""
