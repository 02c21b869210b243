"""Faults: observations, the rules that decide about them, and the actions. docs/operate/hai-faults.md.

`observations` defines the kinds of observation, and `rules` the pure decision table. `kernel_messages`
parses a line of the kernel's log. `hang_detection` is the pure core of watchdog and stragglers, `classifier`
the shell beside the controller.
"""
