# Functions for the scripts beside this file, which run under bash (its /dev/tcp
# tells whether a port is taken). Sourced, never run.
#
# A cluster lives in a directory: n1 n2 n3 (and more) hold the nodes' data, objects what they
# store together (checkpoints), nX.log what they said, nX.pid their process ids. Only processes named there are ever signalled,
# and only if they still are nodes on that data.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "${0##*/}: $*"
    exit 1
}

build() {
    "${MAKE:-make}" --no-print-directory -s build >&2 || fail "the build failed"
}

# now_ms prints the time in milliseconds.
now_ms() { date +%s%3N; }

# await SECONDS WHAT COMMAND... repeats a command until it succeeds.
await() {
    local seconds=$1 what=$2 deadline
    shift 2
    deadline=$(($(now_ms) + seconds * 1000))
    until "$@"; do
        if [ "$(now_ms)" -ge "$deadline" ]; then
            say "waited $seconds s in vain: $what"
            return 1
        fi
        sleep 0.05 # between two looks
    done
}

# taken PORT says whether somebody listens there.
taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# layout DIR GRPC RAFT GOSSIP HTTP [NODES]: node i, of 3 if not said, has each port
# plus i.
layout() {
    local i
    dir=$1 grpc=$2 raft=$3 gossip=$4 http=$5
    endpoints="" members="" seeds=""
    for i in $(seq 1 "${6:-3}"); do
        endpoints+="${endpoints:+,}127.0.0.1:$((grpc + i))"
        members+="${members:+,}n$i=127.0.0.1:$((raft + i))"
        seeds+="${seeds:+,}127.0.0.1:$((gossip + i))"
    done
}

ctl() { bin/keelctl --endpoints "$endpoints" "$@"; }

# node_pid I prints the process id of a node that runs.
node_pid() {
    local pid
    pid=$(cat "$dir/n$1.pid" 2>/dev/null) || return 1
    [ -n "$pid" ] && { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null |
        grep -q -- "keelstate-node .*--data-dir $dir/n$1 " || return 1
    printf '%s\n' "$pid"
}

runs() { node_pid "$1" >/dev/null; }

gone() { ! runs "$1"; }

# check_ports I refuses to start a node whose ports others have.
check_ports() {
    local port
    for port in $((grpc + $1)) $((raft + $1)) $((gossip + $1)) $((http + $1)); do
        if taken "$port"; then
            say "port $port on 127.0.0.1 is taken by another program; node n$1 needs it. Stop that program (ss -ltnp shows it)."
            return 1
        fi
    done
}

# start_node I starts a node in a session of its own, so that an interrupt of
# this script does not reach it.
start_node() {
    local i=$1
    mkdir -p "$dir"
    setsid bin/keelstate-node --node-id "n$i" --data-dir "$dir/n$i" \
        --grpc-addr "127.0.0.1:$((grpc + i))" --raft-addr "127.0.0.1:$((raft + i))" \
        --gossip-addr "127.0.0.1:$((gossip + i))" --http-addr "127.0.0.1:$((http + i))" \
        --object-store "file://$PWD/$dir/objects" --join "$seeds" --memory "${NODE_MEMORY:-256MiB}" >>"$dir/n$i.log" 2>&1 </dev/null &
    echo $! >"$dir/n$i.pid"
    disown $!
    if ! await 30 "node n$i listens on port $((grpc + i))" up_or_dead "$i" || ! runs "$i"; then
        say "node n$i did not start; the end of $dir/n$i.log:"
        tail -n 5 "$dir/n$i.log" >&2
        return 1
    fi
}

up_or_dead() { taken $((grpc + $1)) || { [ -s "$dir/n$1.log" ] && gone "$1"; }; }

# stop_nodes I... asks nodes to stop, all at once, and insists after a while.
stop_nodes() {
    local i pid
    for i in "$@"; do
        if pid=$(node_pid "$i"); then kill -TERM "$pid" 2>/dev/null || true; fi
    done
    for i in "$@"; do
        if ! await 40 "node n$i stops" gone "$i" && pid=$(node_pid "$i"); then
            say "killing n$i"
            kill -KILL "$pid" 2>/dev/null || true
            await 10 "node n$i is gone" gone "$i" || true
        fi
        rm -f "$dir/n$i.pid"
    done
}

# kill_node I is a crash. It notes when the signal was sent (killed_ms), and when
# the process was seen to be gone (gone_ms).
kill_node() {
    local pid
    pid=$(node_pid "$1") || return 1
    killed_ms=$(now_ms)
    kill -KILL "$pid"
    await 10 "node n$1 is gone" gone "$1"
    gone_ms=$(now_ms)
}

# found [FLAG...] makes the nodes a cluster; again, it only looks whether they are.
found() {
    ctl cluster init --nodes "$members" --timeout 90s --quiet "$@" >/dev/null &&
        ctl cluster status --exit-when-healthy --wait 90s --quiet >/dev/null
}
