"""Podium's advantages and rollout metrics against a real `trl.GRPOTrainer` scoring the same completions.

TRL's `_generate_and_score_completions` runs whole, on a tiny model; `rollout_func` gives it fixed completions and its
reward functions return fixed numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset

from podium.algorithm.advantages import AGGREGATIONS, AdvantageSettings, advantages
from podium.algorithm.metrics import RolloutTable, rollout_metrics, rollout_rows
from podium.records import Completion, Group, Prompt, ScoredGroup
from podium.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

NAN = math.nan
NAMES = ("exact", "form")
WEIGHTS = (2.0, 0.5)
PATTERNS = {
    "plain": [[1, 0.2], [0, 0.7], [0, 0.1], [1, 0.9], [0, -0.3], [1, 0.4], [0.5, 0], [0, 0]],
    "one group without spread": [[0.1, 0.3], [0.1, 0.3], [0.1, 0.3], [0.1, 0.3], [0, 1], [1, 0], [0.2, 0.2], [1, 1]],
    "no spread at all": [[0.1, 0.3]] * 8,
    "functions that cancel": [[1, -4], [0, 0], [0.5, -2], [0, 0], [0, 1], [1, 0], [0, 0], [1, 1]],
    "some None": [[1, NAN], [0, 0.7], [NAN, 0.1], [1, 0.9], [NAN, -0.3], [1, NAN], [0.5, 0], [0, 0]],
    "rows of None": [[1, 0.2], [NAN, NAN], [0, 0.1], [1, 0.9], [NAN, NAN], [NAN, NAN], [NAN, NAN], [0.3, 0]],
    "a group of None": [[NAN, NAN]] * 4 + [[1, 0], [0, 1], [0, 0], [0.5, NAN]],
    "all None": [[NAN, NAN]] * 8,
    "a function of None": [[1, NAN], [0, NAN], [0, NAN], [1, NAN], [0, NAN], [1, NAN], [0.5, NAN], [0, NAN]],
}
PROMPTS = ("2+2=", "the capital of", "a", "longer than the others", "5", "six", "seven", "8")
LENGTHS = (3, 5, 1, 4, 2, 6, 5, 1)
TRUNCATED = (1, 4, 5)


class Scorer:
    """A real TRL trainer whose completions and rewards are given."""

    def __init__(self, output_dir: str) -> None:
        self.rewards = np.zeros((8, 2))
        self.tokenizer = tiny_tokenizer()
        eos = self.tokenizer.eos_token_id
        self.completions = [[10 + i] * (n - 1) + [20 if i in TRUNCATED else eos] for i, n in enumerate(LENGTHS)]
        args = trl.GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=8,
            num_generations=4,
            reward_weights=list(WEIGHTS),
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        self.trainer = trl.GRPOTrainer(
            model=tiny_model("llama"),
            reward_funcs=[self.reward(k) for k in range(2)],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            processing_class=self.tokenizer,
            rollout_func=self.rollout,
        )
        self.trainer.model.train()

    def reward(self, k: int):
        def function(completions, **_):
            return [None if math.isnan(r) else r for r in self.rewards[: len(completions), k].tolist()]

        function.__name__ = NAMES[k]
        return function

    def rollout(self, prompts, _trainer):
        ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": self.completions[: len(prompts)], "logprobs": None}

    def __call__(self, rewards, group_size: int, scale: str, aggregation: str) -> tuple[np.ndarray, dict[str, float]]:
        """TRL's advantages [P * G] and metrics for these rewards [P * G, K]."""
        trainer, self.rewards = self.trainer, np.array(rewards, dtype=float)
        trainer.num_generations, trainer.scale_rewards = group_size, scale
        trainer.multi_objective_aggregation = aggregation
        trainer._metrics["train"] = defaultdict(list)
        trainer.state.num_input_tokens_seen = 0
        rows = [{"prompt": PROMPTS[i // group_size]} for i in range(len(self.rewards))]
        scored = trainer._generate_and_score_completions(rows)
        return scored["advantages"].numpy(), {name: values[0] for name, values in trainer._metrics["train"].items()}

    def groups(self, group_size: int) -> list[ScoredGroup]:
        """The same as Podium's records."""
        return [
            ScoredGroup(
                group=Group(
                    prompt=Prompt(
                        id=p,
                        row=p,
                        token_ids=tuple(self.tokenizer(PROMPTS[p])["input_ids"]),
                        text=PROMPTS[p],
                        content=PROMPTS[p],
                    ),
                    completions=tuple(
                        Completion(
                            token_ids=tuple(self.completions[i]),
                            logps=(0.0,) * LENGTHS[i],
                            finish="length" if i in TRUNCATED else "stop",
                            text="",
                            policy_step=0,
                        )
                        for i in range(start, start + group_size)
                    ),
                ),
                names_K=NAMES,
                rewards_GK=self.rewards[start : start + group_size],
            )
            for p, start in enumerate(range(0, len(self.rewards), group_size))
        ]


def table_of(groups: list[ScoredGroup]) -> RolloutTable:
    return RolloutTable.of(NAMES, np.concatenate([rollout_rows(group) for group in groups]))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    torch.manual_seed(0)
    return Scorer(str(tmp_path_factory.mktemp("trl")))


@pytest.mark.cases(18)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_advantages_and_metrics_are_trls(scorer: Scorer, pattern: str, scale: str, aggregation: str) -> None:
    """Groups of 2, 4, 8 and of 1 (which only evaluation has)."""
    settings = AdvantageSettings(weights_K=np.array(WEIGHTS), scale_rewards=scale, aggregation=aggregation)
    for group_size in (1, 2, 4, 8):
        theirs, metrics = scorer(PATTERNS[pattern], group_size, scale, aggregation)
        ours = advantages(np.array(PATTERNS[pattern], dtype=float).reshape(-1, group_size, 2), settings)
        np.testing.assert_allclose(ours.advantages_PG.ravel(), theirs, rtol=1e-4, atol=1e-5)
        table = table_of(scorer.groups(group_size))
        got = {**rollout_metrics(table, ours), "num_tokens": table.num_tokens}
        flat, theirs_flat = got.pop("frac_reward_zero_std"), metrics.pop("frac_reward_zero_std")
        assert got == pytest.approx(metrics, rel=1e-5, abs=1e-6, nan_ok=True), group_size
        # TRL compares the deviation that divides with 0: that of the batch, or NaN in a group with one reward.
        known_P = (~np.isnan(ours.reward_PG)).sum(axis=1)
        by_group = scale != "batch" and aggregation == "sum_then_normalize" and (known_P >= min(group_size, 2)).all()
        assert flat == pytest.approx(theirs_flat) if by_group else flat >= theirs_flat


def test_a_single_completion_has_no_advantage(scorer: Scorer) -> None:
    """Evaluation with one generation and a batch of one."""
    for scale, aggregation in itertools.product(("group", "batch", "none"), AGGREGATIONS):
        theirs, metrics = scorer([[1.0, 0.5]], 1, scale, aggregation)
        settings = AdvantageSettings(weights_K=np.array(WEIGHTS), scale_rewards=scale, aggregation=aggregation)
        ours = advantages(np.array([[[1.0, 0.5]]]), settings)
        assert ours.advantages_PG.tolist() == [[0.0]] == [theirs.tolist()]
        table = table_of(scorer.groups(1))
        got = {**rollout_metrics(table, ours), "num_tokens": table.num_tokens}
        assert got == pytest.approx(metrics, nan_ok=True)
