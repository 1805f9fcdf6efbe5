"""The checks: plain functions from evidence to a `Check`, in three tables for the three moments at which they run.

Each has gone wrong, silently, in a trainer that people use. Adding one is adding a function and a row, and its page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podium.advantages import combine
from podium.config import sampling_settings
from podium.forward import unwrap
from podium.packing import keep
from podium.precision import ROUNDED
from podium.proof.evidence import (
    EXACT,
    Sample,
    Traces,
    difference,
    sampler_tolerance,
    tolerance_of,
    training_logps,
    weight_traces,
)
from podium.proof.records import Check
from podium.records import Completion, ScoredGroup, TrainingGroup

if TYPE_CHECKING:
    from podium.trainer import GRPOTrainer

NAMED = 3
"""Tensors that a message names; it counts the others."""
TRAINED_TOKENS = 32
"""First tokens of a completion whose log-probabilities are compared."""
EXACT_GRADIENT, HALF_GRADIENT = 1e-2, 0.5
"""Largest difference of a gradient, relative to it: of every tensor in float32, of all together in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What the checks before the first optimizer step look at."""

    trainer: GRPOTrainer
    trained: tuple[TrainingGroup, ...]
    """All groups of the step that will be trained on."""
    scored: tuple[ScoredGroup, ...]
    """As they were sampled and scored."""
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """What the checks after a step compare."""

    trainer: GRPOTrainer
    weights_before: Traces
    groups: tuple[TrainingGroup, ...]
    logps_before: tuple[np.ndarray, ...]
    """Of `groups`, as the run trains on them."""


# ---- before anything is sampled ----


def weights(trainer: GRPOTrainer) -> Check:
    """No weight is NaN or infinite."""
    bad = [_not_finite(name, p) for name, p in unwrap(trainer.model).named_parameters() if _is_bad(p)]
    count = sum(1 for _ in unwrap(trainer.model).parameters())
    return Check(
        name="weights are finite",
        code="P001",
        passed=not bad,
        measured=float(len(bad)),
        tolerance=0.0,
        detail=_named(bad) if bad else f"{count} tensors",
        fix="Load the model again, from another copy.",
    )


def trainable(trainer: GRPOTrainer) -> Check:
    """What should train requires a gradient and is in the optimizer."""
    named = dict(unwrap(trainer.model).named_parameters())
    frozen = sorted(name for name in trainer.parts.should_train if name in named and not named[name].requires_grad)
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in named.items() if p.requires_grad and id(p) not in optimized]
    problems = ([f"frozen: {_named(frozen)}"] if frozen else []) + (
        [f"in no group of the optimizer: {_named(left_out)}"] if left_out else []
    )
    trained = [p for p in named.values() if p.requires_grad]
    by_caller = [] if hasattr(unwrap(trainer.model), "peft_config") else [n for n, p in named.items() if _off(p)]
    note = f"; frozen by the caller: {_named(by_caller)}" if by_caller else ""
    return Check(
        name="trained tensors",
        code="P002",
        passed=not problems,
        warning=bool(by_caller),
        measured=float(len(frozen) + len(left_out)),
        tolerance=0.0,
        detail="; ".join(problems) or f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} numbers{note}",
        fix="Unfreeze them before training (parameter.requires_grad_(True)), and give the optimizer all of them.",
    )


def ends(trainer: GRPOTrainer) -> Check:
    """Sampling ends where the model, its tokenizer and its generation config say that a turn ends."""
    settings = sampling_settings(trainer.args, trainer.parts.end_ids, num_completions=1, round_number=0)
    chosen = "eos_token_id" in (trainer.args.generation_kwargs or {})
    missing = sorted(() if chosen else declared_ends(trainer) - settings.end_ids)
    turn = turn_end(trainer)
    unended = turn is not None and turn not in settings.end_ids and not missing
    note = f"; the chat template ends a turn with {_token(trainer, turn)}, which does not end it" if unended else ""
    listed = ", ".join(_token(trainer, i) for i in sorted(settings.end_ids)) or "none: only the length does"
    return Check(
        name="end tokens",
        code="P003",
        passed=not missing,
        warning=unended,
        measured=float(len(missing)),
        tolerance=0.0,
        detail=f"{', '.join(_token(trainer, i) for i in missing)} does not end a completion, though the model's "
        f"generation config or tokenizer says so (ends: {listed})"
        if missing
        else f"a completion ends with {listed}{note}",
        fix="Make generation_config.eos_token_id and tokenizer.eos_token agree with the chat template.",
    )


# ---- before the first step ----


def rewards(x: Before) -> Check:
    """One finite number or None a completion, and advantages that follow them."""
    problem, flat = "", 0
    advantage = {_key(g.prompt_ids, ids): a for g in x.trained for ids, a in _with_advantages(g)}
    names = tuple(reward.name for reward in x.trainer.parts.rewards)
    for scored in x.scored:
        problem = problem or _reward_problem(scored, names)
        if not problem:
            problem = _advantage_problem(x, scored, advantage)
        flat += not x.trainer.parts.has_spread(scored)
    spread = len(x.scored) - flat
    return Check(
        name="rewards",
        code="P010",
        passed=None if not x.scored else not problem,
        warning=not spread,
        detail=problem or f"{len(names)} functions, {spread} of {len(x.scored)} groups have spread",
        fix="Look at the completions with `podium sample`; a reward is one number or None for each of them.",
    )


def tokens(x: Before) -> Check:
    """What is trained on is what was sampled, token by token."""
    sampled = {_key(s.group.prompt.token_ids, c.token_ids): c for s in x.scored for c in s.group.completions}
    settings = sampling_settings(x.trainer.args, x.trainer.parts.end_ids, num_completions=1, round_number=0)
    problems = [_completion_problem(x, c, settings.end_ids, settings.max_tokens) for c in sampled.values()]
    trained = [(g.prompt_ids, ids) for g in x.trained for ids in g.completion_ids]
    problems += [_unsampled(x, prompt, ids) for prompt, ids in trained if _key(prompt, ids) not in sampled]
    problems = [problem for problem in problems if problem]
    count = sum(len(s.group.completions) for s in x.scored)  # more than `sampled`, where two are alike
    return Check(
        name="trained tokens are the sampled ones",
        code="P009",
        passed=None if not x.scored else not problems,
        measured=float(len(problems)),
        tolerance=0.0,
        detail=_named(problems) if problems else f"{len(trained)} of {count} completions are trained on",
        fix="Train on the ids that the engine sampled; never on text that is tokenized again.",
    )


def turns(x: Before) -> Check:
    """No completion goes on after the token with which the chat template ends a turn."""
    end = turn_end(x.trainer) if any(s.group.prompt.is_chat for s in x.scored) else None
    all_ids = [c.token_ids for s in x.scored for c in s.group.completions]
    beyond = sum(end in ids[:-1] for ids in all_ids)
    return Check(
        name="completions end with the turn",
        code="P003",
        passed=None if end is None else not beyond,
        measured=float(beyond),
        tolerance=0.0,
        detail="no chat template that ends a turn with a token of its own"
        if end is None
        else f"{beyond} of {len(all_ids)} completions go on after {_token(x.trainer, end)}",
        fix=f"Let it end them: generation_kwargs: {{eos_token_id: [{end}]}}, or set tokenizer.eos_token.",
    )


def rollouts(x: Before) -> Check:
    """The log-probabilities that came with the rollouts are those that training computes."""
    groups = () if x.trainer.parts.filtered_logps else shortened(x.trained)
    tolerance = sampler_tolerance(x.trainer, exact=False)
    mine = training_logps(x.trainer, groups)
    theirs = [values for group in groups for values in group.sampled_logps]
    apart = [difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)]
    flat = [np.concatenate(v) if v else np.zeros(0, np.float32) for v in (mine, theirs)]
    measured = difference(flat[0], flat[1], tolerance) if groups else 0.0
    worst = int(np.argmax(apart)) if apart else 0
    return Check(
        name="rollout and training log-probabilities",
        code="P004",
        passed=None if not groups else measured <= tolerance,
        measured=measured,
        tolerance=tolerance,
        detail=f"{_nats(measured, tolerance)} over {len(flat[0])} tokens"
        + ("" if measured <= tolerance else f"; most in {_worst(x, groups, worst, mine, theirs)}")
        if groups
        else "they are of what a filter (top_p, top_k, min_p, repetition_penalty) left of the distribution"
        if x.trained
        else "no group to train on in this step",
        fix="The engine samples from another distribution than is trained: look at temperature, adapter and precision.",
    )


def sampler(x: Before) -> Check:
    """The engine's log-probabilities are the model's, also after its weights (or adapter) were changed."""
    s, tolerance = x.sample, sampler_tolerance(x.trainer, exact=True)
    measured = difference(s.sampled_N, s.plain_N, tolerance)
    effect = difference(s.before_N, s.plain_N, tolerance)
    what = "adapter" if hasattr(unwrap(x.trainer.model), "peft_config") else "weights"
    stale = difference(s.sampled_N, s.before_N, tolerance) <= tolerance < measured
    reason = (
        f"the {what} do{'es' if what == 'adapter' else ''} not reach the sampler: its log-probabilities are those from "
        f"before a change that moves them by {effect:.3g} nats"
        if stale
        else f"the sampler is off by {_nats(measured, tolerance)}{_temperature(x, s.sampled_N, tolerance)}"
    )
    return Check(
        name=f"the {what} reach{'es' if what == 'adapter' else ''} the sampler",
        code="P006" if stale else "P004",
        passed=measured <= tolerance and (effect > 2 * tolerance or None),
        measured=measured,
        tolerance=tolerance,
        detail=f"{_nats(measured, tolerance)} after a change worth {effect:.2g} nats"
        if measured <= tolerance
        else reason,
        fix="The engine must sample from the model that is trained, with its adapter switched on.",
    )


def packed(x: Before) -> Check:
    """The packed, shared-prefix forward gives what a plain forward of every row gives."""
    s, tolerance = x.sample, tolerance_of(x.trainer, exact=True)
    measured = difference(s.packed_N, s.plain_N, tolerance)
    where = f"; first in {s.misplaced}" if s.misplaced else ""
    problem = f"off by {_nats(measured, tolerance)}{_temperature(x, s.packed_N, tolerance)}{where}"
    passed = measured <= tolerance and not s.misplaced
    return Check(
        name="packed forward equals plain rows",
        code="P005",
        passed=passed,
        measured=measured,
        tolerance=tolerance,
        detail=f"{_nats(measured, tolerance)} over {len(s.plain_N)} tokens" if passed else problem,
        fix="Report this model; until then set rollout_engine: transformers.",
    )


def cutting(x: Before) -> Check:
    """Packs and micro-steps change neither loss nor gradient, and both are those of the plain model."""
    s = x.sample
    rows = [("two micro-steps", s.cut, s.cut_loss, True), ("one micro-step", s.whole, s.whole_loss, False)]
    problems, measured, limit = [], 0.0, 0.0
    for name, traces, loss, exact in rows:
        tight = tolerance_of(x.trainer, exact=exact) == EXACT
        error, length, worst = gradient_error(traces, s.plain, each=tight)
        tolerance = EXACT_GRADIENT if tight else HALF_GRADIENT
        measured, limit = max((measured, limit), (error, tolerance), key=lambda pair: pair[0] / (pair[1] or 1))
        if not error <= tolerance:
            problems.append(f"{name}: the gradient is {length:.3g} times the plain one, {worst} differs most")
        if not abs(loss - s.plain_loss) <= tolerance * max(1.0, abs(s.plain_loss)):
            problems.append(f"{name}: the loss is {loss:.4g}, not {s.plain_loss:.4g}")
    return Check(
        name="cutting the batch changes nothing",
        code="P007",
        passed=not problems,
        measured=measured,
        tolerance=limit,
        detail="; ".join(problems) or f"gradients differ by {measured:.2g} of their length",
        fix="Something scales loss or gradient by packs or micro-steps: look at overridden methods and callbacks.",
    )


def gradients(x: Before) -> Check:
    """Every trained tensor gets a gradient, finite and not zero."""
    bad = [name for name, t in x.sample.whole.items() if not math.isfinite(t.norm)]
    parameters = dict(unwrap(x.trainer.model).named_parameters())
    zero = [n for n, t in x.sample.whole.items() if t.norm == 0 and not _may_be_zero(n) and parameters[n].numel()]
    problems = ([f"not finite: {_named(bad)}"] if bad else []) + ([f"none: {_named(zero)}"] if zero else [])
    return Check(
        name="every trained tensor gets a gradient",
        code="P008",
        passed=not problems,
        measured=float(len(bad) + len(zero)),
        tolerance=0.0,
        detail="; ".join(problems) or f"{len(x.sample.whole)} tensors",
        fix="Freeze what is not part of the forward (parameter.requires_grad_(False)), or repair the layer named.",
    )


# ---- after a step that moved ----


def moved(x: After) -> Check:
    """The optimizer step changed weights."""
    now = weight_traces(unwrap(x.trainer.model))
    still = [
        n for n, t in now.items() if n in x.weights_before and np.array_equal(t.numbers, x.weights_before[n].numbers)
    ]
    bad = [name for name, t in now.items() if not math.isfinite(t.norm)]
    count = len(now) - len(still)
    detail = f"{count} of {len(now)} tensors changed"
    return Check(
        name="the step moved the weights",
        code="P011",
        passed=count > 0 and not bad,
        measured=float(count),
        detail=f"not finite after the step: {_named(bad)}" if bad else detail,
        fix="Train in float32 weights (model_init_kwargs: {dtype: float32}), or raise the learning rate.",
    )


def followed(x: After) -> Check:
    """New weights give new log-probabilities: nobody computes with an old copy."""
    now = training_logps(x.trainer, x.groups)
    same = bool(now) and all(np.array_equal(a, b) for a, b in zip(now, x.logps_before, strict=True))  # none: no prompt
    old = stale_copies(x.trainer)
    shift = max((float(np.abs(a - b).max()) for a, b in zip(now, x.logps_before, strict=True)), default=0.0)
    problem = f"old copies of {_named(old)}" if old else "the same log-probabilities with other weights" if same else ""
    return Check(
        name="the weights moved the log-probabilities",
        code="P012",
        passed=not problem,
        measured=shift,
        detail=problem or f"by up to {shift:.2g} nats",
        fix="Something keeps a copy of the weights: look at hooks, caches and compiled modules.",
    )


BEFORE_ROLLOUTS: tuple[Callable[[GRPOTrainer], Check], ...] = (weights, trainable, ends)
BEFORE_STEP: tuple[Callable[[Before], Check], ...] = (
    rewards,
    tokens,
    turns,
    rollouts,
    sampler,
    packed,
    cutting,
    gradients,
)
AFTER_STEP: tuple[Callable[[After], Check], ...] = (moved, followed)


# ---- what the checks share ----


def gradient_error(traces: Traces, plain: Traces, *, each: bool) -> tuple[float, float, str]:
    """How far gradients are from the plain ones, how long they are against them, and the tensor that differs most.

    `each`: the largest error of a tensor, relative to it; else that of all together.
    """
    scale = max((float(np.linalg.norm(t.numbers)) for t in plain.values()), default=0.0)
    errors = {
        name: float(np.linalg.norm(traces[name].numbers - t.numbers))
        / max(float(np.linalg.norm(t.numbers)), 1e-3 * scale, 1e-30)
        for name, t in plain.items()
    }
    mine, theirs = (np.concatenate([t.numbers for t in x.values()]) for x in (traces, plain))
    norms = [math.sqrt(sum(t.norm**2 for t in x.values())) for x in (traces, plain)]
    together = float(np.linalg.norm(mine - theirs)) / max(float(np.linalg.norm(theirs)), 1e-30)
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    error = errors[worst] if each else together
    return (error if math.isfinite(error) else math.inf), norms[0] / max(norms[1], 1e-30), worst


def shortened(groups: Sequence[TrainingGroup]) -> tuple[TrainingGroup, ...]:
    """Two completions of two groups, their first tokens; only what log-probabilities need."""
    chosen = sorted(groups, key=lambda group: len(group.prompt_ids))[:2]
    return tuple(
        TrainingGroup(
            prompt_ids=group.prompt_ids,
            completion_ids=tuple(ids[:TRAINED_TOKENS] for ids in group.completion_ids),
            advantages_G=group.advantages_G,
            sampled_logps=tuple(x[:TRAINED_TOKENS] for x in group.sampled_logps),
        )
        for group in (keep(group, range(min(2, len(group.completion_ids)))) for group in chosen)
    )


def declared_ends(trainer: GRPOTrainer) -> set[int]:
    """What the model's generation config and the tokenizer say."""
    said = getattr(getattr(unwrap(trainer.model), "generation_config", None), "eos_token_id", None)
    ids = [said] if isinstance(said, int) else list(said or [])
    return {i for i in (*ids, trainer.parts.tokenizer.eos_token_id) if i is not None}


