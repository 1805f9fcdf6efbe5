"""Rows with images in `vllm_mode: colocate`, where vLLM and Podium share an environment. A minute on one core."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.served import Compared, losses
from tests.vllm.served_images import made, save_family

NAME = "qwen2_5_vl"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_images_are_sampled_as_they_are_trained_on(tmp_path: Path) -> None:
    """In a process of its own: vLLM's engine stays in the one that it was made in."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.vllm.test_images_colocate", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    texts, apart, gaps = json.loads((tmp_path / "compared.json").read_text())
    assert len(apart) == len(gaps) == 3
    assert len({str(ids) for ids in texts}) > 1
    assert max(*apart, *gaps) < 1e-4


def main(folder: Path) -> None:
    """Three steps."""
    model = save_family(NAME, folder / "tiny")
    memory = {"vllm_max_model_length": 256, "vllm_gpu_memory_utilization": 0.1}
    run = made(folder / "run", model, NAME, vllm_mode="colocate", **memory)
    compared = Compared(run)
    run.add_callback(compared)
    run.train()
    gaps = [row["sampling/sampling_logp_difference/max"] for row in losses(run)]
    (folder / "compared.json").write_text(json.dumps([compared.theirs, compared.apart, gaps]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
