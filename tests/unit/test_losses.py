"""Losses by hand, and what parity with TRL cannot show: packing, extremes, what may be left out."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
import trl

from podium.algorithm import losses
from podium.algorithm.losses import (
    OBJECTIVES,
    EntropyControl,
    LossInputs,
    LossSettings,
    LossSums,
    close_to_sampler,
    keep_high_entropy,
    no_sums,
    policy_loss,
    reduce_sums,
    skips_zero_advantage,
    with_skipped,
)
from podium.algorithm.metrics import loss_metrics

LEVELS = ("token", "sequence")


def pack(rollouts: list[tuple[float, list[float]]], **changes) -> LossInputs:
    """Rollouts as (advantage, ratio of each token); every token has log-probability -1 and entropy 2."""
    ratios = torch.tensor([ratio for _, tokens in rollouts for ratio in tokens])
    lengths = torch.tensor([len(tokens) for _, tokens in rollouts], dtype=torch.long)
    logps_N = torch.full_like(ratios, -1.0).requires_grad_()
    fields = {
        "logps_N": logps_N,
        "entropy_N": torch.full_like(ratios, 2.0).requires_grad_(),
        "old_logps_N": logps_N.detach() - ratios.log(),
        "advantages_R": torch.tensor([advantage for advantage, _ in rollouts]),
        "rollout_N": torch.repeat_interleave(lengths),
        "num_rollouts": float(len(rollouts)),
        "num_tokens": float(len(ratios)),
        **changes,
    }
    return LossInputs(**fields)


def loss_of(x: LossInputs, **settings) -> float:
    return policy_loss(x, LossSettings(**settings)).loss.item()


ROLLOUTS = [(2.0, [1.0, 1.5, 0.5]), (-1.0, [0.5, 3.0])]
CLIPPED = [-2.0, -2.4, -1.0, 0.8, 3.0]
"""-min(ratio * A, clamp(ratio, 0.8, 1.2) * A) of those five tokens, by hand."""


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", (-5.4 / 3 + 3.8 / 2) / 2),
        ("dapo", sum(CLIPPED) / 5),
        ("bnpo", sum(CLIPPED) / 5),
        ("dr_grpo", sum(CLIPPED) / (2 * 10)),
        ("luspo", sum(CLIPPED) / 2),
        # -min(ratio, 1.2) * A * logp, logp = -1
        ("cispo", (2 * (1 + 1.2 + 0.5) - (0.5 + 1.2)) / 5),
    ],
)
def test_losses_by_hand(loss_type: str, expected: float) -> None:
    epsilon_high = 1.2 if loss_type == "cispo" else 0.2
    x = pack(ROLLOUTS)
    assert loss_of(x, loss_type=loss_type, epsilon_high=epsilon_high, max_completion_length=10) == pytest.approx(
        expected
    )


def test_delta_bounds_the_open_side_by_hand() -> None:
    assert loss_of(pack(ROLLOUTS), delta=2.0) == pytest.approx((sum(CLIPPED) - 1.0) / 5)


def test_gmpo_is_a_geometric_mean_of_ratios_clipped_in_the_direction_of_the_advantage() -> None:
    """By TRL's words in plain numbers: the log of a ratio is bounded from above where A > 0, from below elsewhere."""
    settings = {"loss_type": "gmpo", "epsilon_low": 0.3, "epsilon_high": 0.2}
    first = math.exp((0.0 + min(math.log(1.5), 0.2) + math.log(0.5)) / 3)
    second = math.exp((max(math.log(0.5), -0.3) + math.log(3.0)) / 2)
    assert loss_of(pack(ROLLOUTS), **settings) == pytest.approx((-2 * first + second) / 2)
    x = pack(ROLLOUTS)
    (grad,) = torch.autograd.grad(policy_loss(x, LossSettings(**settings)).loss, x.logps_N)
    # d exp(mean of logs) = the mean itself, over the length, for tokens that are not clipped
    torch.testing.assert_close(grad, torch.tensor([-2 * first / 3, 0, -2 * first / 3, 0, second / 2]) / 2)
    sums = policy_loss(pack(ROLLOUTS), LossSettings(**settings)).sums
    assert (sums.low_clipped.item(), sums.high_clipped.item()) == (1, 1)


