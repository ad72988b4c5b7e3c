#!/usr/bin/env bash
# Runs the benchmarks of docs/benchmarks.md; all of them, or the parts named:
#
#   engine   the state machine on one engine: mem, and rocks on both builds
#   log      the bare Raft log: 1, 4 and 16 groups on each log store
#   writes   single writes and batches on three nodes, and the nodes' memory
#   reads    linearizable reads and multi-gets on three nodes
#   resume   time until writes resume after SIGKILL of a leader
#   restart  restart of a node with 1 GB of state
#   checkpoints  all of these, on nodes and an S3 service that they start and
#            remove; bounded by CHECKPOINT_SECONDS:
#     checkpoint  bytes and time of checkpoints of 1M keys, writes meanwhile
#     modes       checkpoint duration against state size and mode
#     rollback    1 GB, with what the nodes have kept and from the store
#     restore     1 GB into new clusters, beside cp
#     catchup     a replica of a shard of 1 GB is rebuilt under writes
#
# Results are printed and kept in .bench/: results.jsonl, engine.txt, log.txt.
#
# Variables: SHARDS (4), CLIENTS (1,64,256), MODES (client,grpc), SECONDS_EACH
# (5) of each measurement, ROUNDS (5) of resume, FILL_BYTES (1 GiB), NODE_MEMORY
# (1GiB), LIMIT_SECONDS (720) for everything but checkpoints, CHECKPOINT_SECONDS
# (3000), CHECKPOINT_FLAGS (of `ksbench checkpoints`), KEELSTATE_PPROF=true for
# profiles.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

shards=${SHARDS:-4}
clients=${CLIENTS:-1,64,256}
modes=${MODES:-client,grpc}
seconds=${SECONDS_EACH:-5}
rounds=${ROUNDS:-5}
fill_bytes=${FILL_BYTES:-$((1 << 30))}
limit=${LIMIT_SECONDS:-720}
checkpoint_limit=${CHECKPOINT_SECONDS:-3000}
export NODE_MEMORY=${NODE_MEMORY:-1GiB}
linked=${ROCKSDB_BUILD:-debian}
release=$PWD/.deps/rocksdb-release
layout .bench 7500 7510 7520 7530
deadline=$(($(date +%s) + limit))

usage() {
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
    exit 2
}

# bounded COMMAND... ends it when the time for everything is over.
bounded() {
    local left=$((deadline - $(date +%s)))
    [ "$left" -gt 0 ] || fail "the $limit seconds for everything are over (LIMIT_SECONDS)"
    timeout -k 10 "$left" "$@" || {
        local code=$?
        [ "$code" -ne 124 ] || say "the $limit seconds for everything are over (LIMIT_SECONDS)"
        return "$code"
    }
}

part() {
    say
    say "== $1: $2"
    say "   RocksDB: $linked; load average $(cut -d ' ' -f 1-3 /proc/loadavg); $(nproc) cores; $(date -u +%Y-%m-%dT%H:%MZ); $(git rev-parse --short HEAD 2>/dev/null || echo '?')"
}

ks() {
    local command=$1
    shift
    bounded .bench/ksbench "$command" --json .bench/results.jsonl --label "rocksdb=$linked" "$@"
}

# Called by the trap.
# shellcheck disable=SC2317
clean_up() {
    local code=$?
    trap - EXIT
    stop_nodes 1 2 3
    rm -rf .bench/n1 .bench/n2 .bench/n3
    exit "$code"
}

# fresh starts three new nodes and founds a cluster, unless one is there.
cluster_is_up=""
fresh() {
    [ -z "$cluster_is_up" ] || return 0
    stop_nodes 1 2 3
    rm -rf .bench/n1 .bench/n2 .bench/n3
    local i
    for i in 1 2 3; do
        check_ports "$i"
        start_node "$i"
    done
    ctl cluster init --nodes "$members" --shards "$shards" --timeout 90s --quiet >/dev/null
    healthy
    cluster_is_up=yes
}

pids() {
    local i all=""
    for i in 1 2 3; do all="$all${all:+,}n$i=$(node_pid "$i")"; done
    printf '%s\n' "$all"
}

healthy() { ctl cluster status --exit-when-healthy --wait 90s --quiet >/dev/null || fail "the cluster did not become healthy; see .bench/n*.log"; }

# memory prints the most that each node ever held.
memory() {
    local i
    for i in 1 2 3; do
        awk -v n="n$i" -v budget="$NODE_MEMORY" '/^VmHWM/ { printf "memory peak of %s: %.0f MiB (--memory %s)\n", n, $2 / 1024, budget }' \
            "/proc/$(node_pid "$i")/status"
    done | tee -a .bench/memory.txt
}

# medians reads go test -bench output and prints, for each benchmark, the median
# of its runs of one unit.
medians() {
    awk -v unit="$1" -v title="$2" '
        /^Benchmark/ {
            for (i = 3; i < NF; i += 2) if ($(i + 1) == unit) { if (!($1 in n)) order[++m] = $1; v[$1, ++n[$1]] = $i }
        }
        END {
            for (k = 1; k <= m; k++) {
                b = order[k]
                for (i = 2; i <= n[b]; i++) # insertion sort: a handful of runs
                    for (j = i; j > 1 && v[b, j - 1] > v[b, j]; j--) { t = v[b, j]; v[b, j] = v[b, j - 1]; v[b, j - 1] = t }
                c = n[b]
                median = (v[b, int((c + 1) / 2)] + v[b, int(c / 2) + 1]) / 2
                sub(/-[0-9]+$/, "", b)
                printf "%-10s %-60s %12.0f %s (median of %d)\n", title, b, median, unit, c
            }
        }'
}

