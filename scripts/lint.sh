#!/usr/bin/env bash
# Every static check. Prints one line a check; the first failure ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
# The build of all tests, for the address sanitizer, is also the one that looks for warnings; it runs beside the rest.
scripts/native-test.sh --build address >build/lint-native.log 2>&1 & native=$!
trap wait EXIT
echo "lint: ruff";          $bin/ruff check --quiet .; $bin/ruff format --check --quiet .
echo "lint: clang-format";  git ls-files native | grep -E "\.([ch]pp|inl)$" | xargs $bin/clang-format --dry-run -Werror
echo "lint: sizes";         $bin/python scripts/sizes.py
echo "lint: prose";         $bin/python scripts/prose.py
echo "lint: includes";      $bin/python scripts/includes.py
echo "lint: circles";       $bin/python scripts/circles.py
echo "lint: docs";          scripts/site.sh --check
echo "lint: mypy --strict"; $bin/mypy --no-error-summary
echo "lint: imports";       $bin/lint-imports --no-cache >build/lint-imports.log || { cat build/lint-imports.log; exit 1; }
echo "lint: C++ warnings"
wait "$native" || { tail -n 40 build/lint-native.log; exit 1; }
echo "lint: ok"
