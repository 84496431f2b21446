#!/usr/bin/env bash
# Trains on this machine alone: bash launch/local.sh NUM_RANKS CONFIG.yaml [key=value ...]
# Several machines: launch/node.sh. The config is checked first; the exit code is the run's own (0 done,
# 1 failed, 2 bad usage or config, 3 guard, 75 resumable).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -lt 2 ]; then
    echo "usage: bash launch/local.sh NUM_RANKS CONFIG.yaml [key=value ...]" >&2
    exit 2
fi
ranks="$1"
shift
python="$root/.venv/bin/python"
if [ ! -x "$python" ]; then python=python3; fi # a container that has megappo installed
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m megappo.launch --nproc-per-node "$ranks" "$@"
