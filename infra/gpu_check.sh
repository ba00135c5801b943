#!/usr/bin/env bash
# Tries on one GPU what no machine without one can: training steps, attention, rollouts, ZeRO-3, memory against `awpo plan`.
#
#   infra/gpu_check.sh                       all parts, a few minutes; a table, and gpu_check.json in the folder it is run in
#   infra/gpu_check.sh --only step           one part: step, attention, rollout, policy, zero3
#   infra/gpu_check.sh --cpu                 the same code on a CPU with tiny shapes: that it runs, not how fast
#
# Needs the project's environment and nothing from a network. PYTHON names another interpreter than .venv's.
# Exit code 0: all that could be tried went well; 1: something failed, the table says why; 2: no GPU; 3: no Python.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || {
    echo "error: there is no $python; run make install, or name a Python: PYTHON=... infra/gpu_check.sh" >&2
    exit 3
}
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=true TOKENIZERS_PARALLELISM=false
exec "$python" "$root/infra/gpu_check.py" "$@"
