"""Fail where the last whole run of a tier shows a part that costs 1.5 times its budget."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.plugins.costs import RECORD, recorded_over_budget


def main() -> int:
    found = recorded_over_budget()
    print("\n".join(found), end="\n" if found else "")
    if not RECORD.exists():
        print("no run of the tests is recorded yet: `make test` records one")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
