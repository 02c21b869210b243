"""`make sim-mutants`: takes one rule of the protocol away at a time; the simulator must notice each.

A mutant is a small replacement in one source file. Sources, simulator and native code are copied to a
scratch directory, where each mutant is made, built if it is native, simulated until a history fails,
and undone.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fs3.sim.mutation.mutations import MUTANTS, Mutant
from tests.fs3.sim.simulate import HISTORIES

ROOT = Path(__file__).resolve().parents[4]
SCRATCH = ROOT / "build" / "mutants"
COPIED = ("native", "src", "tests/fs3")
SUFFIXES = (".py", ".hpp", ".cpp", ".inl", ".json")
RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path[:0] = [{src!r}, {root!r}]
from tests.fs3.sim import simulate
sys.argv[1:] = "--first {first} --histories {histories} --jobs {jobs} --kind {kind}".split()
sys.exit(simulate.main())
"""


@dataclass(frozen=True)
class Outcome:
    """`family`: of the histories that caught it, "" where none did; `histories` ran until then."""

    mutant: Mutant
    family: str
    histories: int
    seconds: float
    said: str

    def __str__(self) -> str:
        family = self.family or "MISSED"
        return (
            f"{self.mutant.name:52} {self.histories:9} {family:11} {self.seconds:6.1f}  {self.said}"
        )


def copy_sources() -> None:
    """Brings the scratch directory up to date; what has not changed keeps its time, so builds are short."""
    sources = [ROOT / "CMakeLists.txt"]
    for name in COPIED:
        sources += [path for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES]
    wanted = {SCRATCH / path.relative_to(ROOT): path for path in sources}
    for name in COPIED:
        for old in (SCRATCH / name).rglob("*"):
            if old.suffix in SUFFIXES and old not in wanted:
                old.unlink()
    for copy, path in wanted.items():
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


def build() -> None:
    """The native module of the scratch sources, beside the Python ones."""
    at = SCRATCH / "build"
    if not (at / "build.ninja").exists():
        configure = [
            "cmake",
            "-S",
            SCRATCH,
            "-B",
            at,
            "-G",
            "Ninja",
            "-DSKBUILD=ON",
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        configure.append(f"-DPython_EXECUTABLE={sys.executable}")
        subprocess.run([str(part) for part in configure], check=True, capture_output=True)
    made = subprocess.run(
        ["cmake", "--build", str(at), "--target", "_native"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise SystemExit(made.stdout[-3000:])
    for module in at.glob("_native*.so"):
        shutil.copy(module, SCRATCH / "src" / "fireflyer" / module.name)


def simulate(kind: str, histories: int, jobs: int) -> tuple[bool, int, str]:
    """Whether a history failed that passes without the mutant, how many ran until then, and what was
    said of it."""
    root, src = str(SCRATCH), str(SCRATCH / "src")
    first = 1
    while first <= histories:
        script = RUN.format(
            src=src, root=root, first=first, histories=histories + 1 - first, jobs=jobs, kind=kind
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            cwd=SCRATCH,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"the simulator ended with {done.returncode}: {done.stderr[-2000:]}")
        said = re.search(r"^seed (\d+)[^:]*: (.*)$", done.stdout, re.MULTILINE)
        if not said:
            break
        seed = int(said[1])
        if HISTORIES[kind](seed).error:
            print(f"{kind} history {seed} fails without any mutant", flush=True)
            first = seed + 1
        else:
            return True, seed, said[2][:70]
    return False, histories, ""


def try_mutant(mutant: Mutant, histories: int, jobs: int) -> Outcome:
    """First against the families of faults that suit it, then against all."""
    path = SCRATCH / mutant.file
    sane = path.read_text()
    if sane.count(mutant.old) != 1:
        raise SystemExit(
            f"mutant {mutant.name}: its text occurs {sane.count(mutant.old)} times in {mutant.file}"
        )
    path.write_text(sane.replace(mutant.old, mutant.new))
    try:
        if mutant.file.startswith("native/"):
            build()
        began, total = time.monotonic(), 0
        for kind in (*mutant.suited, "meta" if mutant.suited == ("meta",) else "chunks"):
            caught, ran, said = simulate(kind, histories, jobs)
            total += ran
            if caught:
                return Outcome(mutant, kind, total, time.monotonic() - began, said)
        return Outcome(mutant, "", total, time.monotonic() - began, "")
    finally:
        path.write_text(sane)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim-mutants")
    parser.add_argument("--histories", type=int, default=400, help="of each family")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", help="a word of the names of mutants")
    arguments = parser.parse_args()
    copy_sources()
    build()
    print(f"{'mutant':52} {'histories':>9} {'family':11} {'s':>6}  what was said")
    outcomes = []
    for mutant in MUTANTS:
        if arguments.only and not any(word in mutant.name for word in arguments.only):
            continue
        outcomes.append(try_mutant(mutant, arguments.histories, arguments.jobs))
        print(outcomes[-1], flush=True)
    caught = sum(outcome.family != "" for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} mutants caught")
    return 0 if caught >= 0.95 * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
