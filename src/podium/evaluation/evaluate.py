"""Sample a model on held-out prompts, score, and write down what came: some prompts at a time, in bounded memory.

    ready = prepare(policy, task)               # everything knowable, before weights
    loaded = load(policy, task.args, ready)
    measured = evaluate(loaded, ready, task, path)

The random numbers of a completion depend on the seed, on the row's number in the data and on which of its completions
it is: nothing of the model. So two models are asked the same and draw alike, and an evaluation repeats to the letter.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerState

from podium.data.check import check_dataset
from podium.data.prompts import PromptBuilder
from podium.engines.base import RolloutEngine
from podium.engines.live.engine import LiveEngine
from podium.engines.transformers import TransformersEngine
from podium.errors import DataError
from podium.evaluation.measured import Measured, join, measure
from podium.evaluation.saved import Settings, Writer
from podium.isolation.machine import fit_threads
from podium.models import loading
from podium.models.devices import kind_of
from podium.models.precision import release_free_memory, rounds_products
from podium.records import Prompt, SamplingSettings
from podium.rewards.resolve import Reward, check_rewards, load_reward_models
from podium.rewards.score import score
from podium.runs.find_model import ModelSource
from podium.trainer.assembly import engine_for, load_settings, prompt_builder
from podium.trainer.config import GRPOConfig
from podium.trainer.rollouts import EVALUATION
from podium.trainer.settings import advantage_settings, call_settings, sampling_settings

COMPLETIONS_AT_ONCE = 256
"""Sampled, scored and written together. A prompt's completions always are."""

