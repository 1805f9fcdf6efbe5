"""With `async_rollouts` the next round is sampled and scored while this one is trained on: on tiny models, on a CPU."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback

from podium import GRPOConfig, GRPOTrainer
from podium.algorithm.losses import CORRECTIONS
from podium.engines.live.engine import CopyEngine, LiveEngine
from podium.errors import ConfigError, RewardError
from podium.records import Sample, ScoredGroup
from podium.trainer.rounds import Plan, PromptOrder, RoundKey
from podium.trainer.settings import loss_settings

ADAPTER = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 4) for b in range(4)]


def logs(trainer: GRPOTrainer, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Rounds(TrainerCallback):
    """Keeps every round that is trained on, and the weights before every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.scored: list[list[ScoredGroup]] = []

    def watch(self, trainer: GRPOTrainer) -> GRPOTrainer:
        trainer.add_callback(self)
        self.trainer = trainer
        return trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append({k: v.clone() for k, v in kwargs["model"].state_dict().items()})
        self.scored.append(self.trainer.scored)

    @property
    def tokens(self) -> list[list[tuple[int, ...]]]:
        return [[c.token_ids for s in scored for c in s.group.completions] for scored in self.scored]


def run(make_trainer: Callable, *args: Any, **settings: Any) -> tuple[GRPOTrainer, Rounds]:
    rounds = Rounds()
    trainer = rounds.watch(make_trainer(*args, **settings))
    trainer.train()
    return trainer, rounds


def numbers(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The log without times."""
    timed = ("time", "per_second", "resident", "runtime", "flos", "health/")
    return [
        {k: v for k, v in entry.items() if not any(part in k for part in timed)} for entry in trainer.state.log_history
    ]


# ---- what is sampled from which weights ----


@pytest.mark.cases(2)
@pytest.mark.parametrize("waits", [None, True, False], ids=["", "snapshots", "at-once"])
@pytest.mark.parametrize(("ahead", "adapter"), [(1, False), (3, True), (2, False), (1, True), (3, False)])
def test_a_round_is_sampled_from_the_weights_of_so_many_rounds_ago(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch, ahead: int, adapter: bool, waits: bool | None
) -> None:
    """Held against an engine of this test's own, on the weights as they were, whether these waited for it or not."""
    if waits is not None:
        monkeypatch.setattr("podium.trainer.ahead.RoundsAhead.is_sampling", waits)
    trainer, rounds = run(
        make_trainer, max_steps=5, async_rollouts=ahead, learning_rate=0.3, peft_config=ADAPTER if adapter else None
    )
    assert isinstance(trainer.run.step.engine, CopyEngine)
    engine = LiveEngine(
        trainer.model, trainer.run.policy.tokenizer, precision=trainer.run.policy.forward.precision.sampling
    )
    for k, scored in enumerate(rounds.scored):
        before = max(k - ahead, 0)
        trainer.model.load_state_dict(rounds.weights[before])
        prompts = [s.group.prompt for s in scored]
        key = trainer.run.plan.micro_step(*divmod(k, 3)).round
        settings = trainer.run.step.sampling(4, (key.epoch << 32) + key.number)
        again = engine.generate(prompts, settings, policy_step=before)
        assert again == [s.group for s in scored]
        assert {c.policy_step for s in scored for c in s.group.completions} == {before}
    assert logs(trainer, "rollouts/staleness") == [min(k, ahead) for k in range(5)]
    newest = {k: v for k, v in rounds.weights[3].items() if not torch.equal(v, rounds.weights[2][k])}
    assert newest, "weights that never move would show nothing"


@pytest.mark.slow
def test_the_first_round_and_step_are_those_of_a_run_that_waits(make_trainer: Callable) -> None:
    waits, its = run(make_trainer, max_steps=3)
    ahead, theirs = run(make_trainer, max_steps=3, async_rollouts=1)
    assert its.scored[0][0].group == theirs.scored[0][0].group
    assert its.tokens[0] == theirs.tokens[0]
    assert logs(ahead, "loss")[0] == pytest.approx(logs(waits, "loss")[0], abs=1e-6)
    assert logs(ahead, "grad_norm")[0] == pytest.approx(logs(waits, "grad_norm")[0], rel=1e-4)
    assert all(torch.allclose(v, theirs.weights[1][k], atol=1e-5) for k, v in its.weights[1].items())
    assert its.tokens[1] != theirs.tokens[1], "from weights that are a step older"


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rounds_ahead", "staleness"), [(2, [0, 4, 8]), (1, [0, 4, 4])])
def test_without_movement_all_rounds_are_those_of_a_run_that_waits(
    make_trainer: Callable, rounds_ahead: int, staleness: list[int]
) -> None:
    """Over an epoch's end, with rounds that several steps share, and with weights of rewards that adapt."""
    settings = {
        "max_steps": 10,
        "learning_rate": 0.0,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "adaptive_rewards": {"digits": True},
        "dynamic_sampling": True,
    }
    waits, its = run(make_trainer, **settings)
    ahead, theirs = run(make_trainer, **settings, async_rollouts=rounds_ahead)
    assert its.tokens == theirs.tokens
    assert logs(waits, "reward") == logs(ahead, "reward")
    assert logs(waits, "reward_weights/digits") == logs(ahead, "reward_weights/digits")
    assert logs(waits, "resampled_prompts") == logs(ahead, "resampled_prompts")
    assert logs(ahead, "rollouts/staleness") == staleness


@pytest.mark.slow
def test_a_run_is_the_same_every_time(make_trainer: Callable) -> None:
    """Rewards that draw random numbers included, and an evaluation in between."""

    def noisy(completions: list[str], **_: Any) -> list[float]:
        time.sleep(random.Random(time.time()).random() / 50)
        return [sum(c.isdigit() for c in text) + random.random() for text in completions]

    settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "eval_rows": ROWS[:2], "async_rollouts": 1}
    settings |= {"prove_first_batch": True, "peft_config": ADAPTER}
    one, other = (run(make_trainer, noisy, **settings)[0] for _ in range(2))
    assert numbers(one) == numbers(other)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.slow
