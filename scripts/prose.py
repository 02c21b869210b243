"""Fails where a docstring or comment breaks a rule of language that a program can check.

A docstring, also a binding's (in its stub), and a block of C++ comments begin with a verb or a noun.
The docstring of a function begins with no preposition, pronoun or determiner. A sentence has at most
30 words. Processes, ranks and nodes are things, not persons. Python has no phrase that hides its
subject ("as it was", "returns what ...") or that has a shorter form ("for ever", "any more").
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
FUNCTION_OPENINGS = re.compile(
    r"(As|At|By|For|From|In|On|To|With|Without|It|Its|This|These|They|There|Only|Not|Nothing|None|No"
    r"|Each|Every|All|Any|Another|Other|Both|If|Unless|Until|While|Because|After|Before|Like|Also"
    r"|Such|Then|Or|And|But|Here|Now|Never|Always)\b"
)
PERSONS = re.compile(r"\b(whoever|somebody|nobody|whom|he|she|him|his|hers)\b", re.IGNORECASE)
VAGUE = re.compile(
    r"\b(for ever|any more|again and again|goes on|says so"
    r"|(?<!soon )(?<!long )(?<!far )as (?:it|they) (?:is|are|was|were|has|had|does|did)"
    r"|(?:returns|records|reads|samples|releases|sends|writes|adds|tells|shows|yields|has|takes|gives"
    r"|keeps) what)\b",
    re.IGNORECASE,
)
MOST_WORDS = 30
WORD = re.compile(r"[A-Za-z][\w'-]+")
NATIVE = (".hpp", ".cpp", ".inl")
NATIVE_COMMENT = re.compile(r"(?:^|[\s;{}])//[ /!]*(.*)$")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Docstrings of modules, classes and functions, and the strings below attributes; True for the
    docstring of a function that is not a property."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, statement in enumerate(body if isinstance(body, list) else ()):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text, not place and _is_called(node)


def _is_called(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
        "property" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of a docstring, without tables and indented blocks."""
    lines = text.split("\n")
    margin = min((len(n) - len(n.lstrip()) for n in lines[1:] if n.strip()), default=0)
    found: list[str] = []
    for line in [" " * margin + lines[0], *lines[1:], ""]:
        words = line.strip()
        indented = len(line) - len(line.lstrip()) > margin
        if not words or indented or "   " in words or words[0] in "|*>-":
            if found:
                yield " ".join(found)
            found = []
        else:
            found.append(words)


def persons(text: str, place: str) -> Iterator[str]:
    for person in PERSONS.finditer(text):
        yield f"{place}: {person[0]!r}: name the process, rank, node or user"


def phrases(text: str, place: str) -> Iterator[str]:
    yield from persons(text, place)
    for vague in VAGUE.finditer(text):
        yield f"{place}: {' '.join(vague[0].split())!r}: name the subject, or use the field's term"


def sentences(paragraph: str, place: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.:;!?])\s", paragraph):
        count = len(WORD.findall(sentence))
        if count > MOST_WORDS:
            yield f"{place}: a sentence of {count} words, at most {MOST_WORDS}: {sentence[:60]!r}..."


def python_findings(path: Path) -> Iterator[str]:
    text = path.read_text()
    stub = path.suffix == ".pyi"  # generated from native code
    for line, found, called in docstrings(ast.parse(text)):
        place, start = f"{path}:{line}", found.strip()
        called = called and not stub
        if opening := OPENINGS.match(start) or (called and FUNCTION_OPENINGS.match(start)):
            yield f"{place}: a docstring opens with {opening[0]!r}: begin with a verb or a noun"
        yield from (persons if stub else phrases)(found, place)
        for paragraph in paragraphs(found):
            yield from sentences(paragraph, place)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from phrases(token.string, f"{path}:{token.start[0]}")


def native_findings(path: Path) -> Iterator[str]:
    block: list[str] = []  # lines of the comment so far
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        comment = NATIVE_COMMENT.search(line)
        place = f"{path}:{number}"
        if comment:
            yield from persons(comment[1], place)
        if comment and line.lstrip().startswith("//"):
            if not block and (opening := OPENINGS.match(comment[1])):
                yield f"{place}: a comment opens with {opening[0]!r}: begin with a verb or a noun"
            block.append(comment[1])
        else:
            for paragraph in paragraphs("\n".join(block)):
                yield from sentences(paragraph, f"{path}:{number - 1}")
            block = []


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
