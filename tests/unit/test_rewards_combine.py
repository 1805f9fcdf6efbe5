"""Several rewards as one: the numbers, what they ask for, and how they are written in recipes."""

from __future__ import annotations

import functools
import pickle
from types import SimpleNamespace

import pytest

from podium.errors import ConfigError, RewardError
from podium.recipe.rewards import RewardReader, find_reward
from podium.records import Completion, Group, Prompt
from podium.rewards import (
    RewardModel,
    check_rewards,
    clipped,
    gated,
    library_reward,
    load_reward_models,
    normalised,
    resolve_rewards,
    scheduled,
    score,
    weighted,
)
from podium.rewards.combine import PartFailed
from podium.rewards.score import CallSettings


def column(values, name="values"):
    """A reward that says what stands in a list."""

    def said(completions):
        return list(values)

    said.__name__ = name
    return said


def ask(reward, num, **arguments):
    return reward(completions=["x"] * num, **arguments)


def group(texts, columns, *, chat=False):
    completions = tuple(
        Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in texts
    )
    content = [{"role": "user", "content": "3+4"}] if chat else "3+4="
    return Group(
        prompt=Prompt(id=0, row=0, token_ids=(1,), text="", content=content, columns=columns), completions=completions
    )


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_weighted_leaves_out_what_has_no_opinion():
    reward = weighted([column([1, None, None]), column([1, 2, None])], weights=[2, -0.5])
    assert ask(reward, 3) == [1.5, -1.0, None]


def test_gated():
    reward = gated(column([1, 2, 3, None, 5]), gate=column([1, 0, 0.5, 1, None]), above=0.5, otherwise=-1)
    assert ask(reward, 5) == [1.0, -1.0, -1.0, None, None]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"low": 0}, [0.0, 0.5, 9.0, None]),
        ({"high": 1}, [-3.0, 0.5, 1.0, None]),
        ({"low": 0.7, "high": 0.7}, [0.7] * 3),
    ],
)
def test_clipped(bounds, expected):
    assert ask(clipped(column([-3, 0.5, 9, None]), **bounds), 4)[: len(expected)] == expected


def test_normalised():
    values = column([1, 3, None, 10, 10, 10 + 1e-14])
    prompts = ["a", "a", "a", "b", "b", "b"]
    assert ask(normalised(values), 6, prompts=prompts) == [-1.0, 1.0, None, 0.0, 0.0, 0.0]
    in_range = ask(normalised(column([0, 1, 4]), within="round", scale="range"), 3)
    assert in_range == pytest.approx([-5 / 12, -2 / 12, 7 / 12])
    assert ask(normalised(column([0, 1, 5]), within="round", scale="none"), 3) == [-2.0, -1.0, 3.0]


def test_normalised_of_conversations():
    prompts = [[{"role": "user", "content": text}] for text in "aabb"]
    assert ask(normalised(column([0, 1, 5, 7])), 4, prompts=prompts) == [-1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"steps": 4}, {0: 0.0, 1: 0.25, 4: 1.0, 9: 1.0}),
        ({"steps": 2, "begin": 2, "start": 1, "end": 3}, {0: 1.0, 2: 1.0, 3: 2.0, 4: 3.0}),
        ({}, {0: 0.0, 5: 0.5, 10: 1.0}),  # over the whole run
        ({"schedule": "cosine", "steps": 4}, {0: 0.0, 1: 0.1464466094, 2: 0.5, 4: 1.0}),
        ({"schedule": "steps", "at": {3: 0.5, 6: 2}, "start": 0.1}, {0: 0.1, 2: 0.1, 3: 0.5, 5: 0.5, 6: 2.0}),
    ],
)
def test_scheduled(settings, weights):
    reward, logged = scheduled(column([2.0, None]), **settings), {}
    for step, weight in weights.items():
        state = SimpleNamespace(global_step=step, max_steps=10)
        assert ask(reward, 2, trainer_state=state, log_metric=logged.__setitem__) == [pytest.approx(2 * weight), None]
        assert logged["rewards/scheduled_values/weight"] == pytest.approx(weight)