Progress = Callable[[int, int | None], None]
"""Told after each part: prompts so far, and prompts in all (None: not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which weights to ask."""

    name: str
    """As messages and files call it."""
    source: ModelSource
    quantization_config: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to ask and how to score: the same for every model that is to be compared."""

    data: str
    """As messages and files call it."""
    rows: Any
    """A `datasets.Dataset`, a stream, or a list of rows."""
    rewards: tuple[Reward, ...]
    accuracy: str | None
    args: GRPOConfig
    num_completions: int
    greedy: bool = False
    temperature: float | None = None
    """None: the training's."""
    num_rows: int | None = None
    """None: all."""

    @property
    def weights_K(self) -> np.ndarray:
        """Of the reward functions."""
        return advantage_settings(self.args, len(self.rewards)).weights_K

    @property
    def total(self) -> int | None:
        """Rows that will be looked at; None: a stream."""
        if not hasattr(self.rows, "__len__"):
            return self.num_rows
        return len(self.rows) if self.num_rows is None else min(self.num_rows, len(self.rows))

    def sampling(self, end_ids: frozenset[int]) -> SamplingSettings:
        """How completions are drawn."""
        return sampling_settings(
            self.args,
            end_ids,
            num_completions=self.num_completions,
            round_number=EVALUATION,
            greedy=self.greedy,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What is known of a model before its weights are loaded."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that can be asked."""

    policy: nn.Module
    engine: RolloutEngine
    end_ids: frozenset[int]


def prepare(policy: Policy, tasks: Sequence[Task]) -> Ready:
    """Look at the model's config and tokenizer, at every row and at the rewards.

    Raises:
        PodiumError: what cannot work, before any weight is loaded.
    """
    settings, source = _load_settings(policy, tasks[0].args), policy.source
    config = loading.load_config(source.base, settings)
    own = source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file()
    tokenizer = loading.load_tokenizer(str(source.adapter) if own else source.base, None, settings)
    ready = Ready(config=config, tokenizer=tokenizer)
    for task in tasks:
        if task.total == 0:
            raise DataError(f"{task.data} has no rows.", code="D024")
        check_dataset(task.rows, task.data, builder=_builder(ready, task))
        columns = getattr(task.rows, "column_names", None) or list(next(iter(task.rows)))
        check_rewards(task.rewards, columns)
    return ready


def decided(args: GRPOConfig) -> GRPOConfig:
    """The arguments with the precision of products measured once, so that two models are computed alike."""
    if kind_of(args.device).autocast or args.product_precision != "auto":
        return args
    args = copy.copy(args)
    args.product_precision = "bfloat16" if rounds_products("auto") else "float32"
    return args


def load(policy: Policy, args: GRPOConfig, ready: Ready, rewards: Sequence[Reward] = ()) -> Loaded:
    """The weights, and those of reward models."""
    fit_threads()
    model = loading.load_to_sample(policy.source.base, policy.source.adapter, _load_settings(policy, args))
    loading.align_pad_token(model, ready.tokenizer)
    if not getattr(model, "hf_device_map", None):
        model.to(args.device)
    load_reward_models(rewards)
    return Loaded(
        policy=model,
        engine=engine_for(args, ready.config, model, ready.tokenizer),
        end_ids=loading.end_ids(model, ready.tokenizer),
    )


def unload() -> None:
    """Give back what a model that nobody refers to any more has held."""
    gc.collect()
    release_free_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def evaluate(
    loaded: Loaded, ready: Ready, task: Task, *, settings: Settings, path: Path, on_progress: Progress | None = None
) -> Measured:
    """Every row's completions, scored; they are written to `path` (Parquet) as they come.

    Raises:
        DataError: no row has a prompt short enough.
        RewardError: a reward function that raised.
    """
    parts: list[Measured] = []
    sampling = task.sampling(loaded.end_ids)
    with Writer(path, settings) as writer:
        done = 0
        for prompts in _parts(_builder(ready, task), task):
            scored = score(
                loaded.engine.generate(prompts, sampling, policy_step=0),
                task.rewards,
                trainer_state=TrainerState(),
                settings=call_settings(task.args),
            )
            writer.add(scored)
            parts.append(measure(scored, task.weights_K, task.accuracy))
            done += len(prompts)
            if on_progress is not None:
                on_progress(done, task.total)
        if not parts:
            raise DataError(f"No prompt of {task.data} is short enough.", code="D014")
    return join(parts)


def settings_of(policy: Policy, task: Task, loaded: Loaded) -> Settings:
    """What is kept beside the numbers."""
    return Settings(
        model=policy.name,
        data=task.data,
        names=tuple(reward.name for reward in task.rewards),
        weights=tuple(map(float, task.weights_K)),
        accuracy=task.accuracy,
        products=task.args.product_precision if not kind_of(task.args.device).autocast else "",
        **how(task.sampling(loaded.end_ids), loaded.engine),
    )


_ENGINES = {"live": LiveEngine, "transformers": TransformersEngine}


def how(sampling: SamplingSettings, engine: RolloutEngine) -> dict[str, Any]:
    """The part of `Settings` that says how completions were drawn."""
    return {
        "num_completions": sampling.num_completions,
        "greedy": sampling.greedy,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "engine": next((name for name, kind in _ENGINES.items() if isinstance(engine, kind)), "vllm"),
    }


def _load_settings(policy: Policy, args: GRPOConfig) -> loading.LoadSettings:
    return load_settings(args, policy.quantization_config, None)


def _builder(ready: Ready, task: Task) -> PromptBuilder:
    return dataclasses.replace(prompt_builder(task.args, ready.tokenizer, ready.config), name=task.data)


def _parts(builder: PromptBuilder, task: Task) -> Iterator[list[Prompt]]:
    """Prompts, some at a time; a row's number is its prompt's id. Overlong rows are left out where that was asked."""
    rows = enumerate(itertools.islice(task.rows, task.num_rows))
    built = (builder(row, id=index, row_index=index) for index, row in rows)
    prompts = (prompt for prompt in built if prompt is not None)
    size = max(1, COMPLETIONS_AT_ONCE // task.num_completions)
    while part := list(itertools.islice(prompts, size)):
        yield part
