"""A tiny trainer whose completions are scripted, for the tests of tools, environments and several turns."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from podium import GRPOConfig
from podium.agents.chat import set_tool_template
from podium.testing import save_tiny_model, tiny_tokenizer
from podium.trainer.trainer import GRPOTrainer

ROWS = [{"prompt": [{"role": "user", "content": f"Row {i}"}], "level": i} for i in range(8)]


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
"""A PNG of one black pixel, in base64."""


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def called(name: str, **arguments: Any) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def replied(text: str) -> bool:
    """Whether a tool has answered in this conversation."""
    return "<tool_response>\n" in text


@functools.cache
def model_folder() -> str:
    return save_tiny_model(tempfile.mkdtemp(), max_position_embeddings=4096)


def tool_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    set_tool_template(tokenizer)
    return tokenizer


def settings(**changes: Any) -> GRPOConfig:
    given = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 256,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "prove_first_batch": False,
        "product_precision": "float32",
        "shuffle_dataset": False,
    }
    return GRPOConfig(**{**given, **changes})


def one(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(i % 2) for i, _ in enumerate(completions)]


def make(kind: type = GRPOTrainer, *, config: Mapping[str, Any] | None = None, **changes: Any) -> GRPOTrainer:
    given = {"reward_funcs": one, "train_dataset": ROWS, "processing_class": tool_tokenizer()}
    given["model"] = changes.get("model") or model_folder()
    return kind(args=settings(**(config or {})), **{**given, **changes})


def scripted(trainer: GRPOTrainer, answer: Callable[[str, int], str]) -> list[list[str]]:
    """Replace `model.generate`: `answer(text so far, row)` is the next turn. The texts of every call are recorded."""
    tokenizer, calls = trainer.processing_class, list[list[str]]()

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = [tokenizer.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask, strict=True)]
        calls.append(texts)
        turns = [tokenizer(answer(text, i))["input_ids"] + [tokenizer.eos_token_id] for i, text in enumerate(texts)]
        width = max(map(len, turns))
        padded = [[*turn, *[tokenizer.pad_token_id] * (width - len(turn))] for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    trainer.model.generate = generate
    return calls


class Seen:
    """A reward function that keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> list[float]:
        self.given.append(given)
        return one(**given)
