#!/bin/sh
# Generates Go code from api/proto. Usage: proto.sh [--check] OUT PLUGIN@VERSION...
# With --check it writes nothing and fails if OUT differs from what it would
# write. The plugins are installed, at exactly these versions, into .deps/bin.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
check=""
if [ "$1" = --check ]; then
    check=yes
    shift
fi
out=$1
shift

bin=$root/.deps/bin
mkdir -p "$bin"
for plugin in "$@"; do
    # A plugin is installed again when its pinned version changes.
    mark=$bin/.$(echo "$plugin" | tr '/' '_')
    if [ ! -e "$mark" ]; then
        echo "proto: installing $plugin"
        GOBIN=$bin "${GO:-go}" install "$plugin"
        : >"$mark"
    fi
done

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
PATH=$bin:$PATH protoc -I api/proto \
    --go_out="$tmp" --go_opt=module=github.com/keelstate/keelstate \
    --go-grpc_out="$tmp" --go-grpc_opt=module=github.com/keelstate/keelstate \
    api/proto/keelstate/v1/*.proto

if [ -z "$check" ]; then
    mkdir -p "$out"
    rm -f "$out"/*.pb.go
    cp "$tmp/$out"/*.pb.go "$out"/
    echo "proto: wrote $out"
    exit 0
fi

# The comment that names protoc's own version may differ, nothing else.
strip_version() { sed '/^\/\/ .*protoc  *v[0-9]/d' "$1"; }
bad=""
for f in "$tmp/$out"/*.pb.go "$out"/*.pb.go; do
    name=$(basename "$f")
    if ! [ -f "$out/$name" ] || ! [ -f "$tmp/$out/$name" ]; then
        echo "proto: $out/$name is missing or superfluous" >&2
        bad=yes
        continue
    fi
    strip_version "$out/$name" >"$tmp/have"
    strip_version "$tmp/$out/$name" >"$tmp/want"
    cmp -s "$tmp/have" "$tmp/want" || { echo "proto: $out/$name is out of date" >&2; bad=yes; }
done
[ -z "$bad" ] || { echo "proto: run make proto" >&2; exit 1; }
echo "proto: $out is up to date"
