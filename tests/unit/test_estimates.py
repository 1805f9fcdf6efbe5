"""What a run will take: counted and computed, against what the model and the trainer really have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from podium import GRPOConfig
from podium.models import memory as models_memory
from podium.planning.estimates import duration, memory
from podium.planning.estimates.duration import Measurement, estimate_time
from podium.planning.estimates.memory import estimate_memory
from podium.testing import KINDS, tiny_model

GB = 10**9


def arguments(folder: Path, **settings: Any) -> GRPOConfig:
    given = {
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 8,
        "use_cpu": True,
        "product_precision": "float32",
        "report_to": [],
        **settings,
    }
    return GRPOConfig(str(folder), **given)


def test_steps_are_those_that_the_trainer_takes(make_trainer: Callable[..., Any]) -> None:
    """Three rounds of an epoch, two to a step: the last step has one."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": -1, "num_train_epochs": 2}
    trainer = make_trainer(**settings)
    trainer.train()
    order = trainer.parts.order
    assert trainer.state.global_step == 4
    assert duration.num_steps(trainer.args, order.plan, len(trainer.train_dataset)) == 4


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_loaded_model(tmp_path: Path, kind: str, lora: bool) -> None:
    model: Any = tiny_model(kind)
    peft = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    sizes = memory.model_sizes(model.config, arguments(tmp_path), peft)
    model = get_peft_model(model, peft) if peft else model
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.num_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes.weight_bytes == 4 * sizes.num_parameters


