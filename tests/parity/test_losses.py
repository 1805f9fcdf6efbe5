"""Podium's losses against TRL's own `GRPOTrainer._compute_loss`, on the same numbers.

TRL's method runs as it is, with the real accelerator and config; only its forward pass is replaced by given
log-probabilities and entropies. An optimizer step of two micro-batches of three rollouts goes through both: TRL takes
it padded, one micro-batch after the other; Podium flat, in packs of unequal size. The loss, the gradient with respect
to every log-probability and entropy, and the metrics have to agree.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace

import pytest
import torch
import trl
from accelerate import Accelerator
from torch import Tensor

from podium.algorithm.losses import (
    LossInputs,
    LossSettings,
    keep_high_entropy,
    phi,
    policy_loss,
    reduce_sums,
    skips_zero_advantage,
)
from podium.algorithm.metrics import loss_metrics, mean_kept_entropy
from podium.trainer.config import GRPOConfig
from podium.trainer.settings import entropy_control, loss_settings

LENGTHS = (4, 7, 1, 5, 3, 6)
WIDTH = 8
ADVANTAGES = (-1.5, 0.4, 2.0, 0.0, -0.3, 0.8)
# log(pi / pi_old) of the rollouts: far above the bounds with a negative advantage (where only `delta` stops it), above
# them with a positive one, below with a positive one, anything with none, below with a negative one, and within.
DRIFTS = (0.9, 0.3, -0.3, 0.5, -0.4, 0.05)
TRUNCATED = (1, 4)
MICRO_BATCHES = (slice(0, 3), slice(3, 6))
PACKS = ((0, 1), (1, 3), (3, 6))
"""Rollouts of each pack; a pack lies within a micro-batch, because `bnpo` divides by the micro-batch's tokens."""


@dataclass(frozen=True)
class Case:
    """Six padded rollouts [6, WIDTH]. Padding holds plausible garbage that a missing mask would let in."""

    logps: Tensor
    entropies: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor
    sampled_logps: Tensor | None
    mask: Tensor
    advantages: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.logps, self.entropies


def case(*, off_policy: bool, truncated: bool = False, with_sampler: bool = False) -> Case:
    numbers = torch.Generator().manual_seed(3)
    logps = -2 * torch.rand(6, WIDTH, generator=numbers) - 0.05
    wiggle = torch.tensor([0.25, -0.25, 0.1, 0.0]).repeat(6, WIDTH // 4)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    if truncated:
        mask[list(TRUNCATED)] = 0
    return Case(
        logps=logps.requires_grad_(),
        entropies=(3 * torch.rand(6, WIDTH, generator=numbers)).requires_grad_(),
        old_logps=logps.detach() - torch.tensor(DRIFTS)[:, None] - wiggle if off_policy else None,
        ref_logps=logps.detach() + torch.randn(6, WIDTH, generator=numbers) / 2,
        sampled_logps=logps.detach() + torch.randn(6, WIDTH, generator=numbers) / 4 + 0.2 if with_sampler else None,
        mask=mask,
        advantages=torch.tensor(ADVANTAGES),
    )


def config(tmp_path, **settings) -> GRPOConfig:
    """Two micro-batches of three rollouts a step; epsilon is unequal so that a mix-up shows."""
    settings = {"epsilon": 0.15, "epsilon_high": 0.22, "max_completion_length": 16, **settings}
    if settings["loss_type"] == "cispo":
        settings["epsilon_high"] = 1.2
    return GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        num_generations=6,
        report_to=[],
        use_cpu=True,
        **settings,
    )


# ---- TRL ----


