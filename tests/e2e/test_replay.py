"""Replayed successes and extra completions in training, on tiny models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import podium
from podium import GRPOConfig, GRPOTrainer
from podium.errors import ConfigError
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer.rounds import Round

ROWS = [{"prompt": f"{n}+1="} for n in range(4)]
EARLY = 2
"""Optimizer steps until every completion is wrong."""


def fading(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """Half of what is sampled in the first steps is right, and nothing afterwards."""
    return [float(trainer_state.global_step < EARLY and sum(map(ord, text)) % 2) for text in completions]


def rare(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 9 == 0) for text in completions]


class Keep(TrainerCallback):
    """The rounds of a run, and the weights before every step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.rounds, self.weights = trainer, list[Round](), list[dict[str, Tensor]]()
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer.round is not None
        self.rounds.append(self.trainer.round)
        self.weights.append({name: x.clone() for name, x in kwargs["model"].state_dict().items()})


def trainer(folder: Path, reward: Callable[..., Any], **settings: Any) -> GRPOTrainer:
    settings = {"max_steps": 4, "save_strategy": "no", "per_device_train_batch_size": 16, **settings}
    args = GRPOConfig(
        str(folder),
        num_generations=4,
        max_completion_length=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        product_precision="float32",
        **settings,
    )
    return GRPOTrainer(tiny_model(), reward, args, ROWS, processing_class=tiny_tokenizer())


def logs(run: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in run.state.log_history if name in row]


