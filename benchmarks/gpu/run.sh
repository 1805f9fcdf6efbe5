#!/usr/bin/env bash
# What a GPU has to show, without a network: correctness, decoding, a step beside TRL, a pack, memory, two processes.
#
#   bash benchmarks/gpu/run.sh                          all scripts in order, about half an hour
#   bash benchmarks/gpu/run.sh matrix decode            some of them; each ends within ten minutes
#   bash benchmarks/gpu/run.sh --device cpu --tiny      all of them on a CPU with tiny shapes, to rehearse them
#
# --out DIR: folder of the JSON lines and of tables.md (gpu-results). PYTHON: interpreter with torch, transformers and
# peft (.venv/bin/python, else python3). The exit code is 0 if every case ran and is right.
# No `set -e`: a script that fails must not cost the ones after it.
set -uo pipefail

out=gpu-results flags=() names=()
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift ;;
    --device) flags+=(--device "$2"); shift ;;
    --tiny) flags+=(--tiny) ;;
    matrix | decode | step | train_pack | memory | two_ranks) names+=("$1") ;;
    *) echo "unknown: $1" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
[ ${#names[@]} -gt 0 ] || names=(matrix decode step train_pack memory two_ranks)

cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

status=0
for name in "${names[@]}"; do
  "$python" -m "benchmarks.gpu.$name" ${flags[@]+"${flags[@]}"} --out "$out" --budget 540 || status=1
done
"$python" -m benchmarks.gpu.tables "$out" | tee "$out/tables.md" || status=1
exit $status
