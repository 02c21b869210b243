"""Planner of training runs: predicts step time, memory and bytes of a layout before the run. Pure.

`costs.plan` prices one layout; `search.search` ranks all layouts that fit. `fireflyer plan train`
is the command line.
"""
