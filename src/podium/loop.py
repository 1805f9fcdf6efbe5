"""A training loop that its caller writes: `sample`, `forward_backward`, `optim_step`, `save_state`, `load_state`.

    loop = podium.Loop("builtin:smollm2-135m-instruct", podium.GRPOConfig("runs/mine", num_generations=8))
    for rows in batches:
        groups = loop.sample([row["prompt"] for row in rows])
        advantages = [my_advantages(group) for group in groups]     # [G] for each
        loop.forward_backward(loop.data(groups, advantages), "importance_sampling")
        loop.optim_step(learning_rate=1e-5)
    loop.save_state("runs/mine/state")

The names mean what they mean in Tinker's API: losses are sums over tokens, gradients add up until `optim_step`, and
log-probabilities are those of the sampler. Beneath it is the `Step` that a trainer has, too.

Shape letters: G completions of a prompt, L tokens of a completion.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer

from podium.algorithm.losses import LossSettings
from podium.errors import CheckpointError, ConfigError, DataError
from podium.errors.texts import named_list, nearest
from podium.records import Completion, Group, Prompt, Sample
from podium.trainer.arguments import converted
from podium.trainer.assembly import load_alone
from podium.trainer.config import GRPOConfig
from podium.trainer.loop_arguments import (
    check_loss,
    check_prompt,
    check_room,
    checked,
    datum,
    number,
    sampling_settings,
    step_settings,
)
from podium.trainer.rounds import MicroBatch
from podium.trainer.run import Arguments
from podium.trainer.states import MODEL, load_weights, of_this_model, putting_back, replacing
from podium.trainer.step import Objective

LOSSES: Mapping[str, LossSettings] = {
    # -w log pi: REINFORCE whose ratio is 1 and is never cut
    "cross_entropy": LossSettings(loss_type="cispo", epsilon_high=math.inf),
    "importance_sampling": LossSettings(loss_type="dapo", epsilon_low=math.inf, epsilon_high=math.inf),
    "ppo": LossSettings(loss_type="dapo"),
    "cispo": LossSettings(loss_type="cispo", epsilon_high=5.0),
}
"""By Tinker's names. `forward_backward` takes a `LossSettings` as well."""

STATE = "loop.json"

logger = logging.getLogger(__name__)


