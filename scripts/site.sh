#!/usr/bin/env bash
# The documentation site in build/site (`--to DIR`: in DIR). `--check` builds it without the Python reference, in
# seconds, for `make lint`; `--serve` shows it while pages change. A warning fails: a dead link or anchor, a page
# that the navigation lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=1
build() { .venv/bin/mkdocs build --strict --site-dir "$1" 2>&1 | sed '/^INFO/d'; }  # --quiet would hide warnings
case "${1:-}" in
  --check) SITE_REFERENCE=false build build/site-check ;;
  --serve) exec .venv/bin/mkdocs serve --watch README.md --watch ARCHITECTURE.md --watch src ;;
  --to) build "$2" ;;
  *) build build/site; echo "docs: build/site/index.html" ;;
esac
