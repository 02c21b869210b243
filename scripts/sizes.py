"""Fails where a file is longer than 600 lines or a Python function longer than 80."""

import ast
import subprocess
import sys
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 80
CODE = {".py", ".pyi", ".cpp", ".hpp", ".inl", ".sh"}


def findings(path: Path) -> list[str]:
    text = path.read_text()
    found = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{path}: {lines} lines (at most {FILE_LINES})")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    paths = [Path(name) for name in listed]
    found = [f for p in paths if p.suffix in CODE and p.is_file() for f in findings(p)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
