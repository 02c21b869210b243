#!/usr/bin/env bash
# Writes the type stubs of the built native module to a folder (default: the committed one).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-src/fireflyer/_native}
# One line a module: its name, and the file of its stub under $out. A module with others in it is a folder.
.venv/bin/python - <<'END' | while read -r module file; do
import types
import fireflyer._native

def show(module: types.ModuleType, path: str) -> None:
    below = [value for value in vars(module).values() if isinstance(value, types.ModuleType)]
    print(module.__name__, f"{path}/__init__.pyi" if below else f"{path}.pyi")
    for each in below:
        show(each, f"{path}/{each.__name__.rpartition('.')[2]}")

show(fireflyer._native, ".")
END
  mkdir -p "$(dirname "$out/$file")"
  .venv/bin/python -m nanobind.stubgen -q -m "$module" -o "$out/$file"
done
