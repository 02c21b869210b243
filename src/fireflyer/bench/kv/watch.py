"""Process that reads a store: `python -m fireflyer.bench.kv.watch URL`.

For each new value of the key "seen" it prints the value and the monotonic time at which it read the
value.
"""

import sys
import time

from fireflyer import kv


def main() -> None:
    with kv.open(sys.argv[1]) as store:
        sys.stdout.write("ready 0\n")
        sys.stdout.flush()
        last: bytes | None = store.get(b"seen")
        while last != b"end":
            found = store.get(b"seen")
            if found is not None and found != last:
                last = found
                sys.stdout.write(f"{found.decode()} {time.monotonic()}\n")
                sys.stdout.flush()
            time.sleep(0.0005)


if __name__ == "__main__":
    main()
