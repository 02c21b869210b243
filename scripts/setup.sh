#!/usr/bin/env bash
# Brings the checkout to a working state: .venv, dependencies by constraints.txt, the native module. Does nothing when
# a stamp named by the hash of the build files is there. `--test-packages` adds what else `make test` needs, from Debian;
# `--all-test-packages` what `make test-all` does: services, and Lightning, transformers, scikit-learn, torchft,
# Triton, pandas, polars, DuckDB and datasets in an environment of their own; `--fuzz-packages` clang for `make fuzz`.
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/setup.log
mkdir -p build

need() {  # need COMMAND PACKAGE: one line and the install command when a tool is missing
  command -v "$1" >/dev/null || { echo "setup: '$1' is missing: apt-get install $2" >&2; exit 1; }
}

stage() {  # stage NAME COMMAND...: one line with its seconds; the log's end on failure
  local name=$1 start=$EPOCHREALTIME; shift
  if ! "$@" >>"$log" 2>&1; then
    echo "setup: $name failed; the end of $log:" >&2
    tail -n 25 "$log" >&2
    exit 1
  fi
  printf 'setup: %-24s %5.1f s\n' "$name" "$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN{print b-a}')"
}

apt_install() {
  local apt=(apt-get -o DPkg::Lock::Timeout=180)
  "${apt[@]}" update -q && "${apt[@]}" install -y -q --no-install-recommends "$@"
}
try_apt_install() { apt_install "$@" || echo "setup: $* cannot be installed: what needs it is left out"; }

try_install_postgresql() {  # without the cluster that Debian would make and start
  mkdir -p /etc/postgresql-common/createcluster.d
  echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/fireflyer.conf
  try_apt_install postgresql
}

callback_names="lightning transformers accelerate scikit-learn torchft-nightly triton pandas polars duckdb datasets"
callback_packages() {  # into build/callbacks, which sees what .venv has and is seen by nothing; leaves $1 as a mark
  local at=build/callbacks python=.venv/bin/python site
  local pip=("$python" -m pip --disable-pip-version-check --python "$at/bin/python" install --no-compile)
  rm -rf "$at"
  "$python" -m venv --without-pip "$at" &&
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') &&
    echo "import site; site.addsitedir('$site')" >"$at/${site#*/.venv/}/venv.pth" &&
    "${pip[@]}" -c constraints.txt $callback_names && touch "$1" && return
  rm -rf "$at"
  echo "setup: Lightning, transformers, scikit-learn, torchft, Triton, pandas, polars, DuckDB and datasets cannot be installed: the tests that need them are skipped"
}

if [[ ${1:-} = --*-packages ]]; then
  if [ "$1" = --all-test-packages ]; then
    peers=build/callbacks/.of-$( { cat constraints.txt; echo "$callback_names"; } | sha256sum | cut -c1-16)
    [ -e "$peers" ] || stage "Lightning, torchft, ..." callback_packages "$peers"
  fi
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
  if [ "$1" = --fuzz-packages ]; then
    stage "clang" try_apt_install clang libclang-rt-dev llvm
    exit 0
  fi
  command -v ip >/dev/null && command -v tc >/dev/null || stage "Debian packages" apt_install iproute2
  [[ $(ldconfig -p) = *libucp.so.0* ]] || stage "UCX" try_apt_install libucx0
  if [ ! -e /usr/include/fuse3/fuse_lowlevel.h ]; then  # the module is built again, with the mount
    stage "libfuse3" try_apt_install libfuse3-dev fuse3
    [ ! -e /usr/include/fuse3/fuse_lowlevel.h ] || { rm -f .venv/.setup-*; scripts/setup.sh; }
  fi
  [ "$1" = --all-test-packages ] || exit 0
  compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || stage "PostgreSQL" try_install_postgresql
  [ -x /usr/bin/chromedriver ] || stage "Chromium" try_apt_install chromium chromium-driver fonts-dejavu-core
  [ -x /usr/sbin/slurmctld ] || stage "Slurm" try_apt_install slurmctld slurmd slurm-client munge
  exit 0
fi

python=${PYTHON:-python3}
need "$python" "python3 python3-venv python3-dev"
need c++ g++
need make make
"$python" - <<'E2' || exit 1
import sys, sysconfig, pathlib, importlib.util
if sys.version_info < (3, 11):
    sys.exit(f"setup: Python {sys.version.split()[0]} is too old: 3.11 or newer is needed (set PYTHON=...)")
if importlib.util.find_spec("ensurepip") is None:
    sys.exit("setup: Python's venv is missing: apt-get install python3-venv")
if not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists():
    sys.exit("setup: Python's headers are missing: apt-get install python3-dev")
E2

# The names of the packages, too: the editable install keeps a list of them.
hash=$( { cat pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh; find src -name __init__.py | LC_ALL=C sort; find native -type f | LC_ALL=C sort | xargs cat; } | sha256sum | cut -c1-16)
stamp=.venv/.setup-$hash
[ -e "$stamp" ] && exit 0
: >"$log"
pip=(.venv/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt)
[ -n "${TORCH_INDEX:-}" ] && pip+=(--extra-index-url "$TORCH_INDEX")


native_module() {
  local CMAKE_BUILD_PARALLEL_LEVEL; CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
  export CMAKE_BUILD_PARALLEL_LEVEL  # more jobs than cores get in each other's way
  log=build/setup-native.log
  : >"$log"
  stage "native module" "$@" "${pip[@]}" --no-build-isolation --no-deps -e .
}

byte_code() {  # of what the product and its tests import, a third of all that was installed
  env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX .venv/bin/python - <<'E2'
import alembic.command, fastapi.testclient, fsspec.implementations.local, hypothesis, jinja2, msgspec, numpy
import prometheus_client, psutil, psycopg, pyarrow.parquet, pytest, rich.progress, safetensors.torch, sqlalchemy.dialects.sqlite, sqlalchemy.orm
import tokenizers, typer, uvicorn, xdist.plugin, zstandard
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run
import torch.distributed.tensor.parallel, torch.utils.data
E2
}

deps=.venv/.deps-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
if [ -e "$deps" ]; then
  native_module
else
  [ -x .venv/bin/python ] || stage "virtual environment" "$python" -m venv .venv
  # cmake and ninja come from PyPI only where the system has none.
  tools=(scikit-build-core nanobind)
  command -v cmake >/dev/null || tools+=(cmake)
  command -v ninja >/dev/null || tools+=(ninja)
  stage "build tools" "${pip[@]}" "${tools[@]}"
  # The compiler takes what the downloads leave of the cores. It is a process group, which ends with this script.
  set -m
  native_module nice -n 3 & native=$!
  set +m
  trap 'kill -- -$native 2>/dev/null || true' EXIT
  wanted=$(.venv/bin/python - <<'E2'
import tomllib, pathlib
p = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = p["optional-dependencies"]
names = p["dependencies"] + [d for e in ("torch", "demo", "envpool", "parquet", "postgresql", "zstd", "docs", "dev") for d in extras[e]]
print("\n".join(n for n in names if not n.startswith("fireflyer[")))
E2
)
  mapfile -t wanted <<<"$wanted"
  stage "dependencies" "${pip[@]}" "${wanted[@]}"
  # Without it `import torch` takes 5 s wherever Python may not write.
  stage "byte code" byte_code
  rm -f .venv/.deps-*
  touch "$deps"
  wait "$native" || exit 1
  trap - EXIT
fi
rm -f .venv/.setup-*
touch "$stamp"
