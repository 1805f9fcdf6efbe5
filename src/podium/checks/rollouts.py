"""Numbers of groups that were sampled before a run is trained; `verdict` derives the findings.

    diagnosis = diagnose(sample(trainer, rows), trainer.args)

`diagnose` is a pure function of scored groups. Shape letters: P prompts, G completions per prompt, R = P G, K rewards.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.algorithm.advantages import combine, has_spread
from podium.algorithm.metrics import RIGHT, accuracy_name
from podium.checks.verdict import LONGER, TRUNCATED_SHARE, Diagnosis, RewardSummary, verdict
from podium.data.selection import fingerprint, sampled_rows
from podium.errors import ConfigError
from podium.errors.texts import listed
from podium.records import Prompt, ScoredGroup
from podium.rewards.score import score
from podium.runs.conversations import drawn_text
from podium.trainer.config import GRPOConfig
from podium.trainer.policy_state import PolicyState
from podium.trainer.rollouts import make_prompt
from podium.trainer.settings import sampling_settings

if TYPE_CHECKING:
    from podium.trainer.trainer import GRPOTrainer

ROUND = -2
"""A round number that training never uses, so the random stream is separate."""

_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Sampled groups, and the time they took."""

    groups: tuple[ScoredGroup, ...]
    weights_K: np.ndarray
    generate_seconds: float
    reward_seconds: Mapping[str, float]
    longer_lengths: tuple[int, ...] = ()
    """Tokens of a few completions that were allowed more; empty where few were cut off."""


def sample(trainer: GRPOTrainer, dataset: Any, num_prompts: int, *, longer_too: bool = True) -> Sampled:
    """Groups of rows drawn from the whole set (of a stream the first), by the run's own settings.

    `longer_too`: whether a few completions are allowed more tokens where many are cut off.
    """
    parts, args = trainer.parts, trainer.args
    rows = sampled_rows(dataset, num_prompts, args.seed)
    prompts = [make_prompt(parts, row, i, index) for i, (index, row) in enumerate(rows)]
    settings = sampling_settings(args, parts.end_ids, num_completions=args.num_generations, round_number=ROUND)
    start = time.perf_counter()
    groups, environments, _ = trainer.rollouts.sample(prompts, settings, PolicyState.of(trainer))
    generate_seconds = time.perf_counter() - start
    reward_seconds, columns = {}, []
    for reward in parts.rewards:
        start = time.perf_counter()
        columns.append(score(groups, [reward], trainer_state=trainer.state, environments=environments))
        reward_seconds[reward.name] = time.perf_counter() - start
    names = tuple(reward.name for reward in parts.rewards)
    scored = tuple(
        ScoredGroup(group=group, names_K=names, rewards_GK=np.hstack([column[i].rewards_GK for column in columns]))
        for i, group in enumerate(groups)
    )
    longer: tuple[int, ...] = ()
    if longer_too and _cut_off(scored).mean() > TRUNCATED_SHARE:
        room = (parts.builder.context_length or 1 << 20) - max(len(group.prompt.token_ids) for group in groups[:8])
        limit, count = min(LONGER * settings.max_tokens, room), min(4, args.num_generations)
        more = dataclasses.replace(settings, max_tokens=limit, num_completions=count)
        again = trainer.rollouts.sample(prompts[:8], more, PolicyState.of(trainer)).groups
        longer = tuple(len(completion.logps) for group in again for completion in group.completions)
    return Sampled(
        groups=scored,
        weights_K=parts.advantage.weights_K,
        generate_seconds=generate_seconds,
        reward_seconds=reward_seconds,
        longer_lengths=longer,
    )


def _cut_off(groups: Sequence[ScoredGroup]) -> np.ndarray:
    """Whether each completion ended at the limit, shape [R]: with a turn, or before what it was to be given."""
    return np.array([c.finish in ("length", "context") for each in groups for c in each.group.completions])


def _has_examples(prompt: Prompt) -> bool:
    turns = prompt.content
    return not isinstance(turns, str) and any(turn.get("role") == "assistant" for turn in turns[:-1])


