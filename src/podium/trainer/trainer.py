"""GRPO on transformers' Trainer, with rollouts in place of a collator.

    prompts -> groups -> rewards -> advantages -> packs -> log-probabilities -> loss -> optimizer step -> metrics

The Trainer brings optimizer, schedule, callbacks, trackers and devices. Its hooks are the phases of a step:

    hook of transformers.Trainer    phase
    get_train_dataloader            numbers of micro-steps; rows are looked up when a round is drawn
    get_batch_samples               rollouts of one optimizer step: sampled, scored, cut into its micro-batches
    training_step                   one micro-batch: packs, log-probabilities, loss, gradients (`trainer.step`)
    (optimizer.step, callbacks)     the Trainer's own; `Health` and the proof on the first batch are callbacks
    log                             numbers of the steps since the last log
    evaluation_loop                 held-out rows: sampled, scored, their loss (`trainer.evaluation`)
    _save_checkpoint, _load_...     what a run continues from (`trainer.saved_run`), in folders written as a whole
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from accelerate.utils import set_seed as accelerate_seed
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from podium.agents.rollout_func import RolloutFunction, checked_output
from podium.algorithm.losses import LossSums, no_sums, reduce_sums, with_skipped
from podium.algorithm.metrics import MetricsBuffer, Mode, loss_metrics, mean_kept_entropy
from podium.errors import DataError
from podium.models import adapters
from podium.models.devices import kind_of
from podium.models.memory import explained, fewer_rows, held_by, smaller_packs
from podium.models.precision import compute_in_full, release_free_memory
from podium.models.reference import FollowPolicy, freeze_reference_adapter, has_reference_adapter
from podium.records import ScoredGroup
from podium.runs import checkpoint
from podium.runs.completions_log import CompletionsLog
from podium.runs.occupied import occupying
from podium.runs.recording import set_earlier_run_aside
from podium.runs.shipping.hub import one_message
from podium.trainer import parts, resume
from podium.trainer.arguments import converted, for_transformers, rows_of
from podium.trainer.assembly import load_run, prepare_run, with_rows
from podium.trainer.attributes import refuse_another_model, refuse_overrides, with_attributes
from podium.trainer.checkpointing import (
    AtomicTrainer,
    agreed_checkpoint,
    losses_named,
    save_where_folders_are_own,
)
from podium.trainer.config import GRPOConfig, refuse_unknown
from podium.trainer.evaluation import Evaluation, no_best_metric, rows_in
from podium.trainer.health import Health, show_in_notebook, show_notes
from podium.trainer.processes import (
    Processes,
    groups_left_out_on_cpu,
    shard_on_cpu,
    share_gradient_memory,
    without_autocast_wrapper,
)
from podium.trainer.proof.evidence import Subject
from podium.trainer.proof.first_batch import FirstBatch
from podium.trainer.resume import STATE
from podium.trainer.rollouts import Rollouts
from podium.trainer.rounds import Measurements, MicroBatch, Round, micro_batches
from podium.trainer.rules import warn_experimental
from podium.trainer.run import Arguments, Prepared, TrainingRun
from podium.trainer.saved_run import RunCheckpoint
from podium.trainer.setting_rules import warn_unlike_paper
from podium.trainer.settings import completions_log_settings, entropy_control
from podium.trainer.states import write_card
from podium.trainer.step import Objective, PackResult, Step

logger = logging.getLogger(__name__)


@with_attributes
class GRPOTrainer(AtomicTrainer):
    """TRL's `GRPOTrainer`: the same arguments, the same names in the logs, several times faster.

    Args:
        model: a name, a folder, `builtin:...`, a `PreTrainedModel` or a `PeftModel`.
        reward_funcs: functions, reward models, or a list of them; see `podium.rewards.score`.
        args: a `GRPOConfig`; TRL's, a `TrainingArguments` or a dict is converted.
        train_dataset: rows with a `prompt` (text or messages), or a file's name; other columns go to reward functions.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None: the model's.
        reward_processing_classes: tokenizers of the reward models.
        callbacks: as in `Trainer`.
        optimizers: as in `Trainer`.
        quantization_config: used when `model` is a name.
        peft_config: trains a new adapter; a dict is that of a `LoraConfig`.
        tools: functions that completions may call, with type hints and a docstring.
        rollout_func: samples in place of the engine; see `podium.agents.rollout_func`.
        environment_factory: makes an environment for each completion, whose methods are tools; a dict of factories is
            looked up by the rows' `environment`. See `podium.agents.environments`.
        agent: a program that talks to an OpenAI endpoint and returns a reward; see `podium.agents.programs`.

    Raises `ConfigError`, `DataError`, `ModelError` or `RewardError`, before weights are loaded where possible.
    """

    train_dataset: Any

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
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        agent: Any = None,
        **unknown: Any,
    ) -> None:
        given = Arguments(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            agent=agent,
        )
        refuse_unknown(GRPOTrainer, unknown)
        refuse_overrides(self, args)
        warn_experimental(rollout_func=rollout_func, environment_factory=environment_factory)
        show_notes()
        self._begin(*for_transformers(callbacks, optimizers), load_run(self._prepared(converted(given))))

    def _prepared(self, given: Arguments) -> Prepared:
        """The run before its weights are loaded, checked."""
        prepared = prepare_run(given)
        warn_unlike_paper(prepared.args)
        return prepared

    def _begin(self, callbacks: Sequence[TrainerCallback], optimizers: tuple[Any, Any], run: TrainingRun) -> None:
        self.rollouts = Rollouts(run, self._bound(run.agents.rollout_func))
        self.round: Round | None = None
        self.base = adapters.base_hash(run.policy.model)  # before weights are sharded
        self.entropy = entropy_control(run.args)
        self.weights = run.scoring.adaptive
        self._random_numbers_in: str | None = None
        """A checkpoint whose random state is still to be loaded."""
        self._evaluates = False
        """Whether what is logged now are the numbers of an evaluation."""
        self._measured = MetricsBuffer()
        self._sums: list[LossSums] = []
        self._loss: Tensor | float = 0.0
        self._of_step: tuple[Sequence[MicroBatch], float] = (), 0.0  # what is computed, and its loss on all processes
        self._step_started = time.perf_counter()
        self.health = Health(run, self._measured)
        self.proof = FirstBatch(run.args, self.health.say, self.health.add)
        self.evaluation = Evaluation(self.rollouts, self.health.say)
        self.saved = RunCheckpoint(self.rollouts, self.health)
        self.completions = CompletionsLog(completions_log_settings(run.args))
        super().__init__(
            model=run.policy.model,
            args=run.args,
            data_collator=list,
            train_dataset=run.rows.train,
            eval_dataset=run.rows.evaluation,
            processing_class=run.policy.tokenizer,
            callbacks=[self.proof, *_following(run), self.health, *callbacks],
            optimizers=optimizers,
        )
        show_in_notebook(self)
        self._shard()
        accelerate_seed(self.args.seed, device_specific=True)

    @property
    def run(self) -> TrainingRun:
        """What does not change while it trains."""
        return self.rollouts.run

    @property
    def step(self) -> Step:
        """The policy that samples and learns."""
        return self.rollouts.run.step

    def _bound(self, rollout_func: Callable[..., Any] | None) -> RolloutFunction | None:
        """The user's function with this trainer, its results checked."""
        if rollout_func is None:
            return None
        return lambda prompts: checked_output(rollout_func(prompts, self), self.model)

    def _shard(self) -> None:
        """Move policy and reference to their devices, sharded where asked, before anything is sampled."""
        self.processes = Processes(self.accelerator, self.step.touch)
        reference = self.run.objective.reference
        if self.processes.division == "fsdp2":
            self.model, self.optimizer = self.processes.shard(self.step.model, self.create_optimizer())
            self.model_wrapped = self.model
            compute_in_full(self.run.policy.forward.precision)
            if reference is not None and reference.copy is not None:
                fsdp2_prepare_model(self.accelerator, reference.copy)
        elif reference is not None:
            reference.to(self.args.device)
        self.step.divided(self.processes, self.model)

    # ---- a run ----

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer; FSDP2 on CPUs, too."""
        if self.args.train_image_encoder and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = True  # LLaVA's last layer, for example, leads to no feature
        with groups_left_out_on_cpu(self.args):
            super().create_accelerator_and_postprocess()
        without_autocast_wrapper(self.accelerator)
        if not kind_of(self.args.device).host_memory:
            share_gradient_memory(self.accelerator)
        if shard_on_cpu(self.accelerator, self.args):
            self.is_fsdp_enabled = True

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`, on the `train_dataset` of now.

        `True` resumes from the newest whole checkpoint, `"auto"` does so where there is a checkpoint.
        """
        self.rollouts.refuse_nested()
        refuse_another_model(self)
        self.health.overruled_before(refuse_overrides(self, self.args), say=True)  # it may have been patched since
        self.round = None  # of an earlier run, as the best
        self.best = None
        if self.train_dataset is not self.run.rows.train:
            self.rollouts.run = with_rows(self.run, rows_of(self.train_dataset, "train_dataset", "train"))
            self.health.take(self.run)
            self.train_dataset = self.run.rows.train
        folder = Path(str(self.args.output_dir))
        is_main = self.is_world_process_zero()
        with losses_named(folder), occupying(folder) if is_main else contextlib.nullcontext():
            self._step_started = time.perf_counter()
            self.health.compare_rows()
            if is_main:
                checkpoint.sweep(folder)
            several = self.accelerator.num_processes > 1 and not self.processes.sharded
            if several and save_where_folders_are_own(self.args) and is_main:
                logger.info("%s is not shared: every machine saves there for itself.", folder)
            found = agreed_checkpoint(folder, resume_from_checkpoint)
            if found is not None:
                self.saved.refuse_others(Path(found))
            if is_main:
                set_earlier_run_aside(folder, found, self.run.policy.source)
            while True:
                with self.rollouts.of_a_run():
                    result = super().train(resume_from_checkpoint=found, **kwargs)
                self.step.free()
                if (healthy := self.health.back_to()) is None:
                    return result
                found = str(healthy)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Numbers of micro-steps: rows are looked up when a round is drawn, so no worker is started in training."""
        numbers = cast(Any, range(self.run.rows.order.num_micro_steps))
        workers = self.args.dataloader_num_workers
        return DataLoader(numbers, collate_fn=itemgetter(0), num_workers=0 if self.is_in_train else workers)

    # ---- rollouts ----

    def get_batch_samples(
        self, epoch_iterator: Iterator[int], num_batches: int, device: Any
    ) -> tuple[list[MicroBatch], None]:
        """All the rollout work of one optimizer step, cut into its `num_batches` micro-steps."""
        if self._is_done():
            return [], None
        run = self.run
        plan = run.plan
        self.step.prepared = self.model_wrapped
        fewer = partial(fewer_rows, self.args.per_device_train_batch_size, self.args.num_generations)
        with explained("sampling", self._held, fewer):
            if self._random_numbers_in is not None:
                self._load_rng_state(self._random_numbers_in)
            self.proof.before_rollouts(self._subject)
            epoch = 0 if run.rows.order.is_stream else int(self.state.epoch or 0)
            taken = []
            scored: list[ScoredGroup] = []
            for index in itertools.islice(epoch_iterator, num_batches):
                step = plan.micro_step(epoch, index)
                if self.round is None or self.round.key != step.round:
                    self.round, self.weights = self.rollouts.draw(step.round, self.state, self.weights)
                    self._record(self.round)
                    scored += self.round.scored
                taken.append(self.round.micro_batches[step.share])
            if kind_of(self.args.device).host_memory:
                release_free_memory()
            per_micro_batch = self.run.objective.loss.loss_type == "bnpo"
            batches = micro_batches(taken, per_micro_batch=per_micro_batch, ranks=plan.ranks)
            self.proof.before_step(self._subject, batches, scored)
            self._of_step = batches, 0.0
            if self.args.async_rollouts and self.round:
                # Sampled while this step is trained, from the weights before it.
                self._add("train", self.rollouts.prefetch(self.round.key, self.state, self.weights))
            return batches, None

    @property
    def _subject(self) -> Subject:
        return Subject(
            training=self.run,
            state=self.state,
            optimizer=self.optimizer,
            try_step=self._try_step,
            wait=self.rollouts.ahead.wait,
            entropy_coef=self._entropy_coef,
        )

    scored = property(lambda self: self.round.scored if self.round else (), doc="The groups of the latest round.")

    def _record(self, drawn: Round) -> None:
        for finding in drawn.findings:
            self.health.say(finding)
        self.state.num_input_tokens_seen += drawn.num_tokens
        self._add("train", drawn.measured, num_tokens=self.state.num_input_tokens_seen)
        self.health.compare_settings()
        self.health.saw_round(drawn.scored, drawn.advantages, drawn.kept, step=self.state.global_step + 1)
        if self.args.log_completions:
            self.completions.add(drawn.scored, drawn.advantages)

    # ---- forward and backward ----

    def training_step(self, model: nn.Module, batch: MicroBatch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-step; gives its share of the step's loss, as the Trainer averages it."""
        measured = Measurements()
        with measured.timed("train_seconds"):
            results, total = self._add_gradients(
                batch, self.step, self.run.objective, quantile=self.args.top_entropy_quantile
            )
        self._sums += [result.sums for result in results]
        self._loss = self._loss + total
        self.health.saw_gaps([gap for result in results for gap in result.gaps])
        for result in results:
            measured.add(result.metrics)
        self._add("train", measured)
        if batch.is_last:
            self.proof.after_backward()
            self._finish_step(batch)
        return total * self.accelerator.num_processes  # the log takes the mean over ranks; our shares add up

    def _add_gradients(
        self, batch: MicroBatch, step: Step, objective: Objective, *, quantile: float
    ) -> tuple[list[PackResult], Tensor]:
        """Forward and backward of one micro-batch; gives the packs' results, and the loss of this process."""
        checkpointing = bool(self.args.gradient_checkpointing)
        smaller = partial(smaller_packs, step.policy.tokens_per_pack, checkpointing=checkpointing)
        with explained("training", self._held, smaller):
            results = step.forward_backward(batch, objective, entropy_coef=self._entropy_coef, quantile=quantile)
            total = sum((result.loss for result in results), torch.zeros((), device=self.args.device))
            if batch.is_last:
                self.processes.average()
        return results, total

    def _try_step(self, batch: MicroBatch, step: Step, objective: Objective) -> Tensor:
        """The gradients and the loss of a step that is only tried, with settings of its own; no number is logged."""
        _, total = self._add_gradients(batch, step, objective, quantile=1.0)
        return total * self.accelerator.num_processes

    @property
    def _entropy_coef(self) -> float:
        return self.entropy.applied if self.args.use_adaptive_entropy else self.args.entropy_coef

    def floating_point_ops(self, batch: MicroBatch) -> int:
        """6 FLOPs a parameter and token (Kaplan et al., arXiv:2001.08361)."""
        return 6 * batch.step_tokens * self.run.policy.num_parameters // self.args.gradient_accumulation_steps

    def _held(self) -> dict[str, int]:
        return held_by(self.model, self.optimizer)

    # ---- numbers ----

    def _add(self, mode: Mode, measured: Measurements, **latest: float) -> None:
        """Log what was measured, seconds of training steps alone; `latest` are values that count up."""
        for name, value in measured.metrics:
            self._measured.add(mode, {name: value})
        if mode == "train" and self.is_in_train:
            self._measured.add("train", measured.times())
        self._measured.replace(mode, latest)

    def _finish_step(self, batch: MicroBatch) -> None:
        """One reduction over packs and ranks, one copy to the host, one set of numbers."""
        sums = self._sums
        self._sums = []
        rows = gather_object(torch.stack([x.stack() for x in sums]).tolist() if sums else [])
        trained = reduce_sums(torch.tensor([no_sums().stack().tolist(), *rows]))
        loss_settings = self.run.objective.loss
        counted = with_skipped(trained, loss_settings, num_tokens=batch.step_tokens, num_rollouts=batch.num_rollouts)
        bonus = bool(self.args.entropy_coef) or self.args.use_adaptive_entropy
        coef = self._entropy_coef if bonus else None
        values = loss_metrics(counted, loss_settings, has_entropy_bonus=bonus, entropy_coef=coef)
        if self.args.use_adaptive_entropy and float(trained.kept_tokens):
            self.entropy = self.entropy.after(mean_kept_entropy(trained))
        step_time = time.perf_counter() - self._step_started - self.proof.take_seconds()
        self._measured.add("train", {**values, "step_time": step_time})
        loss = sum(gather_object([float(self._loss)]))
        self._of_step = self._of_step[0], loss
        self._measured.add("step", {"loss": loss})
        self._loss = 0.0
        self._step_started = time.perf_counter()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The Trainer's, which it logs only now and then. A step whose gradient or loss is not finite is left out."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        batches, loss = self._of_step
        finite = norm is None or math.isfinite(norm)
        scaler = self.accelerator.scaler
        if norm is None or (not finite and scaler is not None and scaler.get_scale() > 1):
            return norm  # a scaler leaves steps out while it looks for a scale at which float16 does not overflow
        self._measured.add("step", {"grad_norm": float(norm)})
        name = "loss" if finite else "gradient"  # the loss alone shows a ratio of NaN, which is cut off
        if finite and (math.isfinite(loss) or scaler is not None):
            self.health.saw_gradient(None, name, self.state.global_step + 1)
            return norm
        if scaler is None and self.processes.division != "deepspeed":  # which steps in the backward
            # The optimizer leaves the step out, as between two of them; the Trainer sets this anew for the next.
            self.accelerator.gradient_state._set_sync_gradients(False)
        origin = self.step.origin(batches, self.run.objective, self._entropy_coef)
        self.health.saw_gradient(origin, name, self.state.global_step + 1)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's numbers and ours; the last log of a run also carries what has come in since the one before."""
        if not self._evaluates:
            logs.update(cast(Any, self._measured.flush("train")))
        super().log(logs, start_time)
        if self.args.log_completions and self.is_world_process_zero():
            self.completions.write(self.state.global_step)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """The Trainer's, which cannot print the None of a number that no step of the run had."""
        super().log_metrics(split, {name: value for name, value in metrics.items() if value is not None})

    # ---- evaluation ----

    def generate_completions(
        self,
        rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
        num_generations: int | None = None,
        *,
        greedy: bool = False,
        temperature: float | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[ScoredGroup]:
        """Sample and score, without training; the same rows give the same random numbers every time.

        `rows` may be a dict of columns, as `dataset[:4]` is. `temperature` is the training's unless given. `numbers`:
        of the rows in their dataset; counted from 0 unless given. Several processes call it together, and share the
        work; all get all of it.
        """
        count = num_generations or self.run.plan.num_generations
        return self.evaluation.groups(rows, count, self.state, greedy=greedy, temperature=temperature, numbers=numbers)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The Trainer's. Numbers are named `eval_...`, as in TRL, and by another prefix, too, where one is given."""
        before = self._evaluates
        self._evaluates = True
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._evaluates = before

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample each prompt `num_generations_eval` times with the training settings, score, and compute the loss."""
        rows = rows_in(dataloader, self.args.world_size)
        loss, measured = self.evaluation.measure(rows, self.state, self.weights)
        self._add("eval", measured, num_tokens=self.state.num_input_tokens_seen)
        own = self._measured.flush("eval")
        named = {metric_key_prefix + name.removeprefix("eval"): value for name, value in own.items()}
        values = {f"{metric_key_prefix}_loss": loss, **(own if self._evaluates else {}), **named}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=cast(Any, values), num_samples=len(rows))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """All rows of the set at once; the engine makes its own batches."""
        named = isinstance(eval_dataset, str) and isinstance(self.eval_dataset, Mapping)
        chosen = cast(Any, self.eval_dataset)[eval_dataset] if named else eval_dataset
        chosen = self.eval_dataset if chosen is None else chosen
        if chosen is None:
            raise DataError(
                "There are no rows to evaluate on: the trainer was made without an eval_dataset.",
                code="C030",
                fix="trainer.evaluate(rows), or GRPOTrainer(..., eval_dataset=rows)",
                settings=("eval_dataset",),
            )
        rows = list(rows_of(chosen, "eval_dataset", "test"))
        no_draws = torch.Generator()  # iterating would draw from torch's, which training uses
        return DataLoader(cast(Any, rows), batch_size=1, collate_fn=list, generator=no_draws)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The same of what `predict` is given, whose metrics are those of an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's, whose time belongs to no step."""
        begun = time.perf_counter()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._step_started += time.perf_counter() - begun

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """The Trainer's. Raises `ConfigError` for a metric that the evaluation has not measured."""
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError:
            raise no_best_metric(str(self.args.metric_for_best_model), metrics) from None

    # ---- saving ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """With the rounds ahead: once they are scored, reward functions draw no random numbers meanwhile."""
        self.rollouts.ahead.wait()
        super()._save_checkpoint(model, trial)

    def _save_own(self, staging: Path) -> None:
        self.saved.write(staging, self.round, self.entropy, self.weights, is_first=self.args.should_save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer; from sharded weights, too, whatever accelerate's `state_dict_type` is."""
        if self.processes.division != "fsdp2":
            super().save_model(output_dir, _internal_call)
            return
        state = self.processes.full_state(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the Trainer; where weights are sharded, every process writes its own part of all that moves."""
        if self.processes.division != "fsdp2":
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.processes.save_parts(Path(output_dir), self.model, self.optimizer, self.run.objective.reference)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Iterable[str] | None = None,
        **metadata: Any,
    ) -> None:
        """TRL's: README.md in `output_dir`. It is the card of `podium push`.

        `metadata`: other keys that the hub reads, as `license`, and those of `transformers.Trainer`'s method.
        """
        if self.is_world_process_zero():
            tags = tags if tags is None or isinstance(tags, str) else list(tags)
            metadata = {"tags": tags, "datasets": dataset_name, **metadata}
            address = self.hub_model_id or Path(str(self.args.output_dir)).name
            model = self.accelerator.unwrap_model(self.model)
            folder = Path(str(self.args.output_dir))
            source = self.step.policy.source
            write_card(source, model, folder, address=address, title=model_name, metadata=metadata)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer, with `create_model_card`'s arguments. Raises `HubError`."""
        with one_message(self.args.hub_model_id or Path(str(self.args.output_dir)).name):
            return super().push_to_hub(*args, **kwargs)

    # ---- loading ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As the Trainer, which leaves out the trained adapter where a second one lies in a folder of its own."""
        policy = self.model if model is None else model
        folder = Path(resume_from_checkpoint)
        reference = self.run.objective.reference
        if reference is not None and parts.num_parts(folder, parts.REFERENCE):
            parts.load_weights(cast(nn.Module, reference.copy), folder, parts.REFERENCE)
            reference.moved = True
        if self.processes.division == "fsdp2":
            parts.load_weights(policy, folder, parts.WEIGHTS, trained=True)
            return
        with resume.readable(resume_from_checkpoint, "weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if has_reference_adapter(policy) and (folder / "adapter_config.json").is_file():
            cast(Any, policy).load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            freeze_reference_adapter(policy)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        """As the Trainer; from parts where weights are sharded, and with the settings of this run."""
        with resume.readable(folder, "optimizer and schedule"):
            if not self.saved.keeps_optimizer:
                logger.warning("The optimizer and its schedule begin anew: %s holds those of another kind.", folder)
            elif folder is not None and parts.num_parts(Path(folder), parts.OPTIMIZER):
                parts.load_optimizer(self.optimizer, Path(folder))
                self.lr_scheduler.load_state_dict(torch.load(Path(folder) / "scheduler.pt", weights_only=True))
            else:
                super()._load_optimizer_and_scheduler(folder)
        self._find_best(folder)
        if folder is None:
            return
        if self.saved.keeps_optimizer:
            resume.apply_settings(Path(folder), self.args, self.optimizer, self.lr_scheduler)
        with resume.readable(folder, STATE):
            self.entropy, self.weights, self.round = self.saved.read(Path(folder), self.entropy, self.weights)
        self._random_numbers_in = folder
        self.health.slow_down(self.optimizer, self.lr_scheduler)

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


def _following(run: TrainingRun) -> list[TrainerCallback]:
    """The callback that lets the reference follow the policy (`sync_ref_model`)."""
    reference = run.objective.reference
    if reference is None or not run.args.sync_ref_model:
        return []
    every = run.args.ref_model_sync_steps
    return [FollowPolicy(reference, alpha=run.args.ref_model_mixup_alpha, every=every)]
