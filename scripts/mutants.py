"""`make mutants PART=hfreduce`: change one line of a part at a time; its tests must fail each time.

A seed draws the lines and the changes. The checkout is copied to build/line-mutants, where each mutant
is made, built if it is native, tested until the first failure, and undone. The tests must pass there without
a mutant. Exits with 1 if a mutant survives.
"""

import argparse
import ast
import contextlib
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = {"venv", "native-build", "__pycache__"}
"""What is made in the copy and is no copy."""
SKIPPED = re.compile(r"(_test|_fuzz|/bind)\.cpp$|/__init__\.py$")
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
NATIVE = [  # pattern, replacement; spaces keep templates and pointers out
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ 1\b", " - 1"),
    (r" - 1\b", " + 1"),
    (r" \+= ", " -= "),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"\bstd::min\(", "std::max("),
    (r"\bstd::max\(", "std::min("),
    (r"\bif \(!", "if ("),
    (r"^( +)[\w.>-]+\([^;{}]*\);$", r"\1;"),
]


@dataclass(frozen=True)
class Mutant:
    """Line `line` of `path`, relative to the checkout, becomes `text`."""

    path: str
    line: int
    text: str

    def apply(self, tree: Path) -> str:
        """Changes the file in `tree`; returns its text from before."""
        file = tree / self.path
        sane = file.read_text()
        lines = sane.splitlines(keepends=True)
        lines[self.line - 1] = self.text + "\n"
        file.write_text("".join(lines))
        return sane


# -- which mutants there are -----------------------------------------------------------------------


def _between(line: str, left: ast.expr, right: ast.expr, new: str) -> str | None:
    """The line with the operator between two operands replaced; None where they are on several lines."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return None
    raw = line.encode()
    between = raw[left.end_col_offset : right.col_offset].decode()
    closing = between[: len(between) - len(between.lstrip(") "))]
    opening = between[len(between.rstrip("( ")) :]
    whole = raw[: left.end_col_offset].decode() + closing + new + opening
    return whole + raw[right.col_offset :].decode()


def _span(line: str, node: ast.expr | ast.stmt, new: str) -> str | None:
    if node.lineno != node.end_lineno:
        return None
    raw = line.encode()
    return raw[: node.col_offset].decode() + new + raw[node.end_col_offset :].decode()


def _changed(node: ast.AST, line: str) -> str | None:
    """The line with this node of it changed; None: no change for such a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            return _between(line, left, right, COMPARISONS[type(op)])
        case ast.BoolOp(op=op, values=[left, right]):
            return _between(line, left, right, "or" if isinstance(op, ast.And) else "and")
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            if any(isinstance(o, ast.Constant) and isinstance(o.value, str) for o in (left, right)):
                return None
            return _between(line, left, right, "-" if isinstance(op, ast.Add) else "+")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _span(line, node, ast.unparse(operand))
        case ast.Constant(value=bool() as value):
            return _span(line, node, str(not value))
        case ast.Constant(value=int() as value):
            return _span(line, node, str(value + 1))
        case ast.Call(func=ast.Name(id="min" | "max" as name)) if node.lineno == node.func.lineno:
            return _span(line, node.func, "max" if name == "min" else "min")
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return _span(line, node, "pass")
    return None