def turn_end(trainer: GRPOTrainer) -> int | None:
    """The special token with which the chat template ends an assistant's turn; None: there is none."""
    tokenizer, mark = trainer.parts.tokenizer, "podium-turn"
    if not trainer.parts.builder.chat_template:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **(trainer.args.chat_template_kwargs or {}))
    except Exception:  # noqa: BLE001  a template may refuse any conversation, with any exception
        return None
    ids = tokenizer(str(text).partition(mark)[2], add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder) else None


def stale_copies(trainer: GRPOTrainer) -> list[str]:
    """Layers whose rounded copy is not the rounded weight."""
    with trainer.parts.precision():
        return [
            name
            for name, module in unwrap(trainer.model).named_modules()
            if ROUNDED in module.__dict__
            and not torch.equal(module.__dict__[ROUNDED](), module.weight.detach().to(torch.bfloat16))
        ]


def _is_bad(p: torch.Tensor) -> bool:
    if not p.is_floating_point():
        return False
    return not math.isfinite(float(torch.linalg.vector_norm(p.detach(), dtype=torch.float32)))


def _not_finite(name: str, p: torch.Tensor) -> str:
    """`q_proj.weight (128 numbers, rows 8 to 15)`."""
    where = ~p.detach().isfinite()
    rows = where.reshape(len(p), -1).any(-1).nonzero()[:, 0].tolist() if p.dim() else [0]
    return f"{name} ({int(where.sum())} numbers, rows {rows[0]} to {rows[-1]})" if rows else name