def test_dppo_drops_tokens_that_have_moved_far_enough() -> None:
    """Probabilities under the policy are all e^-1 = 0.368; before they were 0.368 / ratio."""
    p = math.exp(-1)
    x = pack([(2.0, [1.0, 1.5, 3.0, 50.0]), (-1.0, [0.5, 3.0])])
    settings = LossSettings(loss_type="dppo")
    # moved: 0, +0.12, +0.25 (dropped), +0.36 (dropped); -0.37 (dropped), +0.25 (with the advantage's sign: kept)
    assert [p - p / r for r in (1.5, 3.0, 0.5)] == pytest.approx([0.123, 0.245, -0.368], abs=1e-3)
    (grad,) = torch.autograd.grad(policy_loss(x, settings).loss, x.logps_N)
    torch.testing.assert_close(grad, torch.tensor([-2.0 * 1.0, -2.0 * 1.5, 0, 0, 0, 3.0]) / 6)
    assert policy_loss(x, settings).loss.item() == pytest.approx((2 * (1 + 1.5) - 3.0) / 6)
    sums = policy_loss(x, settings).sums
    assert (sums.low_clipped.item(), sums.high_clipped.item()) == (1, 2)
    rare = dataclasses.replace(pack([(2.0, [50.0])]), logps_N=torch.tensor([-9.0]), old_logps_N=torch.tensor([-13.0]))
    assert policy_loss(rare, settings).loss.item() == pytest.approx(2 * 20 * 9), "a ratio of 55, capped"


def test_delta_is_the_dual_clip() -> None:
    """For negative advantages max(clipped loss, ...) stops at c A (arXiv:1912.09729, equation 5)."""
    for ratio, c in ((2.0, 3.0), (4.0, 3.0), (0.5, 3.0)):
        clipped = min(-ratio, -min(max(ratio, 0.8), 1.2))
        assert loss_of(pack([(-1.0, [ratio])]), delta=c) == pytest.approx(-max(clipped, -c))


def test_gspo_is_one_ratio_per_rollout_by_hand() -> None:
    """Geometric means: (1.0 * 1.5 * 0.5)^(1/3) = 0.909 is within the bounds, (0.5 * 3)^(1/2) = 1.225 has A < 0."""
    expected = (-2 * 0.75 ** (1 / 3) + 1.5**0.5) / 2
    assert loss_of(pack(ROLLOUTS), loss_type="gspo") == pytest.approx(expected)
    assert loss_of(pack(ROLLOUTS), loss_type="grpo", level="sequence") == pytest.approx(expected)


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    """The ratio is 1 but not a constant: forgetting its gradient would leave nothing to learn from."""
    x = pack([(2.0, [1.0, 1.0]), (-1.0, [1.0])], old_logps_N=None)
    (grad,) = torch.autograd.grad(policy_loss(x, LossSettings()).loss, x.logps_N)
    torch.testing.assert_close(grad, torch.tensor([-2.0, -2.0, 1.0]) / 3)


def test_kl_is_added_where_the_policy_term_is_masked() -> None:
    """k3 of log r = 1 is e - 2; the masks of the policy term do not reach it."""
    x = pack([(1.0, [1.0, 1.0])], ref_logps_N=torch.zeros(2), keep_N=torch.zeros(2, dtype=torch.bool))
    assert loss_of(x, beta=0.5) == pytest.approx(0.5 * (math.e - 2))


def test_kl_takes_the_ratio_as_a_factor_with_its_gradient() -> None:
    x = pack([(0.0, [2.0])], ref_logps_N=torch.zeros(1))
    for corrected, value, slope in (
        (True, 2 * (math.e - 2), 2 * (math.e - 2) + 2 * (1 - math.e)),
        (False, math.e - 2, 1 - math.e),
    ):
        loss = policy_loss(x, LossSettings(beta=1.0, use_bias_correction_kl=corrected)).loss
        (grad,) = torch.autograd.grad(loss, x.logps_N)
        assert (loss.item(), grad.item()) == pytest.approx((value, slope))


