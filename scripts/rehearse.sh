#!/usr/bin/env bash
# Does what CI does to HEAD: a fresh clone, a fresh environment, no compiler cache. Passed: build/rehearsed holds the
# commit's hash.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse HEAD)
[ -z "$(git status --porcelain)" ] || echo "rehearse: what is not committed does not take part" >&2
folder=$(mktemp -d)
chmod 755 "$folder"  # tests run commands as another user
trap 'rm -rf "$folder"' EXIT
git clone --quiet --no-hardlinks . "$folder/clone"
git -C "$folder/clone" checkout --quiet "$commit"
rm -f build/rehearsed
began=$SECONDS
env -u FIREFLYER_TEST_RUN CI=true CCACHE_DISABLE=1 bash "$folder/clone/.ci/run" </dev/null
echo "rehearse: $commit passed in $((SECONDS - began)) s"
mkdir -p build
echo "$commit" >build/rehearsed
