"""Memory of a rank that sends weights divided by FSDP2: `torchrun --nproc_per_node 2 gathered.py FOLDER`.

Each process writes `RANK.json`: bytes of its part, of the largest tensor, and the most that it held beside its part.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from podium.engines.vllm.weights import FILE_BYTES, Folder, tensors


def resident(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last `clear_refs`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main(folder: Path) -> None:
    """Measure what `Broadcast` walks through, and what `Folder` writes."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 6, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8))
    largest = max(p.nbytes for p in model.parameters())
    whole = sum(p.nbytes for p in model.parameters())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    def most(walk: bool) -> int:
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        if walk:
            for _ in tensors(model, torch.float32):
                pass
        else:
            Folder(folder / "weights", torch.float32, here=rank == 0)._write(
                model, folder / "weights" / "one", here=rank == 0
            )
        return resident("VmHWM") - before

    most(True)  # buffers of the first collective stay
    found = {"whole": whole, "largest": largest, "walked": most(True), "written": most(False), "file": FILE_BYTES}
    part = sum(p.to_local().nbytes for p in model.parameters())
    (folder / f"{rank}.json").write_text(json.dumps({**found, "part": part}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
