"""What is measured: shapes of a GRPO step, with lengths and rewards forced, so that both trainers do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One row of the table: P prompts x G completions a step."""

    name: str
    what: str
    prompts: int
    generations: int
    prompt_tokens: int
    max_tokens: int
    length: Callable[[int, int], int]
    """Tokens of completion g of prompt p."""
    reward: Callable[[int, int], float]
    """Reward of completion g of prompt p."""
    lora: bool = False
    beta: float = 0.0
    warm_up: int = 1
    """Steps that are not counted; none where a step takes TRL minutes, of which warming up is a hundredth."""
    target: float = 0.0
    """Least ratio to TRL's better setting that is asked for, on two CPU cores."""

    @property
    def completions(self) -> int:
        """Per step."""
        return self.prompts * self.generations

    def lengths(self) -> list[int]:
        """Of all completions of a step."""
        return [self.length(p, g) for p in range(self.prompts) for g in range(self.generations)]

    def useful(self) -> int:
        """Completions in groups with signal."""
        groups = ([self.reward(p, g) for g in range(self.generations)] for p in range(self.prompts))
        return sum(self.generations for group in groups if len(set(group)) > 1)

    def config(self) -> dict[str, Any]:
        """Arguments that both trainers get."""
        return {
            "per_device_train_batch_size": self.completions,
            "num_generations": self.generations,
            "max_completion_length": self.max_tokens,
            "beta": self.beta,
            "temperature": 1.0,
            "loss_type": "dapo",
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.99,
            "max_grad_norm": 1.0,
            "seed": 1,
        }


def alternating(p: int, g: int) -> float:
    """Every group has signal."""
    return float((p + g) % 2)


def one_group_in_four(p: int, g: int) -> float:
    """Three quarters of the groups have equal rewards."""
    return float(g % 2) if p % 4 == 0 else 0.0


def quickstart_length(p: int, g: int) -> int:
    """8 to 16 tokens, 12 on average."""
    return 8 + (5 * p + 3 * g) % 9


def skewed_length(p: int, g: int) -> int:
    """One completion in sixteen has 256 tokens, the others 8 to 32."""
    return 256 if (8 * p + g) % 16 == 0 else 8 + (7 * p + 5 * g) % 25


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="W1",
            what="quickstart: short prompts, 8 x 8 of 8-16 tokens",
            prompts=8,
            generations=8,
            prompt_tokens=62,
            max_tokens=16,
            length=quickstart_length,
            reward=alternating,
            target=6,
        ),
        Workload(
            name="W2",
            what="long prompts: 512 tokens, 4 x 8 of 64",
            prompts=4,
            generations=8,
            prompt_tokens=512,
            max_tokens=64,
            length=lambda p, g: 64,
            reward=alternating,
            warm_up=0,
            target=15,
        ),
        Workload(
            name="W3",
            what="skewed lengths: 1 of 16 has 256 tokens, the others 8-32",
            prompts=8,
            generations=8,
            prompt_tokens=62,
            max_tokens=256,
            length=skewed_length,
            reward=alternating,
            warm_up=0,
            target=8,
        ),
        Workload(
            name="W4",
            what="sparse signal: W1 with 3 of 4 groups equal",
            prompts=8,
            generations=8,
            prompt_tokens=62,
            max_tokens=16,
            length=quickstart_length,
            reward=one_group_in_four,
            target=12,
        ),
        Workload(
            name="W5",
            what="LoRA r=16 on all linear layers, beta 0.04, W1's shape",
            prompts=8,
            generations=8,
            prompt_tokens=62,
            max_tokens=16,
            length=quickstart_length,
            reward=alternating,
            lora=True,
            beta=0.04,
            target=5,
        ),
        Workload(
            name="W6",
            what="64 x 8 of 512 tokens (GPU)",
            prompts=64,
            generations=8,
            prompt_tokens=128,
            max_tokens=512,
            length=lambda p, g: 512,
            reward=alternating,
            target=10,
        ),
    )
}

CPU = ("W1", "W2", "W3", "W4", "W5")