def trl_self(args: GRPOConfig, *, accumulation: int, training: bool = True) -> SimpleNamespace:
    """What `_compute_loss` reads of its trainer, set as TRL's constructor sets it."""
    trainer = SimpleNamespace(
        args=args,
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=training),
        current_gradient_accumulation_steps=accumulation,
        aux_loss_enabled=False,
        use_vllm=args.use_vllm,
        vllm_importance_sampling_correction=args.use_vllm and args.vllm_importance_sampling_correction,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high if args.epsilon_high is not None else args.epsilon,
        use_adaptive_entropy=args.use_adaptive_entropy,
        entropy_coef=args.entropy_coef,
        _entropy_bonus_enabled=args.entropy_coef != 0.0 or args.use_adaptive_entropy,
        _last_world_entropy=math.inf,
        _entropy_window_stats=None,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
    )
    for name in ("loss_type", "importance_sampling_level", "beta", "max_completion_length", "top_entropy_quantile"):
        setattr(trainer, name, getattr(args, name))
    trainer.off_policy_mask_threshold = args.off_policy_mask_threshold
    trainer.get_high_entropy_mask = MethodType(trl.GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


def trl_micro_batch(trainer: SimpleNamespace, c: Case, rows: slice) -> Tensor:
    inputs = {
        "prompt_ids": torch.zeros(len(c.logps[rows]), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(c.logps[rows]), 2, dtype=torch.long),
        "completion_ids": torch.zeros_like(c.mask[rows]),
        "completion_mask": c.mask[rows],
        "advantages": c.advantages[rows],
        "num_items_in_batch": c.mask.sum(),
        "ref_per_token_logps": c.ref_logps[rows],
    }
    if c.old_logps is not None:
        inputs["old_per_token_logps"] = c.old_logps[rows]
    if c.sampled_logps is not None:
        inputs["sampling_per_token_logps"] = c.sampled_logps[rows]
    if trainer.use_vllm:
        inputs.setdefault("old_per_token_logps", c.logps[rows].detach())
        inputs["importance_sampling_ratio"] = trl_sampler_ratio(trainer.args, c, inputs, rows)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (c.logps[rows], c.entropies[rows], None)
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


def trl_sampler_ratio(args: GRPOConfig, c: Case, inputs: dict, rows: slice) -> Tensor:
    """As TRL computes it while it generates, in a method too long to call."""
    gap = torch.nan_to_num((inputs["old_per_token_logps"] - c.sampled_logps[rows]) * c.mask[rows], nan=0.0)
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    mode = args.vllm_importance_sampling_mode
    ratio = torch.exp(gap.sum(dim=-1, keepdim=True) if mode.startswith("sequence") else gap)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    bounds = (-math.inf if low is None else low), (math.inf if high is None else high)
    return ratio.masked_fill((ratio < bounds[0]) | (ratio > bounds[1]), value=0.0)


def trl_step(args: GRPOConfig, c: Case) -> Tensor:
    trainer = trl_self(args, accumulation=2)
    return sum(trl_micro_batch(trainer, c, rows) for rows in MICRO_BATCHES)


# ---- Podium ----


def inputs_of(args: GRPOConfig, c: Case, rollouts: range, micro_batch: slice, accumulation: int = 2) -> LossInputs:
    """The pack of these rollouts, flat; counts as the trainer gives them."""
    is_token = c.mask.bool() & torch.zeros(6, 1).index_fill(0, torch.tensor(rollouts), 1).bool()
    in_batch = torch.zeros_like(c.mask, dtype=torch.bool)
    in_batch[micro_batch] = c.mask[micro_batch].bool()
    kept = in_batch
    if args.top_entropy_quantile < 1:
        everywhere = c.entropies.flatten(), c.entropies[in_batch]
        kept = in_batch & keep_high_entropy(everywhere[0], args.top_entropy_quantile, everywhere[1]).view_as(in_batch)

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[is_token]

    per_batch = {"bnpo": float(in_batch.sum()) * accumulation}
    return LossInputs(
        logps_N=c.logps[is_token],
        entropy_N=c.entropies[is_token],
        old_logps_N=flat(c.old_logps),
        ref_logps_N=flat(c.ref_logps),
        sampled_logps_N=flat(c.sampled_logps),
        keep_N=kept[is_token] if args.top_entropy_quantile < 1 else None,
        advantages_R=c.advantages[list(rollouts)],
        rollout_N=is_token.nonzero()[:, 0] - rollouts.start,
        num_rollouts=3 * accumulation,
        num_tokens=per_batch.get(args.loss_type, float(c.mask.sum())),
        num_entropy_tokens=float(kept.sum()) * accumulation,
    )


def podium_step(args: GRPOConfig, c: Case) -> Tensor:
    settings = loss_settings(args)
    losses = []
    for start, end in PACKS:
        micro_batch = next(rows for rows in MICRO_BATCHES if rows.start <= start < rows.stop)
        x = inputs_of(args, c, range(start, end), micro_batch)
        losses.append(policy_loss(x, settings, args.entropy_coef).loss)
    return sum(losses)


def gradients(loss: Tensor, c: Case) -> list[Tensor]:
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(c.leaves, torch.autograd.grad(loss, c.leaves, allow_unused=True), strict=True)
    ]


def assert_same(args: GRPOConfig, c: Case, what: object) -> None:
    theirs, ours = trl_step(args, c), podium_step(args, c)
    torch.testing.assert_close(ours, theirs, msg=lambda m: f"loss, {what}: {m}")
    for name, mine, other in zip(("logps", "entropies"), gradients(ours, c), gradients(theirs, c), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda m, name=name: f"gradient of {name}, {what}: {m}")


