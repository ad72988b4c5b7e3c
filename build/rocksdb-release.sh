#!/bin/sh
# Builds a release (no assertions) static librocksdb.a of the version that
# Debian packages, from Debian's source package, into .deps/rocksdb-release/.
# A stamp makes a second call return at once. About 9 minutes on 2 free cores.
#
# The source repository is derived from the package sources already configured
# on this machine; the system's own lists are neither edited nor refreshed.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
version=7.8.3
# Raise when the way of building changes, so that old results are not reused.
recipe=2
deps=$root/.deps
out=$deps/rocksdb-release
work=$deps/rocksdb-build
stamp=$out/stamp
want="rocksdb $version recipe $recipe"

if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
    echo "rocksdb-release: $out is up to date"
    exit 0
fi
say() { echo "rocksdb-release: $*"; }
fail() { say "$*" >&2; exit 1; }

"$root/build/deps.sh" dpkg-dev
mkdir -p "$work" "$out"

# source_options prints the "[option=value] " of the system's own entry for a
# repository: the key it is signed with, or that the owner trusts it unsigned.
source_options() {
    entry=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(SOURCESENTRY)' |
        awk -v uri="${1%/}/" -v suite="$2" '$1 == uri && $2 == suite {sub(/:[0-9]+$/, "", $3); print $3; exit}')
    [ -f "$entry" ] || return 0
    case $entry in
    *.sources)
        key=$(sed -n 's/^Signed-By: *\(\/.*\)$/\1/p' "$entry" | head -n 1)
        trusted=$(sed -n 's/^Trusted: *yes *$/yes/p' "$entry" | head -n 1)
        ;;
    *)
        key=$(grep -F "$1" "$entry" | sed -n 's/^deb .*signed-by=\([^] ]*\).*/\1/p' | head -n 1)
        trusted=$(grep -F "$1" "$entry" | sed -n 's/^deb \[.*trusted=\(yes\).*\].*/\1/p' | head -n 1)
        ;;
    esac
    [ -z "$key" ] || printf '[signed-by=%s] ' "$key"
    [ -n "$key" ] || [ -z "$trusted" ] || printf '[trusted=yes] '
}

# fetch_source leaves the unpacked source in $work/src.
fetch_source() {
    apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    # The repositories that offer librocksdb-dev, as "uri suite component".
    apt-cache madison librocksdb-dev | awk -F'|' '{print $3}' |
        awk '{split($2, a, "/"); print $1, a[1], a[2]}' | sort -u >"$apt/origins"
    [ -s "$apt/origins" ] || fail "no configured repository offers librocksdb-dev; run apt-get update"
    : >"$apt/sources.list"
    while read -r uri suite component; do
        echo "deb-src $(source_options "$uri" "$suite")$uri $suite $component" >>"$apt/sources.list"
    done <"$apt/origins"

    set -- -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=- \
        -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" \
        -o "APT::Sandbox::User=$(id -un)" -o APT::Update::Error-Mode=any
    say "fetching the source package (sources derived from this machine's)"
    apt-get "$@" update </dev/null
    rm -rf "$work/fetch" "$work/src"
    mkdir -p "$work/fetch"
    (cd "$work/fetch" && apt-get "$@" source rocksdb </dev/null) || fail "apt-get source rocksdb failed"
    set -- "$work"/fetch/rocksdb-*/
    [ $# -eq 1 ] && [ -d "$1" ] || fail "the source package did not unpack into one directory"
    grep -q "ROCKSDB_MAJOR 7" "$1/include/rocksdb/version.h" &&
        grep -q "ROCKSDB_MINOR 8" "$1/include/rocksdb/version.h" &&
        grep -q "ROCKSDB_PATCH 3" "$1/include/rocksdb/version.h" ||
        fail "the source package is not version $version"
    mv "$1" "$work/src"
}

[ -f "$work/src/Makefile" ] || fetch_source

# USE_RTTI: our native code derives from RocksDB's classes and needs their type
# information. DISABLE_*: only lz4, zstd and snappy; nothing that happens to be
# installed on the machine may slip in. They are set in the environment because
# the platform detection is a script that does not see make's own variables.
jobs=${JOBS:-2}
export DEBUG_LEVEL=0 PORTABLE=1 USE_RTTI=1 DISABLE_WARNING_AS_ERROR=1
export ROCKSDB_DISABLE_GFLAGS=1 ROCKSDB_DISABLE_ZLIB=1 ROCKSDB_DISABLE_BZIP=1
export ROCKSDB_DISABLE_TBB=1 ROCKSDB_DISABLE_NUMA=1 ROCKSDB_DISABLE_MEMKIND=1
export ROCKSDB_DISABLE_JEMALLOC=1 ROCKSDB_USE_IO_URING=0
say "compiling with $jobs jobs; the log is $work/build.log"
if ! make -C "$work/src" -j"$jobs" static_lib DEBUG_LEVEL=0 PORTABLE=1 USE_RTTI=1 \
    </dev/null >"$work/build.log" 2>&1; then
    tail -n 30 "$work/build.log" >&2
    fail "the build failed"
fi

rm -rf "$out/include" "$out/lib" "$stamp"
mkdir -p "$out/lib"
cp -R "$work/src/include" "$out/include"
cp "$work/src/librocksdb.a" "$out/lib/librocksdb.a"
strip --strip-debug "$out/lib/librocksdb.a"
echo "$want" >"$stamp"
rm -rf "$work"
say "installed $out (include/, lib/librocksdb.a)"