class Loop:
    """One policy and its optimizer, in one process."""

    def __init__(
        self, model: Any, args: GRPOConfig | None = None, *, processing_class: Any = None, peft_config: Any = None
    ) -> None:
        """As `GRPOTrainer`, without rewards and rows; of `args` those count that sampling, packs and optimizer have.

        Raises:
            ConfigError, ModelError: as `GRPOTrainer`; ConfigError in a run of several processes.
        """
        given = converted(
            Arguments(
                model=model,
                args=args or GRPOConfig("runs/loop"),
                processing_class=processing_class,
                peft_config=peft_config,
            )
        )
        args = given.args
        assert args is not None
        if args.world_size > 1:
            raise ConfigError(
                f"A loop runs in one process, and there are {args.world_size}.",
                fix="start it with python, not with torchrun or accelerate; GRPOTrainer divides a run over processes",
                processes=args.world_size,
            )
        self._step, self._builder = load_alone(given)
        self._step.optimizer = optimizer_of(self.model, args)
        self.steps = 0
        self.rounds = 0

    @property
    def model(self) -> Any:
        """The policy."""
        return self._step.model

    @property
    def tokenizer(self) -> Any:
        return self._step.policy.tokenizer

    def sample(self, prompts: Sequence[Any], num_completions: int | None = None, **settings: Any) -> list[Group]:
        """Completions of each prompt, from the weights as they are now.

        Random numbers depend on the run's seed, the number of this call, the prompt's place and the completion's.
        Log-probabilities are those at the temperature of this call (greedy: 1). Where it is not the run's, at which
        `forward_backward` computes, there are none for ratios: such completions train by `cross_entropy` alone.

        Args:
            prompts: texts, conversations, rows with a `prompt`, or `Prompt`s, whose tokens are taken as they are.
            num_completions: of each; None: `num_generations`.
            settings: in place of the run's, by the names in `loop_arguments.SAMPLING`; `temperature=0` is greedy.

        Raises:
            ConfigError: an unknown setting, or a value beyond its limits.
            DataError: a prompt that cannot be used, or that `max_tokens` leads beyond the model's context.
        """
        if isinstance(prompts, str | Mapping | Prompt):
            raise DataError(
                "sample takes a list of prompts, and was given one prompt by itself.",
                fix="put it into brackets: sample([prompt])",
            )
        made = [self._prompt(prompt, i) for i, prompt in enumerate(prompts)]
        given = settings if num_completions is None else {"num_completions": num_completions, **settings}
        drawn_with = sampling_settings(self._step.sampling(self._step.args.num_generations, self.rounds), given)
        if "max_tokens" in settings:
            check_room(made, drawn_with.max_tokens, self.model.config)
        self.rounds += 1
        groups = self._step.sample(made, drawn_with, taken=self.steps)
        temperature = 1.0 if drawn_with.greedy else drawn_with.temperature
        if temperature == self._step.policy.forward.temperature:
            return groups
        return [dataclasses.replace(group, temperature=temperature) for group in groups]

    def _prompt(self, given: Any, place: int) -> Prompt:
        if isinstance(given, Prompt):
            check_prompt(given.token_ids, f"prompts, row {place}", self.model.config)
            return dataclasses.replace(given, id=place)
        row = given if isinstance(given, Mapping) else {"prompt": given}
        prompt = self._builder(row, id=place, row_index=place)
        if prompt is None:
            raise DataError(
                f"Prompt {place} is too long for the model, and a prompt cannot be left out here.",
                fix="shorten it, or overlong_prompts='truncate'",
                place=place,
            )
        return prompt

    @staticmethod
    def data(groups: Sequence[Group], advantages: Sequence[Any], *, on_policy: bool = False) -> list[Sample]:
        """Each completion of the groups with its advantage, or with one for each of its tokens.

        `on_policy`: the weights are still those that sampled, so that ratios are exactly 1. Log-probabilities of
        completions that were sampled at another temperature than the run's are NaN.

        Raises:
            DataError: there are more or fewer advantages than completions.
        """
        _same_number(advantages, groups, "groups")
        for of_group, group in zip(advantages, groups, strict=True):
            _same_number(of_group, group.completions, "completions of a prompt")
        return [
            dataclasses.replace(
                datum(
                    group.prompt.token_ids,
                    completion.token_ids,
                    advantage,
                    _logps(group, completion, on_policy=on_policy),
                ),
                candidates=completion.candidates,
            )
            for group, of_group in zip(groups, advantages, strict=True)
            for completion, advantage in zip(group.completions, of_group, strict=True)
        ]

    datum = staticmethod(datum)

    def forward(self, data: Iterable[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the tokens of each sample under the weights of now, float32 [L].

        Raises:
            DataError: as `forward_backward`.
        """
        return self._step.logps(checked(data, self.model.config, old=False))

    def forward_backward(
        self, data: Iterable[Sample], loss: str | LossSettings = "importance_sampling", *, divide_by: float = 1.0
    ) -> dict[str, float]:
        """Add the gradient of a loss over the data to what is there; the loss, and the tokens that had a weight.

        Args:
            data: samples, of `data` or `datum`.
            loss: a key of `LOSSES`, or settings of a loss.
            divide_by: divides the sum over tokens (`dapo`, `cispo`) or over sequences (`grpo`).

        Raises:
            ConfigError: a loss that there is not, or that needs more than samples have; a divisor that is not above 0.
            DataError: some of the data have log-probabilities of the sampler, and others have not; a sample with
                log-probabilities that are not finite, or tokens that the model cannot take.
        """
        divide_by = number("divide_by", divide_by, 1.0)
        settings = _loss_settings(loss)
        samples = tuple(checked(data, self.model.config, old=loss != "cross_entropy"))
        unknown = sum(sample.old_logps_A is None for sample in samples)
        if loss != "cross_entropy" and 0 < unknown < len(samples):
            raise DataError(
                f"{unknown} of {len(samples)} sequences have no log-probabilities of the sampler, and the "
                "others have them: a ratio needs them of all.",
                fix="give logps to all, or to none",
                without=unknown,
                count=len(samples),
            )
        batch = MicroBatch(samples=samples, num_rollouts=divide_by, num_tokens=divide_by, step_tokens=int(divide_by))
        quantile = self._step.args.top_entropy_quantile
        results = self._step.forward_backward(batch, Objective(loss=settings), quantile=quantile)
        weighed = sum(int((sample.advantages_A != 0).sum()) for sample in samples)
        return {"loss": float(sum(result.loss for result in results)), "tokens": weighed}

    def optim_step(
        self, learning_rate: float | None = None, *, max_grad_norm: float | None = None, **settings: Any
    ) -> dict[str, float]:
        """Take an optimizer step and clear the gradients. Returns the gradient norm before clipping.

        Without any gradient the step is left out.

        Args:
            learning_rate: from now on; None: as it was.
            max_grad_norm: of this step, 0 for no clipping; None: the run's.
            settings: of the optimizer from now on, such as `betas`, `eps`, `weight_decay` (biases and norms have no
                decay, as in a run).

        Raises:
            ConfigError: a setting that the optimizer does not have, or a value beyond its limits.
        """
        run = self._step.args
        if learning_rate is not None:
            learning_rate = number("learning_rate", learning_rate, run.learning_rate)
        limit = run.max_grad_norm if max_grad_norm is None else number("max_grad_norm", max_grad_norm, 1.0)
        groups = self._step.optimizer.param_groups
        settings = step_settings(groups[0], settings)
        rate = {} if learning_rate is None else {"lr": learning_rate}
        for place, group in enumerate(groups):
            spared = {"weight_decay"} if place and not group.get("weight_decay") else set()
            group.update({**rate, **{name: value for name, value in settings.items() if name not in spared}})
        norm = self._step.optim_step(limit)
        self.steps += 1
        return {"grad_norm": norm}

    # ---- states ----

    def save_state(self, folder: str | Path) -> None:
        """Write weights, optimizer, counters and torch's random state; what goes on from them goes on as this would.

        Gradients that no step has taken yet are left out, with a warning.
        """
        if any(p.grad is not None for p in self.model.parameters()):
            logger.warning("Gradients are not in the state: save it behind optim_step, or compute them again.")
        with replacing(Path(folder)) as made:
            self._step.save_state(made)
            (made / STATE).write_text(json.dumps({"steps": self.steps, "rounds": self.rounds}))

    def save_weights(self, folder: str | Path) -> None:
        """Write the weights alone, for `weights_of`; in the folder they are where `save_state` has them."""
        with replacing(Path(folder)) as made:
            self._step.save_weights(made)

    @contextlib.contextmanager
    def weights_of(self, folder: str | Path) -> Iterator[None]:
        """Inside, sample and compute with weights that were saved; gradients and optimizer are left alone.

        Raises:
            CheckpointError: there are none, or they are of another model.
        """
        with putting_back(self.model, always=True):
            with of_this_model(Path(folder)):
                load_weights(self.model, Path(folder) / MODEL)
            yield

    def load_state(self, folder: str | Path, *, optimizer: bool = True) -> None:
        """Take over what `save_state` wrote; without `optimizer` the weights alone.

        Raises:
            CheckpointError: it is not there, broken, or of another model; then nothing has changed.
        """
        folder = Path(folder)
        if not (folder / STATE).is_file():
            weights = folder / MODEL if (folder / MODEL).is_dir() else None
            raise CheckpointError(
                f"There is no state in {folder}: it has no loop.json.",
                fix=f"{weights} holds weights alone, and weights_of computes with them"
                if weights
                else "the folder that save_state was given",
                folder=folder,
                weights=weights,
            )
        with of_this_model(folder):
            counters = json.loads((folder / STATE).read_text())
            steps = counters["steps"]
            rounds = counters["rounds"]
        self._step.load_state(folder, optimizer=optimizer)
        if optimizer:
            self.steps = steps
            self.rounds = rounds


def optimizer_of(model: nn.Module, args: GRPOConfig) -> torch.optim.Optimizer:
    """The optimizer of `optim`, with weight decay on all but biases and norms, as transformers' Trainer makes it.

    It is made by the Trainer's own method, which reads no more than this of its object, so that it is the same in every
    version of transformers.
    """
    maker: Any = Trainer.__new__(Trainer)
    maker.model = model
    maker.args = args
    maker.optimizer = None
    maker.optimizer_cls_and_kwargs = None
    made: torch.optim.Optimizer = maker.create_optimizer()
    return made


def _same_number(advantages: Sequence[Any], of: Sequence[Any], what: str) -> None:
    try:
        given = len(advantages)
    except TypeError:
        raise DataError(
            f"Advantages are rows of one for each completion, and {advantages} stands for {len(of)} {what}.",
            fix="a list for each group, in the order in which sample gave them",
            given=advantages,
            count=len(of),
            what=what,
        ) from None
    if given != len(of):
        raise DataError(
            f"There are {given} advantages for {len(of)} {what}.",
            fix="give one to each completion, in the order in which sample gave them",
            given=given,
            count=len(of),
            what=what,
        )


def _logps(group: Group, completion: Completion, *, on_policy: bool) -> Sequence[float] | None:
    if group.temperature is not None:
        return [math.nan] * len(completion.token_ids)
    return None if on_policy else completion.logps


def _loss_settings(loss: str | LossSettings) -> LossSettings:
    if isinstance(loss, LossSettings):
        check_loss(loss)
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        alike = [name for name in LOSSES if name[0] == str(loss)[:1].lower()]  # "dpo" is no misspelt "ppo"
        near = nearest(loss, alike)
        raise ConfigError(
            f"There is no loss {loss!r}; there are {named_list(list(LOSSES))}.",
            fix=f"Did you mean `{near}`?" if near else "a key of podium.loop.LOSSES, or a LossSettings",
            loss=loss,
            losses=list(LOSSES),
            near=near,
        )
    return LOSSES[loss]
