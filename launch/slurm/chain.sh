#!/usr/bin/env bash
# A run as several jobs, each going on from the last one's checkpoint; for clusters that do not requeue.
#
#   bash launch/slurm/chain.sh NUM_JOBS [sbatch options] launch/slurm/ppo.sbatch CONFIG.yaml [key=value ...]
#
# A job starts when the one before it is done or has saved at its time limit. One that fails, or is
# stopped by a guard, ends the chain: the jobs behind it are cancelled. A run that is finished early
# says so in each job that is left, at once. The run's folder says how far it came.
set -euo pipefail
if [ $# -lt 3 ] || ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: bash launch/slurm/chain.sh NUM_JOBS [sbatch options] launch/slurm/ppo.sbatch CONFIG.yaml ..." >&2
    exit 2
fi
jobs="$1"
shift
after=()
for ((i = 1; i <= jobs; i++)); do
    if ! job="$(ON_STOP=next sbatch --parsable --no-requeue ${after[@]+"${after[@]}"} "$@")"; then
        echo "chain.sh: job $i of $jobs was not accepted; those before it stay in the queue" >&2
        exit 1
    fi
    job="${job%%;*}" # a cluster's name may follow
    echo "$job"
    after=("--dependency=afterok:$job" --kill-on-invalid-dep=yes)
done
