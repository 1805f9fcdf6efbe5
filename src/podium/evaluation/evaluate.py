"""Sample a model on held-out prompts, score, and write the completions down: some prompts at a time, in bounded memory.

    prepared = prepare(policy, [task])          # every check that needs no weights
    loaded = load(prepared, task.args)
    evaluate(loaded, task, path).summary

The random numbers of a completion depend on the seed, on the row's number in the data and on the completion's number
among those of its prompt, not on the model. So two models get the same prompts and random numbers, and an evaluation
repeats to the letter.
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
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from podium.agents.environments import EnvironmentPools
from podium.agents.rollouts import sample_groups
from podium.agents.setup import Agents, Program, bare_prompt
from podium.agents.tools import Tool
from podium.data.prompts import PromptBuilder
from podium.data.selection import sampled_rows
from podium.data.sources import keeps_rows, undecoded
from podium.data.survey import check_dataset
from podium.engines.base import RolloutEngine
from podium.errors import DataError
from podium.evaluation.baselines import Scoring
from podium.evaluation.held_out import HeldOut, keep
from podium.evaluation.saved import EvalSettings, sha256
from podium.isolation.machine import fit_threads
from podium.models import loading
from podium.models.devices import kind_of
from podium.models.precision import release_free_memory, rounds_products
from podium.records import Prompt, SamplingSettings, ScoredGroup
from podium.rewards.resolve import Reward, check_rewards, load_reward_models
from podium.rewards.score import score
from podium.runs.environment import reward_source
from podium.runs.find_model import ModelSource
from podium.trainer.assembly import (
    agents_of,
    drawn_prompt,
    engine_for,
    has_prompts,
    load_settings,
    prompt_builder,
    prompt_with_images,
)
from podium.trainer.config import GRPOConfig
from podium.trainer.rollouts import EVALUATION
from podium.trainer.run import Arguments
from podium.trainer.settings import advantage_settings, call_settings, sampling_settings

COMPLETIONS_AT_ONCE = 256
"""Sampled, scored and written together. A prompt's completions always are."""