# ---- tests ----

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gspo")
KL = ({}, *({"beta": 0.04, "use_bias_correction_kl": corrected} for corrected in (False, True)))
MASKS = (
    {},
    {"top_entropy_quantile": 0.4},
    {"off_policy_mask_threshold": 0.1},
    {"off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.4},
)


@pytest.mark.cases(4)
@pytest.mark.diagonal
@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient_are_trls(tmp_path, loss_type: str, level: str, *, off_policy: bool) -> None:
    """Every loss and level, crossed with KL, masks, two-sided clipping, truncated rollouts and the entropy bonus."""
    cases = {truncated: case(off_policy=off_policy, truncated=truncated) for truncated in (False, True)}
    base = config(tmp_path, loss_type=loss_type, importance_sampling_level=level)
    for kl, masks, delta, coef, truncated in itertools.product(KL, MASKS, (None, 1.6), (0.0, 0.05), cases):
        args = with_settings(base, {**kl, **masks, "delta": delta, "entropy_coef": coef})
        assert_same(args, cases[truncated], (loss_type, level, kl, masks, delta, coef, truncated))


def with_settings(base: GRPOConfig, settings: dict) -> GRPOConfig:
    """A copy with some fields set; building a config anew for each of thousands of cases would take minutes."""
    args = object.__new__(type(base))
    args.__dict__.update(base.__dict__, **settings)
    return args


@pytest.mark.parametrize("old_is_stored", [False, True])
def test_off_policy_mask_prefers_what_the_engine_recorded(tmp_path, *, old_is_stored: bool) -> None:
    """The recorded log-probabilities decide, and a NaN among them is no evidence."""
    c = case(off_policy=old_is_stored, with_sampler=True)
    c.sampled_logps[0, 1] = c.sampled_logps[4, 0] = math.nan
    for threshold in (-0.5, 0.1, 0.3, 2.0):
        args = config(tmp_path, loss_type="grpo", off_policy_mask_threshold=threshold)
        assert_same(args, c, threshold)


@pytest.mark.cases(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_correction_of_the_sampler_is_trls(tmp_path, loss_type: str, mode: str) -> None:
    """Every loss and mode, with bounds that bite, crossed with KL, masks and rollouts that are reused."""
    if loss_type == "vespo" and mode.startswith("sequence"):
        return  # both refuse it
    base = config(tmp_path, loss_type=loss_type, use_vllm=True, vllm_importance_sampling_mode=mode)
    without = with_settings(base, {"vllm_importance_sampling_correction": False})
    for off_policy, bounds in itertools.product((False, True), ((None, 1.1), (0.7, 1.1), (0.9, None))):
        c = case(off_policy=off_policy, with_sampler=True)
        c.sampled_logps[0, 1] = math.nan
        clips = {
            f"vllm_importance_sampling_clip_{name}": bound for name, bound in zip(("min", "max"), bounds, strict=True)
        }
        for kl, masks in [*((kl, MASKS[0]) for kl in KL), *((KL[1], masks) for masks in MASKS[1:])]:
            args = with_settings(base, {**clips, **kl, **masks})
            assert_same(args, c, (loss_type, mode, off_policy, bounds, kl, masks))
        args = with_settings(base, clips)
        assert podium_step(args, c).item() != pytest.approx(podium_step(without, c).item())


def test_the_masks_of_these_cases_bite(tmp_path) -> None:
    """Guards the tests above: with these numbers every mask, bound and factor changes the loss."""
    c = case(off_policy=True)

    def loss(**settings) -> float:
        return podium_step(config(tmp_path, **{"loss_type": "grpo", **settings}), c).item()

    plain = loss()
    for settings in [
        *MASKS[1:],
        *KL[1:],
        {"delta": 1.6},
        {"entropy_coef": 0.05},
        {"importance_sampling_level": "sequence"},
    ]:
        assert loss(**settings) != pytest.approx(plain), settings
    assert loss(**KL[1]) != pytest.approx(loss(**KL[2]))


def test_vespo_weights_are_trls_at_the_extremes() -> None:
    """Ratios beyond the bounds: of a token (20), of a rollout (20 and log 1e-8), and their weights either side of 0."""
    log_ratio = torch.tensor(
        [[30.0, -19.5], [-30.0, 19.5], [21.0, -21.0], [0.5, 0.2], [-15, -15], [2.0, 18.5], [-9, -8]]
    )
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 1.0, 1.0])
    settings = LossSettings(
        loss_type="vespo", vespo_k_pos=0.3, vespo_lambda_pos=1e-9, vespo_k_neg=0.2, vespo_lambda_neg=0.7
    )
    knobs = {name: getattr(settings, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    theirs = trl.GRPOTrainer.get_gamma_weights(
        advantages[:, None], log_ratio, torch.ones(7, 2), importance_sampling_ratio=None, **knobs
    )
    x = LossInputs(
        logps_N=log_ratio.flatten(),
        old_logps_N=torch.zeros(14),
        entropy_N=torch.zeros(14),
        advantages_R=advantages,
        rollout_N=torch.arange(7).repeat_interleave(2),
        num_rollouts=7,
        num_tokens=14,
    )
    torch.testing.assert_close(phi(x, settings), theirs[:, 0])
    assert len(set(theirs.flatten().tolist())) == 7


@pytest.mark.diagonal
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_metrics_are_trls(tmp_path, loss_type: str, level: str) -> None:
    """One micro-batch, where TRL's means over micro-batches and Podium's over the step are the same thing."""
    for off_policy, truncated, delta in itertools.product((False, True), (False, True), (None, 1.6)):
        c = case(off_policy=off_policy, truncated=truncated)
        args = config(tmp_path, loss_type=loss_type, importance_sampling_level=level, beta=0.04, entropy_coef=0.02)
        args = with_settings(args, {"delta": delta, "steps_per_generation": 1, "use_bias_correction_kl": off_policy})
        trainer = trl_self(args, accumulation=1)
        trl_micro_batch(trainer, c, slice(0, 6))
        theirs = {name: values[0] for name, values in trainer._metrics["train"].items()}

        settings = loss_settings(args)
        packs = [inputs_of(args, c, range(*pack), slice(0, 6), accumulation=1) for pack in PACKS]
        packs = [replace(x, num_rollouts=6) for x in packs]
        outputs = [policy_loss(x, settings, args.entropy_coef) for x in packs]
        sums = reduce_sums(torch.stack([output.sums.stack() for output in outputs]))
        ours = loss_metrics(sums, settings, has_entropy_bonus=True, entropy_coef=args.entropy_coef)
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), (off_policy, truncated, delta)


def test_adaptive_entropy_moves_as_trls(tmp_path) -> None:
    """Five steps whose entropy crosses the target both ways: the same coefficient applied and logged."""
    args = config(
        tmp_path,
        loss_type="grpo",
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        entropy_coef_delta=0.004,
        entropy_target=1.2,
        entropy_coef_max=0.02,
        entropy_coef_min=0.005,
        top_entropy_quantile=0.5,
    )
    args = with_settings(args, {"steps_per_generation": 1})
    trainer, control = trl_self(args, accumulation=1), entropy_control(args)
    seen = []
    for scale in (1.0, 0.2, 0.3, 0.25, 1.0, 1.0, 1.0):
        c = replace(
            case(off_policy=True), entropies=(case(off_policy=True).entropies.detach() * scale).requires_grad_()
        )
        theirs = trl_micro_batch(trainer, c, slice(0, 6))
        x = replace(inputs_of(args, c, range(6), slice(0, 6), accumulation=1), num_rollouts=6)
        ours = policy_loss(x, loss_settings(args), control.applied)
        torch.testing.assert_close(ours.loss, theirs)
        control = control.after(mean_kept_entropy(ours.sums))
        assert control.coef == pytest.approx(trainer.entropy_coef)
        seen.append((control.coef, control.applied))
    assert len({coef for coef, _ in seen}) > 3
    assert {applied > 0 for _, applied in seen} == {True, False}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_leaving_out_zero_advantages_changes_nothing(tmp_path, loss_type: str) -> None:
    """The fourth rollout has advantage 0: without it the loss is the same and the gradients are, to the last bit."""
    args = config(tmp_path, loss_type=loss_type, off_policy_mask_threshold=0.1, delta=1.6)
    c = case(off_policy=True)
    settings = loss_settings(args)
    assert skips_zero_advantage(settings, entropy_coef_possible=False, top_entropy_quantile=1.0, moe=False)
    with_it = policy_loss(inputs_of(args, c, range(3, 6), MICRO_BATCHES[1]), settings).loss
    without = policy_loss(inputs_of(args, c, range(4, 6), MICRO_BATCHES[1]), settings).loss
    torch.testing.assert_close(with_it, without)  # sums of other length are added up in another order
    assert all(map(torch.equal, gradients(with_it, c), gradients(without, c)))
