"""What TRL's public tests of training on images ask for, where no other test of ours shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from benchmarks.families import tiny
from podium import GRPOConfig, GRPOTrainer
from podium.records import Completion, Group, Prompt, ScoredGroup, Turn
from podium.runs.completions_log import rows
from tests.images.tiny import asked, picture, processor_of

OF_TRL = ("gemma3", "gemma4", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
"""The families of TRL's `test_train_vlm`."""

UNUSED = {"gemma3": (".head.",), "llava_next": ("layers.1.", "post_layernorm")}
"""Parts of the names of parameters that a family's own forward does not use: LLaVA takes the last layer but one."""


def letters(completions: list[Any], **_: Any) -> list[float]:
    """Differs between any two texts."""
    return [sum(map(ord, messages[0]["content"])) % 101 / 101 for messages in completions]


def trained(name: str, folder: Path, model: PreTrainedModel, **settings: Any) -> GRPOTrainer:
    data = [{"prompt": [{"role": "user", "content": "What is it?"}], "image": picture(number)} for number in range(4)]
    rest = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False, "logging_steps": 1}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=letters,
        args=GRPOConfig(str(folder), **{**rest, **quiet, **settings}),
        train_dataset=Dataset.from_list(data),
        processing_class=processor_of(name),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "llava_next" else pytest.mark.slow) for x in OF_TRL])
def test_every_parameter_is_trained(name: str, tmp_path: Path) -> None:
    """With the first batch proved; what a family's own forward leaves out stays as it was."""
    model = tiny(name)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained(name, tmp_path, model, train_image_encoder=True, learning_rate=0.1, prove_first_batch=True)
    same = {x for x, parameter in model.named_parameters() if torch.equal(parameter, before[x])}
    unused = {x for x in before if "vision_tower" in x and any(part in x for part in UNUSED.get(name, ()))}
    assert same == unused


def test_tables_of_completions_hold_text_alone(tmp_path: Path) -> None:
    """Whatever `log_multimodal` says; each image is a mark in the prompt."""
    settings = {"log_completions": True, "log_multimodal": False, "max_steps": 1}
    trained("qwen3_vl", tmp_path, tiny("qwen3_vl"), **settings)
    [path] = (tmp_path / "completions").glob("*.parquet")
    table = pd.read_parquet(path)
    assert {type(x) for name in ("prompt", "completion") for x in table[name]} == {str}
    assert all("What is it?" in text for text in table["prompt"])


def test_tables_of_several_turns_hold_text_alone() -> None:
    """Whose messages are written as they are, with the word Image for each."""
    prompt = Prompt(id=0, row=0, token_ids=(5,), text="", content=asked("What is it?", picture(0)))
    turn = Turn(start=0, stop=1, message={"role": "assistant", "content": "a cat"})
    completion = Completion(
        token_ids=(6,), logps=(-1.0,), finish="stop", text="a cat", policy_step=0, turns=(turn,), prompt=None
    )
    group = Group(prompt=prompt, completions=(completion,))
    [row] = rows(ScoredGroup(group=group, names_K=(), rewards_GK=np.zeros((1, 0))), np.zeros(1))
    blocks = '[{"type": "image", "image": "Image"}, {"type": "text", "text": "What is it?"}]'
    assert row["prompt"][0]["content"] == blocks
    assert row["completion"][0]["content"] == "a cat"