def test_a_stream_is_read_in_its_order(make_trainer: Callable) -> None:
    rows = IterableDataset.from_generator(lambda: iter(ROWS))
    _, rounds = run(make_trainer, rows=rows, max_steps=4, async_rollouts=1, shuffle_dataset=False)
    read = [s.group.prompt.text for scored in rounds.scored for s in scored]
    assert read == [row["prompt"] for row in (ROWS * 2)[:16]]


# ---- the loss ----


def logps_of(trainer: GRPOTrainer, samples: list[Sample]) -> list[np.ndarray]:
    """Log-probabilities under the weights of this moment."""
    return trainer.step.logps(samples)


@pytest.mark.slow
def test_a_tokens_weight_is_how_much_likelier_it_has_become(make_trainer: Callable) -> None:
    """The ratio of the loss begins at 1; what has changed since a token was sampled is a weight, 3 at most."""
    trainer, rounds = run(make_trainer, max_steps=3, async_rollouts=1, learning_rate=0.3, logging_steps=1)
    assert trainer.round is not None
    samples = [sample for share in trainer.round.micro_batches for sample in share.samples]
    assert samples
    assert all(sample.old_logps_A is None for sample in samples)
    trainer.model.load_state_dict(rounds.weights[-3 + 1])
    then = np.concatenate(logps_of(trainer, samples))
    np.testing.assert_allclose(np.concatenate([sample.sampled_logps_A for sample in samples]), then, atol=2e-4)
    trainer.model.load_state_dict(rounds.weights[-3 + 2])
    now = np.concatenate(logps_of(trainer, samples))
    weights = np.minimum(np.exp(now - then), 3.0)
    assert np.abs(weights - 1).max() > 1e-2, "the policy has moved since"
    name = "sampling/importance_sampling_ratio"
    seen = [logs(trainer, f"{name}/{which}")[-1] for which in ("min", "mean", "max")]
    np.testing.assert_allclose(seen, [weights.min(), weights.mean(), weights.max()], rtol=1e-3)
    assert logs(trainer, "clip_ratio/region_mean") == [0, 0, 0]


