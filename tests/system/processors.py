"""Two steps of the built-in model from Python, as a script written for TRL has them: `python processors.py FOLDER`.

With a second argument, a model without pretrained weights that an emulated processor trains in minutes.
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset

from podium import GRPOConfig, GRPOTrainer
from podium.models import precision
from podium.testing import tiny_model, tiny_tokenizer


def digits(completions: list[str], **_: object) -> list[float]:
    return [sum(character.isdigit() for character in text) + len(text) / 10 for text in completions]


def main(folder: str, *sizes: str) -> None:
    tiny = "tiny" in sizes
    trainer = GRPOTrainer(
        # Wide enough that products are rounded.
        model=tiny_model("llama", hidden_size=64, head_dim=16) if tiny else "builtin:smollm2-135m-instruct",
        processing_class=tiny_tokenizer() if tiny else None,
        reward_funcs=digits,
        args=GRPOConfig(
            folder,
            bf16=True,
            product_precision="bfloat16" if "insist" in sizes else "auto",
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            max_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(2, 5) for b in range(4)]),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    rounded = trainer.run.policy.forward.precision.rounds
    packed = bool(precision._packable) and all(precision._packable.values())
    print(f"capability {torch.backends.cpu.get_cpu_capability()} rounded {rounded} packed {packed}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
