"""A planner of training runs: step time, memory and bytes of a layout, before the run. Pure.

`costs.plan` prices one layout; `search.search` ranks all that fit. `fireflyer plan train` is the
command line.
"""
