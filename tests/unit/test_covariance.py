"""Clip-Cov and KL-Cov against the paper's sums in plain Python, in value and in gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from podium import GRPOConfig, GRPOTrainer
from podium.algorithm.covariance import BOUNDS, KL_COEF, clip_cov, covariances, kl_cov
from podium.algorithm.losses import LossInputs, LossSettings, policy_loss
from podium.errors import ConfigError
from podium.records import Sample
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer import samples

ADVANTAGES = [2.0, 2.0, -1.0, -1.0, 0.5, 3.0]
LOGPS = [-0.1, -4.0, -0.2, -3.0, -0.5, -0.1]
ROWS = [{"prompt": f"{n}+1="} for n in range(8)]


def by_hand() -> list[float]:
    a, p = sum(ADVANTAGES) / 6, sum(LOGPS) / 6
    return [(x - a) * (y - p) for x, y in zip(ADVANTAGES, LOGPS, strict=True)]


def test_the_covariance_of_a_token() -> None:
    found = covariances(np.array(ADVANTAGES), np.array(LOGPS))
    np.testing.assert_allclose(found, by_hand(), rtol=1e-12)
    assert found.mean() == pytest.approx(np.cov(ADVANTAGES, LOGPS, bias=True)[0, 1])
    assert len(covariances(np.array([]), np.array([]))) == 0


def test_clip_cov_draws_within_its_bounds() -> None:
    cov = covariances(np.array(ADVANTAGES), np.array(LOGPS))
    within = {i for i, value in enumerate(by_hand()) if BOUNDS[0] < value < BOUNDS[1]}
    assert len(within) == 3
    seen = set()
    for seed in range(30):
        [token] = np.flatnonzero(clip_cov(cov, 2e-4, np.random.default_rng(seed)))
        seen.add(int(token))
    assert seen == within
    assert set(np.flatnonzero(clip_cov(cov, 0.9, np.random.default_rng(0)))) == within
    assert not clip_cov(np.zeros(5), 0.5, np.random.default_rng(0)).any(), "none is within the bounds"


def test_kl_cov_takes_the_highest() -> None:
    cov = covariances(np.array(ADVANTAGES), np.array(LOGPS))
    assert np.flatnonzero(kl_cov(cov, 2e-4)).tolist() == [int(np.argmax(by_hand()))]
    assert np.flatnonzero(kl_cov(cov, 0.5)).tolist() == sorted(np.argsort(by_hand())[-3:].tolist())


def test_the_penalty_is_that_of_the_distance_to_the_sampler() -> None:
    """Value and gradient against the sum written down."""
    old = torch.tensor(LOGPS)
    logps = (old + torch.tensor([0.1, -0.2, 0.05, 0.0, 0.3, -0.1])).requires_grad_()
    penalties = torch.tensor([0.0, KL_COEF, 0.0, 0.0, KL_COEF, 0.0])
    rollout = torch.tensor([0, 0, 1, 1, 2, 2])
    same: dict[str, Any] = {
        "entropy_N": torch.zeros(6),
        "advantages_R": torch.tensor([2.0, -1.0, 0.5]),
        "rollout_N": rollout,
        "num_rollouts": 3,
        "num_tokens": 6,
        "old_logps_N": old,
    }
    settings = LossSettings(loss_type="dapo")
    with_it = policy_loss(LossInputs(logps_N=logps, token_penalties_N=penalties, **same), settings).loss
    [gradient] = torch.autograd.grad(with_it, logps)
    again = logps.detach().requires_grad_()
    without = policy_loss(LossInputs(logps_N=again, **same), settings).loss
    [plain] = torch.autograd.grad(without, again)
    assert float((with_it - without).detach()) == pytest.approx((0.2 + 0.3) / 6, abs=1e-6)
    torch.testing.assert_close(gradient - plain, torch.tensor([0, -1, 0, 0, 1, 0]) / 6)


def spread(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def run(folder: Path, **settings: Any) -> GRPOTrainer:
    args = GRPOConfig(
        str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        product_precision="float32",
        **settings,
    )
    return GRPOTrainer(tiny_model(), spread, args, ROWS, processing_class=tiny_tokenizer())


@pytest.mark.cases(1)
@pytest.mark.parametrize(("control", "per_round"), [("clip", 1), ("kl", 2)])
def test_a_run_chooses_tokens_of_the_whole_round(
    control: str, per_round: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    original = samples.controlled

    def watched(sample: Sample, chosen_A: np.ndarray, control: str) -> Sample:
        found = original(sample, chosen_A, control)
        seen.append((sample, chosen_A, found))
        return found

    monkeypatch.setattr(samples, "controlled", watched)
    trainer = run(tmp_path, covariance_control=control, covariance_share=0.1, steps_per_generation=per_round)
    trainer.train()
    first_round = seen[: 8 * per_round]
    advantages = np.concatenate([sample.advantages_A for sample, *_ in first_round])
    logps = np.concatenate([sample.sampled_logps_A for sample, *_ in first_round])
    cov = (advantages - advantages.mean()) * (logps - logps.mean())
    chosen = np.concatenate([chosen_A for _, chosen_A, _ in first_round])
    assert chosen.any()
    if control == "kl":
        assert chosen.sum() == int(0.1 * len(cov))
        assert cov[chosen].min() >= cov[~chosen].max() - 1e-6
        penalties = np.concatenate([found.penalties_A for *_, found in first_round])
        assert (penalties == chosen).all()
    else:
        assert ((cov[chosen] > 1) & (cov[chosen] < 5)).all()
        assert not np.concatenate([found.advantages_A for *_, found in first_round])[chosen].any()
    assert trainer.state.global_step == 2


def test_kl_cov_on_policy_changes_nothing_and_is_refused() -> None:
    with pytest.raises(ConfigError, match="before the policy has moved: it changes nothing") as raised:
        GRPOConfig("out", covariance_control="kl")
    assert raised.value.code == "C062"
    GRPOConfig("out", covariance_control="kl", num_iterations=2)
    with pytest.raises(ConfigError, match="before the policy has moved"):
        GRPOConfig("out", covariance_control="kl", async_rollouts=1)
