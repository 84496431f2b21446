#!/usr/bin/env bash
# Trains on several machines; start it on each of them, with the same arguments and these variables:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 GPUS_PER_NODE=8 \
#       bash launch/node.sh CONFIG.yaml [key=value ...]
#
# NNODES         how many nodes the run has
# NODE_RANK      this node's number, from 0; the only one that differs
# MASTER_ADDR    node 0's address as the other nodes reach it
# MASTER_PORT    a free port on node 0
# GPUS_PER_NODE  ranks to start here
# MAX_RESTARTS   how often torchrun starts the ranks again after a failure (default 0)
#
# Nothing is guessed. The nodes meet first, compare config, versions and ranks, and end with one
# message if one is missing or odd. Exit codes as in docs/launch.md: 0 done, 1 failed, 2 bad usage or
# config, 3 guard, 75 resumable.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
if [ ! -x "$python" ]; then python=python3; fi # a container that has megappo installed
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Of a peer that ended the C++ side logs a stack per call; the run's own message comes after them.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
exec "$python" -m megappo.node "$@"
