#!/usr/bin/env bash
# Fuzzes the parsers of record files under address and undefined: fuzz.sh [SECONDS]. With libFuzzer where clang is.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
seconds=${1:-600}
dir=build/fuzz
options=(-DFF_TESTS=ON -DFF_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo)
run=("$dir/index_fuzz" "$seconds")
if command -v clang++ >/dev/null; then
  options+=(-DCMAKE_CXX_COMPILER=clang++ -DFF_LIBFUZZER=ON)
  mkdir -p "$dir/corpus"
  run=("$dir/index_fuzz" -max_total_time="$seconds" "$dir/corpus")
fi
cmake -S . -B "$dir" -G Ninja "${options[@]}" >/dev/null
cmake --build "$dir" --target index_fuzz
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "${run[@]}"