# --- what they ask for -----------------------------------------------------------------------------------------------


def test_a_combination_asks_for_what_its_parts_ask_for():
    def first(completions, answer, level=None):
        return [float(answer[0])] * len(completions)

    def second(prompts, completion_ids):
        return [1.0] * len(prompts)

    [reward] = resolve_rewards(gated(first, gate=weighted([second, "answer_correct"])))
    assert set(reward.needs) == {"completions", "answer", "prompts", "completion_ids"}
    assert reward.wants == {*reward.needs, "level", "log_metric"}
    with pytest.raises(RewardError, match=r"gated_first.* needs `answer`.*\n.*Columns: solution"):
        check_rewards([reward], ["prompt", "solution"])


def test_a_part_with_kwargs_gets_everything():
    seen = {}

    def everything(completions, **kwargs):
        seen.update(kwargs)
        return [0.0] * len(completions)

    rewards = resolve_rewards([clipped(everything, high=1), clipped("answer_correct", high=1)])
    score([group(["7"], {"answer": "7", "level": 3})], rewards, trainer_state=SimpleNamespace(global_step=1))
    assert set(seen) == {"prompts", "completion_ids", "answer", "level", "trainer_state", "log_extra", "log_metric"}
    assert rewards[0].wants is None
    assert "level" not in rewards[1].wants


@pytest.mark.parametrize("chat", [False, True])
def test_through_the_boundary(chat):
    logged = {}
    tree = gated({"name": "numeric_match", "args": {"tolerance": 0.5}}, gate="answer_format", above=0.5)
    rewards = resolve_rewards([tree, weighted([tree, "answer_correct"], weights=[1, 10])])
    groups = [group(["<answer>7</answer>", "<answer>7.4</answer>", "7"], {"answer": "7"}, chat=chat)]
    (scored,) = score(groups, rewards, log_metric=logged.__setitem__)
    assert scored.names_K == ("gated_numeric_match", "weighted")
    assert scored.rewards_GK.tolist() == [[1, 11], [1, 1], [0, 0]]
    assert logged["rewards/gated_numeric_match/numeric_match/mean"] == 1.0
    assert logged["rewards/weighted/answer_correct/mean"] == pytest.approx(1 / 3)


def test_async_parts_run_together():
    order = []

    async def slow(completions, name):
        order.append(f"{name} starts")
        await __import__("asyncio").sleep(0.01)
        order.append(f"{name} ends")
        return [1.0] * len(completions)

    parts = [functools.partial(slow, name="a"), functools.partial(slow, name="b"), "exact_match"]
    [reward] = resolve_rewards(weighted(parts))
    assert reward.is_async
    (scored,) = score([group(["7", "8"], {"answer": "7"})], [reward])
    assert scored.rewards_GK.tolist() == [[3], [2]]
    assert order[:2] == ["a starts", "b starts"]


@pytest.mark.parametrize(
    ("returned", "text"),
    [([1.0], "1 values for 2"), ([1.0, "1"], "str '1'"), ([1.0, float("nan")], "NaN"), (1.0, "expected a list of 2")],
)
def test_a_part_that_returns_nonsense_is_named(returned, text):
    def broken(completions):
        return returned

    with pytest.raises(PartFailed, match=rf"(?s)`broken` .*{text}"):
        ask(clipped(broken, high=1), 2)


def test_an_error_in_a_part_shows_the_users_file():
    def broken(completions, answer):
        return [1 / 0 for _ in completions]

    with pytest.raises(RewardError) as raised:
        score([group(["7"], {"answer": "7"})], resolve_rewards(clipped(broken, high=1)))
    assert "ZeroDivisionError" in str(raised.value)
    assert "rewards/combine.py" not in str(raised.value).split("\n", 1)[1]


