#!/usr/bin/env bash
# From nothing to a model that has learned small sums by PPO, on two CPU ranks.
#
#   bash launch/quickstart.sh [key=value ...]     e.g. trainer.total_steps=20 trainer.run_dir=runs/mine
#
# Makes .venv, a 0.7M-parameter model (models/tiny) and word problems (data/arithmetic), then trains with
# real Megatron-Core and real SGLang. What is there already is kept; an interrupted run goes on.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_VISIBLE_DEVICES="" # the quickstart is the CPU path, also where there is a GPU

bash launch/setup_venv.sh
if [ ! -f data/arithmetic/val.parquet ]; then
    echo "quickstart: making word problems in data/arithmetic"
    .venv/bin/megappo data arithmetic data/arithmetic
fi
echo "quickstart: the tiny model"
.venv/bin/python -W "ignore:Failed to load image" tools/make_model.py tiny models/tiny
echo "quickstart: training on 2 ranks"
bash launch/local.sh 2 configs/quickstart.yaml "$@"
run="$(printf '%s\n' "$@" | sed -n 's/^trainer\.run_dir=//p' | tail -n 1)"
run="${run:-runs/quickstart}"
cat <<END

What to look at:
  $run/metrics.jsonl            one line a step; critic/score/mean and val/score/mean rise
  $run/rollouts/                what the model wrote, with scores
  $run/actor_hf/                the trained model, for transformers and SGLang
  .venv/bin/tensorboard --logdir "$run/tensorboard"
END
