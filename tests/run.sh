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
measures=tests/distributed/test_network.py  # times, which others must not stretch
run_tests tests/distributed --ignore "$measures" -n 2 --dist loadfile -q "$@"
run_tests "$measures" -q "$@"
stage "engine tests (real SGLang)"
run_tests tests/engine -q "$@"
stage "end-to-end tests"
# Those that stop and kill processes, or have networks and ports with fixed names, run one by one.
alone=(tests/e2e/test_{chaos,guard,nodes,run,server_run,slurm}.py)
run_tests tests/e2e "${alone[@]/#/--ignore=}" -n 2 --dist loadfile -q "$@"
run_tests "${alone[@]}" -q "$@"
echo
echo "all green"
