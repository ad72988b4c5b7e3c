#!/usr/bin/env bash
# A real job on a real cluster, with failures, and the right answer.
#
# Starts three nodes on free ports, counts 20,000 flights, kills the job itself
# and starts it again, takes a checkpoint under load, kills the node that leads a
# shard, starts that again, compares both reports with the expected answer and the
# replicas with each other, takes another checkpoint and verifies both. Then it wipes
# all nodes, restores the second checkpoint into five new ones with twice the shards,
# and compares again. Exits non-zero if anything differs. Everything is left in .demo/.
#
# Variables: RATE rows per second (1500), KILL_JOB_AT and KILL_NODE_AT rows
# acknowledged (4000, 8000), DATA the folder of the input and the expected answer.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

rate=${RATE:-1500}
kill_job_at=${KILL_JOB_AT:-4000}
kill_node_at=${KILL_NODE_AT:-8000}
data=${DATA:-examples/flights/testdata} # flights-20k.csv and its expected answer
rows=20000

# free_ports prints a number above which all ports that the nodes need are free.
free_ports() {
    local try base i
    for try in 1 2 3 4 5 6 7 8 9 10; do
        base=$((20000 + (RANDOM + try * 131) % 1000 * 10))
        for i in $(seq 1 20); do
            if taken $((base + i)); then continue 2; fi
        done
        printf '%s\n' "$base"
        return
    done
    fail "found no free ports on 127.0.0.1"
}

job=""
# Called by the trap.
# shellcheck disable=SC2317
clean_up() {
    local code=$?
    trap - EXIT
    if [ -n "$job" ]; then
        kill -KILL "$job" 2>/dev/null || true
        wait "$job" 2>/dev/null || true
    fi
    stop_nodes 1 2 3 4 5
    if [ "$code" -ne 0 ]; then say "demo: FAILED; logs are in $dir/"; fi
    exit "$code"
}

start_job() {
    bin/flights --endpoints "$endpoints" --input "$data/flights-20k.csv" --rate "$rate" --acks "$dir/acks.csv" \
        --report "$dir/report.csv" --days "$dir/days.csv" 2>>"$dir/job.log" &
    job=$!
}

# acked prints how many rows are acknowledged, over all runs of the job.
acked() { awk -F, '{n += $5} END {print n + 0}' "$dir/acks.csv"; }

job_runs() { [ -n "$job" ] && kill -0 "$job" 2>/dev/null; }

acked_at_least() {
    job_runs || fail "the job ended too early: $(tail -n 1 "$dir/job.log")"
    [ "$(acked)" -ge "$1" ]
}

# leaders prints "shard node" lines.
leaders() {
    ctl shard list -o jsonl --columns id,leader |
        sed -n 's/.*"id": *"\{0,1\}\([0-9]*\)"\{0,1\}.*"leader": *"\([^"]*\)".*/\1 \2/p'
}

