"""GRPO on transformers' Trainer, with rollouts in place of a collator.

    Prompts become groups, groups are scored, scores become advantages, all of it is packed, the pack gives
    log-probabilities, log-probabilities give a loss, the optimizer steps, and one record of metrics is written.

The Trainer stays the chassis: optimizer, schedule, checkpoints, callbacks, trackers, devices. Its dataloader yields
nothing but the numbers of micro-steps; all rollout work of an optimizer step happens in `get_batch_samples`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from accelerate.utils import set_seed as accelerate_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from podium.algorithm.losses import LossSums, keep_high_entropy, no_sums, policy_loss, reduce_sums, with_skipped
from podium.algorithm.metrics import MetricsBuffer, loss_metrics, mean_kept_entropy
from podium.errors import CheckpointError
from podium.models import loading
from podium.models.devices import kind_of
from podium.models.out_of_memory import explained, fewer_rows, held_by, smaller_packs
from podium.models.packing import Pack, keep, nothing, pack
from podium.models.precision import release_free_memory
from podium.records import ScoredGroup, TrainingGroup
from podium.runs import checkpoint
from podium.runs.occupied import occupying
from podium.runs.recording import set_earlier_run_aside
from podium.trainer import resume
from podium.trainer.assembly import NOT_SUPPORTED, Parts, assemble
from podium.trainer.attributes import with_attributes
from podium.trainer.config import GRPOConfig, refuse_unknown
from podium.trainer.health import Health, show_notes
from podium.trainer.processes import Processes, shard_on_cpu, share_gradient_memory, without_autocast_wrapper
from podium.trainer.proof.first_batch import FirstBatch
from podium.trainer.rollouts import EVALUATION, Rollouts, training_group
from podium.trainer.rounds import MicroBatch, MicroStep, Round, Share, loss_inputs, micro_batches
from podium.trainer.rules import warn_unlike_paper
from podium.trainer.saving import AtomicCheckpointMixin

logger = logging.getLogger(__name__)


@with_attributes
class GRPOTrainer(AtomicCheckpointMixin):
    """TRL's `GRPOTrainer`: the same arguments, the same names in the logs, several times faster.

    Args:
        model: a name, a folder, `builtin:...`, a `PreTrainedModel` or a `PeftModel`.
        reward_funcs: functions, reward models, or a list of them; see `podium.rewards.score`.
        args: a `GRPOConfig`.
        train_dataset: rows with a `prompt` (text or messages); other columns go to the reward functions.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None: the model's.
        reward_processing_classes: tokenizers of the reward models.
        callbacks: as in `Trainer`.
        optimizers: as in `Trainer`.
        quantization_config: used when `model` is a name.
        peft_config: trains a new adapter.

    Raises `ConfigError`, `DataError`, `ModelError` or `RewardError`: before weights are loaded where it can be known.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **not_supported: Any,
    ) -> None:
        refuse_unknown(GRPOTrainer, {name: None for name in not_supported if name not in NOT_SUPPORTED})
        show_notes()
        parts = assemble(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            tokenizer=processing_class,
            reward_tokenizers=reward_processing_classes,
            quantization_config=quantization_config,
            peft_config=peft_config,
            not_supported=not_supported,
        )
        warn_unlike_paper(parts.args)
        self.parts: Parts = parts
        self.round: Round | None = None
        self._random_numbers_in: str | None = None  # a checkpoint whose random state is still to be loaded
        self.entropy = parts.entropy
        self.weights = parts.adaptive
        self._measured = MetricsBuffer()
        self._sums: list[LossSums] = []
        self._loss: Tensor | float = 0.0
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._step_started = time.perf_counter()
        self.health = Health(parts, self._measured)
        self.rollouts = Rollouts(self, self._measured, self.health)
        self.proof = FirstBatch(self)
        super().__init__(
            model=parts.policy,
            args=parts.args,
            data_collator=list,
            train_dataset=parts.train_dataset,
            eval_dataset=parts.eval_dataset,
            processing_class=parts.tokenizer,
            callbacks=[self.proof, *parts.callbacks, self.health, *(callbacks or [])],
            optimizers=optimizers,
        )
        self._divide()
        accelerate_seed(self.args.seed, device_specific=True)

    def _divide(self) -> None:
        """Policy and reference to their devices, whole or in parts, before anything is sampled."""
        self.processes = Processes(self.accelerator, self._touch)
        reference = self.parts.reference
        if self.processes.division == "fsdp2":
            self.model, self.optimizer = self.processes.shard(self.parts.policy, self.create_optimizer())
            self.model_wrapped = self.model
            self.parts.compute_in_full()
            if reference is not None and reference.copy is not None:
                self.processes.shard_frozen(reference.copy)
        elif reference is not None:
            reference.to(self.args.device)

    @torch.no_grad()
    def _touch(self, model: nn.Module) -> None:
        """A forward of one token."""
        with self.parts.attention(model), self.parts.precision():
            self.parts.token_logps(model, nothing(self.args.device))

    # ---- the sentence ----

    def get_batch_samples(
        self, epoch_iterator: Iterator[int], num_batches: int, device: Any
    ) -> tuple[list[MicroBatch], None]:
        """All the rollout work of one optimizer step, cut into its `num_batches` micro-steps."""
        if self._is_done():
            return [], None
        with explained("sampling", self._held, self._fewer_rows):
            return self._samples(epoch_iterator, num_batches), None

    def _samples(self, epoch_iterator: Iterator[int], num_batches: int) -> list[MicroBatch]:
        self._load_rng_state(self._random_numbers_in)
        self.proof.before_rollouts()
        epoch = 0 if self.parts.order.is_stream else int(self.state.epoch or 0)
        steps = [self.parts.plan.micro_step(epoch, index) for index in itertools.islice(epoch_iterator, num_batches)]
        taken = [self._share(step) for step in steps]
        if kind_of(self.args.device).host_memory:
            release_free_memory()
        batches = micro_batches(taken, per_micro_batch=self.args.loss_type == "bnpo", ranks=self.parts.plan.ranks)
        self.proof.before_step(batches)
        self._look_ahead()
        return batches

    def _look_ahead(self) -> None:
        """From here on, while this step is trained, the next round is sampled: from the weights before it."""
        if not self.args.async_rollouts or self.round is None:
            return
        following = self.parts.order.after(self.round.key, self.state.max_steps)
        if following is not None:
            self.rollouts.start(following)

    def _share(self, step: MicroStep) -> Share:
        if self.round is None or self.round.key != step.round:
            self.round = self.rollouts.draw(step.round)
        return self.round.shares[step.share]

    def training_step(self, model: nn.Module, batch: MicroBatch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-step; gives its share of the step's loss, as the Trainer averages it."""
        with explained("training", self._held, self._smaller_packs):
            return self._trained(model, batch)

    def _trained(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        model.train()
        total = torch.zeros((), device=self.args.device)
        with self.rollouts.timed("train_seconds", "train"), self.parts.attention(), self.parts.precision():
            packs = pack(batch.groups, tokens_per_pack=self.parts.tokens_per_pack, device=self.args.device)
            if kind_of(self.args.device).host_memory and not self.processes.in_lockstep:
                self._zero_gradients()  # those that are there first leave no holes between activations
            idle = self.processes.idle(len(packs))
            keeps, num_kept = self._high_entropy(packs, batch, idle)
            for i, (packed, keep_N) in enumerate(zip(packs, keeps, strict=True), start=1):
                with self.processes.accumulating(model, last=i == len(packs) + idle):
                    total += self._backward(model, packed, batch, keep_N, num_kept)
            for i in range(idle, 0, -1):
                with self.processes.accumulating(model, last=i == 1):
                    self._dummy_backward(model)
        self._loss = self._loss + total
        if batch.is_last:
            self.processes.average()
            self._finish_step(batch)
        return total * self.accelerator.num_processes  # the log takes the mean over ranks; our shares add up

    def _backward(
        self, model: nn.Module, packed: Pack, batch: MicroBatch, keep_N: Tensor | None, num_kept: float | None
    ) -> Tensor:
        """One pack: log-probabilities, loss, gradients."""
        out = self.parts.token_logps(model, packed, router=bool(self.parts.router_coef))
        old_logps_N = packed.old_logps_N
        stale = old_logps_N is not None and self.args.async_rollouts  # the old ones may be the sampled ones themselves
        if not stale and not self.parts.filtered_logps:
            self.health.saw_logps(packed.sampled_logps_N, out.logps_N if old_logps_N is None else old_logps_N)
        inputs = loss_inputs(packed, out, batch, keep_N, num_kept, other_sampler=self.parts.other_sampler)
        result = policy_loss(inputs, self.parts.loss, self._entropy_coef)
        loss = result.loss
        if out.router_loss is not None:
            loss = loss + self.parts.router_coef * packed.num_tokens / max(batch.step_tokens, 1) * out.router_loss
            self._measured.add("train", {"aux_loss": float(out.router_loss)})
        self.processes.backward(loss)
        self._sums.append(result.sums)
        return loss.detach()

    def _high_entropy(
        self, packs: Sequence[Pack], batch: MicroBatch, idle: int
    ) -> tuple[list[Tensor | None], float | None]:
        """Per pack the tokens of high entropy that the policy term keeps; what the entropy bonus is divided by.

        The forwards are of the bare model: a data-parallel wrapper waits for all ranks in each of them.
        """
        if self.args.top_entropy_quantile >= 1:
            return [None] * len(packs), None
        with torch.no_grad():
            entropies = [self.parts.token_logps(self.model, packed).entropy_N for packed in packs]
            for _ in range(idle if self.processes.in_lockstep else 0):
                self._touch(self.model)
        torch.clear_autocast_cache()  # torch 2.10 keeps casts without history, and training would get no gradient
        mine = torch.cat(entropies).tolist() if entropies else []
        over = torch.tensor(gather_object(mine), device=self.args.device)
        keeps: list[Tensor | None] = [keep_high_entropy(x, self.args.top_entropy_quantile, over) for x in entropies]
        num_kept = int(keep_high_entropy(over, self.args.top_entropy_quantile).sum())
        return keeps, float(num_kept * batch.micro_steps)

    @property
    def _entropy_coef(self) -> float:
        return self.entropy.applied if self.args.use_adaptive_entropy else self.args.entropy_coef

    def _dummy_backward(self, model: nn.Module) -> None:
        """Gradients of zero: a step without signal still is one for the optimizer, momentum and decay go on.

        With several ranks they come from a backward, so that no other rank waits for this one.
        """
        if self.accelerator.num_processes > 1:
            out = self.parts.token_logps(model, nothing(self.args.device), router=bool(self.parts.router_coef))
            self.processes.backward(0 * (out.logps_N.sum() + (0 if out.router_loss is None else out.router_loss)))
        else:
            self._zero_gradients()

    def _zero_gradients(self) -> None:
        """Zeros where there is no gradient yet: on a CPU in the last step's memory, which is slow to get anew."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                kept = self._gradients.get(parameter)
                parameter.grad = torch.zeros_like(parameter) if kept is None else kept.zero_()
                if kind_of(parameter.device).host_memory:
                    self._gradients[parameter] = parameter.grad

    def _finish_step(self, batch: MicroBatch) -> None:
        """One reduction over packs and ranks, one copy to the host, one set of numbers."""
        sums, self._sums = self._sums, []
        rows = gather_object(torch.stack([x.stack() for x in sums]).tolist() if sums else [])
        trained = reduce_sums(torch.tensor([no_sums().stack().tolist(), *rows]))
        counted = with_skipped(trained, self.parts.loss, num_tokens=batch.step_tokens, num_rollouts=batch.num_rollouts)
        bonus = bool(self.args.entropy_coef) or self.args.use_adaptive_entropy
        coef = self._entropy_coef if bonus else None
        values = loss_metrics(counted, self.parts.loss, has_entropy_bonus=bonus, entropy_coef=coef)
        self._measured.add("train", values)
        if self.args.use_adaptive_entropy and float(trained.kept_tokens):
            self.entropy = self.entropy.after(mean_kept_entropy(trained))
        now = time.perf_counter()
        self._measured.add("train", {"step_time": now - self._step_started})
        self._measured.add("step", {"loss": sum(gather_object([float(self._loss)]))})
        self._loss = 0.0
        self._step_started = now

    # ---- memory ----

    def _held(self) -> dict[str, int]:
        return held_by(self.model, self.optimizer)

    def _smaller_packs(self) -> str:
        return smaller_packs(self.parts.tokens_per_pack, checkpointing=bool(self.args.gradient_checkpointing))

    def _fewer_rows(self) -> str:
        return fewer_rows(self.args.per_device_train_batch_size, self.args.num_generations)

    # ---- evaluation ----

    def generate_completions(
        self,
        rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
        num_generations: int | None = None,
        *,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[ScoredGroup]:
        """Sample and score, without training; the same rows give the same random numbers every time.

        `rows` may be a dict of columns, as `dataset[:4]` is. `temperature` is the training's unless given. Several
        processes call it together, and share the work; all get all of it.
        """
        if isinstance(rows, Mapping):
            rows = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        mine = range(self.parts.plan.rank, len(rows), self.parts.plan.ranks)
        prompts = [self.rollouts.prompt(rows[i], i, i) for i in mine]
        count = num_generations or self.args.num_generations
        scored = self.rollouts.sample_and_score(prompts, count, EVALUATION, greedy=greedy, temperature=temperature)
        everyone = dict(gather_object(list(zip(mine, scored, strict=True))))
        return [everyone[i] for i in range(len(rows))]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """All rows of the set at once; the engine makes its own batches."""
        chosen = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        return DataLoader(
            cast(Any, list(self.eval_dataset if chosen is None else chosen)), batch_size=1, collate_fn=list
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample each prompt `num_generations_eval` times with the training settings, score, and compute the loss."""
        rows = list(cast(Any, dataloader.dataset))
        mine = range(self.parts.plan.rank, len(rows), self.parts.plan.ranks)
        prompts = [self.rollouts.prompt(rows[i], i, i) for i in mine]
        count = self.args.num_generations_eval or self.args.num_generations
        scored = self.rollouts.sample_and_score(prompts, count, EVALUATION)
        table, result = self.rollouts.advantages(scored, mine)
        self.rollouts.measure("eval", table, result)
        _, counted_PG = self.rollouts.trained(table, result)
        groups = [training_group(group, result.advantages_PG[i]) for group, i in zip(scored, mine, strict=True)]
        counted = [keep(group, np.flatnonzero(counted_PG[i]).tolist()) for group, i in zip(groups, mine, strict=True)]
        measured = {f"{metric_key_prefix}_loss": self._evaluation_loss(counted, counted_PG)}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=measured, num_samples=len(rows))

    @torch.no_grad()
    def _evaluation_loss(self, groups: Sequence[TrainingGroup], counted_PG: np.ndarray) -> float:
        self.model.eval()
        groups = self.rollouts.with_other_policies(groups, [np.ones(len(g.completion_ids), bool) for g in groups])
        tokens = int(counted_PG.sum())
        batch = MicroBatch(
            groups=tuple(groups),
            num_rollouts=counted_PG.size,
            num_tokens=tokens,
            step_tokens=tokens,
            micro_steps=1,
            is_last=True,
        )
        loss, sums = 0.0, []
        packs = pack(groups, tokens_per_pack=self.parts.tokens_per_pack, device=self.args.device)
        for _ in range(self.processes.missing(len(packs))):
            self._touch(self.model)
        with self.parts.attention(), self.parts.precision():
            for packed in packs:
                out = self.parts.token_logps(self.model, packed)
                inputs = loss_inputs(packed, out, batch, None, None, other_sampler=self.parts.other_sampler)
                result = policy_loss(inputs, self.parts.loss)
                loss += float(result.loss)
                sums.append(result.sums.stack().tolist())
        self.processes.reshard(self.model)
        gathered = gather_object(sums)
        if gathered:
            self._measured.add("eval", loss_metrics(reduce_sums(torch.tensor(gathered)), self.parts.loss))
        return sum(gather_object([loss]))

    # ---- the chassis ----

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer; FSDP2 on CPUs, too."""
        super().create_accelerator_and_postprocess()
        without_autocast_wrapper(self.accelerator)
        if not kind_of(self.args.device).host_memory:
            share_gradient_memory(self.accelerator)
        if shard_on_cpu(self.accelerator, self.args):
            self.is_fsdp_enabled = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's numbers and ours; the last log of a run also carries what has come in since the one before."""
        logs.update(self._measured.flush("eval" if any(name.startswith("eval_") for name in logs) else "train"))
        super().log(logs, start_time)
        if self.args.log_completions and self.is_world_process_zero():
            self.parts.completions.write(self.state.global_step)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The Trainer's, which it logs only now and then."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:
            self._measured.add("step", {"grad_norm": float(norm)})
        return norm

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Numbers of micro-steps: rows are looked up when a round is drawn, so nothing is fetched early or twice."""
        return DataLoader(
            cast(Any, range(self.parts.order.num_micro_steps)), batch_size=1, collate_fn=lambda batch: batch[0]
        )

    def floating_point_ops(self, batch: MicroBatch) -> int:
        """6 FLOPs a parameter and token (Kaplan et al., arXiv:2001.08361)."""
        return 6 * batch.step_tokens * self.parts.num_parameters // self.args.gradient_accumulation_steps

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`. `True` resumes from the newest checkpoint that verifies."""
        folder = Path(str(self.args.output_dir))
        with occupying(folder) if self.is_world_process_zero() else contextlib.nullcontext():
            self._step_started = time.perf_counter()
            if self.is_world_process_zero():
                checkpoint.sweep(folder)
            found = checkpoint.to_resume_from(folder, asked=resume_from_checkpoint)
            if found is not None:
                self._refuse_others(Path(found))
            if self.is_world_process_zero() and resume_from_checkpoint is not True:
                set_earlier_run_aside(folder, found)
            result = self._train(found, **kwargs)
            while (healthy := self.health.back_to()) is not None:
                result = self._train(str(healthy), **kwargs)
            return result

    def _refuse_others(self, found: Path) -> None:
        """Raises `CheckpointError` where this run cannot go on from a checkpoint; says what has changed since it."""
        self.processes.check_parts(found)
        for finding in resume.differences(found, self.health.made_of):
            if finding.severity == "error":
                raise CheckpointError(f"{finding.what}.", code=finding.code, fix=finding.fix)
            if self.is_world_process_zero():
                logger.warning("%s; %s.", finding.what, finding.why)

    def _train(self, checkpoint: str | None, **kwargs: Any) -> Any:
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            self.rollouts.abandon()

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        with resume.readable(folder, "optimizer and schedule"):
            if folder is not None and self.processes.division == "fsdp2":
                self.processes.load_optimizer(Path(folder), self.optimizer)
                self.lr_scheduler.load_state_dict(torch.load(Path(folder) / "scheduler.pt", weights_only=True))
            else:
                super()._load_optimizer_and_scheduler(folder)
        if folder is not None:
            resume.apply_settings(Path(folder), self.args, self.optimizer, self.lr_scheduler)
            state = self._podium_state()
            loaded = resume.load(Path(folder), self.args.process_index, state)
            self.round, self.entropy, self.weights = loaded.round, loaded.entropy, loaded.weights
            if self.args.async_rollouts and loaded.ahead is not None:
                self.rollouts.restore(loaded.ahead)
            self._random_numbers_in = folder
            self.health.slow_down(self.optimizer, self.lr_scheduler)

    def _podium_state(self) -> resume.State:
        parts = self.parts
        return resume.State(
            self.round,
            self.entropy,
            self.weights,
            parts.reference,
            parts.precision,
            parts.plan,
            self.processes.sharded,
            self.rollouts.wait(),
            self.health.made_of,
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once and before the first rollouts, as reward functions may draw, too; the Trainer would load them after."""
        if checkpoint is not None and checkpoint == self._random_numbers_in:
            self._random_numbers_in = None
            with resume.readable(checkpoint, "random numbers"):
                super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """As the Trainer; one of a run in float16 is of no use to a run without loss scaling."""
        if self.accelerator.scaler is not None:
            with resume.readable(checkpoint, "loss scaling"):
                super()._load_scaler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As the Trainer, which forgets the trained adapter where a second one lies in a folder of its own."""
        policy = self.model if model is None else model
        if self.processes.division == "fsdp2":
            self.processes.load_weights(Path(resume_from_checkpoint), policy, self.parts.reference)
            return
        with resume.readable(resume_from_checkpoint, "weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if loading.has_reference_adapter(policy) and (Path(resume_from_checkpoint) / "adapter_config.json").is_file():
            cast(Any, policy).load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            loading.freeze_reference_adapter(policy)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer; from sharded weights, too, whatever accelerate's `state_dict_type` says."""
        if self.processes.division != "fsdp2":
            super().save_model(output_dir, _internal_call)
            return
        state = self.processes.whole_state(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the Trainer; where weights are sharded, every process writes its own part of all that moves."""
        if self.processes.division != "fsdp2":
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.processes.save_parts(Path(output_dir), self.model, self.optimizer, self.parts.reference)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """With the round ahead, after which reward functions draw no more random numbers until this is written."""
        self.rollouts.wait()
        super()._save_checkpoint(model, trial)

    def _save_own(self, staging: Path) -> None:
        resume.save(staging, self.args.process_index, self._podium_state())
