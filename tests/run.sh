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
stage "distributed tests (gloo ranks): their output follows at the end"
# Beside the stages after it: much of either is waiting, for processes that start or for time limits.
log="$(mktemp)"
run_tests tests/distributed -q "$@" >"$log" 2>&1 &
distributed=$!
trap 'kill "$distributed" 2>/dev/null || true; rm -f "$log"' EXIT
failed=()
stage "engine tests (real SGLang)"
run_tests tests/engine -q "$@" || failed+=(engine)
stage "end-to-end tests"
run_tests tests/e2e -q "$@" || failed+=(end-to-end)
stage "distributed tests"
wait "$distributed" || failed+=(distributed)
cat "$log"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo
echo "all green"
