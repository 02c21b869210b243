#!/usr/bin/env bash
# Writes the type stubs of the built native module to a folder (default: the committed one).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-src/fireflyer/_native}
mkdir -p "$out"
stubgen=(.venv/bin/python -m nanobind.stubgen -q)
"${stubgen[@]}" -m fireflyer._native -o "$out/__init__.pyi"
for part in $(.venv/bin/python -c 'import types, fireflyer._native as n
print(*(k for k, v in vars(n).items() if isinstance(v, types.ModuleType)))'); do
  "${stubgen[@]}" -m "fireflyer._native.$part" -o "$out/$part.pyi"
done
