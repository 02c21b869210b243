"""`python -m tests.kv.sim.mutants`: takes one rule of the protocol away at a time; a history must fail.

A mutant is a replacement in the source of one module of the core, made while it is imported, in a
process of its own. Prints the number of histories until the first failure.
"""

import argparse
import importlib.abc
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

CORE = "fireflyer.kv.core."
HISTORIES = 500


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in the module; without the rule it is `new`."""

    name: str
    module: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "an object of another writer counts as own",
        "manifest",
        "return bool(found == data)",
        "return found is not None",
    ),
    Mutant(
        "a full disk after a lost answer means that nothing was written",
        "manifest",
        "if not unknown:\n",
        "if True:\n",
    ),
    Mutant(
        "a lost answer means that nothing was written",
        "manifest",
        "            unknown = True\n",
        "            raise NoSpace('lost') from None\n",
    ),
    Mutant(
        "a take-over keeps the epoch", "writer", "epoch=base.epoch + 1", "epoch=max(1, base.epoch)"
    ),
    Mutant(
        "a take-over publishes no manifest",
        "writer",
        "            if (yield from publish(mine)):\n                self.manifest = mine\n  "
        "              return\n",
        "            self.manifest = mine if not found else found\n            if found or"
        " (yield from publish(mine)):\n                return\n",
    ),
    Mutant(
        "a batch is acknowledged without a look at the manifests",
        "writer",
        "            raise stale(self.epoch, self.epoch + 1)\n        yield from"
        " self._check_current()\n        self._apply",
        "            raise stale(self.epoch, self.epoch + 1)\n        self._apply",
    ),
    Mutant(
        "no fence is written",
        "writer",
        "if (yield from create_own(log_name(number), fence)):",
        "if fence:",
    ),
    Mutant(
        "any highest manifest is own",
        "writer",
        "if found is None or found.writer != self.identity:",
        "if found is None:",
    ),
    Mutant(
        "a writer fences behind a newer one", "writer", "if frame.epoch > self.epoch:", "if False:"
    ),
    Mutant(
        "a log object counts as flushed before it is", "writer", "flushed=log,", "flushed=log + 1,"
    ),
    Mutant(
        "the sequence of a flush is not kept",
        "writer",
        "flushed=log, sequence=sequence)",
        "flushed=log)",
    ),
    Mutant(
        "a frozen memtable claims the next log object",
        "writer",
        "self.next_log - 1, self.sequence)",
        "self.next_log, self.sequence)",
    ),
    Mutant(
        "conditions ignore the batches before them",
        "writer",
        "pending[key] if key in pending else (yield from self.get(key, now))",
        "(yield from self.get(key, now))",
    ),
    Mutant(
        "a batch is applied although its condition failed",
        "writer",
        "            if batch.applied:\n                parts",
        "            if True:\n                parts",
    ),
    Mutant("every merge drops deletions", "writer", "bottom = count == len(runs)", "bottom = True"),
    Mutant(
        "every flush drops deletions", "writer", "bottom = not self.manifest.runs", "bottom = True"
    ),
    Mutant(
        "a merged run becomes the newest",
        "writer",
        "runs=kept[0] + ((run,) if run else ()) + kept[1]",
        "runs=((run,) if run else ()) + kept[0] + kept[1]",
    ),
    Mutant(
        "a flushed run becomes the oldest",
        "writer",
        "runs = ((run,) if run else ()) + base.runs",
        "runs = base.runs + ((run,) if run else ())",
    ),
    Mutant(
        "two publications of a writer race", "writer", "while self._publishing:", "while False:"
    ),
    Mutant(
        "a missing log object is skipped",
        "writer",
        "                if data is None:\n                    raise Corrupted(\n",
        "                if data is None and number < 0:\n                    raise Corrupted(\n",
    ),
    Mutant(
        "the view forgets frozen memtables",
        "writer",
        "[self.memtable, *(memtable for memtable, _, _ in reversed(self.frozen))]",
        "[self.memtable]",
    ),
    Mutant(
        "frozen memtables are looked up oldest first",
        "writer",
        "for memtable, _, _ in reversed(self.frozen))",
        "for memtable, _, _ in self.frozen)",
    ),
    Mutant(
        "the boundary covers the manifest itself",
        "writer",
        "boundary=base.number, feed",
        "boundary=base.number + 2, feed",
    ),
    Mutant(
        "pins are not read",
        "collect",
        "kept = {pin.manifest for pin in pins.values()} | set(local)",
        "kept = set(local)",
    ),
    Mutant(
        "tables in flight are collected",
        "collect",
        "tables = base.tables() | in_flight",
        "tables = base.tables()",
    ),
    Mutant(
        "a replaced writer collects",
        "collect",
        "if newest is None or newest.writer != writer.identity:",
        "if newest is None:",
    ),
    Mutant(
        "tables of later epochs are collected by a replaced writer",
        "collect",
        "if newest is None or newest.writer != writer.identity:\n        raise"
        " stale(writer.epoch, newest.epoch if newest else 0)\n",
        "writer.manifest = msgspec.structs.replace(writer.manifest, epoch=1 << 30) if newest"
        " and newest.epoch > writer.epoch else writer.manifest\n",
    ),
    Mutant(
        "log objects are collected before they are flushed",
        "collect",
        "feed = min(manifest.feed for manifest in live)",
        "feed = writer.next_log",
    ),
    Mutant(
        "tables of other live manifests are collected",
        "collect",
        "tables |= found.tables()",
        "pass",
    ),
    Mutant(
        "manifests from the boundary on are collected",
        "collect",
        "        if number < base.boundary and number not in kept:\n            yield Delete",
        "        if number <= base.number:\n            yield Delete",
    ),
    Mutant(
        "pinned manifests are collected",
        "collect",
        "        if number < base.boundary and number not in kept:\n            yield Delete",
        "        if number < base.boundary:\n            yield Delete",
    ),
    Mutant(
        "a pin does not look at the boundary",
        "pins",
        "newest.boundary <= manifest.number",
        "newest.boundary > 0",
    ),
    Mutant("a pin dies at once", "pins", "if now - since > pin.seconds:", "if now - since >= 0.0:"),
    Mutant(
        "a reader takes collected log objects over",
        "reader",
        "covered = newest.flushed >= begin",
        "covered = False",
    ),
    Mutant(
        "a reader does not skip what was flushed",
        "reader",
        "if newest.flushed >= self.next_log:",
        "if False:",
    ),
    Mutant(
        "a reader applies log objects twice",
        "reader",
        "if frame.number == self.next_log:",
        "if True:",
    ),
    Mutant(
        "a reader forgets its full memtables", "reader", "if end > newest.flushed]", "if end < 0]"
    ),
    Mutant(
        "a reader goes back to an older manifest",
        "reader",
        "if newest.number > self.manifest.number:",
        "if newest.number >= self.manifest.number - 3:",
    ),
    Mutant(
        "a reader does not look for newer manifests",
        "reader",
        "if max(present, default=0) > newest.number:",
        "if max(present, default=0) > 1 << 40:",
    ),
    Mutant(
        "a feed goes on behind collected operations",
        "feed",
        "if frame.sequence > self.after + 1:",
        "if False:",
    ),
    Mutant(
        "a feed reads log objects that were collected",
        "feed",
        "if newest.feed > self._next:",
        "if False:",
    ),
    Mutant(
        "a feed repeats what it told",
        "feed",
        "if sequence > self.after\n",
        "if sequence >= self.after\n",
    ),
)


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a replacement in its source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != CORE + self.mutant.module or path is None:
            return None
        self.file = next(
            p for each in path if (p := Path(each) / f"{self.mutant.module}.py").exists()
        )
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        source = self.file.read_text()
        assert source.count(self.mutant.old) == 1, f"{self.mutant.name}: its text is not unique"
        exec(
            compile(source.replace(self.mutant.old, self.mutant.new), str(self.file), "exec"),
            vars(module),
        )


def histories_until(mutant: Mutant, first: int, count: int) -> tuple[int, str]:
    """Runs histories in this process; returns the number of the first that fails (0: none) and why."""
    sys.meta_path.insert(0, _Loader(mutant))
    from tests.kv.sim.history import history

    for number in range(1, count + 1):
        try:
            error, _, _ = history(first + number)
        except Exception as failure:  # noqa: BLE001  # a mutant may break anything
            error = f"{type(failure).__name__}: {failure}"
        if error:
            return number, error
    return 0, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kv.sim.mutants")
    parser.add_argument("--only", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--histories", type=int, default=HISTORIES)
    chosen = parser.parse_args()
    if chosen.only is not None:
        number, error = histories_until(MUTANTS[chosen.only], chosen.first, chosen.histories)
        print(
            f"{MUTANTS[chosen.only].name:66} {number or 'MISSED':>7}  {' '.join(error.split())[:90]}"
        )
        return 0 if number else 1
    caught = 0
    for index in range(len(MUTANTS)):
        command = [sys.executable, "-m", "tests.kv.sim.mutants", "--only", str(index)]
        command += ["--first", str(chosen.first), "--histories", str(chosen.histories)]
        caught += subprocess.run(command, check=False).returncode == 0
    print(f"{caught} of {len(MUTANTS)} caught")
    return 0 if caught >= 0.9 * len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
