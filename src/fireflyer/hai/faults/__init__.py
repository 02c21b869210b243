"""Faults: what is observed, what the rules make of it, and what is done. docs/hai-faults.md.

`observations` are what can be seen, `rules` the pure table that decides, `kernel` what a line of the kernel's
log says, `watching` the pure core of watchdog and stragglers, `desk` the shell beside the controller.
"""
