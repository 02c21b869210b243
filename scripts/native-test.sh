#!/usr/bin/env bash
# Builds the C++ tests with a sanitizer and runs those whose programs changed since they last passed:
#     native-test.sh address|thread                           address includes undefined;
#                                                             thread leaves out tests that start no thread
#     native-test.sh --build address|thread                   builds them alone; a warning is an error in any case
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
goal=results
case ${1:-} in --build) goal=build; shift ;; esac
san=${1:-address}
dir=build/native-test-$san
mkdir -p build
exec {lock}>"$dir.lock" && flock "$lock"  # one build at a time
[ "$san" = address ] && san=address,undefined
cmake -S . -B "$dir" -G Ninja -DFF_TESTS=ON -DFF_SANITIZE="$san" -DFF_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$dir"
[ "$goal" = build ] && exit 0
cmake --build "$dir" --target check --parallel "$(nproc)"
cd "$dir"
failed=0
mapfile -t checks <checks
for status in "${checks[@]}"; do
  name=${status%.status}
  case $(cat "$status") in
    0) ;;
    77) echo "skipped: $name: $(tail -n 1 "$name.out")" ;;  # what the kernel forbids here
    *) echo "FAILED: $name"; tail -n 60 "$name.out"; rm "$status"; failed=1 ;;  # it runs again next time
  esac
done
[ "$failed" = 0 ] && echo "all ${#checks[@]} tests passed"