def test_combinations_can_be_sent_to_another_process():
    reward = pickle.loads(pickle.dumps(scheduled(weighted(["exact_match", "answer_format"]), steps=10)))
    state = SimpleNamespace(global_step=5)
    assert reward(completions=["7"], answer=["7"], trainer_state=state) == [0.5]


# --- in recipes ------------------------------------------------------------------------------------------------------


def test_nested_in_a_recipe(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brief(completions, limit):\n    return [1.0 * (len(c) < limit) for c in completions]\n"
    )
    parts = ["exact_match", {"function": "mine.py:brief", "args": {"limit": 3}, "weight": 0.5}]
    entry = {"name": "gated", "weight": 2, "args": {"reward": {"name": "weighted", "args": {"rewards": parts}},
                                                    "gate": "answer_format", "above": -1}}  # fmt: skip
    reader = RewardReader(folder=tmp_path, where=str)
    [spec] = reader.read([entry], "rewards")
    assert not reader.problems
    assert spec.weight == 2
    assert spec.function(completions=["7", "12345"], answer=["7", "7"]) == [1.5, 0.0]


def test_reward_models_inside_are_found(monkeypatch):
    loaded = []
    monkeypatch.setattr(RewardModel, "load", lambda self: loaded.append(self.__name__))
    load_reward_models(resolve_rewards([clipped(find_reward("normalised", {"reward": "org/judge"}), high=1)]))
    assert loaded == ["judge"]


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("gated", {"reward": "exact_match"}, "needs `gate`"),
        ("gated", {"reward": "exact_mach", "gate": "answer_format"}, "Did you mean `exact_match`"),
        ("gated", {"reward": "exact_match", "gate": "answer_format", "above": "1"}, "`above` must be a finite"),
        ("gated", {"reward": {"name": "exact_match", "wait": 1}, "gate": "answer_format"}, "Did you mean `weight`"),
        ("gated", {"reward": {"name": "exact_match", "weight": 1}, "gate": "answer_format"}, "`weight` has no meaning"),
        ("gated", {"reward": 7, "gate": "answer_format"}, "a part of `gated` is a reward"),
        ("clipped", {"reward": {"args": {}}, "high": 1}, "needs a `name`"),
        ("clipped", {"reward": "exact_match"}, "needs `low` or `high`"),
        ("clipped", {"reward": "exact_match", "low": 2, "high": 1}, "`low` not above `high`"),
        ("weighted", {"rewards": "exact_match"}, "needs a list"),
        ("weighted", {"rewards": []}, "needs a list"),
        ("weighted", {"rewards": ["exact_match"], "weights": [1, 2]}, "one number as weight"),
        ("weighted", {"rewards": [{"name": "exact_match", "weight": "much"}]}, "one number as weight"),
        ("normalised", {"reward": "exact_match", "within": "groups"}, "Did you mean `group`"),
        ("scheduled", {"reward": "exact_match", "schedule": "linar"}, "Did you mean `linear`"),
        ("scheduled", {"reward": "exact_match", "schedule": "steps"}, "takes `at`"),
        ("scheduled", {"reward": "exact_match", "at": {1: 2}}, "takes `at`"),
        ("scheduled", {"reward": "exact_match", "steps": 0}, "`steps` must be 1 or more"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(name, settings, text):
    with pytest.raises(ConfigError, match=text):
        library_reward(name, **settings)


def test_a_failing_part_is_an_error_of_the_combination():
    def broken(completions):
        return [1.0]

    groups = [group(["7", "8"], {"answer": "7"})]
    rewards = resolve_rewards([clipped(broken, high=1), library_reward("exact_match")])
    with pytest.raises(RewardError, match=r"(?s)clipped_broken.*PartFailed: .*`broken` .* 1 values for 2"):
        score(groups, rewards)
    (scored,) = score(groups, rewards, settings=CallSettings(on_error="none"))
    assert str(scored.rewards_GK.tolist()) == "[[nan, 1.0], [nan, 0.0]]"
