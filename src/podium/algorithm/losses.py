"""Policy losses of the GRPO family, over packed rollouts.

Eleven published losses are six per-token surrogates crossed with four reductions. `OBJECTIVES` is that table; adding a
loss is adding a row. The terms that any of them can carry (masks, KL to a reference, entropy bonus) are added around
it, in TRL's order, by `policy_loss`. Nothing here knows about padding, devices, ranks, logging or the trainer.

Shape letters: N = trained tokens in this pack, M = given tokens that are to be predicted, R = rollouts in this pack,
X = anything that is summed over.

Counts (`num_rollouts`, `num_tokens`) span the whole optimizer step over all ranks, so the losses of all packs *add up*
to the loss of the step, however it was cut into packs. A rollout is never split between two packs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from podium.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:  # the names of the losses are looked up where nothing is computed
    torch = LazyModule("torch")

Level: TypeAlias = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a loss."""

    logps_N: Tensor
    """log pi(token) under the weights being trained; carries the gradient."""
    entropy_N: Tensor
    """Entropy of the whole next-token distribution in nats; needs a gradient only for the entropy bonus."""
    advantages_R: Tensor
    rollout_N: Tensor
    """int64: which of the R rollouts each token belongs to."""
    num_rollouts: float
    """Rollouts of the optimizer step, over all packs and ranks; also those without a loss token or left out."""
    num_tokens: float
    """Loss tokens of the step; for `bnpo` tokens of the micro-batch x accumulation x ranks, as TRL has it."""
    token_advantages_N: Tensor | None = None
    """Advantages of tokens, where turns have their own; None: those of their rollouts. Terms per rollout (`vespo`, the
    off-policy mask) take `advantages_R`."""
    token_penalties_N: Tensor | None = None
    """Weights of |log(pi / pi_old)| (KL-Cov, `algorithm.covariance`); None: 0."""
    old_logps_N: Tensor | None = None
    """log pi_old(token), under the weights that sampled; None: the weights have not moved since, the ratio is 1."""
    ref_logps_N: Tensor | None = None
    """log pi_ref(token); needed when `beta` is not 0."""
    sampled_logps_N: Tensor | None = None
    """log pi(token) as the engine recorded it, for the off-policy mask; None: `old_logps_N`. NaN says nothing."""
    keep_N: Tensor | None = None
    """bool: tokens whose policy gradient counts (`keep_high_entropy`); None: all."""
    num_entropy_tokens: float | None = None
    """Divisor of the entropy bonus: kept tokens of the step over all ranks (TRL: of the micro-batch over all ranks x
    accumulation). None, which only works without `keep_N`: `num_tokens`."""
    observed_logps_M: Tensor | None = None
    """log pi(token) of the tokens that tools or an environment gave; carries the gradient. None: there are none."""
    num_observed: float = 0.0
    """Those tokens of the step, over all packs and ranks."""

    @property
    def advantages_N(self) -> Tensor:
        return self.advantages_R[self.rollout_N] if self.token_advantages_N is None else self.token_advantages_N

    @property
    def lengths_R(self) -> Tensor:
        """Loss tokens of each rollout, as float, 0 included."""
        return self.sum_per_rollout(torch.ones_like(self.logps_N))

    @property
    def log_ratio_N(self) -> Tensor:
        """log(pi / pi_old); on policy it is 0 and still has a gradient."""
        return self.logps_N - (self.logps_N.detach() if self.old_logps_N is None else self.old_logps_N)

    def sum_per_rollout(self, x_N: Tensor) -> Tensor:
        """[N] -> [R]."""
        return x_N.new_zeros(len(self.advantages_R)).index_add(0, self.rollout_N, x_N)

    def mean_per_rollout(self, x_N: Tensor) -> Tensor:
        """[N] -> [R]; 0 for a rollout without tokens."""
        return self.sum_per_rollout(x_N) / self.lengths_R.clamp(min=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weighs tokens by how likely training finds them against how likely the sampler did: w = pi_old / pi_sampler.

    Truncated importance sampling ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al.
    2025) bounds w; masked importance sampling drops what is out of bounds. As TRL has it. Where a filter such as
    `top_p` was drawn through, pi_sampler is the filtered distribution, so w is smaller by what the filter left out.
    """

    per_rollout: bool
    """One w for a whole rollout, the product over its tokens."""
    masks: bool
    """Out of bounds w is 0, not the bound."""
    low: float | None = None
    high: float | None = 3.0


CORRECTIONS: Mapping[str, Correction] = {
    "token_truncate": Correction(per_rollout=False, masks=False),
    "token_mask": Correction(per_rollout=False, masks=True),
    "sequence_truncate": Correction(per_rollout=True, masks=False),
    "sequence_mask": Correction(per_rollout=True, masks=True),
}
"""TRL's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss's settings; names and defaults are TRL's."""

    loss_type: str = "dapo"
    """A key of `OBJECTIVES`."""
    level: Level = "token"
    """Importance ratio per token or one per rollout; a row of `OBJECTIVES` may fix it."""
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    """For `cispo` the cap of the ratio itself, for the clipped losses its distance from 1."""
    delta: float | None = None
    """Upper bound on the unclipped side of the clipped losses."""
    beta: float = 0.0
    """Weight of the KL to the reference policy."""
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512
    """The constant divisor of `dr_grpo`."""
    off_policy_mask_threshold: float | None = None
    correction: Correction | None = None
    """For a sampler that computes otherwise than training; None: none."""
    observation_coef: float = 0.0
    """Weight of the cross-entropy of given tokens."""

    @property
    def one_ratio_per_rollout(self) -> bool:
        return (OBJECTIVES[self.loss_type].level or self.level) == "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over one pack for the metrics, as detached 0-d tensors. Packs and ranks combine by `reduce_sums`."""

    policy_loss: Tensor
    """This pack's share of the loss, before the entropy bonus and the cross-entropy of given tokens."""
    tokens: Tensor
    """Count for `entropy` and `kl`."""
    entropy: Tensor
    kl: Tensor
    """0 when beta is 0."""
    observed: Tensor
    """Count for `observed_nats`: given tokens that are to be predicted."""
    observed_nats: Tensor
    """-log pi of them."""
    kept_tokens: Tensor
    """Count for `kept_entropy`: tokens that pass `keep_N`."""
    kept_entropy: Tensor
    ratios: Tensor
    """Count for the four below: tokens, or rollouts where a ratio belongs to a rollout."""
    low_clipped: Tensor
    high_clipped: Tensor
    cap_clipped: Tensor
    """cispo."""
    phi: Tensor
    """vespo."""
    low_min: Tensor
    """Smallest share of low-clipped ratios in one rollout; +inf when there was no rollout."""
    high_max: Tensor
    """Largest share of high-clipped ratios in one rollout; -inf when there was no rollout."""
    gap_tokens: Tensor
    """Count for `gap`: tokens whose log-probability the sampler gave. Without `correction` nothing from here on is."""
    gap: Tensor
    """|log pi_old - log pi_sampler|."""
    gap_max: Tensor
    weights: Tensor
    """Count for `weight`: tokens, or rollouts with a token where a weight belongs to a rollout."""
    weight: Tensor
    """The correction's w, bounded."""
    weight_min: Tensor
    weight_max: Tensor

    def stack(self) -> Tensor:
        """All fields as one [fields] tensor, so that ranks can be gathered in one call."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A pack's share of the step's loss, and what was seen while computing it."""

    loss: Tensor
    """[]; call backward on it."""
    sums: LossSums


