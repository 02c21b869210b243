#!/usr/bin/env bash
# Builds the C++ tests with a sanitizer and runs them: native-test.sh address|thread (address includes undefined).
# `--build address|thread [CMAKE OPTIONS]` builds them alone; the options stay in force in that build.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
run=1
[ "${1:-}" = --build ] && run=0 && shift
san=${1:-address}
dir=build/native-test-$san
mkdir -p build
exec {lock}>"$dir.lock" && flock "$lock"  # one build at a time
[ "$san" = address ] && san=address,undefined
cmake -S . -B "$dir" -G Ninja -DFF_TESTS=ON -DFF_SANITIZE="$san" -DCMAKE_BUILD_TYPE=RelWithDebInfo "${@:2}" >/dev/null
cmake --build "$dir"
[ "$run" = 0 ] && exit 0
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ctest --test-dir "$dir" --output-on-failure -j "$(nproc)"
