"""A user's mistake ends in one clear message, and before any weight is read wherever it can be known.

The model is a folder whose weights have wrong shapes: had anything tried to load them, the error would be another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from podium import GRPOConfig, GRPOTrainer
from podium.errors import ModelError, PodiumError, RewardError
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"hello {i}", "answer": str(i)} for i in range(16)]


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def needs_solution(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = Path(save_tiny_model(tmp_path_factory.mktemp("broken")))
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    return str(folder)


def trainer(model: Any, tmp_path: Path, *, reward: Any = length, rows: Any = ROWS, **config: Any) -> GRPOTrainer:
    arguments = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 1}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    extra = {name: config.pop(name) for name in ("tools", "rollout_func", "environment_factory") if name in config}
    args = GRPOConfig(str(tmp_path), **(arguments | config))
    return GRPOTrainer(model, reward, args, rows, **extra)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"per_device_train_batch_size": 6}, ["6", "divisible", "num_generations"]),
        ({"loss_type": "drgrpo"}, ["drgrpo", "Did you mean `dr_grpo`?"]),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.01}, ["No vLLM server", "vllm serve"]),
        ({"max_completion_length": None}, ["max_completion_length"]),
        ({"tools": [print]}, ["tool `print` has no schema"]),
        ({"tools": ["builtin:calculater"]}, ["calculater", "calculator"]),
        ({"environment_factory": 3}, ["environment_factory", "int 3", "class"]),
        ({"environment_factory": object}, ["must define a callable `reset`"]),
        ({"max_turns": 0}, ["max_turns", "at least 1"]),
        ({"tool_result_cut": "center"}, ["left, middle, right"]),
        ({"rows": ROWS[:1]}, ["1", "2"]),
        ({"reward": needs_solution}, ["needs_solution", "solution", "answer"]),
        ({"reward": None}, ["No reward source"]),
        ({"reward_weights": [1.0, 2.0]}, ["must match"]),
        ({"dynamic_sampling": True, "overlong_prompts": "cut"}, ["overlong_prompts", "truncate"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else next(iter(value)),
)
def test_said_before_weights_are_read(mistake: dict[str, Any], says: list[str], broken: str, tmp_path: Path) -> None:
    with pytest.raises(PodiumError) as raised:
        trainer(broken, tmp_path, **mistake)
    message = str(raised.value)
    assert all(word in message for word in says), message
    assert "safetensors" not in message


def test_without_a_mistake_the_weights_are_read(broken: str, tmp_path: Path) -> None:
    """The proof that the tests above would notice: this folder's weights cannot be read."""
    with pytest.raises(ModelError, match=r"3 x 3 in the files and 260 x 32 by config.json"):
        trainer(broken, tmp_path)


def raises(completions: list[str], **kwargs: Any) -> list[float]:
    return [1 / (len(completion) - len(completion)) for completion in completions]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (raises, ["raises", "ZeroDivisionError", "row"]),
        (lambda completions, **kwargs: [1.0], ["1", "8"]),
        (lambda completions, **kwargs: ["1.0"] * len(completions), ["str"]),
        (lambda completions, **kwargs: [float("inf")] * len(completions), ["inf"]),
        (lambda completions, **kwargs: [float("nan")] * len(completions), ["None"]),
        (lambda completions, **kwargs: 1.0, ["float"]),
    ],
    ids=["raises", "count", "string", "inf", "nan", "scalar"],
)
def test_a_broken_reward_stops_the_run_by_name(returned: Any, says: list[str], tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with pytest.raises(RewardError) as raised:
        GRPOTrainer(tiny_model(), returned, args, ROWS, processing_class=tiny_tokenizer()).train()
    assert all(word in str(raised.value) for word in says), str(raised.value)
