#!/usr/bin/env bash
# Lint, types and all tests, cheapest first: bash tests/run.sh [pytest arguments for every stage]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

bash launch/setup_venv.sh dev
bin=.venv/bin
stage() { printf '\n== %s\n' "$1"; }
# A selection (-k ...) may leave a stage without a test: pytest's exit code 5 is then no failure.
selected=$#
run_tests() { "$bin/pytest" "$@" || { [ $? -eq 5 ] && [ "$selected" -gt 0 ]; }; }

stage "lint"
"$bin/ruff" check .
"$bin/ruff" format --check .
stage "types"
"$bin/mypy"
stage "system packages"
bash tests/install_system.sh
stage "unit tests"
run_tests tests/unit -n 2 -q "$@"
stage "distributed tests (gloo ranks)"
run_tests tests/distributed -q "$@"
stage "engine tests (real SGLang)"
run_tests tests/engine -q "$@"
stage "end-to-end tests"
run_tests tests/e2e/test_bad_input.py -n 2 -q "$@"  # commands of one process each
run_tests tests/e2e --ignore tests/e2e/test_bad_input.py -q "$@"
echo
echo "all green"