def test_more_of_anything_takes_more(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    base = estimate_memory(config, arguments(tmp_path), prompt_tokens=20)
    longer = estimate_memory(config, arguments(tmp_path, max_completion_length=64), prompt_tokens=20)
    reference = estimate_memory(config, arguments(tmp_path, beta=0.1), prompt_tokens=20)
    plain_sgd = estimate_memory(config, arguments(tmp_path, optim="sgd"), prompt_tokens=20)
    recomputing = estimate_memory(config, arguments(tmp_path, gradient_checkpointing=True), prompt_tokens=20)
    assert longer.peak_bytes > base.peak_bytes
    ahead = estimate_memory(config, arguments(tmp_path, async_rollouts=1), prompt_tokens=20)
    assert ahead.copy_bytes == base.weights_bytes
    assert ahead.peak_bytes - base.peak_bytes == ahead.copy_bytes + min(
        base.sampling_bytes, base.gradients_bytes + base.activations_bytes
    )
    assert reference.reference_bytes == base.weights_bytes
    assert base.reference_bytes == 0
    assert plain_sgd.optimizer_bytes == 0
    assert base.optimizer_bytes == 2 * base.gradients_bytes
    assert recomputing.activations_bytes < base.activations_bytes


def test_packs_are_those_that_a_gpu_s_free_memory_gives(
    tmp_path: Path, as_if_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trainer makes them: on a large GPU a step takes much of it, and the estimate says so."""
    config, found = tiny_model("llama").config, []
    for free in (1 * GB, 8 * GB, 100 * GB):
        monkeypatch.setattr(memory, "available_memory", lambda _, free=free: free)
        found.append(estimate_memory(config, arguments(tmp_path), prompt_tokens=20).tokens_per_pack)
    assert found == sorted(set(found))
    monkeypatch.setattr(models_memory, "free_bytes", lambda _: 100 * GB)
    sizes: Any = {"half": True, "rounded": None, "copies": False}
    assert found[-1] == models_memory.fitting_tokens_per_pack(tiny_model("llama"), config, torch.device("cpu"), **sizes)


def test_what_fits_fits_and_the_next_size_does_not(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    args = arguments(tmp_path, max_completion_length=256)
    available = estimate_memory(config, args, prompt_tokens=100).peak_bytes + 40_000_000
    found = estimate_memory(config, args, prompt_tokens=100, available_bytes=available)
    assert found.fits
    assert found.largest_num_generations
    assert found.largest_num_generations >= 4
    assert dict(found.rows())["largest num_generations"] == f"{found.largest_num_generations:,}"
    none = estimate_memory(config, args, prompt_tokens=100, available_bytes=1)
    assert not none.fits
    assert none.largest_num_generations is None
    assert dict(none.rows())["largest num_generations"] == "none fits"


MEASURED = Measurement(
    num_completions=32,
    prompt_tokens=64,
    completion_tokens=320,
    ended_tokens=7.0,
    generate_seconds=3.2,
    reward_seconds=0.32,
    train_seconds=6.4,
    trained_share=0.5,
    skips_flat=True,
    shares=False,
    optimizer_seconds=0.1,
)


def test_time_of_a_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    estimate = estimate_time(arguments(tmp_path, max_steps=1), MEASURED, num_rows=12, evaluation_completions=40)
    assert estimate.first == estimate.mean, "of one step the first is all there is"
    assert estimate.first.generate == pytest.approx(16 * 0.1)
    assert estimate.first.reward == pytest.approx(16 * 0.01)
    assert estimate.first.train == pytest.approx(16 * 0.5 * 0.2)
    assert estimate.first.total == pytest.approx(1.6 + 0.16 + 1.6 + 0.1)
    assert estimate.completion_tokens == 160
    assert estimate.evaluation_seconds == pytest.approx(40 * 0.1 * (1 + 9 / 12) / 2)
    assert estimate.total_seconds == pytest.approx(3.46 + estimate.evaluation_seconds)


def test_a_long_run_is_as_it_settles(tmp_path: Path) -> None:
    """Completions as long as those that ended, 0.4 of the groups with signal; a share of 3 / 1000 as at first."""
    long = estimate_time(arguments(tmp_path, max_steps=100_000), MEASURED, num_rows=None)
    assert long.mean.generate == pytest.approx(1.6 * 9 / 12, rel=1e-3)
    assert long.mean.train == pytest.approx(16 * 0.4 * 0.2 * 9 / 12, rel=1e-3)
    assert long.mean.optimizer == 0.1
    assert long.most_seconds == pytest.approx(100_000 * 3.46)
    assert long.total_tokens == pytest.approx(100_000 * 16 * 7, rel=1e-3)


def test_what_comes_to_be_alike_costs_nothing(tmp_path: Path) -> None:
    """5.5 tokens of a completion, and six tenths of a short one."""
    args = arguments(tmp_path, max_steps=100_000)
    for ended, computed in ((7.0, 7 - 0.6 * 7), (10.0, 10 - 5.5)):
        measured = dataclasses.replace(MEASURED, shares=True, ended_tokens=ended)
        long = estimate_time(args, measured, num_rows=None)
        assert long.mean.generate == pytest.approx(1.6 * (2 + computed) / 12, rel=1e-3)
        assert long.total_tokens == pytest.approx(100_000 * 16 * ended, rel=1e-3)


def test_what_cannot_shrink_does_not(tmp_path: Path) -> None:
    """No completion ended, few groups had signal, or those without it are trained on as well."""
    args = arguments(tmp_path, max_steps=1000)
    for change, factor in (
        ({"ended_tokens": float("nan"), "trained_share": 0.3}, 0.3),
        ({"ended_tokens": float("nan"), "trained_share": 1.0, "skips_flat": False}, 1.0),
    ):
        estimate = estimate_time(args, dataclasses.replace(MEASURED, **change), num_rows=None)
        assert estimate.mean == estimate.first
        assert estimate.mean.train == pytest.approx(16 * factor * 0.2)
        assert dict(estimate.rows())["in all"] == f"about {duration.clock(estimate.most_seconds)}"


RECORDED = {
    "seed 1": ((11.20, 8.93, 5.39, 13.57, 1.0), 240.0),
    "seed 2": ((11.38, 9.28, 5.21, 13.53, 1.0), 244.0),
    "seed 3": ((10.80, 9.28, 3.45, 9.06 / 0.875, 0.875), 213.0),
}
"""Of runs of the quickstart on one core: the first step (tokens of a completion, of one that ended, seconds to generate
and to train on all groups, share with signal), and seconds of all 45 steps."""


@pytest.mark.parametrize("run", RECORDED)
def test_recorded_runs(tmp_path: Path, run: str) -> None:
    """From their first step alone within a quarter of what they took; without the model half as much again."""
    (tokens, ended, generate, train, signal), seconds = RECORDED[run]
    measured = Measurement(
        num_completions=128,
        prompt_tokens=50 + 16 * 12,
        completion_tokens=round(128 * tokens),
        ended_tokens=ended,
        generate_seconds=generate,
        reward_seconds=0.002,
        train_seconds=train,
        trained_share=signal,
        skips_flat=True,
        shares=True,
        optimizer_seconds=0.3,
    )
    args = arguments(tmp_path, num_generations=8, per_device_train_batch_size=128, max_steps=45)
    estimate = estimate_time(args, measured, num_rows=None)
    assert estimate.total_seconds == pytest.approx(seconds, rel=0.25)
    assert estimate.most_seconds > 1.3 * seconds


def test_reused_rollouts_are_sampled_once_and_trained_on_often(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=10, steps_per_generation=2, num_iterations=3)
    estimate = estimate_time(args, MEASURED, num_rows=None)
    assert estimate.first.generate == pytest.approx(2 * 16 * 0.1 / 6), "a round of 32 serves six steps"
    assert estimate.first.train == pytest.approx(16 * 0.5 * 0.2), "every step trains on 16"


@pytest.mark.parametrize("settings", [{"max_steps": -1, "num_train_epochs": 2}, {"max_steps": 3}], ids=str)
def test_steps_are_the_trainers(make_trainer: Callable, settings: dict[str, Any]) -> None:
    trainer = make_trainer(**settings, learning_rate=0.0)
    estimate = estimate_time(trainer.args, MEASURED, num_rows=len(trainer.train_dataset))
    trainer.train()
    assert estimate.num_steps == trainer.state.max_steps == trainer.state.global_step


def test_a_measurement_leaves_no_trace(make_trainer: Callable) -> None:
    plain, measured = make_trainer(), make_trainer()
    duration.measure(measured)
    plain.train()
    measured.train()
    for one, other in zip(plain.model.parameters(), measured.model.parameters(), strict=True):
        assert one.equal(other)
    logs = [trainer.state.log_history[0] for trainer in (plain, measured)]
    assert logs[0]["reward"] == logs[1]["reward"]
    assert logs[0]["num_tokens"] == logs[1]["num_tokens"]


def test_a_measurement_counts_what_it_did(make_trainer: Callable) -> None:
    trainer = make_trainer()
    measured = duration.measure(trainer)
    assert measured.num_completions == 16
    assert 16 <= measured.completion_tokens <= 16 * 8
    seconds = dataclasses.asdict(measured)
    assert all(seconds[f"{part}_seconds"] > 0 for part in ("generate", "reward", "train", "optimizer"))
