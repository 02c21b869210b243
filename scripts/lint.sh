#!/usr/bin/env bash
# Every static check. Prints one line a check; the first failure ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
echo "lint: ruff";          $bin/ruff check --quiet .; $bin/ruff format --check --quiet .
echo "lint: sizes";         $bin/python scripts/sizes.py
echo "lint: mypy --strict"; $bin/mypy --no-error-summary
echo "lint: imports";       $bin/lint-imports --no-cache >build/lint-imports.log || { cat build/lint-imports.log; exit 1; }
echo "lint: C++ warnings"
export PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B build/lint -G Ninja -DFF_WERROR=ON -DFF_TESTS=ON -DCMAKE_BUILD_TYPE=Release >build/lint-cmake.log
cmake --build build/lint >>build/lint-cmake.log || { tail -n 40 build/lint-cmake.log; exit 1; }
echo "lint: ok"
