"""Successes of earlier rounds, for groups in which all completions failed.

    replay = SuccessReplay(num_completions=1, names_K=("match",))
    group = replay.filled(scored, weights_K)                      # stored successes in place of its last completions
    replay = replay.after(successes([scored], weights_K), weights_K)

A group whose rewards are all equal has no advantage. Where its row was answered better before, stored successes take
the place of some of its completions, as ARPO does for groups of failures (arXiv:2505.16282). They bring their rewards
and the log-probabilities of the policy that sampled them, so that the ratio of the loss is, as in off-policy GRPO
(RePO, arXiv:2506.09340; ExGRPO, arXiv:2510.02245),

    rho_it = pi(token) / pi_sampler(token)

with the clip of every ratio. Advantages are those of the group with them in it.

Shape letters: G completions per prompt, K reward functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from podium.algorithm.advantages import FLAT, combine, has_spread
from podium.records import Completion, Prompt, ScoredGroup

MOST_TOKENS = 2**20
"""Tokens of all stored completions; beyond it, the rows whose last success is oldest are forgotten."""


class Success(NamedTuple):
    """A completion that was the best of its group, with what reward functions said of it."""

    completion: Completion
    rewards_K: tuple[float, ...]
    """NaN for None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessReplay:
    """The best completions of each row, of those of equal reward the latest."""

    num_completions: int
    """Most of a row, and most that a group gets."""
    names_K: tuple[str, ...]
    """Of the reward functions."""
    rows: Mapping[str, tuple[Success, ...]] = field(default_factory=dict)
    """By `row_key`; the row that succeeded last is the last one."""

    def filled(self, scored: ScoredGroup, weights_K: np.ndarray) -> ScoredGroup:
        """The group with stored completions of a higher reward in place of its last ones; itself unless it is flat."""
        reward_G = combine(scored.rewards_GK, weights_K)
        if has_spread(reward_G) or np.isnan(reward_G).all():
            return scored
        above = np.nanmax(reward_G) + FLAT
        stored = self.rows.get(row_key(scored.group.prompt), ())
        better = [each for each in stored if _total(each, weights_K) > above]
        kept = scored.num_completions - len(better)
        if not better:
            return scored
        completions = (*scored.group.completions[:kept], *(each.completion for each in better))
        return replace(
            scored,
            group=replace(scored.group, completions=completions),
            rewards_GK=np.concatenate([scored.rewards_GK[:kept], [each.rewards_K for each in better]]),
            extras={name: (*values[:kept], *[None] * len(better)) for name, values in scored.extras.items()},
        )

    def after(self, found: Iterable[tuple[str, Success]], weights_K: np.ndarray) -> SuccessReplay:
        """The store with the successes of one more round, by their rows."""
        rows = dict(self.rows)
        for key, success in found:
            total, ids = _total(success, weights_K), success.completion.token_ids
            held = [each for each in rows.pop(key, ()) if each.completion.token_ids != ids]
            held = [each for each in held if _total(each, weights_K) >= total - FLAT]
            if not any(_total(each, weights_K) > total + FLAT for each in held):
                held = [*held, success][-self.num_completions :]
            rows[key] = tuple(held)
        sizes = {key: sum(len(each.completion.token_ids) for each in held) for key, held in rows.items()}
        excess = sum(sizes.values()) - MOST_TOKENS
        for key, size in sizes.items():
            if excess <= 0:
                break
            del rows[key]
            excess -= size
        return replace(self, rows=rows)

    # ---- for checkpoints ----

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; JSON keeps every bit of a float."""
        return {
            "names": self.names_K,
            "rows": {key: [_plain(each) for each in held] for key, held in self.rows.items()},
        }

    def restored(self, saved: Mapping[str, Any]) -> SuccessReplay:
        """With what `to_json` wrote; with nothing where other functions gave the rewards."""
        if tuple(saved["names"]) != self.names_K:
            return self
        rows = {key: tuple(map(_success, held[-self.num_completions :])) for key, held in saved["rows"].items()}
        return replace(self, rows=rows)


def successes(
    scored: Sequence[ScoredGroup], weights_K: np.ndarray, *, ended: bool = False
) -> Iterator[tuple[str, Success]]:
    """The best completions of each group whose rewards differ, by their rows. `ended`: only those that are complete."""
    for each in scored:
        reward_G = combine(each.rewards_GK, weights_K)
        if not has_spread(reward_G):
            continue
        for g in np.flatnonzero(reward_G >= np.nanmax(reward_G) - FLAT):
            completion = each.group.completions[g]
            if not (ended and completion.finish == "length"):
                yield row_key(each.group.prompt), Success(completion, tuple(each.rewards_GK[g].tolist()))


def row_key(prompt: Prompt) -> str:
    """A row by its contents, so that it is the same one wherever it stands: its tokens and its other columns."""
    return hashlib.sha256(repr((prompt.token_ids, dict(prompt.columns))).encode()).hexdigest()[:16]


def _total(success: Success, weights_K: np.ndarray) -> float:
    return float(combine(np.array(success.rewards_K), weights_K))


def _plain(success: Success) -> dict[str, Any]:
    completion, rewards = success.completion, [None if math.isnan(x) else x for x in success.rewards_K]
    names = ("token_ids", "finish", "text", "policy_step")
    own = {name: getattr(completion, name) for name in names}
    return {**own, "logps": [float(x) for x in completion.logps], "rewards": rewards}


def _success(saved: Mapping[str, Any]) -> Success:
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    rewards = fields.pop("rewards")
    return Success(Completion(**fields), tuple(math.nan if x is None else x for x in rewards))
