"""Find circles among the imports of `src/fireflyer`, also those in functions and under TYPE_CHECKING."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def modules(source: Path) -> dict[str, Path]:
    """Returns the file of each module by its name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(text: str, known: dict[str, Path]) -> Iterator[str]:
    """Yields the known modules that a module's text imports anywhere."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def circle(source: Path) -> list[str]:
    """Returns the modules of one circle, the first of them also last; empty: there is none."""
    known = modules(source)
    graph = {name: set(imported(path.read_text(), known)) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]  # each imports the next
    return []


if __name__ == "__main__":
    found = circle(SOURCE)
    if found:
        sys.exit("circle of imports: " + " -> ".join(found))
