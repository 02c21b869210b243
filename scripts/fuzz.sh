#!/usr/bin/env bash
# Fuzzes what reads bytes from outside: fuzz.sh [SECONDS [native|python|ports]], half of the time each for the first two.
# native: record files, and frames of fs3's data connections, under address and undefined, by libFuzzer, or by the
# fuzzers' own driver where clang cannot be had. python: folders, rows, frames, remote indices, manifests, by atheris in
# an environment of its own. ports: FRAMES damaged frames (default 10^6, fewer for less than 20 minutes) on each port of a
# running file system. The corpora in build/fuzz stay.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
dir=build/fuzz
mkdir -p "$dir/native-corpus" "$dir/wire-corpus" "$dir/python-corpus"
seconds=${1:-1200}
parts=${2:-native python ports}
frames=${FRAMES:-$((seconds < 1200 ? seconds * 800 : 1000000))}
[ -z "${2:-}" ] && seconds=$((seconds / 2))

clang() {  # the newest compiler that links libFuzzer; none: nothing
  local name entry='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
  for name in clang++-{22..14} clang++; do
    command -v "$name" >/dev/null && "$name" -fsanitize=fuzzer,address,undefined -x c++ -o "$dir/probe" - <<<"$entry" 2>/dev/null &&
      echo "$name" && return
  done
  return 0
}

build() {  # build FOLDER OPTION...
  cmake -S . -B "$1" -G Ninja -DFF_TESTS=ON -DFF_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo "${@:2}" >/dev/null
  cmake --build "$1" --target index_fuzz wire_fuzz >"$1.log" || { tail -n 40 "$1.log" >&2; exit 1; }
}

fuzz() {  # fuzz NAME COMMAND...: runs libFuzzer; its figures, or what it found
  local name=$1; shift
  echo "fuzz: $name for $seconds s, log in $dir/$name.log"
  if ! "$@" -max_total_time="$seconds" -len_control=0 -artifact_prefix="$dir/$name-" -print_final_stats=1 \
      "$dir/$name-corpus" >"$dir/$name.log" 2>&1; then
    tail -n 60 "$dir/$name.log" >&2
    echo "fuzz: a finding; once more: ${*} FILE, where FILE is the artifact named above" >&2
    exit 1
  fi
  grep -oE 'cov: [0-9]+|stat::(number_of_executed_units|average_exec_per_sec):.*' "$dir/$name.log" | tail -n 3 |
    sed -E "s/^(stat::)?/fuzz: $name /"
}

native() {
  local half=$((seconds / 2)) compiler; compiler=$(clang)
  if [ -z "$compiler" ]; then
    scripts/setup.sh --fuzz-packages
    compiler=$(clang)
  fi
  export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
  if [ -z "$compiler" ]; then
    echo "fuzz: no clang with libFuzzer (apt-get install clang libclang-rt-dev llvm): native by its own driver for $((2 * half)) s"
    build "$dir/gcc"
    "$dir/gcc/index_fuzz" "$half"
    "$dir/gcc/wire_fuzz" "$half"
    return
  fi
  build "$dir/clang" -DCMAKE_CXX_COMPILER="$compiler" -DFF_LIBFUZZER=ON
  LLVM_PROFILE_FILE=$dir/native.profraw seconds=$half fuzz native "$dir/clang/index_fuzz" -max_len=65536
  LLVM_PROFILE_FILE=$dir/wire.profraw seconds=$half fuzz wire "$dir/clang/wire_fuzz" -max_len=16384
  local version=${compiler#clang++}
  command -v "llvm-cov$version" >/dev/null || return 0
  "llvm-profdata$version" merge -o "$dir/native.profdata" "$dir/native.profraw"
  "llvm-cov$version" report "$dir/clang/index_fuzz" -instr-profile="$dir/native.profdata" \
    native/ffrecord/format/{v1_file,v2_file,record_file}.cpp |
    awk 'NF == 13 && /cpp/ {print "fuzz: " $1 ": " $10 " of the lines, " $13 " of the branches reached"}'
}

python() {
  local venv=$dir/venv
  if ! "$venv/bin/python" -c 'import atheris' 2>/dev/null; then
    .venv/bin/python -m venv "$venv"
    "$venv/bin/pip" --disable-pip-version-check install -q atheris==3.0.0 2>"$dir/pip.log" ||
      { echo "fuzz: atheris cannot be installed, nothing was fuzzed in Python: $(tail -n 1 "$dir/pip.log")" >&2; exit 1; }
    # Ours and what it needs, seen from there; no package of the fuzzer gets into ours.
    "$venv/bin/python" - "$PWD/.venv" <<'E2'
import pathlib, sys, sysconfig
ours = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
there = pathlib.Path(sysconfig.get_path("purelib"), "checkout.pth")
there.write_text(f"import site; site.addsitedir({ours!r})\n")
E2
  fi
  OMP_NUM_THREADS=1 fuzz python "$venv/bin/python" -m tests.fuzz -max_len=4096
}

ports() {
  echo "fuzz: $frames damaged frames on each port of a file system"
  FIREFLYER_FUZZ_FRAMES=$frames OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q tests/fs3/test_fuzz.py
}

for part in $parts; do "$part"; done
