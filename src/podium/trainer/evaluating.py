"""Evaluation of the policy while it is trained: sampled and scored as in training, on held-out rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from podium.algorithm.losses import policy_loss, reduce_sums
from podium.algorithm.metrics import MetricsBuffer, Mode, loss_metrics, rollout_metrics
from podium.errors import ConfigError, DataError
from podium.errors.texts import as_lines, listed, nearest
from podium.models.modes import evaluation_mode
from podium.models.packing import pack
from podium.records import ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.runs.completions_log import CompletionsLog
from podium.trainer.arguments import rows_of
from podium.trainer.health import Health
from podium.trainer.processes import Processes
from podium.trainer.rollouts import EVALUATION, Rollouts, gathered_advantages, gathered_turns, make_prompt, num_given
from podium.trainer.rounds import Measurements, MicroBatch, RoundKey, loss_inputs
from podium.trainer.run import TrainingRun
from podium.trainer.samples import EVALUATION_STEPS, ScoredRound, loss_tokens, samples_of_round


class EvaluationMixin(Trainer):
    """Evaluation by sampling: `evaluate` and `generate_completions`."""

    processes: Processes
    rollouts: Rollouts
    health: Health
    weights: AdaptiveWeights
    completions: CompletionsLog
    train_dataset: Any
    _measured: MetricsBuffer
    _step_started: float
    _evaluates = False
    """Whether what is logged now are the numbers of an evaluation."""

    @property
    def run(self) -> TrainingRun:
        raise NotImplementedError

    def _add(self, mode: Mode, measured: Measurements, **latest: float) -> None:
        raise NotImplementedError

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
        if isinstance(rows, Mapping):
            rows = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        count = num_generations or self.run.plan.num_generations
        scored, _ = self._sample(rows, count, numbers, greedy=greedy, temperature=temperature)
        everyone = dict(gather_object(list(scored.items())))
        return [everyone[i] for i in range(len(rows))]

    def _sample(
        self,
        rows: Sequence[Mapping[str, Any]],
        count: int,
        numbers: Sequence[int] | None = None,
        *,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> tuple[dict[int, ScoredGroup], Measurements]:
        """This process's part of the rows, by number, and the numbers that its rewards logged."""
        mine = range(self.run.plan.rank, len(rows), self.run.plan.ranks)
        numbers = range(len(rows)) if numbers is None else numbers
        prompts = [make_prompt(self.run, rows[i], numbers[i], numbers[i]) for i in mine]
        settings = self.run.sampling(count, EVALUATION, greedy=greedy, temperature=temperature)
        scored, measured = self.rollouts.sample_and_score(prompts, settings, self.state)
        return dict(zip(mine, scored, strict=True)), measured

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
            key = "metric_for_best_model"
            wanted = self.args.metric_for_best_model
            names = [name for name in metrics if name.startswith("eval_") and "_second" not in name]
            near = nearest(wanted, names) or nearest(f"eval_{wanted}", names)
            changes = {key: near or "eval_reward"}
            raise ConfigError(
                f"`{key}` must be one of {listed(names)}; got `{wanted}`.",
                code="C004",
                fix=f"Did you mean `{near}`?" if near else f"{as_lines(changes)}",
                changes=changes,
                settings=(key,),
                name=key,
                choices=names,
                value=wanted,
                near=near,
            ) from None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's numbers and ours; the last log of a run also carries what has come in since the one before."""
        if not self._evaluates:
            logs.update(cast(Any, self._measured.flush("train")))
        super().log(logs, start_time)
        if self.args.log_completions and self.is_world_process_zero():
            self.completions.write(self.state.global_step)

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

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """The Trainer's, which cannot print the None of a number that no step of the run had."""
        super().log_metrics(split, {name: value for name, value in metrics.items() if value is not None})

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

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample each prompt `num_generations_eval` times with the training settings, score, and compute the loss."""
        rows = _rows_in(dataloader, self.args.world_size)
        run = self.run
        scored, measured = self._sample(rows, run.args.num_generations_eval or run.plan.num_generations)
        table, result = gathered_advantages([*scored.values()], [*scored], run, self.weights)
        measured.add(rollout_metrics(table, result, run.scoring.accuracy))
        measured.add(gathered_turns([*scored.values()], run))
        evaluated = ScoredRound(
            key=RoundKey(epoch=0, number=EVALUATION),
            groups=scored,
            result=result,
            counted_PG=loss_tokens(table, result.advantages_PG.shape, run.args),
            policy_step=self.state.global_step,
            run=run,
            state=self.state,
            weights=self.weights,
            measured=measured,
            say=self.health.say,
        )
        loss = self._evaluation_loss(evaluated)
        self._add("eval", measured, num_tokens=self.state.num_input_tokens_seen)
        own = self._measured.flush("eval")
        named = {metric_key_prefix + name.removeprefix("eval"): value for name, value in own.items()}
        values = {f"{metric_key_prefix}_loss": loss, **(own if self._evaluates else {}), **named}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=cast(Any, values), num_samples=len(rows))

    @torch.no_grad()
    def _evaluation_loss(self, evaluated: ScoredRound) -> float:
        """The mean loss over all processes; its numbers are measured."""
        run = self.run
        tokens = int(evaluated.counted_PG.sum())
        samples = samples_of_round(evaluated)
        for change in EVALUATION_STEPS:
            samples = change(samples, evaluated)
        batch = MicroBatch(
            samples=tuple(samples),
            num_rollouts=evaluated.counted_PG.size,
            num_tokens=tokens,
            step_tokens=tokens,
            num_observed=sum(gather_object([sum(map(num_given, samples))])),
            micro_steps=1,
            is_last=True,
        )
        loss = 0.0
        sums = []
        observed = bool(run.objective.loss.observation_coef)
        packs = pack(samples, tokens_per_pack=run.policy.tokens_per_pack, device=run.args.device, observed=observed)
        for _ in range(self.processes.num_dummy_forwards(len(packs))):
            self.processes.touch(self.model)
        with evaluation_mode(self.model), run.policy.forward.context(run.policy.model):
            for packed in packs:
                out = run.policy.forward.token_logps(self.model, packed)
                inputs = loss_inputs(out, packed, batch, other_sampler=run.args.use_vllm)
                result = policy_loss(inputs, run.objective.loss)
                loss += float(result.loss)
                sums.append(result.sums.stack().tolist())
        self.processes.reshard(self.model)
        gathered = gather_object(sums)
        if gathered:
            evaluated.measured.add(loss_metrics(reduce_sums(torch.tensor(gathered)), run.objective.loss))
        return sum(gather_object([loss]))


def _rows_in(loader: Any, processes: int) -> list[Mapping[str, Any]]:
    """All rows, as a loader yields them. Raises `ConfigError` for anything else, and for a part of them."""
    if processes > 1 and isinstance(loader, DataLoaderStateMixin):
        raise ConfigError(
            "get_eval_dataloader gave a loader that accelerator.prepare has divided over the processes; "
            "an evaluation takes all rows in each, and divides them itself.",
            fix="return the DataLoader without accelerator.prepare",
        )
    rows = list[Mapping[str, Any]]()
    for batch in loader:
        if not (isinstance(batch, (list, tuple)) and all(isinstance(row, Mapping) for row in batch)):
            raise ConfigError(
                f"get_eval_dataloader gave a loader that yields an object of type {type(batch).__name__}; "
                "an evaluation takes lists of rows, each a dict.",
                fix="DataLoader(rows, collate_fn=list)",
                kind=type(batch).__name__,
            )
        rows += batch
    return rows