# apply_benchmark TITLE FILTER runs the state machine's benchmark, each state
# kind three times, requests in sessions as the client sends them.
apply_benchmark() {
    bounded go test -run '^$' -bench "^BenchmarkApplyBatch\$/$2/.*/session=true" -benchtime 60x -count 3 ./raftfsm >".bench/engine-$1.txt" ||
        fail "the benchmark failed: $(tail -n 3 ".bench/engine-$1.txt")"
    medians mutations/s "$1" <".bench/engine-$1.txt" | tee -a .bench/engine.txt
}

run_engine() {
    part engine "mutations applied per second by one state machine, one thread, 100-byte values, 50,000 keys"
    : >.bench/engine.txt
    (
        unset CGO_CFLAGS CGO_CXXFLAGS CGO_LDFLAGS
        apply_benchmark mem mem
        apply_benchmark debian rocks
    )
    if [ -e "$release/stamp" ]; then
        (
            # As in the Makefile.
            export CGO_CFLAGS="-O2 -g -I$release/include" CGO_CXXFLAGS="-O2 -g -DNDEBUG -I$release/include" CGO_LDFLAGS="-O2 -g -L$release/lib"
            apply_benchmark release rocks
        )
    else
        say "   no release build of RocksDB (make rocksdb-release), so only Debian's"
    fi
}

run_log() {
    part log "entries per second of the bare log, three nodes in one process, 256 proposers, 100-byte entries, fsync on"
    # Not -C: the path of the output is ours.
    (cd bench/logstores && bounded go run . -rounds 2 -seconds 1.5 -stores raftlog,raftwal,pebble -bytes 100) | tee .bench/log.txt
}

run_writes() {
    fresh
    part writes "three nodes, $shards shards, 100-byte values; batches of 100: any shards (batch), one shard as a whole (atomic)"
    ks load --endpoints "$endpoints" --pids "$(pids)" --modes "$modes" --works write,batch,atomic --clients "$clients" --time "${seconds}s"
    memory
}

run_reads() {
    fresh
    part reads "three nodes, $shards shards, linearizable, 100-byte values, multi-gets of 100 keys of any shards"
    ks load --endpoints "$endpoints" --pids "$(pids)" --modes "$modes" --works read,multiget --clients "$clients" --time "${seconds}s"
    memory
}

run_resume() {
    fresh
    part resume "the leader of most shards dies by SIGKILL, $rounds rounds; one writer for each shard"
    local round line node
    for round in $(seq "$rounds"); do
        line=$(ks resume --endpoints "$endpoints" --pids "$(pids)")
        say "$line"
        node=$(printf '%s' "$line" | sed -n 's/^killed n\([1-3]\):.*/\1/p')
        await 10 "node n$node is gone" gone "$node"
        start_node "$node"
        healthy
        say "   round $round of $rounds is over"
    done
}

run_restart() {
    cluster_is_up=""
    fresh
    part restart "a node dies by SIGKILL with $((fill_bytes >> 20)) MiB of values and starts again"
    ks fill --endpoints "$endpoints" --bytes "$fill_bytes"
    healthy
    memory
    du -sm .bench/n1 | awk '{ print "data of n1: " $1 " MiB on disk" }'
    kill_node 1
    local since
    since=$(now_ms)
    start_node 1
    ks restart --endpoints "$endpoints" --node n1 --http "http://127.0.0.1:$((http + 1))" --since "$since"
    cluster_is_up=""
}

# run_checkpoints PARTS (with commas): clusters of its own.
run_checkpoints() {
    cluster_is_up=""
    stop_nodes 1 2 3
    part checkpoints "$1: three nodes, $(cut -d ' ' -f 1 .deps/bin/versitygw.version 2>/dev/null || echo no) versitygw, values that do not compress"
    deadline=$(($(date +%s) + checkpoint_limit))
    # shellcheck disable=SC2086
    ks checkpoints --parts "$1" --memory "$NODE_MEMORY" ${CHECKPOINT_FLAGS:-}
}

parts=("$@")
[ "${#parts[@]}" -gt 0 ] || parts=(engine log writes reads resume restart checkpoints)
for p in "${parts[@]}"; do
    case $p in engine | log | writes | reads | resume | restart | checkpoints | checkpoint | modes | rollback | restore | catchup) ;; *) usage ;; esac
done

needs_nodes=""
for p in "${parts[@]}"; do
    case $p in engine | log) ;; *) needs_nodes=yes ;; esac
done
mkdir -p .bench
rm -f .bench/results.jsonl .bench/memory.txt
for i in 1 2 3; do
    ! runs "$i" || stop_nodes "$i"
done
if [ -n "$needs_nodes" ]; then
    build
    CGO_ENABLED=0 go build -trimpath -o .bench/ksbench ./bench/ksbench
    trap clean_up EXIT
    trap 'exit 130' INT TERM
fi
say "bench: ${parts[*]}; at most $limit s, and $checkpoint_limit s for checkpoints; results in .bench/"
for p in "${parts[@]}"; do
    case $p in
    checkpoints) run_checkpoints checkpoint,modes,rollback,restore,catchup ;;
    checkpoint | modes | rollback | restore | catchup) run_checkpoints "$p" ;;
    *) "run_$p" ;;
    esac
done
if [ -s .bench/results.jsonl ]; then
    say
    .bench/ksbench report .bench/results.jsonl
fi