def test_entropy_bonus_has_its_own_divisor() -> None:
    """Mean entropy over the kept tokens, whatever the loss divides by."""
    keep_N = torch.tensor([True, True, False, False, False])
    for loss_type in OBJECTIVES:
        x = pack(ROLLOUTS, keep_N=keep_N, num_entropy_tokens=2.0)
        settings = LossSettings(loss_type=loss_type)
        with_bonus, without = policy_loss(x, settings, 0.1), policy_loss(x, settings)
        assert (without.loss - with_bonus.loss).item() == pytest.approx(0.1 * 2.0, rel=1e-4)
        assert with_bonus.sums.policy_loss.item() == without.loss.item()
        (grad,) = torch.autograd.grad(with_bonus.loss, x.entropy_N)
        torch.testing.assert_close(grad, torch.tensor([-0.05, -0.05, 0, 0, 0]))


def test_a_step_of_one_token() -> None:
    """Divisors stop at 1, not above."""
    for loss_type in OBJECTIVES:
        x = pack([(1.0, [1.0])], old_logps_N=None)
        settings = LossSettings(loss_type=loss_type, max_completion_length=1, epsilon_high=5.0)
        loss = policy_loss(x, settings, 0.1).loss
        grad, grad_entropy = torch.autograd.grad(loss, (x.logps_N, x.entropy_N))
        assert (grad.item(), grad_entropy.item()) == pytest.approx((-1.0, -0.1)), loss_type


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_packs_add_up(loss_type: str, level: str) -> None:
    """However a step is cut into packs, the loss, the gradients and the metrics are the same."""
    rollouts = [*ROLLOUTS, (0.5, [1.3, 0.9, 0.7]), (-0.2, []), (-0.7, [0.6])]
    settings = LossSettings(loss_type=loss_type, level=level, beta=0.1, off_policy_mask_threshold=0.3)

    def step(cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        outputs, grads = [], []
        for start, end in zip([0, *cuts], [*cuts, len(rollouts)], strict=True):
            x = pack(rollouts[start:end], num_rollouts=5.0, num_tokens=9.0)
            x = dataclasses.replace(x, ref_logps_N=x.logps_N.detach() - 0.5)
            outputs.append(policy_loss(x, settings, 0.1))
            grads.append(torch.autograd.grad(outputs[-1].loss, x.logps_N)[0])
        sums = reduce_sums(torch.stack([no_sums().stack(), *(output.sums.stack() for output in outputs)]))
        return sum(o.loss for o in outputs), torch.cat(grads), loss_metrics(sums, settings, has_entropy_bonus=True)

    loss, grads, metrics = step([])
    for cuts in ([1], [2, 3], [1, 2, 3, 4]):
        other_loss, other_grads, other_metrics = step(cuts)
        torch.testing.assert_close(other_loss, loss)
        torch.testing.assert_close(other_grads, grads)
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_extreme_ratios_give_no_nan(loss_type: str, level: str) -> None:
    """A ratio beyond float32 must not make a NaN of a gradient that the clip, a mask or a zero advantage removes."""
    for advantage in (1.0, 0.0):
        x = pack([(advantage, [1.0, 1.0]), (-1.0, [1.0])])
        x = dataclasses.replace(x, old_logps_N=torch.tensor([-500.0, -200.0, -1.0]), ref_logps_N=torch.full((3,), -1.0))
        for settings in ({}, {"delta": 2.0}):
            loss = policy_loss(x, LossSettings(loss_type=loss_type, level=level, **settings)).loss
            (grad,) = torch.autograd.grad(loss, x.logps_N)
            assert grad.isfinite().all(), (advantage, settings)
            assert loss.isfinite(), (advantage, settings)


@pytest.mark.cases(11)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_no_difference_of_log_probabilities_gives_an_infinite_gradient(loss_type: str, level: str, beta: float) -> None:
    """Up to the largest exponents in float32 (88.7) and beyond, in ratio, reference, sampler, and their products."""
    nats = torch.tensor([-1e4, -700.0, -88.0, -50.0, 0.0, 20.0, 50.0, 87.0, 88.0, 88.5, 88.7, 89.0, 700.0, 1e4])
    ratios, references = (x.flatten() for x in torch.meshgrid(nats, nats, indexing="ij"))
    samplers = ratios.roll(5)
    for advantage in (-10.0, -1.0, 0.5, 10.0):
        for correction in (None, *losses.CORRECTIONS.values()):
            logps = torch.full_like(ratios, -2.0).requires_grad_()
            x = LossInputs(
                logps_N=logps,
                entropy_N=torch.ones_like(ratios),
                advantages_R=torch.full_like(ratios, advantage),
                rollout_N=torch.arange(len(ratios)),
                num_rollouts=float(len(ratios)),
                num_tokens=float(len(ratios)),
                old_logps_N=-2.0 - ratios,
                ref_logps_N=-2.0 + references,
                sampled_logps_N=-2.0 + samplers,
            )
            settings = LossSettings(loss_type=loss_type, level=level, beta=beta, correction=correction)
            policy_loss(x, settings).loss.backward()
            assert logps.grad is not None
            assert logps.grad.isfinite().all()


def test_extreme_ratios_under_a_mask_give_no_nan() -> None:
    x = pack([(-1.0, [1.0, 1.0]), (-1.0, [1.0])])
    x = dataclasses.replace(x, old_logps_N=torch.tensor([-500.0, -1.0, -1.0]), sampled_logps_N=torch.zeros(3))
    x = dataclasses.replace(x, advantages_R=torch.tensor([-2.0, -1.0]))
    loss = policy_loss(x, LossSettings(off_policy_mask_threshold=0.5)).loss
    (grad,) = torch.autograd.grad(loss, x.logps_N)
    assert loss.item() == 0
    assert torch.equal(grad, torch.zeros(3))


def test_no_finite_ratio_is_changed_by_the_cap() -> None:
    log_ratio = torch.tensor([-200.0, -1.0, 0.0, 50.0, 88.0, 88.7228])
    x = pack([(1.0, [1.0] * 6)])
    x = dataclasses.replace(x, old_logps_N=x.logps_N.detach() - log_ratio)
    exact = (x.logps_N.detach() - x.old_logps_N).exp()
    assert exact.isfinite().all()
    assert torch.equal(losses.ratio(x, LossSettings()), exact)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_a_pack_without_tokens_is_nothing(loss_type: str, level: str) -> None:
    """A rank whose groups are all without signal still takes part: loss 0 with a gradient, no metrics, no error."""
    x = pack([])
    settings = LossSettings(loss_type=loss_type, level=level)
    output = policy_loss(x, settings)
    output.loss.backward()
    assert output.loss.item() == 0
    assert torch.equal(output.sums.stack(), no_sums().stack())
    assert all(math.isnan(value) for value in loss_metrics(output.sums, settings).values())


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "cispo"])
def test_a_ratio_at_the_bound_is_not_clipped(loss_type: str) -> None:
    """Bounds that leave no room, and a ratio of exactly 1."""
    epsilon_high = 1.0 if loss_type == "cispo" else 0.0
    settings = LossSettings(loss_type=loss_type, epsilon_low=0.0, epsilon_high=epsilon_high)
    sums = policy_loss(pack([(1.0, [1.0]), (-1.0, [1.0])], old_logps_N=None), settings).sums
    assert {loss_metrics(sums, settings)[name] for name in OBJECTIVES[loss_type].metrics} == {0.0}