def policy_loss(x: LossInputs, s: LossSettings, entropy_coef: float = 0.0) -> LossOutput:
    """This pack's share of the step's loss.

    The masks silence the policy term alone: the KL term and (but for `keep_N`) the entropy bonus see every token.
    `entropy_coef` is the weight of that bonus in this step; an argument because it may adapt (`EntropyControl`).
    """
    objective = OBJECTIVES[s.loss_type]
    ratio_N = ratio(x, s)
    loss_N = objective.surrogate(ratio_N, x, s)
    kept_N = x.keep_N
    if s.off_policy_mask_threshold is not None:
        on_policy_N = close_to_sampler(x, s.off_policy_mask_threshold)[x.rollout_N]
        kept_N = on_policy_N if kept_N is None else on_policy_N & kept_N
    if kept_N is not None:
        loss_N = torch.where(kept_N, loss_N, 0.0)  # not a product: a silenced token may be infinite
    if s.correction is not None and objective.surrogate is not gamma_weight:
        loss_N = loss_N * sampler_weight(x, s.correction)
    if x.token_penalties_N is not None:
        loss_N = loss_N + x.token_penalties_N * x.log_ratio_N.abs()
    kl_N = kl_to_reference(ratio_N, x, s) if s.beta else None
    if kl_N is not None:
        loss_N = loss_N + s.beta * kl_N
    policy = objective.reduction(loss_N, x, s)
    loss = policy - entropy_coef * mean_entropy(x) if entropy_coef else policy
    if s.observation_coef and x.observed_logps_M is not None:
        loss = loss + s.observation_coef * observation_cross_entropy(x)
    with torch.no_grad():
        return LossOutput(loss=loss, sums=_sums(policy, ratio_N, kl_N, x, s))


