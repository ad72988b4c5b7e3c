#!/usr/bin/env bash
# Shows the cluster that make up started. Exits as keelctl cluster status does, 6
# when it is not healthy; 5 when no node runs.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
layout .keelstate 7400 7410 7420 7430

alive=0
for i in 1 2 3; do
    if pid=$(node_pid "$i"); then
        say "n$i  pid $pid  grpc 127.0.0.1:$((grpc + i))  log .keelstate/n$i.log"
        alive=$((alive + 1))
    else
        say "n$i  does not run"
    fi
done
if [ "$alive" -eq 0 ]; then
    say "start the cluster with: make up"
    exit 5
fi
ctl cluster status "$@"
ctl shard list
