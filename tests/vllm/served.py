"""A run that samples from a server, on any number of processes: `accelerate launch ... served.py FOLDER URL [RANK]`.

With RANK an adapter of that rank is trained; with PODIUM_OVER_GLOO weights go by vLLM's interface, over gloo. The first
process writes `weights.safetensors`, `log.json` and `compared.json` into the folder.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import TrainerCallback

from podium import GRPOConfig, GRPOTrainer
from podium.engines.live.engine import LiveEngine
from podium.records import SamplingSettings
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey

SIZES = {"hidden_size": 128}
"""Of the model: vLLM's attention on a CPU takes heads of 32 and more."""
ROWS = [{"prompt": "x" * (1 + 3 * i) + "="} for i in range(12)]


def greedy(trainer: GRPOTrainer, tokens: int = 12) -> SamplingSettings:
    return SamplingSettings(num_completions=1, max_tokens=tokens, greedy=True, end_ids=trainer.run.policy.end_ids)


class Compared(TrainerCallback):
    """After every step: greedy completions of the server, and of the trainer's own modules. All processes look."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer: Any = trainer
        self.theirs: list[list[tuple[int, ...]]] = []
        self.apart: list[float] = []

    def look(self) -> None:
        trainer = self.trainer
        prompts = round_prompts(trainer.run, RoundKey(0, 0), range(4))
        served = trainer.step.sample(prompts, greedy(trainer), taken=trainer.state.global_step)
        own = LiveEngine(trainer.model, trainer.run.policy.tokenizer, precision=trainer.run.policy.forward.precision)
        with trainer.processes.full_weights(trainer.step.prepared):
            mine = own.generate(prompts, greedy(trainer))
        pairs = [(a.completions[0], b.completions[0]) for a, b in zip(served, mine, strict=True)]
        assert [a.token_ids for a, _ in pairs] == [b.token_ids for _, b in pairs]
        self.apart.append(max(float(np.abs(np.subtract(a.logps, b.logps)).max()) for a, b in pairs))
        self.theirs.append([a.token_ids for a, _ in pairs])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.look()


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) + ids[0] / 100 for ids in completion_ids]


def made(
    folder: Path,
    url: str | list[str],
    rank: int = 0,
    *,
    model: str | None = None,
    quantization_config: Any = None,
    reward: Any = lengths,
    **settings: Any,
) -> GRPOTrainer:
    """A trainer of four prompts a step, in float32."""
    given = {
        "num_generations": 4,
        "per_device_train_batch_size": 16 // int(os.environ.get("WORLD_SIZE", "1")),
        "max_completion_length": 12,
        "shuffle_dataset": False,
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "product_precision": "float32",
        "ddp_timeout": 60,
        **settings,
    }
    return GRPOTrainer(
        model or tiny_model("llama", **SIZES),
        reward,
        GRPOConfig(str(folder), use_vllm=True, vllm_mode="server", vllm_server_base_url=url, **given),
        Dataset.from_list(ROWS),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=rank, target_modules="all-linear") if rank else None,
        quantization_config=quantization_config,
    )


def losses(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """What was logged of each step."""
    return [row for row in trainer.state.log_history if "loss" in row]


def main(folder: Path, url: str, rank: int = 0) -> None:
    """Five steps."""
    if os.environ.get("PODIUM_OVER_GLOO"):
        import_module("gloo_podium_worker").register_trainer()
    trainer = made(folder / "run", url, rank, max_steps=5)
    compared = Compared(trainer)
    trainer.add_callback(compared)
    trainer.train()
    state = trainer.processes.full_state(trainer.model)
    if trainer.args.process_index == 0:
        save_file({name: x.clone() for name, x in state.items()}, folder / "weights.safetensors")
        (folder / "log.json").write_text(json.dumps(losses(trainer)))
        (folder / "compared.json").write_text(json.dumps([compared.theirs, compared.apart]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