Progress = Callable[[int, int | None], None]
"""Called after each part with prompts so far, and prompts in all (None: not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The weights to evaluate."""

    name: str
    """In messages and files."""
    source: ModelSource
    quantization_config: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTask:
    """Prompts, rewards and sampling: the same for every model that is to be compared."""

    data: str
    """Name of the data in messages and files."""
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
    first_row: int = 0
    """Number of the first row, where earlier ones of its dataset are not among them."""
    tools: tuple[Tool, ...] = ()
    pools: EnvironmentPools | None = None
    """Environments, whose own rewards are the last of `rewards`."""
    program: Program | None = None
    """An agent, whose own reward is the last."""

    @property
    def weights_K(self) -> np.ndarray:
        """Weights of the reward functions."""
        num_own = int(self.program is not None) if self.pools is None else len(self.pools.reward_functions())
        return advantage_settings(self.args, len(self.rewards) - num_own, num_own).weights_K

    @property
    def total(self) -> int | None:
        """Rows that will be read; None: a stream."""
        if not hasattr(self.rows, "__len__"):
            return self.num_rows
        return len(self.rows) if self.num_rows is None else min(self.num_rows, len(self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model before its weights are loaded."""

    policy: Policy
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    example: Prompt | None = None
    """A prompt with images, if there are some."""

    def agents(self, task: EvalTask) -> Agents:
        """The tools, environments or the program of the task."""
        arguments = Arguments(model=None, tools=task.tools)
        settings = load_settings(task.args, None, None)
        images = loading.image_processor(self.config, self.policy.source.base, None, settings)
        agents = agents_of(arguments, task.pools, task.args, self.tokenizer, task.program, images=images)
        return dataclasses.replace(agents, context_length=loading.context_length(self.config))

    def builder(self, task: EvalTask) -> PromptBuilder:
        """Rows of the task as prompts for this model."""
        builder = prompt_builder(task.args, self.tokenizer, self.config, self.agents(task))
        return dataclasses.replace(builder, name=task.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights and the engine that samples from it."""

    prepared: PreparedModel
    model: nn.Module
    engine: RolloutEngine
    end_ids: frozenset[int]


def prepare(policy: Policy, tasks: Sequence[EvalTask]) -> PreparedModel:
    """Check the model's config and tokenizer, every row and the rewards.

    Raises:
        PodiumError: what cannot work, before any weight is loaded.
    """
    settings = load_settings(tasks[0].args, policy.quantization_config, None)
    source = policy.source
    config = loading.load_config(source.base, settings)
    tokenizer = loading.load_tokenizer(source.tokenizer, None, settings)
    prepared = PreparedModel(policy=policy, config=config, tokenizer=tokenizer)
    for task in tasks:
        if task.total == 0:
            raise DataError(f"{task.data} has no rows.", code="D024", data=task.data)
        builder = prepared.builder(task)
        if task.pools is None or has_prompts(task.rows):
            check_dataset(task.rows, task.data, builder=builder)
        columns = getattr(task.rows, "column_names", None) or list(next(iter(task.rows)))
        check_rewards(task.rewards, columns, environments=task.pools is not None or task.program is not None)
    examples = (_example(prepared, task) for task in tasks)
    return dataclasses.replace(prepared, example=next(filter(None, examples), None))


def _example(prepared: PreparedModel, task: EvalTask) -> Prompt | None:
    """A prompt with images, if a row has some or they may come later."""
    builder = prepared.builder(task)
    found = prompt_with_images(builder, task.rows)
    if found is None and prepared.agents(task).takes_turns:
        return drawn_prompt(builder)
    return found


def decided(args: GRPOConfig) -> GRPOConfig:
    """The arguments with the precision of products measured once, so that two models are computed alike."""
    if kind_of(args.device).autocast or args.product_precision != "auto":
        return args
    args = copy.copy(args)
    args.product_precision = "bfloat16" if rounds_products("auto") else "float32"
    return args


def load(prepared: PreparedModel, args: GRPOConfig, rewards: Sequence[Reward] = ()) -> LoadedModel:
    """The weights, and those of reward models."""
    fit_threads()
    policy = prepared.policy
    tokenizer = prepared.tokenizer
    settings = load_settings(args, policy.quantization_config, None)
    settings = dataclasses.replace(settings, ignored=settings.ignored | policy.source.ignored)
    model = loading.load_to_sample(policy.source.base, policy.source.adapter, settings)
    loading.align_pad_token(model, tokenizer)
    if not getattr(model, "hf_device_map", None):
        model.to(args.device)
    load_reward_models(rewards)
    return LoadedModel(
        prepared=prepared,
        model=model,
        engine=engine_for(args, prepared.config, model, tokenizer, prepared.example),
        end_ids=loading.end_ids(model, tokenizer),
    )


def unload() -> None:
    """Free the memory of models that are no longer referenced."""
    gc.collect()
    release_free_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def evaluate(
    loaded: LoadedModel, task: EvalTask, path: Path, on_progress: Progress | None = None, *, k: int | None = None
) -> HeldOut:
    """Sample and score completions for every row; they are written to `path` (Parquet) as they come.

    `k`: of a pass@k that is wanted besides those of powers of two.

    Raises:
        DataError: no row has a prompt short enough.
        RewardError: a reward function that raised.
    """
    scoring = Scoring(
        rewards=task.rewards,
        weights_K=task.weights_K,
        accuracy=task.accuracy,
        settings=call_settings(task.args),
        environments=task.pools is not None,
    )
    settings = settings_of(
        scoring,
        _sampling(loaded, task),
        loaded.engine,
        loaded.prepared.tokenizer,
        model=loaded.prepared.policy.name,
        data=task.data,
        products=task.args.product_precision if not kind_of(task.args.device).autocast else "",
    )
    return keep(path, settings, scored(loaded, task, on_progress), scoring, k=k)


def settings_of(
    scoring: Scoring,
    sampling: SamplingSettings,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
    data: str,
    products: str,
) -> EvalSettings:
    """The settings of an evaluation of `model` on `data`, both by name. `products`: as in `EvalSettings`."""
    return EvalSettings(
        model=model,
        data=data,
        names=tuple(reward.name for reward in scoring.rewards),
        weights=tuple(map(float, scoring.weights_K)),
        accuracy=scoring.accuracy,
        code=tuple(reward_source(reward).get("sha256", "") for reward in scoring.rewards),
        num_completions=sampling.num_completions,
        seed=sampling.seed,
        greedy=sampling.greedy,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        engine=engine.name,
        products=products,
        vocabulary=sha256(sorted(tokenizer.get_vocab().items())),
    )


def _prompts(loaded: LoadedModel, task: EvalTask) -> Iterator[Prompt]:
    builder = loaded.prepared.builder(task)
    drawn = sampled_rows(undecoded(task.rows), task.num_rows)
    rows = ((task.first_row + number, row) for number, row in drawn)
    if task.pools is not None:
        return (bare_prompt(row, index, index) for index, row in rows)
    checked = keeps_rows(task.rows)  # by `prepare`
    built = (builder(row, id=index, row_index=index, checked=checked) for index, row in rows)
    return (prompt for prompt in built if prompt is not None)


def _sampling(loaded: LoadedModel, task: EvalTask) -> SamplingSettings:
    return sampling_settings(
        task.args,
        loaded.end_ids,
        num_completions=task.num_completions,
        round_number=EVALUATION,
        greedy=task.greedy,
        temperature=task.temperature,
    )


def scored(loaded: LoadedModel, task: EvalTask, on_progress: Progress | None = None) -> Iterator[list[ScoredGroup]]:
    """Sampled and scored groups, some prompts at a time; a row's number is its prompt's id.

    Overlong rows are left out where that was asked. Raises `DataError`, `RewardError` as `evaluate`.
    """
    prompts = _prompts(loaded, task)
    sampling = _sampling(loaded, task)
    size = max(1, COMPLETIONS_AT_ONCE // task.num_completions)
    done = 0
    agents = loaded.prepared.agents(task)
    builder = loaded.prepared.builder(task)
    settings = call_settings(task.args)
    while part := list(itertools.islice(prompts, size)):
        acted = sample_groups(agents, loaded.engine, part, sampling, builder=builder, evaluation=True)
        yield score(acted.groups, task.rewards, environments=acted.environments, settings=settings)
        done += len(part)
        if on_progress is not None:
            on_progress(done, task.total)
    if not done:
        raise DataError(f"No prompt of {task.data} is short enough.", code="D014", data=task.data)
