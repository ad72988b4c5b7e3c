#!/usr/bin/env bash
# Stops the nodes that make up started. The data stays.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
layout .keelstate 7400 7410 7420 7430

running=()
for i in 1 2 3; do
    if runs "$i"; then running+=("$i"); fi
done
if [ "${#running[@]}" -eq 0 ]; then
    say "no node of .keelstate/ runs"
    exit 0
fi
stop_nodes "${running[@]}"
say "stopped ${#running[@]} nodes; the data stays in .keelstate/ (remove it to start afresh)"
