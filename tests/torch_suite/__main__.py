"""Run all of torch's tests over hfreduce: `python -m tests.torch_suite [--hosts N] [NAME ...]`.

A line for each test that does not end as expected, a closing line with counts; the exit status is 1 if
there is such a test.
"""

import argparse
import os
import signal
import sys
from collections import Counter

from tests.torch_suite.expected import EXPECTED_FAILURES, surprise
from tests.torch_suite.gates import WORLD_SIZE
from tests.torch_suite.suite import Suite


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Run these tests. Default: all.")
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        choices=range(1, WORLD_SIZE + 1),
        help="Spread the ranks over this many virtual hosts. Default: 1.",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="Print every test, and failures in full."
    )
    return parser.parse_args()


def _one_line(text: str) -> str:
    """The error itself: the last line that is not torch's advice to run the test."""
    lines = text.partition("\nTo execute this test")[0].strip().splitlines()
    return f"{lines[0]} ... {lines[-1]}" if len(lines) > 1 else "".join(lines)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    suite = Suite(options.hosts)
    names = suite.names()
    unknown = sorted({*options.names, *EXPECTED_FAILURES} - set(names))
    if unknown:
        print(f"torch has no test named {', '.join(unknown)}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for name in options.names or names:
        outcome = suite.run(name)
        difference = surprise(name, outcome)
        if outcome.kind == "failed" and not difference:
            counts["expected"] += 1
        else:
            counts["failed" if difference else outcome.kind] += 1
        if options.verbose:
            print(f"{name}: {outcome.kind} {outcome.text}", flush=True)
        elif difference:
            print(f"{name}: {_one_line(difference)}", flush=True)
    cpu = sum(os.times()[:4])
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, "
        f"{counts['expected']} failed as expected ({cpu:.0f} s of CPU time)"
    )
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