def logps(weights: Mapping[str, Tensor], prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Log-probabilities of a completion's tokens, from the logits of a plain model."""
    model = tiny_model()
    model.load_state_dict(weights)
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        found = model(input_ids=ids).logits[0].log_softmax(-1)
    return found[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


# ---- replay ----


@pytest.mark.parametrize("per_round", [1, 2], ids=["on policy", "two steps a round"])
def test_a_replayed_success_is_weighed_against_the_policy_that_sampled_it(per_round: int, tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(completions: list[str], **more: Any) -> list[float]:
        calls.append(len(completions))
        return fading(completions, **more)

    size = 16 // per_round
    how = {"per_device_train_batch_size": size, "steps_per_generation": per_round, "max_steps": 4 * per_round}
    run = trainer(tmp_path, counted, replay_successes=2, **how, prove_first_batch=False)
    kept = Keep(run)
    run.train()
    assert calls == [16] * 4, "stored completions are not scored again"
    assert run.replay is not None
    drawn, then = kept.rounds[EARLY], kept.weights[EARLY]
    used = [c for group in drawn.scored for c in group.group.completions if c.policy_step < EARLY]
    assert used
    assert logs(run, "replay/used")[EARLY // per_round] == len(used)
    assert set(logs(run, "reward")[EARLY // per_round :]) == {0.0}, "of what nothing has selected"
    loss, tokens = 0.0, 0
    for scored, advantage_G in zip(drawn.scored, drawn.advantages, strict=True):
        rewards = scored.rewards_GK[:, 0]
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) if np.ptp(rewards) else rewards
        np.testing.assert_allclose(advantage_G, expected, atol=1e-6)
        for completion, advantage in zip(scored.group.completions, advantage_G, strict=True):
            prompt = scored.group.prompt.token_ids
            before = logps(kept.weights[completion.policy_step], prompt, completion.token_ids)
            np.testing.assert_allclose(np.array(completion.logps), before, atol=1e-4)
            ratio = (logps(then, prompt, completion.token_ids) - before).exp()
            loss -= float(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum())
            tokens += len(completion.token_ids)
    if per_round == 1:
        assert logs(run, "loss")[EARLY] == pytest.approx(loss / tokens, abs=1e-4)
        assert abs(loss / tokens) > 1e-3, "the ratios are not all 1"
    groups = [group for batch in drawn.micro_batches for group in batch.groups]
    for group in groups:
        assert group.old_logps is not None
        for ids, old in zip(group.completion_ids, group.old_logps, strict=True):
            mine = next((c for c in used if c.token_ids == ids), None)
            if mine is not None:
                np.testing.assert_allclose(old, np.array(mine.logps, np.float32))
            else:
                assert np.isnan(old).all() == (per_round == 1)


def test_without_a_success_nothing_is_replayed(tmp_path: Path) -> None:
    def wrong(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    run = trainer(tmp_path, wrong, replay_successes=1, max_steps=3)
    run.train()
    assert logs(run, "replay/used") == logs(run, "replay/rows") == [0, 0, 0]


# ---- extra completions ----


def test_groups_without_spread_get_more_completions(tmp_path: Path) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def watched(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        calls.append((list(prompts), list(completions)))
        return rare(completions)

    run = trainer(tmp_path, watched, extra_completions=6, max_steps=1, prove_first_batch=False)
    run.train()
    (prompts, texts), *more = calls
    pools: dict[str, list[str]] = {}
    for prompt, text in zip(prompts, texts, strict=True):
        pools.setdefault(prompt, []).append(text)
    assert more
    budget = 6 * 4
    for again, extra in more:
        flat = [prompt for prompt, pool in pools.items() if len(set(rare(pool))) == 1]
        assert set(again) == set(flat)
        assert len(again) == len(flat) * min(4, budget // len(flat))
        budget -= len(again)
        for prompt, text in zip(again, extra, strict=True):
            assert text not in pools[prompt] or len(text) < 3, "random numbers of their own"
            pools[prompt].append(text)
    assert logs(run, "extra/completions") == [6 * 4 - budget]
    assert logs(run, "reward") == [pytest.approx(np.mean(rare(texts)))], "of what nothing has selected"
    helped = 0
    for scored in run.scored:
        pool = pools[scored.group.prompt.text]
        chosen = [each.text for each in scored.group.completions]
        assert len(chosen) == 4
        assert [text for text in pool if text in chosen][:4] == chosen
        most = max(np.var(each) for each in itertools.combinations(rare(pool), 4))
        assert scored.rewards_GK.var() == pytest.approx(most)
        helped += len(set(rare(pool[:4]))) == 1 < len(set(rare(pool)))
    assert logs(run, "extra/groups") == [helped]
    assert helped


def test_no_more_than_the_passes_that_are_allowed(tmp_path: Path) -> None:
    calls: list[int] = []

    def wrong(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [0.0] * len(completions)

    trainer(tmp_path, wrong, extra_completions=100, max_resamples=2, max_steps=1, prove_first_batch=False).train()
    assert calls == [16, 16, 16]
    calls.clear()
    trainer(tmp_path, wrong, extra_completions=1, max_steps=1, prove_first_batch=False).train()
    assert calls == [16, 4]


# ---- both ----


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_run_is_the_same(ahead: int, tmp_path: Path) -> None:
    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        return rare(completions) if trainer_state.global_step < 4 else [0.0] * len(completions)

    how: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "steps_per_generation": 2,
        "async_rollouts": ahead,
        "per_device_train_batch_size": 8,
        "max_steps": 8,
        "replay_successes": 2,
        "extra_completions": 4,
    }
    whole = trainer(tmp_path / "a", reward, **how)
    whole.train()
    assert whole.replay is not None
    assert whole.replay.rows
    assert max(logs(whole, "replay/used")) > 0
    assert max(logs(whole, "extra/groups")) > 0
    for step in (3, 4, 5, 6):  # in the middle of rounds, and at their ends
        again = trainer(tmp_path / f"b{step}", reward, **how)
        again.train(resume_from_checkpoint=str(tmp_path / f"a/checkpoint-{step}"))
        assert again.replay == whole.replay
        for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("steps", "said"), [(1, True), (2, False)])
def test_a_check_says_that_no_row_comes_twice(steps: int, said: bool, tmp_path: Path) -> None:
    how: dict[str, Any] = {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 8}
    args = GRPOConfig(str(tmp_path), replay_successes=1, max_steps=steps, **how)
    model = save_tiny_model(tmp_path / "model")
    found = [each for each in podium.check(model, rare, args, ROWS) if each.code == "C067"]
    assert [each.severity for each in found] == ["warning"] * said
    assert all("max_steps 1 draws 4 of 4 rows, none of them twice" in each.what for each in found)


@pytest.mark.parametrize("setting", ["replay_successes", "extra_completions"])
def test_conversations_are_refused_by_trainer_and_check(setting: str, tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=4, num_generations=4, **{setting: 1})
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    given: dict[str, Any] = {"processing_class": tiny_tokenizer(), "tools": [add]}
    with pytest.raises(ConfigError, match=f"{setting} is for completions of one turn .* has tools") as raised:
        GRPOTrainer(tiny_model(), rare, args, rows, **given)
    assert raised.value.code == "C067"
    model = save_tiny_model(tmp_path / "model")
    assert "C067" in {each.code for each in podium.check(model, rare, args, rows, tools=[add])}
    assert "C067" not in {each.code for each in podium.check(model, rare, args, rows)}
