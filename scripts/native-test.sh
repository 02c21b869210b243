#!/usr/bin/env bash
# Builds the C++ tests with a sanitizer and runs them: native-test.sh address|undefined|thread
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
san=${1:-address}
dir=build/native-test-$san
cmake -S . -B "$dir" -G Ninja -DFF_TESTS=ON -DFF_SANITIZE="$san" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$dir"
ctest --test-dir "$dir" --output-on-failure
