#!/usr/bin/env bash
# Builds the C++ tests with a sanitizer and runs them: native-test.sh address|thread (address includes undefined)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
san=${1:-address}
dir=build/native-test-$san
[ "$san" = address ] && san=address,undefined
cmake -S . -B "$dir" -G Ninja -DFF_TESTS=ON -DFF_SANITIZE="$san" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$dir"
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ctest --test-dir "$dir" --output-on-failure