def test_old_log_probabilities_are_those_at_the_beginning_of_a_round(make_trainer: Callable) -> None:
    """Of rounds that several steps share; of an older policy's completions, too."""
    settings = {"max_steps": 4, "num_iterations": 2, "async_rollouts": 1, "learning_rate": 0.3}
    trainer, rounds = run(make_trainer, **settings)
    assert trainer.round is not None
    samples = [sample for share in trainer.round.micro_batches for sample in share.samples]
    trainer.model.load_state_dict(rounds.weights[-2])  # after two of the four steps
    for sample, at_the_beginning_A in zip(samples, logps_of(trainer, samples), strict=True):
        assert sample.old_logps_A is not None
        np.testing.assert_allclose(sample.old_logps_A, at_the_beginning_A, atol=2e-4)
        assert np.abs(sample.old_logps_A - sample.sampled_logps_A).max() > 1e-3, "sampled by an older one"


def test_a_mode_that_is_asked_for_is_taken() -> None:
    """Else tokens are weighed: TRL's default would leave out most completions of older weights."""
    assert loss_settings(GRPOConfig("out", async_rollouts=1)).correction == CORRECTIONS["token_truncate"]
    asked = GRPOConfig("out", async_rollouts=1, vllm_importance_sampling_mode="sequence_mask")
    assert loss_settings(asked).correction == CORRECTIONS["sequence_mask"]
    off = GRPOConfig("out", async_rollouts=1, vllm_importance_sampling_correction=False)
    assert loss_settings(off).correction is None


@pytest.mark.slow
def test_it_learns(make_trainer: Callable) -> None:
    def letters(completions: list[str], **_: Any) -> list[float]:
        return [sum(c in "aeiou" for c in text) for text in completions]

    curves = []
    for ahead in (0, 1):
        settings = {"max_steps": 30, "optim": "adamw_torch", "learning_rate": 0.01, "async_rollouts": ahead}
        trainer = make_trainer(letters, **settings)
        trainer.train()
        curves.append(logs(trainer, "reward"))
    for reward in curves:
        assert sum(reward[-3:]) / 3 > 3 * sum(reward[:3]) / 3
    assert curves[0][0] == curves[1][0]
    assert curves[0] != curves[1]


# ---- two things at once ----


class Meet(TrainerCallback):
    """Reward function and training step wait for each other: neither goes on unless both are under way."""

    __name__ = "meet"

    def __init__(self) -> None:
        self.both = threading.Barrier(2, timeout=30)
        self.process = os.getpid()
        self.threads: list[str] = []
        self.met = 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) > 1 and os.getpid() == self.process:  # not in the fork that tests rewards before the run
            self.both.wait()
        return [float(len(set(text))) for text in completions]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 < state.max_steps:
            self.both.wait()
            self.met += 1


def test_sampling_overlaps_training(make_trainer: Callable) -> None:
    meet = Meet()
    trainer = make_trainer([meet], max_steps=4, async_rollouts=1, reward_timeout=0)
    trainer.add_callback(meet)
    trainer.train()
    assert meet.met == 3
    assert meet.threads == ["MainThread", *["podium-rollouts"] * 3]


@pytest.mark.slow
def test_a_run_that_waits_does_not(make_trainer: Callable) -> None:
    meet = Meet()
    meet.both = threading.Barrier(2, timeout=0.2)
    trainer = make_trainer([meet], max_steps=4, reward_timeout=0)
    trainer.add_callback(meet)
    with pytest.raises(threading.BrokenBarrierError):
        trainer.train()


