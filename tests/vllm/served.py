"""A run that samples from a server, on any number of processes: `accelerate launch ... served.py FOLDER URL [RANK]`.

With RANK an adapter of that rank is trained. The first process writes `weights.safetensors` and `log.json` into the
folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file

from podium import GRPOConfig, GRPOTrainer
from podium.testing import tiny_model, tiny_tokenizer

ROWS = [{"prompt": "x" * (1 + 3 * i) + "="} for i in range(12)]


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) + ids[0] / 100 for ids in completion_ids]


def main(folder: Path, url: str, rank: int = 0) -> None:
    """Three steps of four prompts."""
    args = GRPOConfig(
        str(folder / "run"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        num_generations=4,
        per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", "1")),
        max_completion_length=12,
        shuffle_dataset=False,
        optim="sgd",
        learning_rate=0.3,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        product_precision="float32",
        ddp_timeout=60,
    )
    trainer = GRPOTrainer(
        tiny_model("llama"),
        lengths,
        args,
        Dataset.from_list(ROWS),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=rank, target_modules="all-linear") if rank else None,
    )
    trainer.train()
    state = trainer.processes.full_state(trainer.model)
    if args.process_index == 0:
        save_file({name: x.clone() for name, x in state.items()}, folder / "weights.safetensors")
        rows = [row for row in trainer.state.log_history if "loss" in row]
        (folder / "log.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