def test_a_rollout_without_tokens_has_no_share_of_clipped_tokens() -> None:
    """It may have a ratio as a rollout, though, as in TRL: 1."""
    for level, low_min in (("token", 1.0), ("sequence", 0.0)):
        settings = LossSettings(level=level)
        sums = policy_loss(pack([(-1.0, [0.5]), (-1.0, [])]), settings).sums
        assert loss_metrics(sums, settings)["clip_ratio/low_min"] == low_min


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", [name for name in OBJECTIVES if name != "vespo"])
def test_skipped_rollouts_count_in_the_clip_ratios(loss_type: str, level: str) -> None:
    """Leaving rollouts of zero advantage out and counting them gives the clip ratios of keeping them."""
    settings = LossSettings(loss_type=loss_type, level=level, epsilon_high=1.1 if loss_type == "cispo" else 0.2)
    names = OBJECTIVES[loss_type].metrics
    for signal in ([], [(2.0, [1.5, 1.5, 0.5])], [(2.0, [1.5, 1.5, 0.5]), (-1.0, [0.5, 0.5])]):
        rollouts = [*signal, (0.0, [2.0, 0.1])]
        tokens = sum(len(ratios) for _, ratios in rollouts)
        whole = policy_loss(pack(rollouts), settings).sums
        trained = policy_loss(pack(signal), settings).sums
        counted = with_skipped(trained, settings, num_tokens=tokens, num_rollouts=len(rollouts))
        expected, got = loss_metrics(whole, settings), loss_metrics(counted, settings)
        assert [got[name] for name in names] == pytest.approx([expected[name] for name in names])
        unchanged = with_skipped(whole, settings, num_tokens=tokens, num_rollouts=len(rollouts))
        assert torch.equal(unchanged.stack(), whole.stack())


