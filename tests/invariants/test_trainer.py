"""What must not change the result of a training step: packs, accumulation, skipping, checkpointing, order of arguments.

SGD with a large rate, so that weights differ as much as gradients do.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

pytestmark = pytest.mark.usefixtures("both_devices_in_float32")

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gspo")


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}


def trained(trainer: Any) -> dict[str, Tensor]:
    """The weights after training, which must have moved."""
    before = weights_of(trainer)
    trainer.train()
    after = weights_of(trainer)
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-3
    return after


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) < tolerance, name


def mostly_flat(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Rewards without spread for prompts of odd sums; some for the others."""
    flat = [(ord(prompt[0]) + ord(prompt[2])) % 2 for prompt in prompts]
    return [1.0 if same else sum(map(ord, text)) / 100 for same, text in zip(flat, completions, strict=True)]


def flat(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("tokens_per_pack", "loss_type"), [*((30, name) for name in LOSSES), (1, "dapo"), (70, "grpo")]
)
def test_the_size_of_packs_does_not_matter(make_trainer: Callable, tokens_per_pack: int, loss_type: str) -> None:
    whole = trained(make_trainer(loss_type=loss_type, max_steps=1))
    cut = trained(make_trainer(loss_type=loss_type, max_steps=1, tokens_per_pack=tokens_per_pack))
    assert_close(whole, cut)


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": name} for name in LOSSES if name != "bnpo"),
        {"beta": 0.1, "scale_rewards": "batch"},
        {"entropy_coef": 0.1, "loss_type": "grpo"},
    ],
    ids=str,
)
def test_accumulation_does_not_matter(make_trainer: Callable, settings: dict[str, Any]) -> None:
    """One micro-step of sixteen completions, or four of four. (`bnpo` divides by the tokens of a micro-step.)"""
    whole = trained(make_trainer(**settings))
    parts = trained(make_trainer(per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings))
    assert_close(whole, parts)


REUSED = {"num_iterations": 2, "steps_per_generation": 2}


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("settings", [{}, pytest.param(REUSED, marks=pytest.mark.slow)], ids=["once", "reused"])
def test_skipping_groups_without_signal_changes_nothing(
    make_trainer: Callable, count_trained_tokens: Callable, loss_type: str, settings: dict[str, Any]
) -> None:
    if settings:
        settings = {**settings, "per_device_train_batch_size": 8, "max_steps": 4, "learning_rate": 0.02}
    skipping = make_trainer(mostly_flat, loss_type=loss_type, **settings)
    assert skipping.run.objective.skips_zero_advantage
    sizes = count_trained_tokens(skipping)
    weights = trained(skipping)
    full = make_trainer(mostly_flat, loss_type=loss_type, **settings)
    full.rollouts.run = dataclasses.replace(
        full.run, objective=dataclasses.replace(full.run.objective, skips_zero_advantage=False)
    )
    full_sizes = count_trained_tokens(full)
    assert_close(weights, trained(full))
    assert 0 < sum(sizes) < 0.8 * sum(full_sizes)
    for one, other in zip(logs(skipping), logs(full), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def logs(trainer: Any) -> list[dict[str, float]]:
    """What a step says of data and loss. Entropy and VESPO's weights are of what was trained on."""
    skipped = ("time", "runtime", "per_second", "resident", "health/logp_gap", "entropy", "vespo", "flos")
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in skipped)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "settings", [{"beta": 0.1}, {"entropy_coef": 0.1}, {"use_adaptive_entropy": True, "entropy_target": 9.0}], ids=str
)
def test_nothing_is_skipped_where_it_would_change_something(
    make_trainer: Callable, count_trained_tokens: Callable, settings: dict[str, Any]
) -> None:
    """Without spread there still is a KL and an entropy."""
    trainer = make_trainer(flat, num_iterations=2, max_steps=2, **settings)
    assert not trainer.run.objective.skips_zero_advantage
    sizes = count_trained_tokens(trainer)
    trainer.train()
    assert sum(sizes) == 2 * sum(entry["completions/mean_length"] * 16 for entry in logs(trainer) if "reward" in entry)


@pytest.mark.cases(1)
def test_a_step_without_signal_is_one_for_the_optimizer(make_trainer: Callable, count_trained_tokens: Callable) -> None:
    """Nothing goes through the model; momentum and weight decay go on, as with gradients of zero."""
    settings = {"optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1, "max_steps": 3}
    skipping = make_trainer(flat, **settings)
    sizes = count_trained_tokens(skipping)
    before = weights_of(skipping)
    skipping.train()
    assert sizes == []
    full = make_trainer(flat, **settings)
    full.rollouts.run = dataclasses.replace(
        full.run, objective=dataclasses.replace(full.run.objective, skips_zero_advantage=False)
    )
    full.train()
    assert_close(weights_of(skipping), weights_of(full), 1e-7)
    assert float((weights_of(skipping)["lm_head.weight"] - before["lm_head.weight"]).abs().max()) > 1e-4
    assert skipping.state.global_step == 3
    assert skipping.state.log_history[0]["loss"] == 0
    assert skipping.state.log_history[0]["frac_reward_zero_std"] == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("path", ["shared", "padded"])
def test_gradient_checkpointing_does_not_matter(make_trainer: Callable, path: str) -> None:
    runs = []
    for checkpointing in (False, True):
        trainer = make_trainer(gradient_checkpointing=checkpointing, beta=0.05)
        forward = dataclasses.replace(trainer.run.policy.forward, path=path)
        trainer.step.policy = dataclasses.replace(trainer.step.policy, forward=forward)
        runs.append(trained(trainer))
        assert trainer.model.is_gradient_checkpointing == checkpointing
    assert_close(*runs)


@pytest.mark.cases(1)
def test_the_padded_path_trains_alike(make_trainer: Callable) -> None:
    shared, padded = make_trainer(beta=0.05), make_trainer(beta=0.05)
    forward = dataclasses.replace(padded.run.policy.forward, path="padded")
    padded.step.policy = dataclasses.replace(padded.step.policy, forward=forward)
    assert_close(trained(shared), trained(padded))


@pytest.mark.cases(1)
def test_the_same_seed_gives_the_same_run_and_another_does_not(make_trainer: Callable) -> None:
    """Nor does the state of the process's own generators matter."""
    first, again = trained(make_trainer()), make_trainer()
    torch.manual_seed(987)
    assert all(torch.equal(first[name], value) for name, value in trained(again).items())
    other = trained(make_trainer(seed=7))
    assert any(not torch.equal(first[name], other[name]) for name in first)
    data = trained(make_trainer(seed=7, data_seed=42))
    assert all(torch.equal(first[name], data[name]) for name in first), "data_seed alone decides what is drawn"


class Gradients(TrainerCallback):
    """Remembers the gradients of every step, without keeping them."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += [weakref.ref(p.grad) for p in kwargs["model"].parameters() if p.grad is not None]


@pytest.mark.cases(1)
def test_no_gradient_outlives_the_training(make_trainer: Callable) -> None:
    """The evaluation behind it, and whatever a script does then, has their memory."""
    trainer, gradients = make_trainer(max_steps=2), Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    assert gradients.seen
    assert not [tensor for each in gradients.seen if (tensor := each()) is not None]
