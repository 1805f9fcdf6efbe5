"""verl's `compute_score` wherever a reward is taken."""

from __future__ import annotations

import asyncio
import functools

import pytest

from podium.errors import RewardError
from podium.recipe.rewards import RewardReader
from podium.records import Completion, Group, Prompt
from podium.rewards import check_rewards, gated, resolve_rewards, score

FILE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": (solution_str == ground_truth) + bonus, "where": data_source, **(extra_info or {})}
"""


def groups(columns, texts=("7", "17"), *, chat=False):
    content = [{"role": "user", "content": "3+4"}] if chat else "3+4="
    completions = tuple(
        Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in texts
    )
    prompt = Prompt(id=0, row=0, token_ids=(1,), text="", content=content, columns=columns)
    return [Group(prompt=prompt, completions=completions)]


def plain(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "columns", [{"ground_truth": "7"}, {"reward_model": {"style": "rule", "ground_truth": "7"}, "data_source": "sums"}]
)
def test_called_for_each_completion(columns, chat):
    rewards = resolve_rewards([plain, gated(plain, gate=lambda completions: [1.0] * len(completions))])
    check_rewards(rewards, ["prompt", *columns])
    (scored,) = score(groups(columns, chat=chat), rewards)
    assert scored.names_K == ("plain", "gated_plain")
    assert scored.rewards_GK.tolist() == [[1, 1], [0, 0]]


def test_from_a_file_with_settings_and_more_than_a_number(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    reader = RewardReader(folder=tmp_path, where=str)
    [spec] = reader.read([{"function": "mine.py:compute_score", "args": {"bonus": 0.5}}], "rewards")
    assert not reader.problems
    columns = {"data_source": "sums", "ground_truth": "7", "extra_info": {"level": 3}}
    rewards = resolve_rewards([spec.function])
    assert rewards[0].name == "compute_score"
    (scored,) = score(groups(columns), rewards)
    assert scored.rewards_GK.tolist() == [[1.5], [0.5]]
    assert scored.extras == {"where": ("sums", "sums"), "level": (3, 3)}


def test_async_ones_run_together():
    running = []

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        running.append(solution_str)
        while len(running) < 2:  # else never ends
            await asyncio.sleep(0.001)
        return float(solution_str == ground_truth)

    [reward] = resolve_rewards(compute_score)
    assert reward.is_async
    (scored,) = score(groups({"ground_truth": "7"}), [reward])
    assert scored.rewards_GK.tolist() == [[1], [0]]


def test_other_columns_and_presets():
    def compute_score(data_source, solution_str, ground_truth, level, factor):
        return factor * level

    rewards = resolve_rewards(functools.partial(compute_score, factor=2))
    assert rewards[0].needs == ("completions", "level")
    (scored,) = score(groups({"ground_truth": "7", "level": 3}), rewards)
    assert scored.rewards_GK.tolist() == [[6], [6]]


def test_no_gold_is_said_before_anything_is_loaded():
    rewards = resolve_rewards([plain])
    with pytest.raises(RewardError, match=r"`plain` \(.*test_rewards_verl.py:\d+\) needs one of the columns"):
        check_rewards(rewards, ["prompt", "answer"])
    with pytest.raises(RewardError, match="needs the column `ground_truth`"):
        score(groups({"answer": "7"}), rewards)


@pytest.mark.parametrize(
    ("returned", "text"), [("1.0", "str '1.0'"), ({"points": 1}, "without `score`; it has points"), ([1.0], "list")]
)
def test_what_is_no_score(returned, text):
    def compute_score(data_source, solution_str, ground_truth):
        return returned

    with pytest.raises(RewardError, match=f"`compute_score`.*{text}"):
        score(groups({"ground_truth": "7"}), resolve_rewards(compute_score))
