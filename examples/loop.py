"""GRPO without a Trainer: the whole algorithm on one page, out of Podium's own pieces.

    python examples/loop.py                 # SmolLM2-135M-Instruct learns additions; a few minutes on two CPU cores
    python examples/loop.py --tiny          # a model of 32 units learns to write lower-case letters; seconds

Prompts become groups, groups are scored, scores become advantages, all of it is packed, the pack gives
log-probabilities, log-probabilities give a loss, the optimizer steps. `GRPOTrainer` does the same and adds what a long
run needs: checkpoints, schedules, evaluation, reuse of rollouts, several processes.

Shape letters: P prompts, G completions per prompt, K reward functions, N trained tokens of a pack.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from podium.algorithm.advantages import Advantages, AdvantageSettings, advantages
from podium.algorithm.losses import LossInputs, LossSettings, policy_loss
from podium.data.prompts import PromptBuilder
from podium.data.tasks import load_task
from podium.engines.live.engine import LiveEngine
from podium.models.attention import tree_attention
from podium.models.builtin import resolve_model
from podium.models.forward import token_logps
from podium.models.loading import context_length, end_ids
from podium.models.packing import Pack, pack
from podium.models.precision import ProductPrecision, measure_products
from podium.records import SamplingSettings, ScoredGroup, TrainingGroup
from podium.rewards import answer_correct, answer_format, resolve_rewards, score
from podium.testing import tiny_model, tiny_tokenizer

PROMPTS, COMPLETIONS = 8, 8
TOKENS_PER_PACK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what, for what."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[Mapping[str, Any]]
    reward_funcs: Sequence[Callable[..., Any]]
    weights_K: np.ndarray
    learning_rate: float


def additions() -> Task:
    """The built-in model and its task: right sums, and nothing but the sum inside tags."""
    folder = resolve_model("builtin:smollm2-135m-instruct")
    return Task(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        rows=list(load_task("additions")[0]),
        reward_funcs=[answer_format, answer_correct],
        weights_K=np.array([1.0, 2.0]),
        learning_rate=1e-5,
    )


def lower_case() -> Task:
    """A random model of 32 units and the easiest of rewards."""

    def share_lower(completions: list[str], **_: Any) -> list[float]:
        return [sum("a" <= letter <= "z" for letter in text) / max(len(text), 1) for text in completions]

    return Task(
        model=tiny_model(),
        tokenizer=tiny_tokenizer(),
        rows=[{"prompt": f"{number}: "} for number in range(50)],
        reward_funcs=[share_lower],
        weights_K=np.ones(1),
        learning_rate=1e-2,
    )


def train(task: Task, *, steps: int, seed: int) -> Iterator[Advantages]:
    """One optimizer step after the other; gives what each step's rewards were."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.model.to(device)
    precision = ProductPrecision(model, enabled=device == "cpu" and measure_products().bfloat16_pays)
    engine = LiveEngine(model, task.tokenizer, precision=precision)
    builder = PromptBuilder(tokenizer=task.tokenizer, context_length=context_length(model.config))
    rewards = resolve_rewards(task.reward_funcs)
    sampling = SamplingSettings(
        num_completions=COMPLETIONS, max_tokens=16, end_ids=end_ids(model, task.tokenizer), seed=seed
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    order = np.random.default_rng(seed)

    for step in range(steps):
        rows = [int(row) for row in order.choice(len(task.rows), PROMPTS, replace=False)]
        prompts = [builder(task.rows[row], id=p, row_index=row) for p, row in enumerate(rows)]
        groups = engine.generate(prompts, replace(sampling, round=step), policy_step=step)
        scored = score(groups, rewards)
        result = advantages(
            np.stack([group.rewards_GK for group in scored]), AdvantageSettings(weights_K=task.weights_K)
        )
        update(model, optimizer, scored, result, precision)
        yield result


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scored: Sequence[ScoredGroup],
    result: Advantages,
    precision: ProductPrecision,
) -> None:
    """One gradient step. Groups without signal add nothing to it: they are counted, but not computed."""
    num_tokens = sum(len(completion.token_ids) for s in scored for completion in s.group.completions)
    groups = [
        training_group(s, advantages_G)
        for s, advantages_G in zip(scored, result.advantages_PG, strict=True)
        if advantages_G.any()
    ]
    model.train()
    with precision(), tree_attention(model):
        for packed in pack(groups, tokens_per_pack=TOKENS_PER_PACK, device=model.device):
            loss(model, packed, num_rollouts=len(scored) * COMPLETIONS, num_tokens=num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def training_group(scored: ScoredGroup, advantages_G: np.ndarray) -> TrainingGroup:
    """The part of a scored group that is trained on."""
    completions = scored.group.completions
    return TrainingGroup(
        prompt_ids=scored.group.prompt.token_ids,
        completion_ids=tuple(completion.token_ids for completion in completions),
        advantages_G=advantages_G.astype(np.float32),
        sampled_logps=tuple(np.array(completion.logps, np.float32) for completion in completions),
    )


def loss(model: PreTrainedModel, packed: Pack, *, num_rollouts: int, num_tokens: int) -> torch.Tensor:
    """This pack's share of the step's loss: counts are those of the whole step, so shares add up."""
    out = token_logps(model, packed, temperature=1.0)
    inputs = LossInputs(
        logps_N=out.logps_N,
        entropy_N=out.entropy_N,
        advantages_R=packed.advantages_R,
        rollout_N=packed.rollout_N,
        num_rollouts=num_rollouts,
        num_tokens=num_tokens,
    )
    return policy_loss(inputs, LossSettings(loss_type="dapo")).loss


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and print the mean reward of every step; gives them."""
    parser = argparse.ArgumentParser(description="GRPO without a Trainer.")
    parser.add_argument("--tiny", action="store_true", help="a model of 32 units and an easy reward: seconds")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)

    task = lower_case() if flags.tiny else additions()
    rewards = []
    for step, result in enumerate(train(task, steps=flags.steps, seed=flags.seed), 1):
        rewards.append(float(np.nanmean(result.reward_PG)))
        signal = result.advantages_PG.any(axis=1).mean()
        print(f"step {step:3}  reward {rewards[-1]:.3f}  groups with signal {signal:.0%}", flush=True)
    return rewards


if __name__ == "__main__":
    main()
