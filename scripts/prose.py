"""Fails where a docstring or comment breaks a rule of language that a program can check.

A docstring, also a binding's (in its stub), and a block of C++ comments begin with a verb or a noun.
Processes, ranks and nodes are things, not persons.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

OPENINGS = re.compile(
    r"(What|Who|Whose|Whether|Of|How|Where|When|That|Which|So many|So much|Those)\b"
)
PERSONS = re.compile(r"\b(whoever|somebody|nobody|whom|he|she|him|his|hers)\b", re.IGNORECASE)
NATIVE = (".hpp", ".cpp", ".inl")
NATIVE_COMMENT = re.compile(r"(?:^|[\s;{}])//[ /!]*(.*)$")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the strings below attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip()


def persons(text: str, place: str) -> Iterator[str]:
    for person in PERSONS.finditer(text):
        yield f"{place}: {person[0]!r}: name the process, rank, node or user"


def python_findings(path: Path) -> Iterator[str]:
    text = path.read_text()
    for line, found in docstrings(ast.parse(text)):
        if opening := OPENINGS.match(found):
            yield f"{path}:{line}: a docstring opens with {opening[0]!r}: begin with a verb or a noun"
        yield from persons(found, f"{path}:{line}")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from persons(token.string, f"{path}:{token.start[0]}")


def native_findings(path: Path) -> Iterator[str]:
    continues = False  # the line before is a comment
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if comment := NATIVE_COMMENT.search(line):
            yield from persons(comment[1], f"{path}:{number}")
        starts = line.lstrip().startswith("//")
        if comment and starts and not continues and (opening := OPENINGS.match(comment[1])):
            yield f"{path}:{number}: a comment opens with {opening[0]!r}: begin with a verb or a noun"
        continues = starts


def main() -> int:
    found: list[str] = []
    for path in sorted([*Path("src").rglob("*.py"), *Path("src").rglob("*.pyi")]):
        found += python_findings(path)
    for path in sorted(path for path in Path("native").rglob("*") if path.suffix in NATIVE):
        found += native_findings(path)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
