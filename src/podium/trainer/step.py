"""One policy that samples, learns and is saved, in four verbs.

    groups = step.sample(prompts, settings)                         completions, from the weights as they are now
    results = step.forward_backward(batch, objective)               adds the gradient of a loss
    norm = step.optim_step(max_grad_norm)                           the optimizer's step; clears the gradients
    step.save_state(folder)                                         weights, optimizer and random numbers

`podium.Loop` is this with checks of what it is given. `GRPOTrainer` has one and lends it to transformers' hooks: there
the Trainer steps the optimizer and writes checkpoints.

Shape letters: A drawn tokens of a sample, N trained tokens of a pack.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from podium.algorithm.losses import LossSettings, LossSums, keep_high_entropy, policy_loss
from podium.engines.base import RolloutEngine
from podium.engines.transformers import TransformersEngine
from podium.models.devices import kind_of
from podium.models.forward import Forward, base_model
from podium.models.modes import evaluation_mode, replaced
from podium.models.packing import Pack, dummy_pack, pack
from podium.models.reference import Reference
from podium.records import GivenImages, Group, Prompt, Sample, SamplingSettings
from podium.trainer.config import GRPOConfig
from podium.trainer.examination import WEIGHTS_ALONE, Examination, overflow, where
from podium.trainer.processes import Processes
from podium.trainer.rounds import MicroBatch, loss_inputs
from podium.trainer.rules import reshaping
from podium.trainer.settings import has_other_sampler, sampling_settings
from podium.trainer.states import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    load_weights,
    of_this_model,
    putting_back,
    random_states,
    save_policy,
    set_random_states,
)
from podium.trainer.teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model that is trained, and how it computes."""

    source: Any
    """As it was given: a name, a folder or a model."""
    model: nn.Module
    """Without a data-parallel wrapper."""
    tokenizer: PreTrainedTokenizerBase
    forward: Forward
    """Settings of the forward passes that compute log-probabilities."""
    tokens_per_pack: int
    end_ids: frozenset[int]
    """Every one of these tokens ends a completion."""
    trained: frozenset[str]
    """Names of the parameters that this run trains."""
    num_parameters: int
    tried_images: tuple[GivenImages, ...] = ()
    """Images that its forward was tried behind; empty: rows have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What training minimises."""

    loss: LossSettings
    router_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts; 0: there is none."""
    skips_zero_advantage: bool = False
    """Whether a sample whose advantages are all 0 provably changes no gradient."""
    reference: Reference | None = None
    """None: beta is 0."""
    teacher: Teacher | None = None


class PackResult(NamedTuple):
    """Forward and backward of one pack."""

    loss: Tensor
    sums: LossSums
    gaps: list[Tensor]
    """Mean and largest difference between sampler and training, where they should agree."""
    metrics: dict[str, float]


class Step:
    """A policy with its engine, its optimizer, and the processes that share its work."""

    processes: Processes
    """That share its work; it is set by `divided`, before anything is computed."""

    def __init__(self, args: GRPOConfig, policy: Policy, engine: RolloutEngine) -> None:
        self.args = args
        self.policy = policy
        self.engine = engine
        self.prepared: nn.Module = policy.model
        """The model as accelerate prepared it: in a wrapper, where its gradients are reduced over processes."""
        self.optimizer: Any = None
        self._examination: Examination | None = None
        """Watches every pack; None: they are healthy."""
        self._zeros: dict[nn.Parameter, Tensor] = {}
        settings = sampling_settings(args, policy.end_ids, num_completions=1, round_number=0)
        self._sampling = settings
        self._reshapes = settings.repetition_penalty != 1 or bool(reshaping(args))

    @property
    def model(self) -> nn.Module:
        return self.policy.model

    def divided(self, processes: Processes, model: nn.Module) -> None:
        """Take the processes of the run, and the policy as they hold it."""
        self.processes = processes
        forward = self.policy.forward
        if processes.in_lockstep:
            forward = replace(forward, beside_text=self.policy.tried_images[:1])
        self.policy = replace(self.policy, model=model, forward=forward)
        self.prepared = model

    def tried(self, **changes: Any) -> Step:
        """The same step with other fields of its policy, for a trial: its gradients stay in this process."""
        tried = copy.copy(self)
        tried.policy = replace(self.policy, **changes)
        tried.prepared = tried.policy.model
        return tried

    # ---- sample ----

    def sampling(
        self, num_completions: int, round_number: int, *, greedy: bool = False, temperature: float | None = None
    ) -> SamplingSettings:
        """Settings of one round, at the temperature at which log-probabilities are computed unless one is given."""
        settings = sampling_settings(
            self.args,
            self.policy.end_ids,
            num_completions=num_completions,
            round_number=round_number,
            greedy=greedy,
            temperature=self.policy.forward.temperature if temperature is None else temperature,
        )
        never = {images.placeholder for images in self.policy.tried_images}  # in no text that is trained beside images
        return replace(settings, never=tuple(never))

    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, taken: int = 0) -> list[Group]:
        """One turn of each completion. `taken`: optimizer steps that the weights have taken."""
        self.sync(taken)
        return self.engine.generate(prompts, settings, policy_step=taken)

    def sync(self, taken: int) -> None:
        """Give an engine with weights of its own the policy's."""
        if self.engine.own_weights:
            self.engine.sync(self.model, taken)

    @property
    def sampler(self) -> RolloutEngine:
        """The engine; transformers' `generate` where the user has replaced it on the model, as code for TRL does."""
        policy = self.policy
        if self.engine.name != "live" or self.engine.own_weights:
            return self.engine
        if not any(map(_generates_otherwise, (policy.model, base_model(policy.model)))):
            return self.engine
        return TransformersEngine(
            policy.model, policy.tokenizer, forward=policy.forward, tokens_per_pack=policy.tokens_per_pack
        )

    def whole_weights(self) -> AbstractContextManager[None]:
        """Around sampling: sharded weights, gathered, unless the engine has weights of its own."""
        return contextlib.nullcontext() if self.engine.own_weights else self.processes.full_weights(self.prepared)

    # ---- forward, backward ----

    @torch.no_grad()
    def touch(self, model: nn.Module) -> None:
        """A forward of one token, which gathers the weights of a sharded model."""
        with self.policy.forward.context(model):
            self.policy.forward.token_logps(model, dummy_pack(self.args.device))

    @torch.no_grad()
    def logps(
        self, samples: Sequence[Sample], model: nn.Module | None = None, forward: Forward | None = None
    ) -> list[np.ndarray]:
        """Log-probabilities of the drawn tokens of each sample, float32 [A], in order.

        Args:
            samples: of this process.
            model: a reference or a teacher; None: the policy.
            forward: settings of the model's forward passes; None: those of the policy.
        """
        model = self.model if model is None else model
        forward = forward or self.policy.forward
        found: list[np.ndarray] = []
        packs = pack(samples, tokens_per_pack=self.policy.tokens_per_pack, device=self.args.device)
        dummies = self.processes.num_dummy_forwards(len(packs))  # counted by all before the first forward of any
        with evaluation_mode(model), forward.context(model):
            for packed in packs:
                found += packed.split(forward.token_logps(model, packed).logps_N)
            for _ in range(dummies):
                forward.token_logps(model, dummy_pack(self.args.device))
        self.processes.reshard(model)
        return found

    def forward_backward(
        self, batch: MicroBatch, objective: Objective, *, entropy_coef: float = 0.0, quantile: float = 1.0
    ) -> list[PackResult]:
        """Add the gradients of one micro-batch, pack by pack.

        Args:
            batch: the samples, and what their loss is divided by.
            objective: the loss.
            entropy_coef: weight of the entropy bonus.
            quantile: share of the tokens, those of highest entropy, that the policy term keeps.
        """
        model = self.prepared
        processes = self.processes
        policy = self.policy
        device = self.args.device
        model.train()
        results: list[PackResult] = []
        with policy.forward.context(self.model):
            observed = bool(objective.loss.observation_coef)
            packs = pack(batch.samples, tokens_per_pack=policy.tokens_per_pack, device=device, observed=observed)
            if kind_of(device).host_memory and not processes.in_lockstep:
                self._zero_gradients()  # those that are there first leave no holes between activations
            dummies = processes.num_dummy_backwards(len(packs))
            keeps: list[Tensor | None] = [None] * len(packs)
            num_kept = None
            if quantile < 1:
                keeps, num_kept = self._high_entropy(packs, batch, quantile, dummies)
            for i, (packed, keep_N) in enumerate(zip(packs, keeps, strict=True), start=1):
                with processes.accumulating(model, last=i == len(packs) + dummies):
                    results.append(self._backward(packed, batch, objective, keep_N, num_kept, entropy_coef))
            for i in range(dummies, 0, -1):
                with processes.accumulating(model, last=i == 1):
                    self._dummy_backward(objective)
        return results

    def _backward(
        self,
        packed: Pack,
        batch: MicroBatch,
        objective: Objective,
        keep_N: Tensor | None,
        num_kept: float | None,
        entropy_coef: float,
    ) -> PackResult:
        """One pack: log-probabilities, loss, gradients."""
        if self._examination is not None:
            self._examination.before_forward(packed)
        out = self.policy.forward.token_logps(self.prepared, packed, router=bool(objective.router_coef))
        gaps = self._gaps(packed, out.logps_N)
        inputs = loss_inputs(out, packed, batch, keep_N, num_kept, other_sampler=has_other_sampler(self.args))
        result = policy_loss(inputs, objective.loss, entropy_coef)
        loss = result.loss
        metrics: dict[str, float] = {}
        if out.router_loss is not None:
            share = packed.num_tokens / max(batch.step_tokens, 1)
            loss = loss + objective.router_coef * share * out.router_loss
            metrics["aux_loss"] = float(out.router_loss.detach())
        if self._examination is not None:
            self._examination.before_backward(inputs, loss)
        self.processes.backward(loss)
        if self._examination is not None:
            self._examination.after_backward(packed)
        return PackResult(loss.detach(), result.sums, gaps, metrics)

    def origin(self, batches: Sequence[MicroBatch], objective: Objective, entropy_coef: float) -> str:
        """Where the numbers of a step stop being finite, found by computing it once more; its gradients are lost."""
        examination = Examination(self.model, self.policy.tokenizer.decode)
        if self.processes.in_lockstep:
            return where(gather_object([examination.found]), WEIGHTS_ALONE)
        if examination.found is None:
            self.prepared.zero_grad()
            once_more = replaced([(self, "_examination", examination)])
            with examination.watching(), once_more, self.processes.accelerator.no_sync(self.prepared):
                for batch in batches:
                    quantile = self.args.top_entropy_quantile
                    self.forward_backward(batch, objective, entropy_coef=entropy_coef, quantile=quantile)
            examination.found = examination.found or overflow(self.model.named_parameters())
        return where(gather_object([examination.found]))

    def _gaps(self, packed: Pack, logps_N: Tensor) -> list[Tensor]:
        """Mean and largest difference of the sampler's log-probabilities from training's, where they should agree."""
        if self.args.async_rollouts or self.filters_logps or not len(logps_N):
            return []
        own_N = logps_N.detach() if packed.old_logps_N is None else packed.old_logps_N
        gap_N = (packed.sampled_logps_N - own_N).abs()
        return [torch.stack([gap_N.mean(), gap_N.max()])]

    @property
    def filters_logps(self) -> bool:
        """Whether the engine's log-probabilities are those of what a filter left, and training's are not."""
        if not self.engine.processed_logps:
            return False
        replayed = self._sampling.keeps_candidates and self.engine.returns_candidates
        return self._reshapes or (self._sampling.filtered and not replayed)

    def _high_entropy(
        self, packs: Sequence[Pack], batch: MicroBatch, quantile: float, dummies: int
    ) -> tuple[list[Tensor | None], float]:
        """Per pack the tokens of high entropy that the policy term keeps, and the divisor of the entropy bonus."""
        with torch.no_grad():
            entropies = [self.policy.forward.token_logps(self.model, packed).entropy_N for packed in packs]
            for _ in range(dummies if self.processes.in_lockstep else 0):
                self.touch(self.model)
        torch.clear_autocast_cache()  # torch 2.10 keeps casts without history, and training would get no gradient
        mine = torch.cat(entropies).tolist() if entropies else []
        gathered = torch.tensor(gather_object(mine), device=self.args.device)
        keeps: list[Tensor | None] = [keep_high_entropy(x, quantile, gathered) for x in entropies]
        return keeps, float(int(keep_high_entropy(gathered, quantile).sum()) * batch.micro_steps)

    def _dummy_backward(self, objective: Objective) -> None:
        """Gradients of zero: without signal the optimizer still steps, for momentum and weight decay.

        With several ranks they come from a backward, so that no other rank waits for this one.
        """
        if self.processes.accelerator.num_processes == 1:
            self._zero_gradients()
            return
        packed = dummy_pack(self.args.device)
        out = self.policy.forward.token_logps(self.prepared, packed, router=bool(objective.router_coef))
        self.processes.backward(0 * (out.logps_N.sum() + (0 if out.router_loss is None else out.router_loss)))

    def _zero_gradients(self) -> None:
        """Zeros where there is no gradient; on a CPU in the last step's memory, as new memory is slow to get."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                kept = self._zeros.get(parameter)
                parameter.grad = torch.zeros_like(parameter) if kept is None else kept.zero_()
                if kind_of(parameter.device).host_memory:
                    self._zeros[parameter] = parameter.grad

    def free(self) -> None:
        """Give up the memory that is kept for the gradients of the next step."""
        self._zeros.clear()

    # ---- optimizer ----

    def optim_step(self, max_grad_norm: float) -> float:
        """Clip the gradients, take an optimizer step and clear them; the gradient norm before clipping.

        Without any gradient, or with one that is not finite, the step is left out. `max_grad_norm`: 0 for no clipping.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf)) if trained else 0.0
        if trained and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    # ---- states ----

    def save_state(self, folder: Path) -> None:
        """Write weights, optimizer and torch's random state into a folder that is there."""
        self.save_weights(folder)
        torch.save(self.optimizer.state_dict(), folder / OPTIMIZER)
        torch.save(random_states(), folder / RANDOM)

    def save_weights(self, folder: Path) -> None:
        """Write the weights, and the tokenizer with them."""
        save_policy(self.model, self.policy.tokenizer, folder / MODEL)

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        """Take over what `save_state` wrote; without `optimizer` the weights alone.

        Raises:
            CheckpointError: it is broken, or of another model; then nothing has changed.
        """
        with putting_back(self.model, always=False), of_this_model(folder):
            states = torch.load(folder / RANDOM, weights_only=True) if (folder / RANDOM).is_file() else {}
            load_weights(self.model, folder / MODEL)
            if optimizer:
                self.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))
        self.optimizer.zero_grad()
        if optimizer:
            set_random_states(states)


def _generates_otherwise(model: nn.Module) -> bool:
    """Whether `generate` of this instance is not its class's. FSDP2's wrapper around that is no replacement."""
    own, original = (inspect.unwrap(getattr(x, "generate", _generates_otherwise)) for x in (model, type(model)))
    return getattr(own, "__func__", own) is not getattr(original, "__func__", original)
