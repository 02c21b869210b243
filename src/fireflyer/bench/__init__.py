"""Benchmarks: our candidates against a peer and against the raw limit, interleaved in one run.

`fireflyer bench NAME` runs a benchmark. `--json FILE` writes the report (to standard output if FILE
is left out or "-"). Every number is a median over rounds; in each round all candidates run one
after the other.
"""