@pytest.mark.slow
def test_an_evaluation_waits_for_the_round_ahead(make_trainer: Callable) -> None:
    """Reward functions are not called twice at once, and an evaluation is of the newest weights."""
    inside = threading.Lock()
    eval_steps: list[set[int]] = []

    def alone(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        assert inside.acquire(blocking=False)
        time.sleep(0.02)
        inside.release()
        return [float(len(set(text))) for text in completions]

    trainer = make_trainer(
        alone, max_steps=3, async_rollouts=1, eval_strategy="steps", eval_steps=1, eval_rows=ROWS[:2]
    )
    evaluate = trainer.rollouts.sample_and_score

    def watched(*args: Any, **kwargs: Any) -> Any:
        scored, measured = evaluate(*args, **kwargs)
        eval_steps.append({c.policy_step for s in scored for c in s.group.completions})
        return scored, measured

    trainer.rollouts.sample_and_score = watched
    trainer.train()
    assert eval_steps == [{1}, {2}, {3}]


def test_reward_functions_see_the_state_of_their_round(make_trainer: Callable) -> None:
    seen: list[tuple[int, int]] = []
    stepped = threading.Event()

    class Step(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stepped.set()

    def late(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if seen:
            stepped.wait(0.3)
        seen.append((trainer_state.global_step, len(trainer_state.log_history)))
        return [float(len(set(text))) for text in completions]

    trainer = make_trainer(late, max_steps=3, async_rollouts=1)
    trainer.add_callback(Step())
    trainer.train()
    assert seen == [(0, 0), (0, 0), (1, 1)]


# ---- ends ----


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "podium-rollouts"]


def test_a_reward_that_raises_ends_the_run_as_ever(make_trainer: Callable) -> None:
    def third(completions: list[str], trainer_state: Any, calls: list[int] = [], **_: Any) -> list[float]:  # noqa: B006
        calls.append(trainer_state.global_step)
        if len(calls) == 3:
            raise ZeroDivisionError("no third round")
        return [float(len(set(text))) for text in completions]

    trainer = make_trainer(third, max_steps=6, async_rollouts=2)
    with pytest.raises(RewardError, match="no third round") as error:
        trainer.train()
    assert "third" in str(error.value)
    assert trainer.state.global_step == 2, "the two rounds before it were trained on"
    assert not alive()


def test_ctrl_c_in_training_leaves_nothing_behind(make_trainer: Callable) -> None:
    class Interrupt(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = make_trainer(max_steps=6, async_rollouts=3, max_completion_length=40)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not alive()


def test_a_run_that_stops_early_does_not_finish_the_round_ahead(make_trainer: Callable) -> None:
    """Its sampling is interrupted: the reward function is not called for it."""
    rounds: list[int] = []
    sampling = threading.Event()

    def count(completions: list[str], **_: Any) -> list[float]:
        rounds.append(len(completions))
        return [float(len(set(text))) for text in completions]

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert sampling.wait(20)
            control.should_training_stop = True

    trainer = make_trainer(count, max_steps=6, async_rollouts=2, max_completion_length=30)
    engine = trainer.run.step.engine
    forward = engine.model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            sampling.set()
            time.sleep(0.1)
        return forward(*args, **kwargs)

    engine.model.forward = slow
    trainer.add_callback(Stop())
    trainer.train()
    assert trainer.state.global_step == 1
    assert rounds == [16]
    assert not alive()
    trainer.train()  # and the next one samples as if nothing had been


def test_a_reward_that_never_returns_does_not_keep_the_run(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.trainer.ahead.JOIN_TIMEOUT", 0.2)
    never = threading.Event()

    def stuck(completions: list[str], **_: Any) -> list[float]:
        if threading.current_thread().name == "podium-rollouts":
            never.wait()
        return [float(len(set(text))) for text in completions]

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer = make_trainer(stuck, max_steps=3, async_rollouts=1, reward_timeout=0)
    trainer.add_callback(Stop())
    trainer.train()
    assert all(thread.daemon for thread in alive())
    never.set()


# ---- what is recorded ----


def test_staleness_is_recorded(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=6, async_rollouts=1, per_device_train_batch_size=8, steps_per_generation=2)
    trainer.train()
    files = sorted((trainer.health.folder.folder / "rollouts").glob("*.parquet"))
    table = pd.concat(pd.read_parquet(file) for file in files)
    ages = table.groupby("step").policy_step.agg(["min", "max"])
    assert ages.to_dict("index") == {
        1: {"min": 0, "max": 0},
        3: {"min": 0, "max": 0},
        5: {"min": 2, "max": 2},
    }
    assert logs(trainer, "rollouts/staleness") == [0, 2, 2]
    assert len(logs(trainer, "time/wait_seconds")) == 2
    assert all(seconds >= 0 for seconds in logs(trainer, "time/idle_seconds"))
    assert logs(trainer, "time/idle_seconds")
    assert len(logs(trainer, "time/generate_seconds")) == 3


def test_the_proof_holds_of_the_engine_with_weights_of_its_own(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=2, async_rollouts=1, prove_first_batch=True)
    trainer.train()
    checks = {check.name: check.passed for check in trainer.proof.checks}
    assert checks["the weights reach the sampler"] is True
    assert all(passed is not False for passed in checks.values())


def test_the_proof_stops_a_copy_that_does_not_follow(make_trainer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(max_steps=2, async_rollouts=1, prove_first_batch=True)
    monkeypatch.setattr(trainer.run.step.engine, "sync", lambda policy, version: None)
    with pytest.raises(Exception, match="P006"):
        trainer.train()


# ---- the copy ----


def test_an_adapters_copy_shares_the_frozen_base(make_trainer: Callable) -> None:
    trainer = make_trainer(async_rollouts=1, peft_config=ADAPTER)
    theirs = dict(trainer.model.named_parameters())
    for name, mine in trainer.run.step.engine.model.named_parameters():
        assert (mine is theirs[name]) == ("lora_" not in name)
        assert not mine.requires_grad or mine is theirs[name]


# ---- which round comes next ----


@pytest.mark.parametrize(
    ("plan", "rows", "max_steps"),
    [
        ({"shares": 1, "iterations": 1, "accumulation": 1}, 12, 7),
        ({"shares": 2, "iterations": 2, "accumulation": 1}, 12, 9),
        ({"shares": 1, "iterations": 1, "accumulation": 2}, 12, 5),
        ({"shares": 3, "iterations": 1, "accumulation": 2}, 8, 4),
        ({"shares": 4, "iterations": 1, "accumulation": 4}, 9, 6),
    ],
)
def test_the_rounds_of_a_run_follow_each_other(plan: Mapping[str, int], rows: int, max_steps: int) -> None:
    """As the Trainer walks through them: an epoch's last step takes what is left of it."""
    arithmetic = Plan(prompts_per_round=4, num_generations=4, ranks=1, rank=0, **plan)
    order = PromptOrder([{}] * rows, arithmetic, shuffle=False, seed=0, max_steps=max_steps)
    walked: list[RoundKey] = []
    steps = 0
    for epoch in range(100):
        for first in range(0, order.num_micro_steps, arithmetic.accumulation):
            if steps < max_steps:
                taken = range(first, min(first + arithmetic.accumulation, order.num_micro_steps))
                walked += [arithmetic.micro_step(epoch, index).round for index in taken]
                steps += 1
    rounds = list(dict.fromkeys(walked))
    assert [order.after(key, max_steps) for key in rounds] == [*rounds[1:], None]


# ---- refused ----


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"async_rollouts": -1}, "`async_rollouts` is -1; it must be at least 0"),
        ({"rollout_device": "cuda:1"}, "async_rollouts is 0"),
        ({"async_rollouts": 1, "rollout_device": "cuda:1"}, "on a device that does not train"),
        ({"async_rollouts": 1, "rollout_device": "second"}, "rollout_device: second"),
        ({"async_rollouts": 1, "rollout_engine": "transformers"}, "rollout_engine: transformers has none of its own"),
        ({"async_rollouts": 1, "use_vllm": True}, "vllm_mode: colocate puts vLLM on the trainer's"),
        ({"async_rollouts": 1, "use_vllm": True, "vllm_mode": "server", "top_p": 0.9}, "what top_p, top_k, min_p or"),
        ({"async_rollouts": 1, "generation_kwargs": {"suppress_tokens": [5]}}, "needs the live engine or vLLM"),
    ],
)
def test_what_cannot_work_is_refused(make_trainer: Callable, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        make_trainer(**settings)
    assert error.value.code in ("C033", "C016")
