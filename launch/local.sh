#!/usr/bin/env bash
# Trains on this machine alone: bash launch/local.sh NUM_RANKS CONFIG.yaml [key=value ...]
# The config is checked first; the exit code is the run's own (0 done, 2 bad config, 3 guard, 75 resumable).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -lt 2 ]; then
    echo "usage: bash launch/local.sh NUM_RANKS CONFIG.yaml [key=value ...]" >&2
    exit 2
fi
ranks="$1"
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$root/.venv/bin/python" -m megappo.launch --nproc-per-node "$ranks" "$@"
