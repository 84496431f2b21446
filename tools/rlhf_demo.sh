#!/usr/bin/env bash
# Fine-tuning, a reward model from preference pairs, and PPO against it, on two CPU ranks.
#
#   bash tools/rlhf_demo.sh [key=value ...]     for the PPO part, e.g. trainer.total_steps=30
#
# Real files, a 0.7M-parameter model, real Megatron-Core and SGLang. Fails unless the reward model puts over 90% of
# the validation pairs in the right order and the policy's reward rises (tools/rlhf_check.py). What is there already
# is kept, and an interrupted run goes on.
# RLHF_ROOT: where data, models and runs lie (the repository if not set).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
base="$(mkdir -p "${RLHF_ROOT:-$root}" && cd "${RLHF_ROOT:-$root}" && pwd)"
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_VISIBLE_DEVICES="" # the demo is the CPU path, also where there is a GPU
python="$root/.venv/bin/python"
megappo() { "$python" -m megappo.cli "$@"; }
say() { echo "rlhf: $*"; }

bash launch/setup_venv.sh
for kind in preferences arithmetic; do
    if [ ! -f "$base/data/$kind/val.parquet" ]; then megappo data "$kind" "$base/data/$kind" --num-train 8192; fi
done
"$python" -W "ignore:Failed to load image" tools/make_model.py tiny "$base/models/tiny"

pairs=("data.train_files=[$base/data/preferences/train.parquet]" "data.val_files=[$base/data/preferences/val.parquet]")
prompts=("data.train_files=[$base/data/arithmetic/train.parquet]" "data.val_files=[$base/data/arithmetic/val.parquet]")
say "1. supervised fine-tuning on the better answers"
megappo train-sft --nproc-per-node 2 configs/sft.yaml "${pairs[@]}" \
    "model.path=$base/models/tiny" "trainer.run_dir=$base/runs/sft"
say "2. a reward model from the pairs"
megappo train-rm --nproc-per-node 2 configs/reward_model.yaml "${pairs[@]}" \
    "model.path=$base/runs/sft/sft_hf" "trainer.run_dir=$base/runs/rm"
say "3. PPO against the reward model"
run="$(printf '%s\n' "$@" | sed -n 's/^trainer\.run_dir=//p' | tail -n 1)"
run="${run:-$base/runs/rlhf_ppo}"
bash launch/local.sh 2 configs/rlhf_ppo.yaml "${prompts[@]}" \
    "model.path=$base/runs/sft/sft_hf" "reward_model.path=$base/runs/rm/rm_hf" "$@" "trainer.run_dir=$run"
say "what came out"
"$python" tools/rlhf_check.py "$base/runs/sft" "$base/runs/rm" "$run"
