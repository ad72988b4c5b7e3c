#!/bin/sh
# Builds the programs that tests run beside the product and never link, at pinned
# versions, into .deps/bin, and is quick and silent when they are there.
set -eu
cd "$(dirname "$0")/.."

# A service that speaks S3 over a directory: objectstore/s3 is tested against it.
module=github.com/versity/versitygw/cmd/versitygw
version=v1.8.0

bin=$PWD/.deps/bin
stamp=$bin/versitygw.version
there() { [ -x "$bin/versitygw" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; }
! there || exit 0

mkdir -p "$bin"
# Tests of several packages may find that it is missing at the same time.
if command -v flock >/dev/null 2>&1; then
    exec 9>"$bin/.lock"
    flock 9
    ! there || exit 0
fi
echo "tools: building versitygw $version (once; about a minute and a half of one core)" >&2
GOBIN=$bin GOFLAGS=-mod=mod CGO_ENABLED=0 "${GO:-go}" install "$module@$version"
echo "$version" >"$stamp"
