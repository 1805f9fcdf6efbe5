"""GRPO on transformers' Trainer, with rollouts in place of a collator.

    Prompts become groups, groups are scored, scores become advantages, all of it is packed, the pack gives
    log-probabilities, log-probabilities give a loss, the optimizer steps, and one record of metrics is written.

The Trainer stays the chassis: optimizer, schedule, checkpoints, callbacks, trackers, devices. Its dataloader yields
nothing but the numbers of micro-steps; all rollout work of an optimizer step happens in `get_batch_samples`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from accelerate.utils import set_seed as accelerate_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from podium import checkpoint, metrics
from podium.advantages import Advantages, advantages
from podium.assembly import Parts, assemble
from podium.config import GRPOConfig, sampling_settings
from podium.errors import CheckpointError
from podium.forward import TokenLogps, token_logps
from podium.losses import LossInputs, LossSums, keep_high_entropy, policy_loss, reduce_sums
from podium.models.attention import tree_attention
from podium.packing import Pack, pack
from podium.records import Prompt, ScoredGroup, TrainingGroup
from podium.resume import load_state, save_state
from podium.rewards.score import score
from podium.rounds import MicroBatch, MicroStep, Round, RoundKey, Share, micro_batches, shares

logger = logging.getLogger(__name__)

EVALUATION = -1
"""Round number of evaluations: always the same random numbers, so that before and after are drawn alike."""


class GRPOTrainer(Trainer):
    """TRL's `GRPOTrainer`: the same arguments, the same names in the logs, several times faster.

    Args:
        model: a name, a folder, `builtin:...`, a `PreTrainedModel` or a `PeftModel`.
        reward_funcs: functions, reward models, or a list of them; see `podium.rewards.score`.
        args: a `GRPOConfig`.
        train_dataset: rows with a `prompt` (text or messages); other columns go to the reward functions.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None: the model's.
        reward_processing_classes: tokenizers of the reward models.
        callbacks, optimizers: as in `Trainer`.
        quantization_config: used when `model` is a name.
        peft_config: trains a new adapter.

    Raises `ConfigError`, `DataError`, `ModelError` or `RewardError`, each before weights are loaded where it can be known.
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
        self.parts: Parts = parts
        self.round: Round | None = None
        self.entropy = parts.entropy
        self.last_scored: list[ScoredGroup] = []
        self._metrics = metrics.MetricsBuffer()
        self._sums: list[LossSums] = []
        self._step_started = time.perf_counter()
        super().__init__(
            model=parts.policy,
            args=parts.args,
            data_collator=list,
            train_dataset=parts.train_dataset,
            eval_dataset=parts.eval_dataset,
            processing_class=parts.tokenizer,
            callbacks=[*parts.callbacks, *(callbacks or [])],
            optimizers=optimizers,
        )
        if parts.reference is not None:
            parts.reference.to(self.args.device)
        accelerate_seed(self.args.seed, device_specific=True)

    # ---- the sentence ----

    def get_batch_samples(self, epoch_iterator: Iterator[int], num_batches: int, device: Any) -> tuple[list[MicroBatch], None]:
        """All the rollout work of one optimizer step, cut into its `num_batches` micro-steps."""
        epoch = 0 if self.parts.order.is_stream else int(self.state.epoch or 0)
        steps = [self.parts.plan.micro_step(epoch, index) for index in itertools.islice(epoch_iterator, num_batches)]
        taken = [self._share(step) for step in steps]
        return micro_batches(taken, per_micro_batch=self.args.loss_type == "bnpo", ranks=self.parts.plan.ranks), None

    def _share(self, step: MicroStep) -> Share:
        if self.round is None or self.round.key != step.round:
            self.round = self._roll_out(step.round)
        return self.round.shares[step.share]

    def _roll_out(self, key: RoundKey) -> Round:
        """Prompts -> groups -> scores -> advantages -> what the micro-steps of this round will train on."""
        prompts = self.parts.plan.mine()
        with self._timed("generate_seconds"):
            scored = self._sample(self._prompts(key, prompts), key)
        if self.args.dynamic_sampling:
            scored = self._refill(scored, prompts, key)
        table, result = self._advantages(scored, prompts)
        self._measure("train", table, result)
        self.last_scored = scored
        kept, counted_PG = self._trained(table, result)
        groups = [training_group(s, result.advantages_PG[p]) for s, p in zip(scored, prompts, strict=True)]
        with self._timed("compare_seconds"):
            groups = self._with_other_policies(groups, [kept[p] for p in prompts])
        self._log_completions(scored, [result.advantages_PG[p] for p in prompts])
        return Round(key=key, shares=shares(groups, prompts, [kept[p] for p in prompts], counted_PG, self.parts.plan))

    def training_step(self, model: nn.Module, batch: MicroBatch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-step; gives its share of the step's loss."""
        model.train()
        total = torch.zeros((), device=self.args.device)
        with self.parts.attention(), self._timed("train_seconds"):
            packs = self._packs(batch.groups)
            keeps, num_entropy_tokens = self._kept_tokens(model, packs)
            for i, packed in enumerate(packs):
                with contextlib.nullcontext() if i == len(packs) - 1 else self.accelerator.no_sync(model):
                    total += self._backward(model, packed, batch, keeps[i], num_entropy_tokens)
        if not packs:
            self._zero_gradients()
        if batch.is_last:
            self._finish_step()
        return total

    def _backward(
        self, model: nn.Module, packed: Pack, batch: MicroBatch, keep_N: Tensor | None, num_entropy_tokens: float | None
    ) -> Tensor:
        """One pack: log-probabilities, loss, gradients."""
        with self.parts.precision():
            out = self._token_logps(model, packed)
            result = policy_loss(
                loss_inputs(packed, out, batch, keep_N, num_entropy_tokens), self.parts.loss, self._entropy_coef
            )
            loss = result.loss
            if out.router_loss is not None:
                share = packed.num_tokens / max(batch.num_tokens, 1)
                loss = loss + self.parts.router_coef * share * out.router_loss
                self._metrics.add("train", {"aux_loss": float(out.router_loss)})
        self.accelerator.backward(loss * self.accelerator.num_processes)  # ranks are averaged; our counts span them
        self._sums.append(result.sums)
        return loss.detach()

    # ---- sampling and scoring ----

    def _prompts(self, key: RoundKey, prompts: Sequence[int]) -> list[Prompt]:
        return [self._prompt(row, p, index) for p, (index, row) in zip(prompts, self.parts.order.rows(key, prompts), strict=True)]

    def _prompt(self, row: Mapping[str, Any], id: int, index: int) -> Prompt:
        prompt = self.parts.builder(row, id=id, row_index=index)
        assert prompt is not None, "overlong rows are dropped before training"
        return prompt

    def _sample(self, prompts: Sequence[Prompt], key: RoundKey) -> list[ScoredGroup]:
        round_number = (key.epoch << 32) + key.number
        return self._sample_and_score(prompts, self.args.num_generations, round_number)

    def _sample_and_score(
        self, prompts: Sequence[Prompt], num_generations: int, round_number: int, greedy: bool = False
    ) -> list[ScoredGroup]:
        settings = sampling_settings(
            self.args, self.parts.end_ids, num_completions=num_generations, round_number=round_number, greedy=greedy
        )
        groups = self.parts.engine.generate(prompts, settings, policy_step=self.state.global_step)
        with self._timed("reward_seconds"):
            mode = "eval" if round_number == EVALUATION else "train"
            return score(
                groups,
                self.parts.rewards,
                trainer_state=self.state,
                log_metric=lambda name, value: self._metrics.add(mode, {name: value}),
            )

    def _refill(self, scored: list[ScoredGroup], prompts: Sequence[int], key: RoundKey) -> list[ScoredGroup]:
        """DAPO's dynamic sampling (arXiv:2503.14476, eq. 11): groups of equal rewards make room for fresh prompts."""
        scored = list(scored)
        for attempt in range(self.args.max_resamples):
            flat = [i for i, s in enumerate(scored) if not self.parts.has_spread(s)]
            if not flat:
                break
            places = [prompts[i] for i in flat]
            rows = self.parts.order.fresh(key, attempt, places)
            ids = [(attempt + 1) * self.parts.plan.prompts_per_round + place for place in places]
            fresh = [self._prompt(row, id, index) for id, (index, row) in zip(ids, rows, strict=True)]
            for i, group in zip(flat, self._sample(fresh, key), strict=True):
                scored[i] = group if self.parts.has_spread(group) else scored[i]
            self._metrics.add("train", {"resampled_prompts": len(flat)})
        return scored

    def _advantages(self, scored: Sequence[ScoredGroup], prompts: Sequence[int]) -> tuple[metrics.RolloutTable, Advantages]:
        """Of all ranks, in the order of the round's prompts, the same on every rank."""
        names = tuple(reward.name for reward in self.parts.rewards)
        mine = metrics.rollout_table(scored, names).stack()
        blocks = gather_object(list(zip(prompts, np.split(mine, max(len(scored), 1)), strict=False)))
        rows = np.concatenate([block for _, block in sorted(blocks, key=lambda item: item[0])])
        table = metrics.unstack(rows, names)
        return table, advantages(table.rewards_RK.reshape(len(blocks), -1, len(names)), self.parts.advantage)

    def _trained(self, table: metrics.RolloutTable, result: Advantages) -> tuple[np.ndarray, np.ndarray]:
        """Which completions are trained on, bool [P, G], and the loss tokens of all of them [P, G]."""
        shape = result.advantages_PG.shape
        masked = self.args.mask_truncated_completions & table.truncated_R.reshape(shape)
        flat = (result.advantages_PG == 0) if self.parts.skips_zero_advantage else np.zeros(shape, bool)
        return ~masked & ~flat, np.where(masked, 0, table.tokens_R.reshape(shape))

    @torch.no_grad()
    def _with_other_policies(self, groups: list[TrainingGroup], kept: Sequence[np.ndarray]) -> list[TrainingGroup]:
        """The groups with log-probabilities under the policy that sampled them and under the reference, where needed."""
        used = [i for i, keeps in enumerate(kept) if keeps.any()]
        for needed, field, context in (
            (self.parts.plan.reuses_rollouts, "old_logps", lambda: contextlib.nullcontext(self.model)),
            (self.parts.reference is not None, "ref_logps", lambda: self.parts.reference.model(self.model)),
        ):
            if needed and used:
                with context() as model:
                    logps = self._score_groups(model, [groups[i] for i in used])
                for i, values in zip(used, logps, strict=True):
                    groups[i] = dataclasses.replace(groups[i], **{field: values})
        return groups

    def _score_groups(self, model: nn.Module, groups: Sequence[TrainingGroup]) -> list[tuple[np.ndarray, ...]]:
        training = model.training
        model.eval()
        flat: list[np.ndarray] = []
        with self.parts.attention(model), self.parts.precision():
            for packed in self._packs(groups):
                flat += packed.split(self._token_logps(model, packed, router=False).logps_N)
        model.train(training)
        values = iter(flat)
        return [tuple(itertools.islice(values, len(group.completion_ids))) for group in groups]

    # ---- the forward ----

    def _packs(self, groups: Sequence[TrainingGroup]) -> list[Pack]:
        packs = pack(groups, tokens_per_pack=self.parts.tokens_per_pack, device=self.args.device)
        if not packs and self.accelerator.num_processes > 1:  # every rank takes part in the gradient's reduction
            packs = pack([NOTHING], tokens_per_pack=1, device=self.args.device)
        return packs

    def _token_logps(self, model: nn.Module, packed: Pack, *, router: bool | None = None) -> TokenLogps:
        router = bool(self.parts.router_coef) if router is None else router
        return token_logps(model, packed, temperature=self.args.temperature, path=self.parts.path, router=router)

    def _kept_tokens(self, model: nn.Module, packs: Sequence[Pack]) -> tuple[list[Tensor | None], float | None]:
        """Per pack the tokens of high entropy that the policy term keeps; their number over all ranks."""
        if self.args.top_entropy_quantile >= 1:
            return [None] * len(packs), None
        with torch.no_grad(), self.parts.precision():
            entropies = [self._token_logps(model, packed, router=False).entropy_N for packed in packs]
        every = torch.cat([torch.zeros(0, device=self.args.device), *entropies])
        over = torch.cat([torch.as_tensor(x, device=every.device) for x in gather_object([every.tolist()])])
        keeps = [keep_high_entropy(x, self.args.top_entropy_quantile, over) for x in entropies]
        kept = sum(int(keep_N.sum()) for keep_N in keeps)
        return keeps, float(sum(gather_object([kept])))

    @property
    def _entropy_coef(self) -> float:
        return self.entropy.applied if self.args.use_adaptive_entropy else self.args.entropy_coef

    def _zero_gradients(self) -> None:
        """A step without signal still is one for the optimizer: momentum and decay go on, as with gradients of zero."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _finish_step(self) -> None:
        """One reduction over packs and ranks, one copy to the host, one set of numbers."""
        gathered = self._gathered_sums()
        if gathered is not None:
            bonus = bool(self.args.entropy_coef) or self.args.use_adaptive_entropy
            coef = self._entropy_coef if bonus else None
            self._metrics.add("train", metrics.loss_metrics(gathered, self.parts.loss, has_entropy_bonus=bonus, entropy_coef=coef))
            if self.args.use_adaptive_entropy:
                self.entropy = self.entropy.after(metrics.mean_kept_entropy(gathered))
        now = time.perf_counter()
        self._metrics.add("train", {"step_time": now - self._step_started})
        self._step_started = now

    def _gathered_sums(self) -> LossSums | None:
        mine, self._sums = self._sums, []
        rows = [x.stack().float() for x in mine]
        if self.accelerator.num_processes > 1:
            rows = [torch.tensor(row) for row in gather_object([row.tolist() for row in rows])]
        return reduce_sums(torch.stack(rows)) if rows else None

    # ---- evaluation ----

    def generate_completions(
        self, rows: Sequence[Mapping[str, Any]], num_generations: int | None = None, *, greedy: bool = False
    ) -> list[ScoredGroup]:
        """Sample and score, without training; the same rows give the same random numbers every time."""
        prompts = [self._prompt(row, id=i, index=i) for i, row in enumerate(rows)]
        return self._sample_and_score(prompts, num_generations or self.args.num_generations, EVALUATION, greedy)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """All rows of the set at once; the engine makes its own batches."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return DataLoader(list(self.eval_dataset if eval_dataset is None else eval_dataset), batch_size=1, collate_fn=list)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample each prompt `num_generations_eval` times with the training settings, score, and compute the loss."""
        rows = list(dataloader.dataset)
        mine = range(self.parts.plan.rank, len(rows), self.parts.plan.ranks)
        prompts = [self._prompt(rows[i], id=i, index=i) for i in mine]
        scored = self._sample_and_score(prompts, self.args.num_generations_eval or self.args.num_generations, EVALUATION)
        table, result = self._advantages(scored, mine)
        self._measure("eval", table, result)
        groups = [training_group(s, result.advantages_PG[p]) for s, p in zip(scored, mine, strict=True)]
        loss = self._evaluation_loss(groups, table)
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics={f"{metric_key_prefix}_loss": loss}, num_samples=len(rows)
        )

    @torch.no_grad()
    def _evaluation_loss(self, groups: list[TrainingGroup], table: metrics.RolloutTable) -> float:
        self.model.eval()
        groups = self._with_other_policies(groups, [np.ones(len(g.completion_ids), bool) for g in groups])
        tokens = int(table.tokens_R.sum())
        batch = MicroBatch(
            groups=tuple(groups), num_rollouts=len(table.tokens_R), num_tokens=tokens, share_tokens=tokens, is_last=True
        )
        losses, sums = [], []
        with self.parts.attention(), self.parts.precision():
            for packed in self._packs(batch.groups):
                out = self._token_logps(self.model, packed, router=False)
                result = policy_loss(loss_inputs(packed, out, batch, None, None), self.parts.loss)
                losses.append(float(result.loss))
                sums.append(result.sums)
        if sums:
            self._metrics.add("eval", metrics.loss_metrics(reduce_sums(torch.stack([x.stack() for x in sums])), self.parts.loss))
        return sum(gather_object([sum(losses)]))

    # ---- metrics ----

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.is_in_train:
            self._metrics.add("train", {f"time/{name}": time.perf_counter() - start})

    def _measure(self, mode: metrics.Mode, table: metrics.RolloutTable, result: Advantages) -> None:
        if mode == "train":
            self.state.num_input_tokens_seen += table.num_tokens
        self._metrics.add(mode, metrics.rollout_metrics(table, result))
        self._metrics.replace(mode, {"num_tokens": self.state.num_input_tokens_seen})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's numbers and ours; the last log of a run also carries what has come in since the one before."""
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        logs.update(self._metrics.flush(mode))
        super().log(logs, start_time)
        if self.args.log_completions and self.is_world_process_zero():
            self.parts.completions.write(self.state.global_step)

    def _export_callback_states(self) -> None:
        """Stateful callbacks into the trainer's state, as `Trainer._save_checkpoint` does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(state)
                else:
                    self.state.stateful_callbacks[name] = state

    def _log_completions(self, scored: Sequence[ScoredGroup], advantages_G: Sequence[np.ndarray]) -> None:
        if self.args.log_completions:
            self.parts.completions.add(scored, advantages_G)

    # ---- the chassis ----

    def get_train_dataloader(self) -> DataLoader:
        """Numbers of micro-steps: rows are looked up when a round is drawn, so nothing is fetched too early or twice."""
        return DataLoader(range(self.parts.order.num_micro_steps), batch_size=1, collate_fn=lambda batch: batch[0])

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt"]

    def floating_point_ops(self, batch: MicroBatch) -> int:
        """6 FLOPs a parameter and token (Kaplan et al., arXiv:2001.08361)."""
        return 6 * batch.share_tokens * self.parts.num_parameters

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`. `True` resumes from the newest checkpoint that verifies."""
        self._step_started = time.perf_counter()
        if self.is_world_process_zero():
            checkpoint.sweep(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint=self._resume_from(resume_from_checkpoint), **kwargs)

    def _resume_from(self, asked: str | bool | None) -> str | None:
        if not asked:
            return None
        if asked is not True:
            return str(checkpoint.verified(Path(asked)))
        found = checkpoint.newest(Path(self.args.output_dir))
        if found is None:
            raise CheckpointError(f"There is no checkpoint in {self.args.output_dir}. Start without resume_from_checkpoint.")
        return str(found)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(folder)
        if folder is not None:
            self.round, self.entropy = load_state(Path(folder), self.args.process_index, self.parts.reference, self.entropy)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Everything the Trainer saves and what a round needs, staged, verified and renamed into place."""
        self.store_flos()
        final = Path(self._get_output_dir(trial=trial)) / f"{checkpoint.PREFIX}{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(final)
        barrier: Callable[[], None] = self.accelerator.wait_for_everyone
        with checkpoint.staged(final, is_main=self.args.should_save, barrier=barrier) as staging:
            self.save_model(str(staging), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(staging))
                self._save_scaler(str(staging))
                self._save_rng_state(str(staging))
                save_state(staging, self.args.process_index, self.round, self.parts.reference, self.entropy)
            if self.args.should_save:
                self._export_callback_states()
                self.state.save_to_json(str(staging / "trainer_state.json"))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            checkpoint.rotate(final.parent, self.args.save_total_limit, self.state.best_model_checkpoint)


# ---- between the records ----


def training_group(scored: ScoredGroup, advantage_G: np.ndarray) -> TrainingGroup:
    """The part of a scored group that is trained on."""
    completions = scored.group.completions
    return TrainingGroup(
        prompt_ids=scored.group.prompt.token_ids,
        completion_ids=tuple(completion.token_ids for completion in completions),
        advantages_G=np.asarray(advantage_G, np.float32),
        sampled_logps=tuple(np.array(completion.logps, np.float32) for completion in completions),
    )


NOTHING = TrainingGroup(
    prompt_ids=(0,), completion_ids=((0,),), advantages_G=np.zeros(1, np.float32), sampled_logps=(np.zeros(1, np.float32),)
)
"""A rollout of advantage 0: what a rank without work sends through the model, so that no other rank waits for it."""


def loss_inputs(
    packed: Pack, out: TokenLogps, batch: MicroBatch, keep_N: Tensor | None, num_entropy_tokens: float | None
) -> LossInputs:
    """What the loss sees of a pack."""
    return LossInputs(
        logps_N=out.logps_N,
        entropy_N=out.entropy_N,
        advantages_R=packed.advantages_R,
        rollout_N=packed.rollout_N,
        num_rollouts=batch.num_rollouts,
        num_tokens=batch.num_tokens,
        old_logps_N=packed.old_logps_N,
        ref_logps_N=packed.ref_logps_N,
        keep_N=keep_N,
        num_entropy_tokens=num_entropy_tokens,
    )
