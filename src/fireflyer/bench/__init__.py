"""Benchmarks: our candidates against a peer and against the raw limit, interleaved in one run.

`fireflyer bench NAME` runs a benchmark. `--json` prints the report as JSON alone, `--output FILE`
writes it to FILE. Every number is a median over rounds; in each round all candidates run one
after the other.
"""