def test_zero_advantages_are_only_skipped_where_nothing_else_needs_them() -> None:
    idle = {"entropy_coef_possible": False, "top_entropy_quantile": 1.0, "moe": False}
    assert skips_zero_advantage(LossSettings(), **idle)
    assert not skips_zero_advantage(LossSettings(beta=0.01), **idle)
    for needs in ({"entropy_coef_possible": True}, {"top_entropy_quantile": 0.9}, {"moe": True}):
        assert not skips_zero_advantage(LossSettings(), **{**idle, **needs})


def test_high_entropy_tokens() -> None:
    entropy = torch.tensor([0.1, 3.0, 0.5, 2.0, 1.0])
    assert keep_high_entropy(entropy, 0.4).tolist() == [False, True, False, True, False]
    assert keep_high_entropy(entropy, 0.0).tolist() == [False, True, False, False, False]
    assert keep_high_entropy(entropy, 1.0).all()
    everywhere = torch.cat([entropy, torch.full((5,), 2.5)])
    assert keep_high_entropy(entropy, 0.4, everywhere).tolist() == [False, True, False, False, False]
    assert keep_high_entropy(torch.empty(0), 0.4).tolist() == []


def test_off_policy_mask_spares_positive_advantages() -> None:
    """Drifts of 10, 0.6, 0.5 and 0.4 nats a token against a threshold of 0.5, which itself is close enough."""
    rollouts = [(1.0, [1.0]), (-1.0, [1.0]), (-1.0, [1.0]), (-1.0, [1.0])]
    x = pack(rollouts, sampled_logps_N=torch.tensor([9.0, -0.4, -0.5, -0.6]))
    assert close_to_sampler(x, 0.5).tolist() == [True, False, True, True]


def test_entropy_control() -> None:
    control = EntropyControl(coef=0.1, target=1.0, step=0.06, coef_min=0.0, coef_max=0.2)
    assert control.applied == 0.0, "no bonus before anything is measured"
    low = control.after(0.5)
    assert (low.coef, low.applied) == pytest.approx((0.16, 0.16))
    at_target = low.after(1.0)
    assert (at_target.coef, at_target.applied) == pytest.approx((0.2, 0.2)), "there it still rises, to the maximum"
    high = low.after(1.5)
    assert (high.coef, high.applied) == pytest.approx((0.1, 0.0))
    assert high.after(2).after(2).coef == 0.0


def test_defaults_are_trls() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    renamed = {"level": "importance_sampling_level", "epsilon_low": "epsilon"}
    for field in dataclasses.fields(LossSettings):
        if field.name not in ("epsilon_high", "correction", "observation_coef"):  # None in TRL, meaning epsilon; ours
            assert field.default == theirs[renamed.get(field.name, field.name)], field.name


def test_every_surrogate_and_reduction_cites_its_paper() -> None:
    for objective in OBJECTIVES.values():
        for function in (objective.surrogate, objective.reduction):
            assert re.search(r"arXiv:\d{4}\.\d{5}", function.__doc__ or ""), function.__name__


def test_sums_survive_stacking() -> None:
    sums = policy_loss(pack(ROLLOUTS), LossSettings()).sums
    again = reduce_sums(sums.stack()[None])
    for field in dataclasses.fields(LossSums):
        assert getattr(again, field.name).item() == getattr(sums, field.name).item()
        assert not getattr(sums, field.name).requires_grad
