"""Train tiny models for twenty steps in each way that a step can go, and print a hash of the weights.

    python -m benchmarks.weights                  all runs, on one process
    python -m benchmarks.weights plain tools      some of them
    torchrun --nproc_per_node 2 -m benchmarks.weights plain reference

`benchmarks.commits --runs` compares two commits by it. One thread, float32: the same code gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Mapping
from typing import Any

from podium import TextEnvironment

STEPS = 20

BASE: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "logging_steps": STEPS,
    "save_strategy": "no",
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "product_precision": "float32",
    "prove_first_batch": False,
}

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"What is {i} + {2 * i}?"}],
        "teacher_prompt": [{"role": "user", "content": f"What is {i} + {2 * i}? It is {3 * i}."}],
        "level": i,
    }
    for i in range(24)
]

TURNS: Mapping[str, Any] = {
    "max_completion_length": 400,
    "generation_kwargs": {"eos_token_id": [2, *range(10, 60)]},  # turns of a few random tokens
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that depends on every token."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def agent(base_url: str, api_key: str, row: Mapping[str, Any], level: int) -> float:
    """Ask twice, the second time in another conversation; give a reward from the text."""
    texts = []
    for messages in (list(row["prompt"]), [{"role": "user", "content": f"and {level}?"}]):
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            data=json.dumps({"model": "policy", "messages": messages}).encode(),
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            texts.append(json.load(answer)["choices"][0]["message"]["content"] or "")
    return float(sum(map(ord, "".join(texts))) % 7)


class Count(TextEnvironment):
    """An environment of three steps, each with a reward."""

    def reset(self, **_: Any) -> str:
        self.turns = 0
        return "begin"

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turns += 1
        return "and now?", float(len(text) % 3), self.turns >= 3, {}


RUNS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "reference": {"config": {"beta": 0.05, "num_iterations": 2, "steps_per_generation": 2}, "lora": True},
    "sequence": {"config": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}},
    "covariance": {"config": {"covariance_control": "clip", "covariance_share": 0.1}},
    "teacher": {"config": {"teacher_model": "policy"}},
    "entropy": {"config": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01}},
    "resampled": {"config": {"dynamic_sampling": True}},
    "async": {"config": {"async_rollouts": 1}},
    "tools": {"tools": True},
    "game": {"config": {"turn_discount": 0.9, **TURNS}, "environment": True},
    "program": {"config": TURNS, "agent": True},
}
"""Arguments of each run beside `BASE`."""


def weights_after(name: str, model: str) -> str:
    """SHA-256 of the weights after the steps of a run, from the weights in a folder."""
    from transformers import PrinterCallback

    import podium

    run = RUNS[name]
    settings = {**BASE, **run.get("config", {})}
    if {"tools", "environment", "agent"} & run.keys():
        settings["chat_template_kwargs"] = {"chat_template": "builtin:tools"}
    given: dict[str, Any] = {"reward_funcs": reward}
    if "tools" in run:
        given["tools"] = [add]
    if "environment" in run:
        given = {"environment_factory": Count}
    if "agent" in run:
        given = {"agent": agent}
    if "lora" in run:
        given["peft_config"] = {"r": 4, "target_modules": "all-linear"}
    trainer = podium.GRPOTrainer(
        model, args=podium.GRPOConfig(tempfile.mkdtemp(), **settings), train_dataset=ROWS, **given
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found = hashlib.sha256()
    for _, weight in sorted(trainer.model.named_parameters()):
        found.update(weight.detach().numpy().tobytes())
    return found.hexdigest()


def main(names: list[str]) -> None:
    """Print one line of JSON: the hash of each run, on the first process."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch

    from podium.testing import save_tiny_model

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    model = tempfile.mkdtemp()
    save_tiny_model(model, max_position_embeddings=4096)  # while there is no group of processes: each writes its own
    found = {name: weights_after(name, model) for name in names or RUNS}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