def _behaviour(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes inside functions, but for annotations, strings, messages of errors and the log."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.arguments | ast.Assert):
            continue
        if isinstance(node, ast.Expr) and re.match(r"(_?log|logger)\.", ast.unparse(node)):
            continue
        if inside:
            yield node
        fields = dict(ast.iter_fields(node))
        fields.pop("annotation", None)
        fields.pop("returns", None)
        fields.pop("decorator_list", None)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for value in fields.values():
            below = value if isinstance(value, list) else [value]
            todo += [(each, inside) for each in below if isinstance(each, ast.AST)]


def _python(path: str, text: str) -> Iterator[Mutant]:
    lines = text.splitlines()
    for node in _behaviour(ast.parse(text)):
        number = getattr(node, "lineno", 0)
        if number and (new := _changed(node, lines[number - 1])) not in (None, lines[number - 1]):
            assert new is not None
            yield Mutant(path, number, new)


def _native(path: str, text: str) -> Iterator[Mutant]:
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("//")[0].rstrip()
        if code.lstrip().startswith(("#", "*", "/*", "static_assert", "template")) or '"' in code:
            continue
        for pattern, replacement in NATIVE:
            if (new := re.sub(pattern, replacement, code, count=1)) != code:
                yield Mutant(path, number, new)


def parts(root: Path) -> list[str]:
    """Folders of sources that have tests of the same name."""
    tests = root / "tests"
    folders = [*(root / "src" / "fireflyer").iterdir(), *(root / "native").iterdir()]
    names = {folder.name for folder in folders if not folder.name.startswith("_")}
    return sorted(name for name in names if (tests / name).is_dir())


def mutants_of(part: str, root: Path) -> list[Mutant]:
    """All mutants of a part, in the order of its files and lines."""
    found: list[Mutant] = []
    for folder, suffixes in (
        (f"src/fireflyer/{part}", (".py",)),
        (f"native/{part}", (".cpp", ".hpp")),
    ):
        for file in sorted((root / folder).rglob("*")):
            name = str(file.relative_to(root))
            if file.suffix in suffixes and not SKIPPED.search(name):
                kind = _python if file.suffix == ".py" else _native
                found += sorted(set(kind(name, file.read_text())), key=lambda m: (m.line, m.text))
    return found


# -- what becomes of them --------------------------------------------------------------------------


class Scratch:
    """A copy of the checkout with a build and an interpreter of its own."""

    def __init__(self, root: Path, place: Path) -> None:
        self.tree = place
        self._python = place / "venv" / "bin" / "python"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
        place.mkdir(parents=True, exist_ok=True)
        self._hold()
        listed_names = set(filter(None, names.split("\0")))
        self._remove_others(listed_names)
        for name in sorted(listed_names):
            source, copy = root / name, place / name
            if source.is_file() and not (
                copy.exists() and copy.read_bytes() == source.read_bytes()
            ):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy)
        if not self._python.exists():
            self._make_interpreter()
        self.build()

    def _hold(self) -> None:
        """Keeps other runs away from the copy until this process ends."""
        self._lock = (self.tree / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run uses {self.tree}: wait for it, or give --tree another checkout")

    def _remove_others(self, names: set[str]) -> None:
        """Removes files of the copy that the checkout no longer has."""
        for folder, below, files in os.walk(self.tree):
            below[:] = [each for each in below if each not in KEPT]
            for file in (Path(folder, each) for each in files):
                made = file.suffix == ".so" or file.name == ".lock"
                if not made and str(file.relative_to(self.tree)) not in names:
                    file.unlink()

    def _make_interpreter(self) -> None:
        """It sees the packages of this one, and the copy instead of what they know as ours."""
        venv = [sys.executable, "-m", "venv", "--without-pip", str(self.tree / "venv")]
        subprocess.run(venv, check=True)
        site = next(p for p in map(Path, sys.path) if p.name == "site-packages")
        inner = self.tree / "venv" / site.relative_to(sys.prefix)
        (inner / "copy.pth").write_text(
            f"import site, sys; site.addsitedir({str(site)!r}); "
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]; "
            f"sys.path.insert(0, {str(self.tree / 'src')!r})\n"
        )

    def build(self) -> bool:
        """Builds the native module beside the copied sources; False: the compiler refuses them."""
        at = self.tree / "native-build"
        if not (at / "build.ninja").exists():
            options = ["-DSKBUILD=ON", "-DCMAKE_BUILD_TYPE=Release"]
            options.append(f"-DPython_EXECUTABLE={sys.executable}")
            configure = ["cmake", "-S", str(self.tree), "-B", str(at), "-G", "Ninja", *options]
            subprocess.run(configure, check=True, capture_output=True)
        made = subprocess.run(
            ["cmake", "--build", at, "--target", "_native"], capture_output=True, check=False
        )
        if made.returncode:
            return False
        for module in at.glob("_native*.so"):
            shutil.copy(module, self.tree / "src" / "fireflyer" / module.name)
        return True

    def failing(self, part: str, limit_s: float, options: list[str]) -> str:
        """The first test of the part that fails, "timeout", or "" where all pass."""
        command = [
            str(self._python),
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
        ]
        run = subprocess.Popen(
            [*command, f"tests/{part}"],
            cwd=self.tree,
            env={**os.environ, "PATH": f"{self._python.parent}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        if run.returncode == 0:
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return failed[1] if failed else output.strip().splitlines()[-1] if output.strip() else "?"

    def check_sane(self, part: str, limit_s: float, options: list[str]) -> None:
        """Ends the run if the tests fail without a mutant: they would seem to catch each."""
        began = time.monotonic()
        if failing := self.failing(part, limit_s, options):
            sys.exit(f"tests/{part} does not pass without a mutant: {failing}")
        print(
            f"tests/{part} passes without a mutant ({time.monotonic() - began:.0f} s)", flush=True
        )


def draw(part: str, count: int, seed: int, scratch: Scratch) -> Iterator[tuple[Mutant, str]]:
    """So many mutants that compile, each with the text that its file has without it."""
    drawn = mutants_of(part, scratch.tree)
    random.Random(f"{part} {seed}").shuffle(drawn)
    for mutant in drawn:
        sane = mutant.apply(scratch.tree)
        try:
            if not mutant.path.startswith("native/") or scratch.build():
                count -= 1
                yield mutant, sane
        finally:
            (scratch.tree / mutant.path).write_text(sane)
            if mutant.path.startswith("native/"):
                scratch.build()
        if count == 0:
            return


def _arguments() -> argparse.Namespace:
    names = ", ".join(parts(ROOT))
    parser = argparse.ArgumentParser(
        prog="make mutants",
        description=__doc__,
        epilog=f"Parts: {names}. `make mutants` takes PART=, COUNT= and SEED=, and the options in ARGS=.",
    )
    parser.add_argument("part", help="a folder of src/fireflyer or native, and of tests")
    parser.add_argument("--count", type=int, default=12, help="how many mutants [12]")
    parser.add_argument("--seed", type=int, default=1, help="draws them [1]")
    parser.add_argument("--full", action="store_true", help="the tests of `make test-all`")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the tests [1800]")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout [this one]")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    arguments = parser.parse_args()
    if arguments.part not in parts(arguments.tree):
        parser.error(f"no part {arguments.part!r}: there are {names}")
    if arguments.full:
        arguments.options.append("--full")
    return arguments


def main() -> int:
    arguments = _arguments()
    scratch = Scratch(arguments.tree, arguments.tree / "build" / "line-mutants")
    scratch.check_sane(arguments.part, arguments.limit, arguments.options)
    tested, survivors = 0, []
    for mutant, sane in draw(arguments.part, arguments.count, arguments.seed, scratch):
        began = time.monotonic()
        failing = scratch.failing(arguments.part, arguments.limit, arguments.options)
        seconds = time.monotonic() - began
        old = sane.splitlines()[mutant.line - 1].strip()
        change = f"{mutant.path}:{mutant.line}: {old}  ->  {mutant.text.strip()}"
        print(f"{change}\n    {failing or 'SURVIVED'} ({seconds:.0f} s)", flush=True)
        tested += 1
        if not failing:
            survivors.append(change)
    fewer = "" if tested == arguments.count else f" (there are no {arguments.count})"
    print(f"{tested - len(survivors)} of {tested} mutants caught{fewer}")
    print("\n".join(["survivors:", *survivors] if survivors else ["no survivors"]))
    return 1 if survivors or not tested else 0


if __name__ == "__main__":
    sys.exit(main())
