#!/usr/bin/env bash
# Makes .venv for a CPU machine and installs megappo into it. Idempotent: done again only when pins change.
#
#   bash launch/setup_venv.sh          what training on CPU needs (about 2.5 GB)
#   bash launch/setup_venv.sh dev      and what the checks and tests need
#
# MEGAPPO_PYTHON       interpreter to use (default python3; 3.11 or newer)
# MEGAPPO_TORCH_INDEX  package index to take PyTorch from. Set it to PyTorch's CPU index to get the CPU
#                      build (200 MB); plain PyPI brings the CUDA build (several GB), which also works.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
extra="${1:-cpu}"
python="${MEGAPPO_PYTHON:-python3}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than Python 3.11; set MEGAPPO_PYTHON to a newer one" >&2
    exit 2
}
pins=(requirements/cpu.txt requirements/cpu-nodeps.txt requirements/constraints.txt setup.py)
if [ "$extra" = dev ]; then pins+=(requirements/dev.txt); fi
want="$(cat "${pins[@]}" | sha256sum | cut -d' ' -f1)  $root"
stamp=".venv/.megappo-$extra"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    echo "setup: .venv is up to date ($extra)"
    exit 0
fi

echo "setup: making .venv ($extra); the first time this downloads about 1 GB"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip)
# A slow mirror is no reason to give up.
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-120}" PIP_RETRIES="${PIP_RETRIES:-10}"
install=("${pip[@]}" install --quiet -c requirements/constraints.txt)
echo "setup: PyTorch"
torch="$(grep '^torch==' requirements/cpu.txt)"
if [ -n "${MEGAPPO_TORCH_INDEX:-}" ]; then
    "${pip[@]}" install --quiet --index-url "$MEGAPPO_TORCH_INDEX" "$torch"
else
    "${pip[@]}" install --quiet "$torch"
fi
echo "setup: Megatron-Core, transformers and the rest"
"${install[@]}" -r requirements/cpu.txt
echo "setup: SGLang, without its CUDA dependencies"
"${pip[@]}" install --quiet --no-deps -r requirements/cpu-nodeps.txt
if [ "$extra" = dev ]; then
    echo "setup: tools for checks and tests"
    "${install[@]}" -r requirements/dev.txt
fi
echo "setup: megappo itself"
"${pip[@]}" install -qq --no-deps --no-build-isolation -e .
echo "$want" >"$stamp"
if [ "$extra" = dev ]; then
    cpu=(requirements/cpu.txt requirements/cpu-nodeps.txt requirements/constraints.txt setup.py)
    echo "$(cat "${cpu[@]}" | sha256sum | cut -d' ' -f1)  $root" >.venv/.megappo-cpu
fi
echo "setup: done"
