"""`vllm` on a CPU with its Triton kernels interpreted, one program after the other: `interpreted_vllm.py serve ...`.

vLLM's model runner V2, which alone says which tokens filters of sampling left, is written in Triton, and Triton's
release on PyPI compiles for GPUs alone. Its interpreter runs the same kernels in numpy, slowly. Workers import this
module again before vLLM.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
driver = import_module("triton.backends.driver").DriverBase
import_module("triton.backends").backends["cpu"] = SimpleNamespace(driver=driver)  # what vLLM looks for
# The interpreter cannot run this one kernel; without Triton vLLM takes torch.
import_module("vllm.v1.sample.ops.topk_topp_sampler").HAS_TRITON = False

if __name__ == "__main__":
    sys.exit(import_module("vllm.entrypoints.cli.main").main())
