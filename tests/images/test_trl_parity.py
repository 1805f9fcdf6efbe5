"""Steps of a real `trl.GRPOTrainer` and of Podium's on rows with images, from the same completions, move weights alike.

Plain gradient descent makes the movement proportional to the gradient. TRL always trains the encoder of images; where
Podium does not, it is frozen in TRL, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from torch import Tensor
from trl.trainer import grpo_trainer as trl_module

from benchmarks import families
from podium import GRPOConfig, GRPOTrainer
from podium.engines.base import RolloutEngine, Sampled
from podium.models.images import joined
from podium.models.stored import outside
from podium.records import RolloutRequest, SamplingSettings
from podium.testing import tiny_tokenizer
from tests.images.test_families import FAST
from tests.images.tiny import PROCESSORS, picture, processor_of
from tests.parity.test_first_step import ids_of, movement, settings_of, weights

QUESTIONS = ("What is it?", "And this???")
COMPLETIONS = (("a cat", "no idea", "xxxxxxxx", ""), ("red", "a pear", "red", "blue"))
REWARDS = ((1.0, 0.2, -0.7, 0.4), (1.0, 0.0, 0.1, 0.7))
SAMPLED = {question: [ids_of(text) for text in texts] for question, texts in zip(QUESTIONS, COMPLETIONS, strict=True)}


def question_in(prompt_ids: Sequence[int]) -> str:
    """What was asked in a prompt."""
    text = tiny_tokenizer().decode([i for i in prompt_ids if i < 260])
    return next(question for question in QUESTIONS if question in text)


EVEN = ("gemma4", "mistral3")
"""Families whose processors fill up a batch of prompts, or refuse it: TRL takes the padding for tokens of a prompt."""


def rows(name: str, column: str) -> Dataset:
    """One image a row, or two of several sizes, which are the same in both rows where prompts are to be of a length."""
    found = []
    for number, question in enumerate(QUESTIONS):
        less = 0 if name in EVEN else 24 * number
        images = [picture(number, 16, 24 + less), picture(number + 9, 32, 64 - less)]
        value = images[0] if column == "image" else images
        found.append({"prompt": [{"role": "user", "content": question}], column: value})
    return Dataset.from_list(found)


@dataclasses.dataclass
class Seen:
    """What one of the trainers has shown its sampler and its rewards."""

    prompt_ids: list[list[int]] = dataclasses.field(default_factory=list)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    rewarded: list[Any] = dataclasses.field(default_factory=list)

    def score(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        """TRL's and Podium's rewards get the same, but for the trainer's state and what logs."""
        others = {name: columns[name] for name in ("image", "images") if name in columns}
        self.rewarded.append(plain({"prompts": prompts, "completions": completions, "ids": completion_ids, **others}))
        return [reward_of(messages, ids) for messages, ids in zip(prompts, completion_ids, strict=True)]


def reward_of(messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> float:
    question = messages[0]["content"][-1]["text"]
    return REWARDS[QUESTIONS.index(question)][SAMPLED[question].index([*ids])]


def plain(value: Any) -> Any:
    """The value with mode, size and bytes in place of images."""
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, Mapping):
        return {name: plain(x) for name, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, list | tuple) else value


class FixedEngine(RolloutEngine):
    """An engine that always says the same."""

    def __init__(self, seen: Seen) -> None:
        self.tokenizer = tiny_tokenizer()
        self.seen = seen

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        images = []
        for request in requests:
            assert request.images
            self.seen.prompt_ids += [[*request.token_ids]] * request.num_completions
            images += [*request.images] * request.num_completions
        tokens = {name: [x.token_fields[name].tolist() for x in images] for name in images[0].token_fields}
        self.seen.fields |= {**joined([x.fields for x in images]), **tokens}
        drawn = [SAMPLED[question_in(request.token_ids)] for request in requests]
        return [[Sampled(ids, [-1.0] * len(ids)) for ids in group] for group in drawn]


def fixed_turn(seen: Seen) -> Any:
    """The same for TRL, in place of what samples."""

    def generate(prompt_ids: Any, _images: Any, fields: Mapping[str, Any], *_: Any) -> tuple[list[list[int]], None]:
        seen.prompt_ids += [[*ids] for ids in prompt_ids]
        seen.fields |= fields
        groups = {question: iter(ids) for question, ids in SAMPLED.items()}
        return [next(groups[question_in(ids)]) for ids in prompt_ids], None

    return generate


@functools.cache
def saved(name: str, folder: Path) -> str:
    """A family's tiny model in a folder, from which references are loaded."""
    families.tiny(name).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Scales are neutral: TRL reads them from names of the config, whatever the model's class does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(families, "SCALES", {})
        folder = tmp_path_factory.mktemp("models")
        yield lambda name: saved(name, folder / name)


LANGUAGE = r".*(language_model|text_model).*\.(q_proj|down_proj)"
EVERYWHERE = r".*\.(q_proj|qkv|down_proj|linear_fc1|fc1)"


def lora(modules: str) -> LoraConfig:
    """With a random B, so that the policy differs from its reference from the start."""
    return LoraConfig(r=4, target_modules=modules, init_lora_weights=False, lora_dropout=0.0)