def skips_zero_advantage(
    s: LossSettings, *, entropy_coef_possible: bool, top_entropy_quantile: float, moe: bool
) -> bool:
    """Whether rollouts with advantage exactly 0 can be left out without changing the gradient.

    Every surrogate is the advantage times something finite, so only terms that do not carry the advantage need such
    rollouts: the KL, the entropy bonus, the entropy quantile (which is taken over their tokens too), the cross-entropy
    of given tokens and the router loss of a mixture of experts. They must still be counted in `num_rollouts` and
    `num_tokens`.
    """
    return s.beta == s.observation_coef == 0 and not entropy_coef_possible and top_entropy_quantile >= 1 and not moe


# ---- ratio, masks, KL, entropy ----


def ratio(x: LossInputs, s: LossSettings) -> Tensor:
    """pi / pi_old [N] of each token, or the length-normalised ratio of its rollout (GSPO, arXiv:2507.18071, eq. 7)."""
    log_ratio_N = x.log_ratio_N
    if s.one_ratio_per_rollout:
        log_ratio_N = x.mean_per_rollout(log_ratio_N)[x.rollout_N]
    return _exp(log_ratio_N)


def kl_to_reference(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """KL(pi || pi_ref) [N] as k3 = r - log r - 1 with r = pi_ref / pi (DeepSeekMath, arXiv:2402.03300, eq. 4).

    With `use_bias_correction_kl` times pi / pi_old: unbiased off policy too (DeepSeek-V3.2, arXiv:2512.02556).
    """
    assert x.ref_logps_N is not None, "beta is not 0, so LossInputs.ref_logps_N is needed"
    log_r_N = x.ref_logps_N - x.logps_N
    kl_N = _exp(log_r_N) - log_r_N - 1
    return _finite(kl_N * ratio_N) if s.use_bias_correction_kl else kl_N


def close_to_sampler(x: LossInputs, threshold: float) -> Tensor:
    """bool [R]: drop rollouts of negative advantage that the policy has moved away from by more than `threshold` nats
    a token (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556)."""
    logps_N = x.logps_N.detach()
    old_logps_N = logps_N if x.old_logps_N is None else x.old_logps_N
    sampled_logps_N = old_logps_N if x.sampled_logps_N is None else x.sampled_logps_N
    drift_R = x.mean_per_rollout((sampled_logps_N - logps_N).nan_to_num(nan=0.0))
    return (x.advantages_R >= 0) | (drift_R <= threshold)


def sampler_weight(x: LossInputs, c: Correction) -> Tensor:
    """w = pi_old / pi_sampler [N], bounded and detached; 1 where the sampler gave no log-probability."""
    gap_N = _sampler_gap(x)
    gap_N = torch.where(gap_N.isnan(), 0.0, gap_N)
    weight_N = _exp(x.sum_per_rollout(gap_N)[x.rollout_N] if c.per_rollout else gap_N)
    low = 0.0 if c.low is None else c.low
    high = math.inf if c.high is None else c.high
    if not c.masks:
        return weight_N.clamp(low, high)
    return torch.where((weight_N >= low) & (weight_N <= high), weight_N, 0.0)


def _sampler_gap(x: LossInputs) -> Tensor:
    """log(pi_old / pi_sampler) [N]; NaN where the sampler said nothing."""
    assert x.sampled_logps_N is not None, "with a correction, LossInputs.sampled_logps_N is needed"
    return (x.logps_N.detach() if x.old_logps_N is None else x.old_logps_N) - x.sampled_logps_N


def keep_high_entropy(entropy_N: Tensor, top_quantile: float, over_X: Tensor | None = None) -> Tensor:
    """bool [N]: the tokens among the `top_quantile` share of highest entropy ("forking tokens", arXiv:2506.01939).

    The quantile is taken over `over_X`: entropies of the micro-batch on all ranks; None: `entropy_N`.
    """
    over_X = (entropy_N if over_X is None else over_X).detach().float()
    if over_X.numel() == 0:
        return torch.zeros_like(entropy_N, dtype=torch.bool)
    return entropy_N.detach() >= torch.quantile(over_X, 1 - top_quantile)


def mean_entropy(x: LossInputs) -> Tensor:
    """This pack's share of the mean entropy over the tokens that count, whatever the loss divides by."""
    if x.keep_N is None:
        kept_N = x.entropy_N
        count = x.num_entropy_tokens or x.num_tokens
    else:
        assert x.num_entropy_tokens is not None, "with keep_N, LossInputs.num_entropy_tokens is needed"
        kept_N = torch.where(x.keep_N, x.entropy_N, 0.0)
        count = x.num_entropy_tokens
    return kept_N.sum() / max(count, 1.0)


def observation_cross_entropy(x: LossInputs) -> Tensor:
    """This pack's share of the mean of -log pi over the given tokens of the step (ECHO, arXiv:2605.24517)."""
    assert x.observed_logps_M is not None
    return -x.observed_logps_M.sum() / max(x.num_observed, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl:
    """The entropy coefficient of the next step, moved up or down by a fixed amount (Skywork-OR1, arXiv:2505.22312)."""

    coef: float
    target: float
    step: float
    coef_min: float
    coef_max: float
    measured: float = math.inf
    """Mean entropy of the last step over all ranks; before the first there is none, and the bonus rests."""

    @property
    def applied(self) -> float:
        """The coefficient to use now: the bonus rests while entropy is above the target."""
        return self.coef if self.measured <= self.target else 0.0

    def after(self, entropy: float) -> EntropyControl:
        """The control after a step whose kept tokens had this mean entropy."""
        if entropy <= self.target:
            coef = min(self.coef + self.step, self.coef_max)
        else:
            coef = max(self.coef - self.step, self.coef_min)
        return replace(self, coef=coef, measured=entropy)


# ---- surrogates: (ratio, inputs, settings) -> per-token loss [N] ----


def clipped(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """PPO's pessimistic clip (arXiv:1707.06347, eq. 7); unequal bounds are clip-higher (DAPO, arXiv:2503.14476).

    `delta` bounds what PPO leaves open, a large ratio with a negative advantage (INTELLECT-2, arXiv:2505.07291).
    """
    clipped_N = ratio_N.clamp(1 - s.epsilon_low, 1 + s.epsilon_high)
    return _finite(-torch.minimum(_bounded(ratio_N, s) * x.advantages_N, clipped_N * x.advantages_N))


def capped(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """REINFORCE with a capped, detached ratio: every token keeps a gradient (CISPO, arXiv:2506.13585, eqs. 4 and 5).

    As in TRL `epsilon_high` is the cap itself, 1 + epsilon_high of the paper, and there is no lower bound.
    """
    return -ratio_N.clamp(max=s.epsilon_high).detach() * x.advantages_N * x.logps_N


def soft_gate(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """A sigmoid gate in place of the hard clip, steeper for negative advantages (SAPO, arXiv:2511.20347)."""
    tau_N = torch.where(x.advantages_N > 0, s.sapo_temperature_pos, s.sapo_temperature_neg)
    return -torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N * x.advantages_N


def gamma_weight(_ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """REINFORCE weighted by the detached phi(w), w the ratio of the whole rollout (VESPO, arXiv:2602.10693)."""
    return -phi(x, s)[x.rollout_N] * x.advantages_N * x.logps_N


def phi(x: LossInputs, s: LossSettings) -> Tensor:
    """phi(w) = w^k e^(lambda (1 - w)) [R], detached; phi(1) = 1. The bounds on log w are the authors'."""
    log_w_R = x.sum_per_rollout(x.log_ratio_N.detach().clamp(-20.0, 20.0))
    if s.correction is not None:  # then w is the ratio to the sampler
        log_w_R = log_w_R + x.sum_per_rollout(sampler_weight(x, s.correction).log().clamp(math.log(1e-8), 20.0))
    log_w_R = log_w_R.clamp(math.log(1e-8), 20.0)
    is_positive_R = x.advantages_R >= 0
    k_R = torch.where(is_positive_R, s.vespo_k_pos, s.vespo_k_neg)
    lambda_R = torch.where(is_positive_R, s.vespo_lambda_pos, s.vespo_lambda_neg).clamp(min=1e-4)
    phi_R = (lambda_R + k_R * log_w_R - lambda_R * log_w_R.exp()).exp()
    return phi_R.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def geometric(_ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """The geometric mean of a rollout's ratios, each clipped in the direction of its advantage before the mean is taken
    (GMPO, arXiv:2507.20673, eq. 4). `epsilon` and `epsilon_high` bound the log of the ratio; the paper has 0.4."""
    log_ratio_N = x.log_ratio_N
    bounded_N = log_ratio_N.clamp(-s.epsilon_low, s.epsilon_high)
    positive_N = x.advantages_N > 0
    log_N = torch.where(positive_N, torch.minimum(log_ratio_N, bounded_N), torch.maximum(log_ratio_N, bounded_N))
    return _finite(-_exp(x.mean_per_rollout(log_N))[x.rollout_N] * x.advantages_N)


MOST_RATIO = 20.0
"""Cap of the ratio that weighs a token in DPPO; the authors'."""


def near_sampler(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """REINFORCE with a capped, detached ratio, without tokens whose probability has already moved by more than
    `epsilon` in the direction of their advantage: a bound on the total variation (DPPO, arXiv:2602.04879)."""
    loss_N = -ratio_N.clamp(max=MOST_RATIO).detach() * x.advantages_N * x.logps_N
    low_N, high_N = _moved(x, s)
    return torch.where(low_N | high_N, 0.0, loss_N)


def _moved(x: LossInputs, s: LossSettings) -> tuple[Tensor, Tensor]:
    """bool [N], [N]: tokens that have become less likely by more than `epsilon_low`, with a negative advantage, and
    likelier by more than `epsilon_high`, with a positive one."""
    logps_N = x.logps_N.detach()
    change_N = logps_N.exp() - (logps_N - x.log_ratio_N.detach()).exp()
    return (change_N < -s.epsilon_low) & (x.advantages_N < 0), (change_N > s.epsilon_high) & (x.advantages_N > 0)


# ---- reductions: (per-token loss [N], inputs, settings) -> this pack's share of the step's loss [] ----


def mean_of_rollout_means(loss_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """Every rollout counts the same, however long (GRPO, DeepSeekMath, arXiv:2402.03300, eq. 3)."""
    return x.mean_per_rollout(loss_N).sum() / (x.num_rollouts or 1.0)


def mean_of_rollout_sums(loss_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """Every rollout weighs as much as it is long (LUSPO, arXiv:2602.05261)."""
    return loss_N.sum() / (x.num_rollouts or 1.0)


def mean_over_max_length(loss_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """A constant divisor, so that length cannot bias the gradient (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    return loss_N.sum() / ((x.num_rollouts or 1.0) * s.max_completion_length)


def mean_over_tokens(loss_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """Every token of the step counts the same (DAPO, arXiv:2503.14476, eq. 8, where it is every token of a group)."""
    return loss_N.sum() / (x.num_tokens or 1.0)


# ---- measures: (ratio, inputs, settings) -> fields of LossSums ----


def measure_clip(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    """Tokens whose gradient the clip removes: too low with a negative advantage, too high with a positive one.

    As in TRL the ratio is seen after `delta`.
    """
    ratio_N = _bounded(ratio_N, s)
    is_low_N = (ratio_N < 1 - s.epsilon_low) & (x.advantages_N < 0)
    return _clipped_shares(is_low_N, (ratio_N > 1 + s.epsilon_high) & (x.advantages_N > 0), x, s)


def measure_log_clip(_ratio_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    """The same of GMPO, whose bounds are those of the log of the ratio."""
    log_ratio_N = x.log_ratio_N
    is_low_N = (log_ratio_N < -s.epsilon_low) & (x.advantages_N < 0)
    return _clipped_shares(is_low_N, (log_ratio_N > s.epsilon_high) & (x.advantages_N > 0), x, s)


def measure_moved(_ratio_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    """Tokens that DPPO leaves out."""
    return _clipped_shares(*_moved(x, s), x, s)


def _clipped_shares(low_N: Tensor, high_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    is_low_N = low_N.float()
    is_high_N = high_N.float()
    has_ratio_R = (x.lengths_R > 0) | s.one_ratio_per_rollout
    return {
        "low_clipped": _count(is_low_N, x, s),
        "high_clipped": _count(is_high_N, x, s),
        "low_min": _extreme(x.mean_per_rollout(is_low_N), has_ratio_R, math.inf),
        "high_max": _extreme(x.mean_per_rollout(is_high_N), has_ratio_R, -math.inf),
    }


def measure_cap(ratio_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    """Ratios above the cap that would have pushed further."""
    return {"cap_clipped": _count(((ratio_N > s.epsilon_high) & (x.advantages_N > 0)).float(), x, s)}


def measure_phi(_ratio_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    """The weights of the rollouts; they are per rollout at either level."""
    return {"phi": phi(x, s).sum(), "ratios": torch.ones_like(x.advantages_R).sum()}


def measure_correction(x: LossInputs, c: Correction) -> dict[str, Tensor]:
    """Distance of the sampler's log-probabilities from training's, and the weights that follow."""
    gap_N = _sampler_gap(x).abs()
    is_known_N = ~gap_N.isnan()
    weight = sampler_weight(x, c)
    has_weight = torch.ones_like(weight, dtype=torch.bool)
    if c.per_rollout:
        weight = x.mean_per_rollout(weight)  # 0 where there is no token
        has_weight = x.lengths_R > 0
    return {
        "gap_tokens": is_known_N.to(gap_N.dtype).sum(),
        "gap": torch.where(is_known_N, gap_N, 0.0).sum(),
        "gap_max": _extreme(gap_N, is_known_N, -math.inf),
        "weights": has_weight.to(weight.dtype).sum(),
        "weight": weight.sum(),
        "weight_min": _extreme(weight, has_weight, math.inf),
        "weight_max": _extreme(weight, has_weight, -math.inf),
    }


def measure_nothing(_ratio_N: Tensor, x: LossInputs, s: LossSettings) -> dict[str, Tensor]:
    """A soft gate clips nothing."""
    return {}


class LossType(NamedTuple):
    """One row of the table."""

    surrogate: Callable[[Tensor, LossInputs, LossSettings], Tensor]
    reduction: Callable[[Tensor, LossInputs, LossSettings], Tensor]
    measure: Callable[[Tensor, LossInputs, LossSettings], dict[str, Tensor]]
    metrics: tuple[str, ...]
    """Names of the metrics that `measure` is for."""
    level: Level | None = None
    """The level that belongs to the loss's name; None: the setting's."""


_CLIP = tuple(f"clip_ratio/{which}" for which in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"))

OBJECTIVES: Mapping[str, LossType] = {
    "grpo": LossType(clipped, mean_of_rollout_means, measure_clip, _CLIP),
    "bnpo": LossType(clipped, mean_over_tokens, measure_clip, _CLIP),  # num_tokens is the micro-batch's
    "dr_grpo": LossType(clipped, mean_over_max_length, measure_clip, _CLIP),
    "dapo": LossType(clipped, mean_over_tokens, measure_clip, _CLIP),
    "cispo": LossType(capped, mean_over_tokens, measure_cap, ("cispo_clip_ratio",)),
    "sapo": LossType(soft_gate, mean_of_rollout_means, measure_nothing, ()),
    "gspo": LossType(clipped, mean_of_rollout_means, measure_clip, _CLIP, "sequence"),
    "luspo": LossType(clipped, mean_of_rollout_sums, measure_clip, _CLIP),  # meant for level "sequence"
    "vespo": LossType(gamma_weight, mean_over_tokens, measure_phi, ("vespo/phi_seq_mean",)),
    "gmpo": LossType(geometric, mean_of_rollout_means, measure_log_clip, _CLIP, "token"),
    "dppo": LossType(near_sampler, mean_over_tokens, measure_moved, _CLIP, "token"),
}


# ---- sums for the metrics ----


def reduce_sums(rows_XF: Tensor) -> LossSums:
    """The sums of X packs or ranks (each a `LossSums.stack()`) in one."""
    combined = {name: torch.amin if least > 0 else torch.amax for name, least in _EXTREMES.items()}
    names = [field.name for field in fields(LossSums)]
    return LossSums(**{name: combined.get(name, torch.sum)(rows_XF[:, i], dim=0) for i, name in enumerate(names)})


def with_skipped(sums: LossSums, s: LossSettings, *, num_tokens: float, num_rollouts: float) -> LossSums:
    """The sums of a step as if rollouts left out for their zero advantage had been there: their ratios clip nothing.

    All numbers are of all packs of all ranks; loss tokens and rollouts are counted with those left out.
    """
    total = num_rollouts if s.one_ratio_per_rollout else num_tokens
    if OBJECTIVES[s.loss_type].measure in (measure_phi, measure_nothing) or float(sums.ratios) >= total:
        return sums
    return replace(
        sums,
        ratios=torch.full_like(sums.ratios, total),
        low_min=sums.low_min.clamp(max=0.0),
        high_max=sums.high_max.clamp(min=0.0),
    )


def no_sums(device: torch.device | str = "cpu") -> LossSums:
    """The sums of no pack at all: what a rank without work contributes."""
    names = [field.name for field in fields(LossSums)]
    return LossSums(**{name: torch.full((), _EXTREMES.get(name, 0.0), device=device) for name in names})


_EXTREMES = {
    **dict.fromkeys(("low_min", "weight_min"), math.inf),
    **dict.fromkeys(("high_max", "gap_max", "weight_max"), -math.inf),
}
"""Sums that are none, as they are where there was nothing."""


def _sums(policy: Tensor, ratio_N: Tensor, kl_N: Tensor | None, x: LossInputs, s: LossSettings) -> LossSums:
    ones_N = torch.ones_like(x.logps_N)
    kept_N = ones_N if x.keep_N is None else x.keep_N.float()
    measured = {
        "policy_loss": policy.detach(),
        "tokens": ones_N.sum(),
        "entropy": x.entropy_N.detach().sum(),
        "kept_tokens": kept_N.sum(),
        "kept_entropy": (x.entropy_N.detach() * kept_N).sum(),
        "ratios": torch.ones_like(x.advantages_R if s.one_ratio_per_rollout else x.logps_N).sum(),
    }
    if kl_N is not None:
        measured["kl"] = kl_N.detach().sum()
    if x.observed_logps_M is not None:
        measured["observed"] = torch.ones_like(x.observed_logps_M).sum()
        measured["observed_nats"] = -x.observed_logps_M.detach().sum()
    if s.correction is not None:
        measured |= measure_correction(x, s.correction)
    return replace(no_sums(x.logps_N.device), **measured | OBJECTIVES[s.loss_type].measure(ratio_N, x, s))


def _count(is_N: Tensor, x: LossInputs, s: LossSettings) -> Tensor:
    """Number of ratios: tokens, or rollouts where all tokens of a rollout share one ratio."""
    return x.mean_per_rollout(is_N).sum() if s.one_ratio_per_rollout else is_N.sum()


def _extreme(x_X: Tensor, counts_X: Tensor, none: float) -> Tensor:
    """The least or largest of the values that count, `none` (an infinity) without any.

    Not by an index: how many there are would have to be asked of the device.
    """
    if not len(x_X):
        return x_X.new_full((), none)
    return (torch.amin if none > 0 else torch.amax)(torch.where(counts_X, x_X, none), dim=0)


def _bounded(ratio_N: Tensor, s: LossSettings) -> Tensor:
    return ratio_N if s.delta is None else ratio_N.clamp(max=s.delta)


def _finite(product_N: Tensor) -> Tensor:
    """Products with a ratio, without infinity and with a gradient of 0 there; all below 0.999 of the largest stay."""
    return product_N.clamp(max=0.999 * torch.finfo(product_N.dtype).max)


def _exp(log_x: Tensor) -> Tensor:
    """exp without infinity: an infinite ratio that a clip then ignores would still have gradient inf * 0 = NaN.

    The cap is the largest argument whose exp is finite, so no finite value changes.
    """
    return log_x.clamp(max=_largest_exponent(log_x.dtype)).exp()


@functools.cache
def _largest_exponent(dtype: torch.dtype) -> float:
    largest = torch.tensor(math.log(torch.finfo(dtype).max), dtype=dtype)
    return float(torch.nextafter(largest, torch.zeros_like(largest)))
