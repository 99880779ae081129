#!/usr/bin/env bash
# Everything that only a GPU can show, in under eight minutes: tests/gpu/run.sh [--dry-run] [--output FILE] [--parts a,b]
# PYTHON names the interpreter; it needs torch, triton and what tests/gpu/needs.py lists, and downloads nothing. See docs/gpu.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-}
if [[ -z "$python" ]]; then
  python=python3
  [[ ! -x "$root/.venv/bin/python" ]] || python="$root/.venv/bin/python"
fi
export PYTHONPATH="$root/src:$root/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m gpu "$@"