# resumed SHARD... succeeds when all these shards have acknowledged an update
# after the node was gone, and puts into resumed_ms how long after the signal the
# slowest did.
resumed() {
    resumed_ms=$(awk -F, -v gone="$gone_ms" -v killed="$killed_ms" -v shards="$*" '
        BEGIN { n = split(shards, want, " ") }
        $1 > gone + 20 && !($3 in first) { first[$3] = $1 - killed } # 20 ms: replies still in the socket
        END {
            for (i = 1; i <= n; i++) {
                if (!(want[i] in first)) exit 1
                if (first[want[i]] > slowest) slowest = first[want[i]]
            }
            print slowest
        }' "$dir/acks.csv")
}

differences=0
verdict() { # verdict NAME COMMAND...
    local name=$1
    shift
    if "$@"; then
        say "  ok    $name"
    else
        say "  WRONG $name"
        differences=$((differences + 1))
    fi
}

# days_of_input is the second answer, by a single pass of awk.
days_of_input() {
    echo origin,day,flights
    awk -F, 'NR > 1 { n[$4 "," substr($1, 1, 10)]++ } END { for (k in n) print k "," n[k] }' "$data/flights-20k.csv" | LC_ALL=C sort
}

# days_sum_to_flights compares the two reports with each other.
days_sum_to_flights() {
    awk -F, 'FNR == 1 { file++; next }
        file == 1 { days[$1] += $3 }
        file == 2 { flights[$1] = $2; if (days[$1] != $2) { bad = 1; print "origin " $1 ": " days[$1] " in the days, " $2 " flights" } }
        END { for (o in days) if (!(o in flights)) bad = 1; exit bad }' "$dir/days.csv" "$dir/report.csv" >&2
}

# checkpoint FILE makes one of the whole cluster, and keeps what it is.
checkpoint() { ctl checkpoint create --quiet --timeout 60s -o json --columns number,fullBytes,newBytes,files,newFiles,seconds,uri >"$1"; }

# of FILE KEY prints a number from it.
of() { sed -n 's/.*"'"$2"'": *\([0-9.]*\).*/\1/p' "$1"; }

# text_of FILE KEY prints a text from it.
text_of() { sed -n 's/.*"'"$2"'": *"\([^"]*\)".*/\1/p' "$1"; }

sound() { ctl checkpoint verify "$(of "$1" number)" --timeout 60s -o json >"$1.verified"; }

hashes_agree() { ctl shard hash --timeout 60s >"$dir/hashes.txt"; }

build
layout .demo 0 0 0 0
for i in 1 2 3 4 5; do
    if runs "$i"; then
        say "demo: stopping n$i of an earlier demo"
        stop_nodes "$i"
    fi
done
rm -rf .demo
mkdir .demo
: >.demo/acks.csv
base=$(free_ports)
layout .demo "$base" $((base + 5)) $((base + 10)) $((base + 15))
trap clean_up EXIT
trap 'exit 130' INT TERM

say "demo: starting three nodes (127.0.0.1:$((grpc + 1)) to $((grpc + 3))), data in .demo/"
for i in 1 2 3; do start_node "$i"; done
found || fail "the cluster did not become healthy"

say "demo: counting $rows flights, $rate rows/s"
started=$(now_ms)
start_job
await 120 "$kill_job_at rows are acknowledged" acked_at_least "$kill_job_at"
kill -KILL "$job"
wait "$job" 2>/dev/null || true
say "demo: killed the job at $(acked) rows; starting it again"
start_job
checkpoint "$dir/checkpoint-1.json" || fail "no checkpoint could be made under load"
say "demo: checkpoint $(of "$dir/checkpoint-1.json" number) under load: $(of "$dir/checkpoint-1.json" fullBytes) bytes in $(of "$dir/checkpoint-1.json" files) files, in $(of "$dir/checkpoint-1.json" seconds) s"
await 120 "$kill_node_at rows are acknowledged" acked_at_least "$kill_node_at"

leaders >"$dir/leaders.txt"
read -r _ victim <"$dir/leaders.txt" || fail "keelctl shard list names no leader"
shards=$(awk -v n="$victim" '$2 == n { print $1 }' "$dir/leaders.txt" | tr '\n' ' ')
kill_node "${victim#n}"
say "demo: killed $victim, the leader of shard ${shards% }, at $(acked) rows"
# shellcheck disable=SC2086
await 60 "shards ${shards% } take writes again" resumed $shards
say "demo: all its shards took writes again after $resumed_ms ms; starting $victim again"
start_node "${victim#n}"

code=0
wait "$job" || code=$?
job=""
took=$(($(now_ms) - started))
[ "$code" -eq 0 ] || fail "the job ended with code $code: $(tail -n 1 "$dir/job.log")"

say "demo: comparing"
days_of_input >"$dir/days-expected.csv"
verdict "report: equal to the expected answer" cmp "$dir/report.csv" "$data/flights-20k-expected.csv"
verdict "days: equal to a single pass over the input" cmp "$dir/days.csv" "$dir/days-expected.csv"
verdict "days sum to flights" days_sum_to_flights
verdict "no row was acknowledged twice" [ "$(acked)" -le "$rows" ]
verdict "all nodes are healthy again" ctl cluster status --exit-when-healthy --wait 90s --quiet -o json >"$dir/status.json"
verdict "all replicas hold the same" hashes_agree
verdict "a second checkpoint completes" checkpoint "$dir/checkpoint-2.json"
verdict "every object of the first checkpoint is sound" sound "$dir/checkpoint-1.json"
verdict "every object of the second checkpoint is sound" sound "$dir/checkpoint-2.json"

say "demo: wiping all three nodes"
uri=$(text_of "$dir/checkpoint-2.json" uri)
stop_nodes 1 2 3
rm -rf "$dir/n1" "$dir/n2" "$dir/n3"
mkdir "$dir/before"
mv "$dir/report.csv" "$dir/days.csv" "$dir/acks.csv" "$dir/before/"
: >"$dir/acks.csv"
layout .demo "$base" $((base + 5)) $((base + 10)) $((base + 15)) 5
say "demo: restoring checkpoint $(of "$dir/checkpoint-2.json" number) into five nodes with eight shards"
for i in 1 2 3 4 5; do start_node "$i"; done
ctl cluster init --nodes "$members" --shards 8 --restore "$uri" --dry-run --timeout 60s -o json >"$dir/restore-plan.json" || fail "no plan of the restore"
restoring=$(now_ms)
found --shards 8 --restore "$uri" || fail "the restored cluster did not become healthy"
restored_ms=$(($(now_ms) - restoring))
say "demo: it serves after $restored_ms ms; the same job reads its reports"
start_job
code=0
wait "$job" || code=$?
job=""
[ "$code" -eq 0 ] || fail "the job ended with code $code on the restored cluster: $(tail -n 1 "$dir/job.log")"

say "demo: comparing"
eight_shards() { [ "$(ctl shard list -o jsonl --columns id | wc -l)" -eq 8 ]; }
verdict "restored: five nodes, eight shards" eight_shards
verdict "restored: the report is the same" cmp "$dir/report.csv" "$dir/before/report.csv"
verdict "restored: the days are the same" cmp "$dir/days.csv" "$dir/before/days.csv"
verdict "restored: no row had to be counted again" [ "$(acked)" -eq 0 ]
verdict "restored: all replicas hold the same" hashes_agree
verdict "restored: a checkpoint completes" checkpoint "$dir/checkpoint-3.json"
verdict "restored: every object of it is sound" sound "$dir/checkpoint-3.json"

say
say "rows                 $rows, each counted once, through a killed job and a killed node"
say "throughput           $((rows * 1000 / took)) rows/s over the whole run, throttled to $rate"
say "checkpoints          $(of "$dir/checkpoint-2.json" newBytes) of $(of "$dir/checkpoint-2.json" fullBytes) bytes were new to the store in the second"
say "restored after       $restored_ms ms: five nodes, eight shards"
say "writes resumed after $resumed_ms ms (SIGKILL of $victim, leader of shard ${shards% })"
if [ "$differences" -ne 0 ]; then
    say "verdict              WRONG: $differences differences"
    exit 1
fi
say "verdict              correct"