def run_trl(
    name: str, model: str, column: str, settings: Mapping[str, Any], modules: str | None, *, trains_encoder: bool
) -> tuple[Any, dict[str, Tensor], Seen]:
    seen = Seen()
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=seen.score,
        args=trl.GRPOConfig(**settings),
        train_dataset=rows(name, column),
        processing_class=processor_of(name),
        peft_config=lora(modules) if modules else None,
    )
    trainer._generate_single_turn = fixed_turn(seen)  # in place of sampling
    if not trains_encoder:
        for parameter in outside(trainer.model).values():
            parameter.requires_grad_(False)
    before = weights(trainer)
    trainer.train()
    return trainer, before, seen


def run_podium(
    name: str,
    model: str,
    column: str,
    settings: Mapping[str, Any],
    modules: str | None,
    start: Mapping[str, Tensor],
    *,
    trains_encoder: bool,
) -> tuple[GRPOTrainer, Seen]:
    seen = Seen()
    config = lora(modules) if modules else None
    if config is not None:  # TRL's reference is the base also of an adapter that is random from the start
        config = dataclasses.replace(config, init_lora_weights=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=seen.score,
        args=GRPOConfig(**settings, prove_first_batch=False, train_image_encoder=trains_encoder),
        train_dataset=rows(name, column),
        processing_class=processor_of(name),
        peft_config=config,
    )
    trainer.step.engine = FixedEngine(seen)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert parameters.keys() == start.keys()
    with torch.no_grad():
        for parameter_name, parameter in parameters.items():  # a new adapter is random in both
            parameter.copy_(start[parameter_name])
    trainer.train()
    return trainer, seen


SIZES = {
    **{"per_device_train_batch_size": 8, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0},
    **{"learning_rate": 0.005, "max_grad_norm": 1e3},  # so that sizes of gradients are compared, too, and not cut off
}


def assert_alike(
    name: str,
    model: str,
    folder: Path,
    column: str = "image",
    modules: str | None = None,
    *,
    trains_encoder: bool = False,
    **changes: Any,
) -> None:
    settings = settings_of(str(folder), accumulation=1, steps=3, **{**SIZES, **changes})
    theirs, start, theirs_seen = run_trl(name, model, column, settings, modules, trains_encoder=trains_encoder)
    ours, ours_seen = run_podium(name, model, column, settings, modules, start, trains_encoder=trains_encoder)
    assert_same_view(ours_seen, theirs_seen)
    expected, got = (movement(trainer, [*start], start) for trainer in (theirs, ours))
    assert expected.norm() > 1e-3, "nothing moved, so nothing is compared"
    apart = float((got - expected).norm() / expected.norm())
    assert apart < 1e-4
    if trains_encoder:
        of_encoder = [x for x in start if x in outside(ours.model)]
        assert movement(ours, of_encoder, start).norm() > 1e-5
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        names = [x for x in ("loss", "grad_norm", "reward", "reward_std", "kl", "num_tokens") if x in other]
        assert {x: mine[x] for x in names} == pytest.approx({x: other[x] for x in names}, rel=1e-3, abs=1e-4)


def assert_same_view(ours: Seen, theirs: Seen) -> None:
    """Prompts, pixels and what rewards receive."""
    assert ours.prompt_ids == theirs.prompt_ids
    assert ours.rewarded == theirs.rewarded
    assert ours.fields.keys() == theirs.fields.keys()
    for name, mine in ours.fields.items():
        other = theirs.fields[name]
        if isinstance(mine, Tensor):
            np.testing.assert_array_equal(mine.numpy(), np.array(other))
        else:
            assert mine == [[*row] for row in other]


ALL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in PROCESSORS]


@pytest.mark.parametrize("name", ALL)
def test_the_language_model_moves_as_in_trl(name: str, model_of: Any, tmp_path: Path) -> None:
    assert_alike(name, model_of(name), tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_the_encoder_moves_as_in_trl(name: str, model_of: Any, tmp_path: Path) -> None:
    assert_alike(name, model_of(name), tmp_path, "images", trains_encoder=True)


CHANGES = {
    "beta": {"beta": 0.04},
    "two iterations": {"num_iterations": 2, "epsilon": 0.02},
    "grpo": {"loss_type": "grpo", "num_iterations": 2, "beta": 0.04},
    "dapo": {"loss_type": "dapo", "num_iterations": 2, "beta": 0.04},
    "padding": {"pad_to_multiple_of": 7},
    "several steps of a round": {
        **{"per_device_train_batch_size": 4, "steps_per_generation": 2},
        **{"loss_type": "grpo", "epsilon": 0.02},
    },
    "two micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}
SOME = [pytest.param(name, marks=[] if name == "qwen3_vl" else pytest.mark.slow) for name in FAST]


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", SOME)
def test_settings_move_weights_as_in_trl(
    name: str, changes: dict[str, Any], model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the encoder trained and two images a row; TRL's shuffling is off, so that steps have the same rows."""
    monkeypatch.setattr(trl_module, "shuffle_sequence_dict", lambda batch: batch)
    assert_alike(name, model_of(name), tmp_path, "images", trains_encoder=True, **changes)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", SOME)
def test_an_adapter_moves_as_in_trl(name: str, beta: float, model_of: Any, tmp_path: Path) -> None:
    """In the language model alone; the reference is the model without it."""
    assert_alike(name, model_of(name), tmp_path, modules=LANGUAGE, beta=beta, num_iterations=2)


@pytest.mark.parametrize("name", SOME)
def test_an_adapter_of_the_encoder_moves_as_in_trl(name: str, model_of: Any, tmp_path: Path) -> None:
    assert_alike(name, model_of(name), tmp_path, "images", EVERYWHERE, trains_encoder=True, beta=0.04)
