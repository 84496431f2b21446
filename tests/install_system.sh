#!/usr/bin/env bash
# Debian packages that some tests need: Slurm with munge, network namespaces, a browser. Only those that
# are absent are installed, which takes root and apt; without these the tests that need them are skipped, with the reason.
set -euo pipefail
wanted=(slurm-wlm munge iproute2 chromium chromium-driver)
missing=()
for package in "${wanted[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "system packages: all there (${wanted[*]})"
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "system packages: ${missing[*]} missing; installing them takes root and apt-get, so their tests will be skipped"
    exit 0
fi
echo "system packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
patience=(-o Acquire::Retries=5 -o DPkg::Lock::Timeout=300)
install=(apt-get "${patience[@]}" install -y -qq --no-install-recommends "${missing[@]}")
# Lists may be absent or old.
if "${install[@]}" >/dev/null 2>&1 || { apt-get "${patience[@]}" update -qq && "${install[@]}" >/dev/null; }; then
    echo "system packages: done"
else
    echo "WARNING: system packages: ${missing[*]} could not be installed (apt-get's words are above)," \
        "so THEIR TESTS WILL BE SKIPPED" >&2
fi
