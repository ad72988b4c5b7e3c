#!/usr/bin/env bash
# Starts three nodes on loopback and founds a cluster of them, for play. Again,
# it starts what does not run. Data, logs and process ids are in .keelstate/.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
layout .keelstate 7400 7410 7420 7430

build
started=()
# Called by the trap on failure.
# shellcheck disable=SC2317
undo() {
    local code=$?
    trap - EXIT
    if [ "$code" -ne 0 ] && [ "${#started[@]}" -gt 0 ]; then
        say "stopping what was started"
        stop_nodes "${started[@]}"
    fi
    exit "$code"
}
trap undo EXIT
trap 'exit 130' INT TERM

for i in 1 2 3; do
    if runs "$i"; then
        say "n$i runs already"
        continue
    fi
    check_ports "$i"
    started+=("$i")
    start_node "$i"
done
found || fail "the cluster is not healthy; see .keelstate/n*.log"
ctl cluster status
say
say "Endpoints: $endpoints (bin/keelctl uses the first by default)"
say "Metrics:   http://127.0.0.1:7431/metrics  Logs: .keelstate/n*.log"
say "make status shows the cluster, make down stops it; its data stays in .keelstate/"
