#!/bin/sh
# Installs what the build needs and the machine lacks, and is quick and silent
# when nothing is missing. Usage: deps.sh [extra Debian package ...]
#
# Needs Debian or a relative of it. Without root it uses sudo; where neither
# works it names the packages and fails.
set -eu

# The C++ compiler, the storage engine, and what it is linked with.
packages="g++ librocksdb-dev libsnappy-dev liblz4-dev libzstd-dev zlib1g-dev libbz2-dev $*"
# What the chaos harness makes hosts and faults with; it can only as root.
[ "$(id -u)" -ne 0 ] || packages="$packages iproute2 nftables e2fsprogs"

if ! command -v go >/dev/null 2>&1; then
    echo "deps: Go is missing; go.mod says which version is needed" >&2
    exit 1
fi

missing=""
if command -v dpkg-query >/dev/null 2>&1; then
    for p in $packages; do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)
        [ "$status" = installed ] || missing="$missing $p"
    done
else
    # Another system: look for the tools and headers themselves.
    command -v "${CXX:-g++}" >/dev/null 2>&1 || missing="$missing g++"
    for h in rocksdb/c.h:librocksdb-dev snappy.h:libsnappy-dev lz4.h:liblz4-dev zstd.h:libzstd-dev; do
        echo "#include <${h%%:*}>" | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1 || missing="$missing ${h##*:}"
    done
fi
missing=${missing# }
[ -n "$missing" ] || exit 0

give_up() {
    echo "deps: $1" >&2
    echo "deps: please install these packages (Debian's names), then run again:" >&2
    echo "deps:     $missing" >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 || give_up "this system has no apt-get"
as_root=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || give_up "not root, and there is no sudo"
    as_root="sudo"
    # Without a terminal sudo must not wait for a password that nobody types.
    [ -t 0 ] || as_root="sudo -n"
fi

echo "deps: installing with apt-get: $missing" >&2
install() {
    # shellcheck disable=SC2086 # both are lists of words
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing </dev/null >&2
}
# An old package list may name files that the mirror no longer has, and a fresh
# image has no list at all, so a first failure is followed by one refresh.
if [ -z "$(apt-cache policy librocksdb-dev 2>/dev/null | grep 'Candidate: [0-9]')" ] || ! install; then
    echo "deps: refreshing the package lists" >&2
    $as_root apt-get update </dev/null >&2 || give_up "apt-get update failed"
    install || give_up "apt-get install failed"
fi
echo "deps: done" >&2