def _off(p: torch.Tensor) -> bool:
    return p.is_floating_point() and not p.requires_grad


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _may_be_zero(name: str) -> bool:
    """Experts that no token of the sample was sent to."""
    return "expert" in name


def _nats(measured: float, tolerance: float) -> str:
    which = "at most" if tolerance == EXACT else "on average"
    return f"{measured:.2g} nats {which} ({tolerance:g} allowed)"


def _token(trainer: GRPOTrainer, token: int | None) -> str:
    return f"{trainer.parts.tokenizer.convert_ids_to_tokens(token)} ({token})"


def _key(prompt_ids: Sequence[int], ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(prompt_ids), tuple(ids)


def _with_advantages(group: TrainingGroup) -> Iterable[tuple[tuple[int, ...], float]]:
    return zip(group.completion_ids, group.advantages_G.tolist(), strict=True)


def _temperature(x: Before, logps_N: np.ndarray, tolerance: float) -> str:
    """Whether it is the temperature that is missing."""
    at_1, asked = x.sample.plain_at_1_N, x.trainer.args.temperature
    if at_1 is None or asked == 1 or not difference(logps_N, at_1, tolerance) <= tolerance:
        return ""
    return f": these are log-probabilities at temperature 1, not {asked:g}"


def _reward_problem(scored: ScoredGroup, names: tuple[str, ...]) -> str:
    if scored.rewards_GK.shape != (scored.num_completions, len(names)):
        return f"{scored.rewards_GK.shape} rewards for {scored.num_completions} completions and {len(names)} functions"
    if np.isinf(scored.rewards_GK).any():
        return f"{names[int(np.isinf(scored.rewards_GK).any(0).argmax())]} gave an infinite reward"
    return ""


def _advantage_problem(x: Before, scored: ScoredGroup, advantage: Mapping[Any, float]) -> str:
    """An advantage that is not finite, or higher for the worse completion."""
    settings = x.trainer.parts.advantage
    reward_G = combine(scored.rewards_GK, settings.weights_K)
    pairs = [
        (reward, advantage[key])
        for c, reward in zip(scored.group.completions, reward_G.tolist(), strict=True)
        if (key := _key(scored.group.prompt.token_ids, c.token_ids)) in advantage
    ]
    if any(not math.isfinite(a) for _, a in pairs):
        return f"an advantage of prompt {scored.group.prompt.id} is not finite"
    best, worst = max(pairs, default=(0.0, 0.0)), min(pairs, default=(0.0, 0.0))
    as_given = settings.aggregation == "sum_then_normalize" and not x.trainer.args.adaptive_rewards
    if as_given and best[0] > worst[0] and best[1] < worst[1]:
        return f"prompt {scored.group.prompt.id}: the better completion has the lower advantage"
    return ""


def _completion_problem(x: Before, c: Completion, end_ids: frozenset[int], max_tokens: int) -> str:
    """What cannot be of a sampled completion."""
    if len(c.logps) != len(c.token_ids):
        return f"a completion of {len(c.token_ids)} tokens came with {len(c.logps)} log-probabilities"
    if c.token_ids[-1] not in end_ids and len(c.token_ids) < max_tokens:
        return f"a completion of {len(c.token_ids)} tokens neither ends with an end token nor is {max_tokens} long"
    inside = [i for i in c.token_ids[:-1] if i in end_ids]
    if inside:
        return f"a completion goes on after {_token(x.trainer, inside[0])}"
    if x.trainer.parts.tokenizer.decode(c.token_ids, skip_special_tokens=True) != c.text:
        return f"the text that was scored is not that of its {len(c.token_ids)} tokens: {c.text[:30]!r}"
    return ""


def _unsampled(x: Before, prompt_ids: tuple[int, ...], ids: tuple[int, ...]) -> str:
    """A trained completion that nobody sampled: where it leaves the nearest one that was."""
    sampled = [c.token_ids for s in x.scored if s.group.prompt.token_ids == prompt_ids for c in s.group.completions]
    if not sampled:
        return "a trained prompt was never sampled from"

    def common(other: tuple[int, ...]) -> int:
        return next((t for t, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))

    nearest = max(sampled, key=common)
    at = common(nearest)
    tokens = [_token(x.trainer, side[at]) if at < len(side) else "its end" for side in (ids, nearest)]
    return f"token {at} of a trained completion is {tokens[0]}, but {tokens[1]} was sampled"


def _worst(
    x: Before, groups: Sequence[TrainingGroup], which: int, mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> str:
    """The token that differs most."""
    ids = [ids for group in groups for ids in group.completion_ids][which]
    if mine[which].shape != theirs[which].shape:
        return f"completion {which}: {len(theirs[which])} log-probabilities for {len(mine[which])} tokens"
    apart = np.abs(mine[which] - theirs[which])
    at = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
    values = f"{theirs[which][at]:.3f} sampled, {mine[which][at]:.3f} in training"
    return f"token {at} of completion {which}, {_token(x.trainer, ids[at])}: {values}"
