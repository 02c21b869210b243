"""Faults: observations, the rules that decide about them, and the actions. docs/operate/hai-faults.md.

`rules` is the pure decision table. `hang_detection` has the pure detectors of hangs and stragglers.
`classifier` and `monitor` do the I/O, beside the controller. The kinds of observation are in
`hai/model/observations.py`; supervisors read the kernel's log (`hai/supervisor/kernel_log.py`).
"""
