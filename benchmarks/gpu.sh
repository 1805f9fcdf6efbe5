#!/usr/bin/env bash
# Everything that needs a CUDA device, without a network: correctness first, then the table.
#
#   bash benchmarks/gpu.sh [python]
#
# Uses the given interpreter (default .venv/bin/python, else python3) with torch, transformers, trl and peft installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src:. HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name(0), torch.__version__)'
"$python" -m pytest -q tests/gpu -m gpu
for model in Qwen2.5-0.5B Qwen2.5-1.5B; do
  "$python" -m benchmarks.bench W1 W2 W3 W4 W5 --model "$model" --rounds 1 --steps 3
done
"$python" -m benchmarks.bench W6 --model Qwen2.5-1.5B --rounds 1 --steps 2
ls benchmarks/results
