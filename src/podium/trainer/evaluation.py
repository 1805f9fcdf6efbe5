"""Evaluation of the policy while it is trained: sampled and scored as in training, on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import gather_object
from transformers import TrainerState

from podium.algorithm.losses import policy_loss, reduce_sums
from podium.algorithm.metrics import loss_metrics, rollout_metrics
from podium.errors import ConfigError, Finding
from podium.errors.texts import as_lines, listed, nearest
from podium.models.modes import evaluation_mode
from podium.models.packing import pack
from podium.records import ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.trainer.rollouts import EVALUATION, Rollouts, gathered_advantages, gathered_turns, make_prompt, num_given
from podium.trainer.rounds import Measurements, MicroBatch, RoundKey, loss_inputs
from podium.trainer.samples import EVALUATION_STEPS, ScoredRound, changed, loss_tokens, samples_of_round
from podium.trainer.settings import has_other_sampler


class Evaluation:
    """Samples, scores and measures held-out rows with the policy of a run as it is now."""

    def __init__(self, rollouts: Rollouts, say: Callable[[Finding], None]) -> None:
        """`say` takes a finding."""
        self.rollouts = rollouts
        self.say = say

    def groups(
        self,
        rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
        count: int,
        state: TrainerState,
        *,
        greedy: bool = False,
        temperature: float | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[ScoredGroup]:
        """`count` completions of every row, scored; see `GRPOTrainer.generate_completions`."""
        if isinstance(rows, Mapping):
            rows = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        scored, _ = self._sampled(rows, count, state, numbers, greedy=greedy, temperature=temperature)
        everyone = dict(gather_object(list(scored.items())))
        return [everyone[i] for i in range(len(rows))]

    def _sampled(
        self,
        rows: Sequence[Mapping[str, Any]],
        count: int,
        state: TrainerState,
        numbers: Sequence[int] | None = None,
        *,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> tuple[dict[int, ScoredGroup], Measurements]:
        """This process's part of the rows, by number, and the numbers that its rewards logged."""
        run = self.rollouts.run
        mine = range(run.plan.rank, len(rows), run.plan.ranks)
        numbers = range(len(rows)) if numbers is None else numbers
        prompts = [make_prompt(run, rows[i], numbers[i], numbers[i]) for i in mine]
        settings = run.step.sampling(count, EVALUATION, greedy=greedy, temperature=temperature)
        scored, measured = self.rollouts.sample_and_score(prompts, settings, state)
        return dict(zip(mine, scored, strict=True)), measured

    def measure(
        self, rows: Sequence[Mapping[str, Any]], state: TrainerState, weights: AdaptiveWeights
    ) -> tuple[float, Measurements]:
        """Sample each prompt `num_generations_eval` times with the training settings, score, and compute the loss.

        The loss is the mean over all processes.
        """
        run = self.rollouts.run
        scored, measured = self._sampled(rows, run.args.num_generations_eval or run.plan.num_generations, state)
        table, result = gathered_advantages([*scored.values()], [*scored], run, weights)
        measured.add(rollout_metrics(table, result, run.scoring.accuracy))
        if run.agents.takes_turns:
            measured.add(gathered_turns([*scored.values()], run))
        evaluated = ScoredRound(
            key=RoundKey(epoch=0, number=EVALUATION),
            groups=scored,
            result=result,
            counted_PG=loss_tokens(table, result.advantages_PG.shape, run.args),
            policy_step=state.global_step,
            run=run,
            state=state,
            weights=weights,
            measured=measured,
            say=self.say,
        )
        return _loss(evaluated), measured


@torch.no_grad()
def _loss(evaluated: ScoredRound) -> float:
    """The mean loss over all processes; its numbers are measured."""
    run = evaluated.run
    step = run.step
    forward = run.policy.forward
    tokens = int(evaluated.counted_PG.sum())
    samples = changed(samples_of_round(evaluated), evaluated, EVALUATION_STEPS)
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
    for _ in range(step.processes.num_dummy_forwards(len(packs))):
        step.touch(step.model)
    with evaluation_mode(step.model), forward.context(step.model):
        for packed in packs:
            out = forward.token_logps(step.model, packed)
            inputs = loss_inputs(out, packed, batch, other_sampler=has_other_sampler(run.args))
            result = policy_loss(inputs, run.objective.loss)
            loss += float(result.loss)
            sums.append(result.sums.stack().tolist())
    step.processes.reshard(step.model)
    gathered = gather_object(sums)
    if gathered:
        evaluated.measured.add(loss_metrics(reduce_sums(torch.tensor(gathered)), run.objective.loss))
    return sum(gather_object([loss]))


def rows_in(loader: Any, processes: int) -> list[Mapping[str, Any]]:
    """All rows, as a loader yields them. Raises `ConfigError` for anything else, and for a part of them."""
    if processes > 1 and isinstance(loader, DataLoaderStateMixin):
        raise ConfigError(
            "get_eval_dataloader gave a loader that accelerator.prepare has divided over the processes; "
            "an evaluation takes all rows in each, and divides them itself.",
            fix="return the DataLoader without accelerator.prepare",
        )
    rows: list[Mapping[str, Any]] = []
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


def no_best_metric(wanted: str, metrics: Mapping[str, float]) -> ConfigError:
    """The error of a `metric_for_best_model` that the evaluation has not measured."""
    key = "metric_for_best_model"
    names = [name for name in metrics if name.startswith("eval_") and "_second" not in name]
    near = nearest(wanted, names) or nearest(f"eval_{wanted}", names)
    changes = {key: near or "eval_reward"}
    return ConfigError(
        f"`{key}` must be one of {listed(names)}; got `{wanted}`.",
        code="C004",
        fix=f"Did you mean `{near}`?" if near else f"{as_lines(changes)}",
        changes=changes,
        settings=(key,),
        name=key,
        choices=names,
        value=wanted,
        near=near,
    )