def diagnose(sampled: Sampled, args: GRPOConfig, accuracy: str | None = None) -> Diagnosis:
    """Numbers of sampled groups, and findings. `accuracy` names the reward that tells right from wrong."""
    groups = sampled.groups
    completions = [completion for each in groups for completion in each.group.completions]
    rewards_RK = np.concatenate([each.rewards_GK for each in groups])
    reward_PG = [combine(each.rewards_GK, sampled.weights_K) for each in groups]
    known = [x[~np.isnan(x)] for x in reward_PG]
    spread = [has_spread(x) for x in known]
    flat = [float(x.mean()) for x, differs in zip(known, spread, strict=True) if x.size and not differs]
    lengths_R = np.array([len(completion.token_ids) for completion in completions])
    repeated = [len(e.group.completions) - len({c.token_ids for c in e.group.completions}) for e in groups]
    low, middle, high = np.quantile(lengths_R, [0.05, 0.5, 0.95]).round().astype(int).tolist()
    names = groups[0].names_K
    logps = np.concatenate([np.asarray(completion.logps) for completion in completions])
    made = Diagnosis(
        num_prompts=len(groups),
        num_completions=len(completions),
        spread_share=float(np.mean(spread)),
        flat_reward=float(np.mean(flat)) if flat else float("nan"),
        mean_reward=float(np.mean(np.concatenate(known))) if any(x.size for x in known) else float("nan"),
        pass_rates=_pass_rates(groups, accuracy),
        rewards=tuple(
            _summary(name, rewards_RK[:, k], lengths_R, sampled.reward_seconds[name]) for k, name in enumerate(names)
        ),
        correlations={
            f"{names[a]} ~ {names[b]}": _correlation(rewards_RK[:, a], rewards_RK[:, b])
            for a, b in combinations(range(len(names)), 2)
        },
        tokens=(low, middle, high),
        truncated_share=float(_cut_off(groups).mean()),
        end_gain=_end_gain(np.concatenate(reward_PG), _cut_off(groups)),
        empty_share=float(np.mean([not drawn_text(completion).strip() for completion in completions])),
        duplicate_share=sum(repeated) / len(completions),
        entropy=float(-logps.mean()),
        unjudged_share=float(np.isnan(rewards_RK).all(axis=1).mean()),
        tokens_per_second=len(logps) / max(sampled.generate_seconds, 1e-9),
        generate_seconds=sampled.generate_seconds,
        has_examples=all(_has_examples(each.group.prompt) for each in groups),
        longer_lengths=sampled.longer_lengths,
    )
    return dataclasses.replace(made, findings=tuple(verdict(made, args)))


def _summary(name: str, values_R: np.ndarray, lengths_R: np.ndarray, seconds: float) -> RewardSummary:
    known = values_R[~np.isnan(values_R)]
    measured = [f(known) for f in (np.mean, np.std, np.min, np.max)] if known.size else [np.nan] * 4
    mean, std, low, high = map(float, measured)
    steps = (low, high) if high > low else (low, low + 1)
    counts = np.histogram(known, bins=_BINS, range=steps)[0].tolist() if known.size else [0] * _BINS
    return RewardSummary(
        name=name,
        mean=mean,
        std=std,
        low=low,
        high=high,
        histogram=tuple(counts),
        none_share=float(np.isnan(values_R).mean()),
        length_correlation=_correlation(values_R, lengths_R.astype(float)),
        seconds=seconds,
    )


def _correlation(a_R: np.ndarray, b_R: np.ndarray) -> float:
    both = ~np.isnan(a_R) & ~np.isnan(b_R)
    a, b = a_R[both], b_R[both]
    if a.size < 3 or a.std() < 1e-12 or b.std() < 1e-12:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _pass_rates(groups: Sequence[ScoredGroup], accuracy: str | None) -> tuple[float, ...]:
    name = accuracy or accuracy_name(groups[0].names_K)
    if name is None:
        return ()
    k = groups[0].names_K.index(name)
    return tuple(float(np.nanmean(np.append(each.rewards_GK[:, k] >= RIGHT, np.nan))) for each in groups)


def _end_gain(reward_R: np.ndarray, cut_R: np.ndarray) -> float:
    known_R = ~np.isnan(reward_R)
    ended, cut = reward_R[known_R & ~cut_R], reward_R[known_R & cut_R]
    size = float(reward_R[known_R].std()) if known_R.any() else 0.0
    return float(ended.mean() - cut.mean()) / size if ended.size and cut.size and size > 1e-9 else float("nan")


def measured_rates(groups: Sequence[ScoredGroup], accuracy: str | None) -> list[dict[str, Any]]:
    """One row a prompt with how often it was solved, for the recipe's key `pass_rates`, as JSONL.

    Raises `ConfigError` where no reward tells right from wrong.
    """
    names = groups[0].names_K
    name = accuracy or accuracy_name(names)
    if name is None:
        raise ConfigError(
            f"none of the rewards {listed(names)} is known to say right or wrong.", fix="accuracy: NAME", names=names
        )
    rows = []
    for each in groups:
        right_G = each.rewards_GK[:, names.index(name)]
        right_G = right_G[~np.isnan(right_G)] >= RIGHT
        if right_G.size:
            content = each.group.prompt.content
            asked = content if isinstance(content, str) else str(content[-1].get("content"))
            rows.append(
                {
                    "fingerprint": fingerprint(content),
                    "pass_rate": round(float(right_G.mean()), 6),
                    "right": int(right_G.sum()),
                    "completions": int(right_G.size),
                    "reward": name,
                    "prompt": asked,
                }
            )
    return rows
