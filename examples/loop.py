"""GRPO without a Trainer: a loop of one's own around four primitives.

    python examples/loop.py                 # SmolLM2-135M-Instruct learns additions; a few minutes on two CPU cores
    python examples/loop.py --tiny          # a model of 32 units learns to write lower-case letters; seconds

Prompts become groups of completions (`sample`), completions get scores, scores become advantages, the loss adds its
gradient (`forward_backward`), the optimizer steps (`optim_step`). `GRPOTrainer` does the same by the same functions and
adds what a long run needs: checkpoints, schedules, evaluation, diagnosis, several processes.

Shape letters: P prompts, G completions per prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium import GRPOConfig, Loop
from podium.data.tasks import load_task
from podium.rewards import answer_correct, answer_format
from podium.testing import tiny_model, tiny_tokenizer

PROMPTS, COMPLETIONS = 8, 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, for what."""

    model: Any
    tokenizer: Any = None
    rows: Sequence[Mapping[str, Any]]
    reward: Callable[[Mapping[str, Any], str], float]
    learning_rate: float


def additions() -> Task:
    """The built-in model and its task: right sums, and nothing but the sum inside tags."""

    def reward(row: Mapping[str, Any], text: str) -> float:
        completion = [[{"role": "assistant", "content": text}]]
        return answer_format(completion)[0] + 2 * answer_correct(completion, answer=[row["answer"]])[0]

    rows = list(load_task("additions")[0])
    return Task(model="builtin:smollm2-135m-instruct", rows=rows, reward=reward, learning_rate=1e-5)


def lower_case() -> Task:
    """A random model of 32 units and the easiest of rewards."""
    return Task(
        model=tiny_model(),
        tokenizer=tiny_tokenizer(),
        rows=[{"prompt": f"{number}: "} for number in range(50)],
        reward=lambda row, text: sum("a" <= letter <= "z" for letter in text) / max(len(text), 1),
        learning_rate=1e-2,
    )


def train(task: Task, *, steps: int, seed: int) -> Iterator[np.ndarray]:
    """One optimizer step after the other; gives what each step's rewards were, [P, G]."""
    args = GRPOConfig(
        "runs/loop",
        per_device_train_batch_size=PROMPTS * COMPLETIONS,
        num_generations=COMPLETIONS,
        max_completion_length=16,
        adam_beta2=0.99,
        seed=seed,
        report_to="none",
    )
    loop = Loop(task.model, args, processing_class=task.tokenizer)
    order = np.random.default_rng(seed)
    for _ in range(steps):
        rows = [task.rows[i] for i in order.choice(len(task.rows), PROMPTS, replace=False)]
        groups = loop.sample(rows)
        rewards_PG = np.array(
            [
                [task.reward(row, each.text) for each in group.completions]
                for row, group in zip(rows, groups, strict=True)
            ]
        )
        advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
        advantages_PG /= rewards_PG.std(axis=1, ddof=1, keepdims=True) + 1e-4
        tokens = sum(len(each.token_ids) for group in groups for each in group.completions)
        loop.forward_backward(loop.data(groups, advantages_PG, on_policy=True), "ppo", divide_by=tokens)
        loop.optim_step(task.learning_rate)
        yield rewards_PG


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and print the mean reward of every step; gives them."""
    parser = argparse.ArgumentParser(description="GRPO without a Trainer.")
    parser.add_argument("--tiny", action="store_true", help="a model of 32 units and an easy reward: seconds")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    task = lower_case() if flags.tiny else additions()
    rewards = []
    for step, rewards_PG in enumerate(train(task, steps=flags.steps, seed=flags.seed), 1):
        rewards.append(float(rewards_PG.mean()))
        differing = (rewards_PG.std(axis=1) > 0).mean()
        print(f"step {step:3}  reward {rewards[-1]:.3f}  groups that differ {differing:.0%}", flush=True)
    return rewards


if __name__ == "__main__":
    main()
