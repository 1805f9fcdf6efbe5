"""One process with one model: trainers for candidates, each from the initial weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed

from podium.algorithm.advantages import combine, has_spread
from podium.algorithm.metrics import RIGHT
from podium.data.selection import fingerprint
from podium.errors import ConfigError, PodiumError
from podium.evaluation import accuracy_name
from podium.models import loading
from podium.pilot.grid import WITH
from podium.pilot.score import Signal, squared_norms
from podium.planning.estimates.duration import num_steps
from podium.recipe import load
from podium.recipe.document import Document
from podium.recipe.recipe import Recipe
from podium.records import ScoredGroup, last_user_turn
from podium.trainer.assembly import load_settings, plan_of
from podium.trainer.rounds import MicroBatch
from podium.trainer.trainer import GRPOTrainer

QUIET: Mapping[str, Any] = {
    "prove_first_batch": False,
    "record": False,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "log_completions": False,
    "push_to_hub": False,
    "async_rollouts": 0,
}
"""Settings of a run that is not kept. Numbers of training are those of the recipe."""

MEASURED_ROWS, MEASURED_SHARE = 32, 0.2
"""Rows on which accuracy is measured, and the most of the training rows that they may be."""
MEASURED_SAMPLES = 2
"""Completions of each."""
NUM_EXAMPLES = 2
TENSORS, VALUES = 32, 2048
"""Most trained tensors, and most numbers of each, by whose gradients two halves of a batch are compared."""


class PilotTrainer(GRPOTrainer):
    """Stops after some steps of a longer schedule; records groups with spread and gradients of half batches."""

    def __init__(self, *args: Any, stop_after: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spreads: list[float] = []
        self.norms: list[tuple[float, float]] = []
        trained = [p for p in self.model.parameters() if p.requires_grad]
        every = max(1, len(trained) // TENSORS)
        self._probed = trained[:: every + (every % 2 == 0)]  # odd, or all would be of an adapter's A matrices
        self.remove_callback(PrinterCallback)
        self.add_callback(_StopAfter(stop_after))

    def training_step(self, model: Any, batch: MicroBatch, num_items_in_batch: Any = None) -> Tensor:
        """The same gradient in two halves, compared in between."""
        if batch.trial is not None or len(batch.groups) < 2:
            return super().training_step(model, batch, num_items_in_batch)
        self.spreads.append(spread_share(self.scored, self.parts.advantage.weights_K))
        start = self._gradients_D()
        half = dataclasses.replace(batch, groups=batch.groups[::2], is_last=False)
        loss = super().training_step(model, half, num_items_in_batch)
        middle = self._gradients_D()
        rest = dataclasses.replace(batch, groups=batch.groups[1::2])
        loss = loss + super().training_step(model, rest, num_items_in_batch)
        first, second = middle - start, self._gradients_D() - middle
        self.norms.append(squared_norms(2 * first, 2 * second))
        return loss

    def _gradients_D(self) -> np.ndarray:
        """A fixed sample of the gradients so far; zeros where there are none yet."""
        parts = []
        for parameter in self._probed:
            flat = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach().flatten()
            parts.append(flat[:: max(1, len(flat) // VALUES)][:VALUES].double().cpu())
        return torch.cat(parts).numpy().copy()

    @property
    def agreement(self) -> float:
        """Share of the squared gradient that is signal, over all steps; NaN: no gradient."""
        signal, total = np.sum(self.norms, axis=0) if self.norms else (0.0, 0.0)
        return float(np.clip(signal / total, 0.0, 1.0)) if total > 0 else math.nan


class _StopAfter(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.steps


def clock(device: torch.device) -> float:
    """Seconds: on a CPU of processor time for each thread, so that other programs change nothing; else of the clock."""
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else time.perf_counter()


def spread_share(groups: Sequence[ScoredGroup], weights_K: np.ndarray) -> float:
    """Share of groups whose weighted rewards differ."""
    rewards = [combine(each.rewards_GK, weights_K) for each in groups]
    return float(np.mean([has_spread(x[~np.isnan(x)]) for x in rewards])) if rewards else 0.0


class Session:
    """The recipe's model, loaded once, and its training rows in two parts: trained on, and measured on.

    Attributes:
        device: that of the trainers.
        full_steps: optimizer steps of the recipe.
        examples: worked examples: the recipe's own, or made of rows; empty: none can be made.
    """

    def __init__(self, document: str | Path | Document, overrides: Mapping[str, Any], *, rows: int, folder: Path):
        self.document, self.overrides, self.folder = document, dict(overrides), folder
        self.recipe = load(document, overrides)
        if self.recipe.stages:
            raise ConfigError(
                "pilot.stages_pilot_compares", recipe_name=self.recipe.name, stages_count=len(self.recipe.stages)
            )
        self._limit = rows
        self._rows: dict[str, tuple[Any, list[Any]]] = {}
        self._before: dict[Any, np.ndarray] = {}
        self._scale = (0.0, 1.0)
        args = self.arguments(self.recipe)
        self.device = args.device
        train = self.recipe.load_rows()[0]
        self.full_steps = num_steps(args, plan_of(args), len(train) if hasattr(train, "__len__") else None)
        self._places, self._measured = self._divided(train, args)
        self._length = 0 if self._places is None else len(train)
        self._first = [] if self._places is None else [train[i] for i in self._places]
        settings = load_settings(args, self.recipe.quantization_config(), self.recipe.peft_config())
        settings = replace(settings, needs_reference=False)
        self.tokenizer = loading.load_tokenizer(self.recipe.model, None, settings)
        set_seed(args.seed)  # a new adapter is random
        self.policy = loading.load_policy(self.recipe.model, settings)
        self._start = {n: p.detach().clone() for n, p in self.policy.named_parameters() if p.requires_grad}
        self.examples: list[dict[str, Any]] = []

    def _divided(self, train: Any, args: Any) -> tuple[list[int] | None, int]:
        """Places of the rows in a random order (None: a stream, read from its start), and how many are measured on."""
        count = min(self._limit, len(train)) if hasattr(train, "__len__") else self._limit
        measured = min(MEASURED_ROWS, int(MEASURED_SHARE * count))
        needed = plan_of(args).prompts_per_round + 1
        if count - measured < needed or measured < 1:
            what = f"A pilot measures on {MEASURED_SHARE:.0%} of the training rows and trains on the rest, at least "
            what += f"{needed} rows here; {count} are too few."
            raise ConfigError(what, fix="more rows, a smaller per_device_train_batch_size, or a larger --rows")
        if not hasattr(train, "__len__"):
            return None, measured
        return np.random.default_rng([args.seed, 26]).permutation(len(train))[:count].tolist(), measured

    # ---- recipes and rows ----

    def variant(self, changes: Mapping[str, Any], seed: int | None = None) -> Recipe:
        """The recipe with changed settings, as a run that leaves nothing behind."""
        more = {} if seed is None else {"seed": seed}
        made = load(self.document, {**self.overrides, **changes, **more})
        config = {**made.config, **QUIET, "output_dir": str(self.folder), "max_steps": self.full_steps}
        return replace(made, config=config)

    def arguments(self, recipe: Recipe) -> Any:
        """Arguments of a trainer around a model that is loaded."""
        args = replace(recipe, config={**recipe.config, **QUIET, "output_dir": str(self.folder)}).arguments()
        if not any(isinstance(spec.function, str) for spec in recipe.rewards):
            args.model_init_kwargs = None
        return args

    def rows(self, recipe: Recipe) -> tuple[Any, list[Any]]:
        """Rows to train on and rows to measure on, with the recipe's examples in front; none of them is held out."""
        key = repr(recipe.given.get("examples"))
        if key not in self._rows:
            train, measured = recipe.load_rows()[0], self._measured
            if self._places is None:
                first = list(itertools.islice(train, self._limit))
                self._rows[key] = first[measured:], first[:measured]
            else:
                places = self._places_in(train)
                rest = [i for part, i in places if part >= measured]
                chosen = [train[i] for part, i in places if part < measured]
                taken = train.select(rest) if hasattr(train, "select") else [train[i] for i in rest]
                self._rows[key] = taken, chosen
        return self._rows[key]

    def _places_in(self, train: Any) -> list[tuple[int, int]]:
        """Rank in the random order and place in `train`, which may lack the rows of worked examples."""
        assert self._places is not None
        if len(train) == self._length:
            return list(enumerate(self._places))
        ranks = {fingerprint(last_user_turn(row["prompt"])): rank for rank, row in enumerate(self._first)}
        found = ((ranks.get(fingerprint(last_user_turn(row["prompt"]))), i) for i, row in enumerate(train))
        return sorted((rank, i) for rank, i in found if rank is not None)

    @property
    def num_rows(self) -> tuple[int, int]:
        """Rows that are trained on, and rows that are measured on."""
        train, measured = next(iter(self._rows.values()))
        return len(train), len(measured)

    def trainer(self, recipe: Recipe, steps: int = 1) -> PilotTrainer:
        """A trainer from the initial weights, which stops after `steps`."""
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if name in self._start:
                    parameter.copy_(self._start[name])
                    parameter.grad = None
        return PilotTrainer(
            model=self.policy,
            reward_funcs=[spec.function for spec in recipe.rewards],
            args=self.arguments(recipe),
            train_dataset=self.rows(recipe)[0],
            processing_class=self.tokenizer,
            stop_after=steps,
            **recipe.agents.arguments(),
        )

    def find_examples(self) -> list[dict[str, Any]]:
        """The recipe's worked examples, or rows as `examples: 2` takes them; none where no row has the form of one."""
        recipe = self.recipe
        if not recipe.data.all_parts[0].columns.examples:
            try:
                recipe = load(self.document, {**self.overrides, "examples": NUM_EXAMPLES})
            except PodiumError:
                return []
        return [dict(each) for each in recipe.data.all_parts[0].columns.examples]

    # ---- measurements ----

    def set_scale(self, rewards: np.ndarray) -> None:
        """The lowest and the highest reward, which become 0 and 1."""
        known = rewards[~np.isnan(rewards)]
        if known.size and known.max() > known.min():
            self._scale = (float(known.min()), float(known.max()))

    def levels(self, groups: Sequence[ScoredGroup], weights_K: np.ndarray) -> tuple[np.ndarray, float]:
        """By prompt the share of right answers [P], or without an accuracy reward the mean reward; and the mean reward.

        Rewards are from 0 (the lowest seen) to 1 (the highest).
        """
        low, high = self._scale
        reward_PG = np.stack([np.clip((combine(g.rewards_GK, weights_K) - low) / (high - low), 0, 1) for g in groups])
        reward = float(np.nan_to_num(np.nanmean(reward_PG))) if not np.isnan(reward_PG).all() else 0.0
        name = self.recipe.accuracy or accuracy_name(groups[0].names_K)
        if name is None:
            return np.nan_to_num(reward_PG).mean(axis=1), reward
        k = groups[0].names_K.index(name)
        return np.stack([(g.rewards_GK[:, k] >= RIGHT).mean() for g in groups]), reward

    @property
    def accuracy(self) -> str | None:
        """The reward that tells right from wrong."""
        return self.recipe.accuracy or accuracy_name([spec.name for spec in self.recipe.rewards])

    def measure(self, trainer: GRPOTrainer, recipe: Recipe) -> tuple[np.ndarray, float]:
        """`levels` of the measured rows under the weights there are, sampled as held-out rows are."""
        rows = [row for row in self.rows(recipe)[1] if trainer.parts.builder(row, id=0, row_index=0) is not None]
        groups = trainer.generate_completions(
            rows, num_generations=MEASURED_SAMPLES, temperature=recipe.eval_temperature
        )
        return self.levels(groups, trainer.parts.advantage.weights_K)

    def train(self, changes: Mapping[str, Any], steps: int, seeds: int) -> Signal:
        """Train a candidate for some steps, with every seed, and measure before and after."""
        found = []
        base = int(self.recipe.config.get("seed", 42))
        for seed in range(base, base + seeds):
            recipe = self.variant(changes, seed)
            trainer = self.trainer(recipe, steps)
            unlike = (
                "examples",
                "max_completion_length",
                *(("temperature",) if recipe.eval_temperature is None else ()),
            )
            key = (seed, *(repr(recipe.given.get(name)) for name in unlike))
            if key not in self._before:
                self._before[key] = self.measure(trainer, recipe)[0]
            trainer.train()
            after_P, reward = self.measure(trainer, recipe)
            last = trainer.spreads[len(trainer.spreads) // 2 :]
            found.append((self._before[key], after_P, float(np.mean(last)) if last else 0.0, trainer.agreement, reward))
        before, after, spread, agreement, reward = zip(*found, strict=True)
        return Signal(
            before_P=np.concatenate(before),
            after_P=np.concatenate(after),
            samples=MEASURED_SAMPLES,
            steps=steps,
            spread=float(np.mean(spread)),
            agreement=float(np.mean(agreement)),
            reward=float(np.mean(reward)),
        )


def changed(values: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A candidate's values as keys and values of a recipe; None takes a key out."""
    shown = None if values.get("examples") != WITH else [dict(each) for each in examples]
    return {axis: shown if axis == "examples" else value for axis, value in values.items()}
