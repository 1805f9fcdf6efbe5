"""The reward boundary: who is called with what, what may come back, and what is said of everything else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
import threading
from array import array
from collections import deque
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from podium.errors import ConfigError, RewardError
from podium.isolation.threads import background_loop
from podium.records import Completion, Group, Prompt
from podium.rewards import check_rewards, resolve_rewards, resolve_weights, score
from podium.rewards.score import StandIns, repeat_findings, warn_of_values


def make_group(row, texts, *, chat=False, **columns):
    content = [{"role": "user", "content": f"q{row}"}] if chat else f"q{row}"
    completions = tuple(
        Completion(token_ids=(row, g), logps=(0.0, 0.0), finish="stop", text=text, policy_step=0)
        for g, text in enumerate(texts)
    )
    prompt = Prompt(id=row, row=row, token_ids=(1,), text=f"q{row}", content=content, columns=columns)
    return Group(prompt=prompt, completions=completions)


GROUPS = [make_group(10, ["a", "bb"], answer="a", level=1), make_group(11, ["ccc", "d"], answer="x", level=2)]
CHAT = [make_group(10, ["a", "bb"], chat=True, answer="a"), make_group(11, ["ccc"], chat=True, answer="x")]


def run(*functions, groups=GROUPS, **settings):
    return score(groups, resolve_rewards(list(functions)), **settings)


def values(*functions, groups=GROUPS):
    return [scored.rewards_GK.tolist() for scored in run(*functions, groups=groups)]


# --- what a function is called with ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reward", "loss", "kl", "rewards/right/mean", "eval_reward", "learning_rate"])
def test_a_metric_of_podiums_own_name_is_recorded_beside_it(name, caplog):
    def right(completions, log_metric):
        log_metric(name, 99.0)
        log_metric("reward_of_my_own", 1.0)
        return [0.0] * len(completions)

    logged = {}
    with caplog.at_level(logging.WARNING, logger="podium"):
        for _ in range(2):
            run(right, log_metric=logged.__setitem__)
    assert logged == {f"custom/{name}": 99.0, "reward_of_my_own": 1.0}
    assert sum(f"`{name}`" in message for message in caplog.messages) == 1


def test_one_call_for_the_round_with_all_that_trl_gives():
    calls = []
    state, metrics = SimpleNamespace(global_step=3), []

    def reward(**kwargs):
        calls.append(kwargs)
        kwargs["log_metric"]("share", 0.5)
        return [0.0] * len(kwargs["completions"])

    run(reward, trainer_state=state, log_metric=lambda name, value: metrics.append((name, value)))
    (call,) = calls
    assert call.pop("trainer_state") is state
    assert callable(call.pop("log_extra"))
    assert callable(call.pop("log_metric"))
    assert call == {
        "prompts": ["q10", "q10", "q11", "q11"],
        "completions": ["a", "bb", "ccc", "d"],
        "completion_ids": [[10, 0], [10, 1], [11, 0], [11, 1]],
        "answer": ["a", "a", "x", "x"],
        "level": [1, 1, 2, 2],
    }
    assert metrics == [("share", 0.5)]


def test_conversations_come_as_messages():
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0] * 3

    run(reward, groups=CHAT)
    assert seen["prompts"][2] == [{"role": "user", "content": "q11"}]
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in ("a", "bb", "ccc")]


def test_only_what_the_signature_names_is_passed():
    def reward(completions, level, missing="default"):
        assert missing == "default"
        return [float(each) for each in level]

    assert values(reward) == [[[1.0], [1.0]], [[2.0], [2.0]]]


def test_rows_with_different_keys():
    groups = [make_group(0, ["a"], answer="x"), make_group(1, ["b"], hint="y")]
    seen = {}

    def reward(answer, hint, completions):
        seen.update(answer=answer, hint=hint)
        return [0, 0]

    run(reward, groups=groups)
    assert seen == {"answer": ["x", None], "hint": [None, "y"]}


def test_inputs_are_copies():
    group = make_group(0, ["a", "b"], chat=True, tests=["t1", {"k": [1]}], table=np.ones(2))
    seen = []

    def vandal(prompts, completions, completion_ids, tests, table):
        prompts[0].clear()
        completions[0][0]["content"] = "changed"
        completion_ids[0].append(99)
        tests[0][1]["k"].append(2)
        table[0][0] = 7
        completions.clear()
        return [0, 0]

    def honest(prompts, completions, completion_ids, tests, table):
        seen.append((prompts[0], completions[0], completion_ids[0], tests, table[0].tolist()))
        return [0, 0]

    run(vandal, honest, groups=[group])
    tests = ["t1", {"k": [1]}]
    chat = [{"role": "user", "content": "q0"}]
    assert seen == [(chat, [{"role": "assistant", "content": "a"}], [0, 0], [tests, tests], [1.0, 1.0])]
    assert group.prompt.content == chat
    assert group.prompt.columns["tests"] == tests


def test_objects_are_passed_as_they_are():
    lock = threading.Lock()  # cannot be copied
    seen = []
    run(lambda completions, handle: seen.append(handle) or [0], groups=[make_group(0, ["a"], handle=lock)])
    assert seen == [[lock]]


# --- which callables -------------------------------------------------------------------------------------------------


def length(completions, **kwargs):
    return [len(each) for each in completions]


async def async_length(completions, **kwargs):
    await asyncio.sleep(0)
    return [len(each) for each in completions]


class Lengths:
    def __call__(self, completions, **kwargs):
        return length(completions)


class AsyncLengths:
    async def __call__(self, completions, **kwargs):
        return await async_length(completions)


class Methods:
    def reward(self, completions):
        return length(completions)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@decorated
def narrow(completions):
    return length(completions)


def scaled(completions, factor, **kwargs):
    return [factor * len(each) for each in completions]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (length, "length"),
        (async_length, "async_length"),
        (functools.partial(async_length, extra=1), "async_length"),
        (functools.partial(scaled, factor=1), "scaled"),
        (functools.partial(functools.partial(scaled, factor=2), factor=1), "scaled"),
        (Lengths(), "Lengths"),
        (AsyncLengths(), "AsyncLengths"),
        (functools.partial(AsyncLengths()), "AsyncLengths"),
        (Methods().reward, "reward"),
        (narrow, "narrow"),
        (lambda completions: length(completions), "<lambda>"),
    ],
)
def test_callables(function, name):
    (first, second) = run(function)
    assert first.names_K == (name,)
    assert first.rewards_GK.tolist() == [[1.0], [2.0]]
    assert second.rewards_GK.tolist() == [[3.0], [1.0]]
    assert first.rewards_GK.dtype == np.float64
    assert first.group is GROUPS[0]


def test_two_of_one_name_are_told_apart():
    rewards = resolve_rewards([lambda completions: [0], length, length, lambda completions: [1], length])
    assert [each.name for each in rewards] == ["<lambda>", "length", "length_2", "<lambda>_2", "length_3"]

    def length_2(completions):
        return [0]

    names = [each.name for each in resolve_rewards([length, length, length_2])]
    assert names == ["length", "length_3", "length_2"]


def test_columns_keep_the_order_of_the_functions():
    zero = lambda completions: [0] * 4  # noqa: E731
    assert values(async_length, zero, length)[0] == [[1.0, 0.0, 1.0], [2.0, 0.0, 2.0]]


def test_async_functions_run_at_the_same_time():
    together = asyncio.Event()

    async def first(completions):
        await asyncio.wait_for(together.wait(), timeout=5)
        return [1] * 4

    async def second(completions):
        together.set()
        return [2] * 4

    assert values(first, second)[0] == [[1.0, 2.0], [1.0, 2.0]]


def test_called_inside_a_running_loop():
    async def outer():
        return values(async_length)

    assert asyncio.run(outer())[0] == [[1.0], [2.0]]


def test_a_single_function_a_tuple_and_the_users_list():
    assert [each.name for each in resolve_rewards(length)] == ["length"]
    assert [each.name for each in resolve_rewards((length, Lengths()))] == ["length", "Lengths"]
    mine = [length, "org/model"]
    resolve_rewards(mine)
    assert mine == [length, "org/model"]


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        (None, "No reward source provided"),
        ([], "No reward source provided"),
        ([length, 5], r"reward_funcs\[1\] is int 5"),
        ([Lengths], r"reward_funcs\[0\] is the class Lengths; pass an instance"),
        ([lambda completions, /: [0]], "by position only"),
    ],
)
def test_what_is_no_reward(rewards, text):
    with pytest.raises(ConfigError, match=text):
        resolve_rewards(rewards)


def test_counts_that_must_match():
    with pytest.raises(ConfigError, match=r"processing classes \(1\) must match .* \(2\)"):
        resolve_rewards([length, length], [None])
    with pytest.raises(ConfigError, match=r"weights \(2\) must match number of reward functions \(1\): .*length"):
        resolve_weights([1.0, 2.0], length)
    with pytest.raises(ConfigError, match="finite"):
        resolve_weights([math.nan], [length])
    assert resolve_weights([1, 2], [length, "org/model"]) == (1.0, 2.0)
    assert resolve_weights(None, resolve_rewards([length, length])) == (1.0, 1.0)


# --- what is needed --------------------------------------------------------------------------------------------------


def needy(completions, solution, promts, prompt, factor=2, *, answr):
    return []


def test_missing_arguments_are_found_before_the_run():
    rewards = resolve_rewards([needy, length])
    with pytest.raises(RewardError) as caught:
        check_rewards(rewards, ["prompt", "answer", "level"])
    message = str(caught.value)
    assert message.count("`needy` (") == 4
    assert "test_score.py:" in message
    assert "needs `solution`, which is neither a column nor given to every reward. Did you mean `answer`?" in message
    assert "needs `promts`, which is neither a column nor given to every reward. Did you mean `prompts`?" in message
    assert "needs `answr`, which is neither a column nor given to every reward. Did you mean `answer`?" in message
    assert "Columns: answer, level." in message
    assert "factor" not in message


def test_what_is_given_is_not_missed():
    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer):
        return []

    check_rewards(resolve_rewards([reward, functools.partial(scaled, factor=2)]), ["prompt", "answer"])
    with pytest.raises(RewardError, match=r"`scaled` .* needs `factor`"):
        check_rewards(resolve_rewards([scaled]), ["prompt"])


# --- what may come back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        [0.0, 1.0, 2.0, 0.5],
        (0, 1, 2, 0.5),
        [False, True, 2, Fraction(1, 2)],
        [np.float32(0), np.int64(1), np.array(2.0), np.bool_(False) + 0.5],
        [torch.tensor(0), torch.tensor(1.0, requires_grad=True), torch.tensor(2, dtype=torch.bfloat16), 0.5],
        np.array([0, 1, 2, 0.5], dtype=np.float16),
        torch.tensor([0, 1, 2, 0.5], requires_grad=True),
        deque([0, 1, 2, 0.5]),
        pd.Series([0, 1, 2, 0.5], index=[7, 5, 3, 1]),
        {"a": 0, "b": 1, "c": 2, "d": 0.5}.values(),
        array("d", [0, 1, 2, 0.5]),
    ],
)
def test_good_answers(answer):
    assert values(lambda completions: answer) == [[[0.0], [1.0]], [[2.0], [0.5]]]


@pytest.mark.parametrize("made", [lambda each: (x for x in each), functools.partial(map, float), iter])
def test_iterators_are_read(made):
    def scored(completions):
        return made([0, 1, 2, 0.5])

    async def scored_later(completions):
        return made([0, 1, 2, 0.5])

    assert values(scored) == values(scored_later) == [[[0.0], [1.0]], [[2.0], [0.5]]]


def test_what_a_generator_raises_is_raised_by_the_function():
    def culprit(completions):
        for text in completions:
            yield 1 / (len(text) - 2)

    with pytest.raises(RewardError) as caught:
        run(culprit)
    assert caught.value.code == "W010"
    assert "completion 2 of 2: 'bb'" in str(caught.value)
    assert "reward_results.py" not in str(caught.value)


def test_an_iterator_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("podium.isolation.reward_results.MOST_VALUES", 1_000)
    with pytest.raises(RewardError) as caught:
        run(lambda completions: itertools.repeat(1.0))
    assert caught.value.code == "W003"


def test_none_is_nan():
    (first, second) = run(lambda completions: [None, 1, None, 0], length)
    np.testing.assert_array_equal(first.rewards_GK, [[np.nan, 1], [1, 2]])
    np.testing.assert_array_equal(second.rewards_GK, [[np.nan, 3], [0, 1]])


async def unfinished(completions):
    return [0] * 4


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "returned None; expected a list of 4 numbers(.|\n)*without `return`"),
        (0.5, "returned float 0.5; expected a list of 4"),
        (np.float64(0.5), "returned float64"),
        ("1234", "returned str '1234'; expected a list"),
        ({"reward": [1]}, "returned dict"),
        ({1, 2, 3, 4}, "returned set"),
        ({"a": 1}.keys(), "returned dict_keys"),
        (b"1234", "returned bytes"),
        (pd.DataFrame({"reward": [1, 2, 3, 4]}), r"returned a DataFrame of shape \(4, 1\)"),
        (np.array(1.0), "returned ndarray"),
        (torch.tensor(1.0), "returned Tensor"),
        (np.ones((4, 1)), r"returned a ndarray of shape \(4, 1\)"),
        (torch.ones(2, 2), r"returned a Tensor of shape \(2, 2\)"),
        ([], "returned 0 values for 4 completions. The first without one is row 10, completion 1 of 2: 'a'"),
        ([1, 2, 3], "returned 3 values for 4 completions. The first without one is row 11, completion 2 of 2: 'd'"),
        ([1] * 5, "returned 5 values for 4 completions"),
        ([1, 2, "1.0", 3], "returned str '1.0' as value 2\n  at row 11, completion 1 of 2: 'ccc'"),
        ([1, [2], 3, 4], r"returned list \[2\] as value 1\n  at row 10, completion 2 of 2: 'bb'"),
        ([1, 2j, 3, 4], "returned complex 2j as value 1"),
        ([1, math.nan, 3, 4], "returned NaN as value 1\n  at row 10, completion 2 of 2: 'bb'\n  fix: return None"),
        ([1, 2, 3, math.inf], "returned inf as value 3\n  at row 11, completion 2 of 2: 'd'"),
        ([1, 2, 3, -math.inf], "returned -inf as value 3"),
        ([1, 2, 3, 10**400], "returned inf as value 3"),
        (np.array([1, np.nan, 3, 4]), "returned NaN as value 1"),
        (torch.tensor([1, 2, 3, float("inf")]), "returned inf as value 3"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_bad_answers(answer, text, is_async):
    def culprit(completions):
        return answer

    async def async_culprit(completions):
        return answer

    with pytest.raises(RewardError, match=r"(?s)reward function `\w*culprit` \(\S*test_score.py:\d+\) " + text):
        run(length, async_culprit if is_async else culprit)


def test_a_coroutine_as_answer_names_the_cure(recwarn):
    with pytest.raises(RewardError, match=r"a coroutine that was not awaited(.|\n)*async def"):
        run(lambda completions: unfinished(completions))
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


# --- what is raised --------------------------------------------------------------------------------------------------


def loops(completions, **kwargs):
    rewards = []
    for text in completions:
        rewards.append(1 / (len(text) - 3))  # noqa: PERF401
    return rewards


def comprehends(completions, **kwargs):
    return [1 / (len(text) - 3) for text in completions]


def calls_a_helper(completions, **kwargs):
    def helper(value):
        return 1 / (len(value) - 3)

    return list(map(helper, completions))


async def awaits(completions, **kwargs):
    async def one(text):
        await asyncio.sleep(0)
        return 1 / (len(text) - 3)

    return [await one(text) for text in completions]


@pytest.mark.parametrize("function", [loops, comprehends, calls_a_helper, awaits])
def test_an_exception_names_function_row_and_completion(function):
    with pytest.raises(RewardError) as caught:
        run(length, function)
    message = str(caught.value)
    head, place, *trace = message.splitlines()
    assert head.startswith(f"reward function `{function.__name__}` (")
    assert head.endswith("raised ZeroDivisionError: division by zero")
    assert place == "  at row 11, completion 1 of 2: 'ccc'"
    assert "1 / (len(" in "".join(trace)
    assert "score.py" not in "".join(trace).replace("test_score.py", "")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "test_score" in caught.value.__cause__.__traceback__.tb_frame.f_code.co_filename


def test_the_completion_is_found_in_chat_data_too():
    def reward(completions):
        return [float(completion[0]["content"] == "a") or int(completion[0]["content"]) for completion in completions]

    def by_content(completions):
        contents = [completion[0]["content"] for completion in completions]
        return [float(text == "a") or int(text) for text in contents]

    for function in (reward, by_content):
        with pytest.raises(RewardError, match="at row 10, completion 2 of 2: 'bb'"):
            run(function, groups=CHAT)


def test_of_equal_completions_the_first_is_named():
    groups = [make_group(10, ["ok", "twice", "twice"])]
    with pytest.raises(RewardError, match="at row 10, completion 2 of 3: 'twice'"):
        run(lambda completions: [0 if text == "ok" else int(text) for text in completions], groups=groups)


def test_an_exception_that_belongs_to_no_completion_names_the_first():
    def reward(completions):
        raise ConnectionError("judge is down")

    with pytest.raises(RewardError, match="judge is down\n  while scoring 4 completions, the first of them row 10"):
        run(reward)


def test_the_wrong_kind_of_completion_is_explained():
    with pytest.raises(RewardError, match=r"TypeError(.|\n)*conversations, so the text .*completion\[0\]\['content'\]"):
        run(lambda completions: [float("a" + each) for each in completions], groups=CHAT)
    with pytest.raises(RewardError, match="plain, so each completion is a string"):
        run(lambda completions: [float(each[0]["content"]) for each in completions])


@pytest.mark.parametrize("is_async", [False, True])
def test_exit_does_not_end_the_run_silently(is_async):
    def leaves(completions):
        raise SystemExit(0)

    async def async_leaves(completions):
        raise SystemExit(0)

    with pytest.raises(RewardError, match="raised SystemExit: 0"):
        run(async_leaves if is_async else leaves)
    assert values(async_length)[0] == [[1.0], [2.0]]  # the loop in the background is alive


def test_an_interrupt_is_let_through():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)


def test_the_background_loop_is_one_and_a_daemon():
    values(async_length)
    loop, thread = background_loop(os.getpid())
    values(async_length)
    # Not counted among all threads: a loop that another test has abandoned keeps its own, of the same name.
    assert background_loop(os.getpid()) == (loop, thread)
    assert thread.daemon
    assert thread.is_alive()


# --- extras and warnings ---------------------------------------------------------------------------------------------


def test_log_extra_is_split_by_group():
    def reward(completions, log_extra):
        log_extra("length", [len(each) for each in completions])
        return [0] * 4

    assert [scored.extras for scored in run(reward)] == [{"length": (1, 2)}, {"length": (3, 1)}]


def test_log_extra_of_two_functions_never_mixes():
    def one(log_extra):
        log_extra("note", ["x"] * 4)
        log_extra("same", [1] * 4)
        return [0] * 4

    async def two(log_extra):
        log_extra("note", ["y"] * 4)
        log_extra("same", [1] * 4)
        return [0] * 4

    assert run(one, two)[0].extras == {"note": ("x", "x"), "same": (1, 1), "note (two)": ("y", "y")}


def test_log_extra_twice_keeps_the_last():
    def reward(log_extra):
        log_extra("note", ["x"] * 4)
        log_extra("note", ["y"] * 4)
        return [0] * 4

    assert run(reward)[0].extras == {"note": ("y", "y")}


def test_log_extra_of_the_wrong_length():
    def reward(log_extra):
        log_extra("note", ["x"])
        return [0] * 4

    with pytest.raises(RewardError, match=r"log_extra\('note', ...\) got 1 values for 4 completions"):
        run(reward)


def test_rows_nobody_scored_are_mentioned_once_in_each_run(caplog):
    def silent(completions):
        return [1, 1, None, 1]

    def mute(completions):
        return [1, None, None, 1]

    for _ in range(2):
        said = set()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_values(run(mute), set())
            assert "This is so for 2 of 4 completions" in caplog.text
            for _ in range(2):
                warn_of_values(run(silent, mute), said)
        assert caplog.text.count("This is so for 1 of 4 completions") == 1
        assert "row 11, completion 1 of 2: 'ccc'" in caplog.text
        assert "'answer': 'x'" in caplog.text


def test_one_function_alone_is_not_said_to_leave_rows_unscored(caplog):
    def of_some_rows(completions, answer):
        return [None if gold == "x" else 1.0 for gold in answer]

    rewards = resolve_rewards([of_some_rows, length])
    with caplog.at_level(logging.WARNING):
        scored = score(GROUPS, rewards)
        assert list(repeat_findings(scored, rewards)) == []
        warn_of_values(scored, set())
    assert caplog.text == ""


@pytest.mark.parametrize(
    "read",
    [
        lambda **kw: [each.score for each in kw["environments"]],
        lambda **kw: [getattr(each, "score", 0.0) for each in kw.get("environments") or []],
        lambda completions, environments=None, **kw: [float(bool(each)) for each in environments],
    ],
    ids=["subscript", "get", "default"],
)
def test_a_function_that_looks_into_environments_is_not_called_again_without_them(read):
    environments = [SimpleNamespace(score=float(g)) for g in range(4)]
    rewards = resolve_rewards([read, length])
    scored = score(GROUPS, rewards, environments=environments)
    assert list(repeat_findings(scored, rewards, environments=True)) == []
    noted = StandIns(GROUPS)
    with contextlib.suppress(RewardError):
        score(GROUPS, rewards[:1], environments=noted)
    assert noted.asked
    untouched = StandIns(GROUPS)
    score(GROUPS, rewards[1:], environments=untouched)
    assert not untouched.asked


@pytest.mark.parametrize("takes_all", [False, True])
def test_the_reward_of_a_class_of_environments_is_not_called_again(takes_all):
    def of_a_class(environments):
        return [each.score if type(each) is SimpleNamespace else None for each in environments]

    def with_the_rest(environments, **kwargs):
        return of_a_class(environments)

    rewards = resolve_rewards([with_the_rest if takes_all else of_a_class])
    scored = score(GROUPS, rewards, environments=[SimpleNamespace(score=float(g)) for g in range(4)])
    assert list(repeat_findings(scored, rewards, environments=True)) == []


def test_no_groups():
    assert run(length, groups=[]) == []


def test_groups_of_different_sizes():
    groups = [make_group(0, ["a"]), make_group(1, ["bb", "ccc", "d"]), make_group(2, [])]
    assert values(length, groups=groups) == [[[1.0]], [[2.0], [3.0], [1.0]], []]


@pytest.mark.defect("AD22", "a reward above a million: said once, and no end of the run")
def test_a_huge_reward_is_said_and_trained_on(caplog, now):
    def in_bytes(completions):
        return [2e9 * len(text) for text in completions]

    with caplog.at_level(logging.WARNING, logger="podium"):
        said_of_run = set()
        for _ in range(2):
            scored = run(in_bytes)
            assert [each.rewards_GK.tolist() for each in scored] == [[[2e9], [4e9]], [[6e9], [2e9]]]
            warn_of_values(scored, said_of_run)
    [said] = [text for text in caplog.messages if "W007" in text]
    assert "`in_bytes` returned 2e+09 at row 10, completion 1 of 2" in said
    now(said)


@pytest.mark.defect("AD22", "a reward that float32 cannot hold is a fact")
@pytest.mark.parametrize("value", [1e39, -1e300, 10**400, math.inf])
def test_a_reward_that_is_infinite_in_training_ends_the_run(value, now):
    with pytest.raises(RewardError, match=r"inf|infinite in float32") as refused:
        run(lambda completions: [value] * len(completions))
    assert refused.value.code == "W007"
    now(refused.value.what.splitlines()[0])
