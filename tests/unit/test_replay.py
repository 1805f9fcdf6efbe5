"""The store of successes against a plain dictionary, the selection against all subsets, and their rules."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from podium import GRPOConfig
from podium.algorithm.advantages import max_variance
from podium.errors import ConfigError, overrule
from podium.records import Completion, Group, Prompt, ScoredGroup
from podium.trainer import replay as replay_module
from podium.trainer.replay import SuccessReplay, row_key, successes
from podium.trainer.training_groups import joined, selection

WEIGHTS = np.array([1.0, 2.0])
NAMES = ("form", "match")


def group(row: int, rewards_GK: Sequence[Sequence[float]], *, step: int = 0, finish: Any = "stop") -> ScoredGroup:
    """A group whose completions have tokens of their own, or, with the same step, the same ones."""
    prompt = Prompt(id=row, row=row, token_ids=(row,), text=str(row), content=str(row), columns={"answer": row})
    completions = tuple(
        Completion(token_ids=(step, g), logps=(-0.1 * step, -0.3), finish=finish, text=f"{step}.{g}", policy_step=step)
        for g in range(len(rewards_GK))
    )
    rewards = np.array(rewards_GK, np.float64)
    extras = {"seen": tuple(range(len(rewards_GK)))}
    return ScoredGroup(
        group=Group(prompt=prompt, completions=completions), names_K=NAMES, rewards_GK=rewards, extras=extras
    )


def stored(*groups: ScoredGroup, count: int = 1) -> SuccessReplay:
    replay = SuccessReplay(num_completions=count, names_K=NAMES)
    for each in groups:
        replay = replay.after(successes([each], WEIGHTS), WEIGHTS)
    return replay


def texts(scored: ScoredGroup) -> list[str]:
    return [each.text for each in scored.group.completions]


ALL_WRONG = [[0.5, 0.0]] * 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_store_keeps_the_latest_of_the_best(count: int) -> None:
    rng = np.random.default_rng(0)
    rounds = [group(row, rng.integers(0, 2, (4, 2)), step=step) for step in range(12) for row in range(3)]
    expected: dict[str, list[tuple[float, str]]] = {}
    for each in rounds:
        totals = [float(x @ WEIGHTS) for x in each.rewards_GK]
        key = row_key(each.group.prompt)
        if len(set(totals)) > 1:
            expected.setdefault(key, []).extend(zip(totals, texts(each), strict=True))
    found = stored(*rounds, count=count).rows
    assert found.keys() == expected.keys()
    for key, seen in expected.items():
        best = [text for total, text in seen if total == max(seen)[0]]
        assert [each.completion.text for each in found[key]] == best[-count:]


def test_stored_successes_take_the_last_places_of_a_group_that_failed() -> None:
    replay = stored(group(5, [[1, 1], [1, 0], [1, 1], [1, 1]], step=3), count=2)
    wrong = group(5, ALL_WRONG, step=9)
    filled = replay.filled(wrong, WEIGHTS)
    assert texts(filled) == ["9.0", "9.1", "3.2", "3.3"]
    assert filled.rewards_GK.tolist() == [[0.5, 0.0], [0.5, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert filled.extras == {"seen": (0, 1, None, None)}
    assert [each.policy_step for each in filled.group.completions] == [9, 9, 3, 3]
    assert filled.group.completions[2].logps == (pytest.approx(-0.3), -0.3)


@pytest.mark.parametrize(
    "scored",
    [
        group(5, [[0.5, 0], [0.5, 0], [0.5, 0], [1, 0]], step=9),  # it differs
        group(5, [[1, 1]] * 4, step=9),  # all are as good as what is stored
        group(5, [[math.nan, math.nan]] * 4, step=9),  # nothing was said of it
        group(6, ALL_WRONG, step=9),  # another row
    ],
    ids=["differs", "solved", "unscored", "other"],
)
def test_other_groups_stay_as_they_are(scored: ScoredGroup) -> None:
    assert stored(group(5, [[1, 1], [1, 0], [1, 0], [1, 0]])).filled(scored, WEIGHTS) is scored


def test_a_row_is_told_by_its_contents() -> None:
    replay = stored(group(5, [[1, 1], [0, 0]]))
    wrong = group(5, ALL_WRONG, step=9)
    moved = replace(wrong, group=replace(wrong.group, prompt=replace(wrong.group.prompt, row=70, id=1)))
    assert replay.filled(moved, WEIGHTS) is not moved
    other = replace(wrong, group=replace(wrong.group, prompt=replace(wrong.group.prompt, columns={"answer": 6})))
    assert replay.filled(other, WEIGHTS) is other


def test_the_same_text_is_stored_once_and_a_cut_one_only_where_it_is_trained_on() -> None:
    twice = stored(*[group(1, [[1, 1], [0, 0]], step=2)] * 2, count=3)
    assert [[each.completion.text for each in held] for held in twice.rows.values()] == [["2.0"]]
    cut = [group(1, [[1, 1], [0, 0]], finish="length")]
    assert not [*successes(cut, WEIGHTS, ended=True)]
    assert len([*successes(cut, WEIGHTS)]) == 1


def test_it_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "MOST_TOKENS", 6)
    rows = [group(row, [[1, 1], [0, 0]], step=step) for step, row in enumerate([0, 1, 2, 0, 3])]
    assert [*stored(*rows).rows] == [row_key(rows[i].group.prompt) for i in (2, 3, 4)]


def test_a_checkpoint_has_all_of_it() -> None:
    replay = stored(group(1, [[math.nan, 1], [0, 0]], step=3), group(2, [[0.1, 0], [0.3, 0]], step=4), count=2)
    again = SuccessReplay(num_completions=2, names_K=NAMES).restored(json.loads(json.dumps(replay.to_json())))
    assert repr(again) == repr(replay)  # NaN is not equal to itself
    assert not SuccessReplay(num_completions=2, names_K=("form",)).restored(replay.to_json()).rows


def test_the_selection_has_the_largest_variance_of_all() -> None:
    rng = np.random.default_rng(1)
    for size, count in itertools.product((4, 6, 8), (2, 3, 4)):
        for _ in range(20):
            reward_G = rng.integers(0, 4, size) / 3
            index = max_variance(reward_G, count)
            assert index.tolist() == sorted(set(index.tolist()))
            most = max(np.var(each) for each in itertools.combinations(reward_G, count))
            assert np.var(reward_G[index]) == pytest.approx(most if np.ptp(reward_G) else 0.0)
    assert max_variance(np.array([1.0, 1.0, 1.0]), 2).tolist() == [0, 1]
    assert max_variance(np.array([math.nan, 0.0, math.nan, 1.0]), 3).tolist() == [0, 1, 3]


def test_groups_are_joined_and_selected_with_all_their_columns() -> None:
    both = joined(group(1, [[1, 0], [0, 0]], step=1), group(1, [[0, 1]], step=2))
    assert texts(both) == ["1.0", "1.1", "2.0"]
    kept = selection(both, np.array([0, 2]))
    assert texts(kept) == ["1.0", "2.0"]
    assert kept.rewards_GK.tolist() == [[1, 0], [0, 1]]
    assert kept.extras == {"seen": (0, 0)}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"replay_successes": 8}, "would take the place of a whole group"),
        ({"replay_successes": 1, "num_train_epochs": 1}, "every row comes once"),
        ({"extra_completions": 4, "dynamic_sampling": True}, "two ways with groups without spread"),
        ({"replay_successes": 1, "use_vllm": True, "top_p": 0.9}, "vLLM's are of what top_p"),
        ({"replay_successes": 1, "use_vllm": True, "generation_kwargs": {"top_k": 5}}, "vLLM's are of what top_p"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        GRPOConfig("out", **settings)
    assert raised.value.code == "C067"
    assert not overrule("C067")


def test_what_can_is_not() -> None:
    GRPOConfig("out", replay_successes=7, extra_completions=4)
    GRPOConfig("out", replay_successes=1, num_train_epochs=1, success_history=True)
    GRPOConfig("out", replay_successes=1, num_train_epochs=1, max_steps=9)
    GRPOConfig("out", replay_successes=1, dynamic_sampling=True, top_p=0.9)
