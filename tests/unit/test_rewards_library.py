"""The library's rewards, on plain text and on conversations."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
import time

import pytest

import podium.rewards as library
from podium.errors import ConfigError
from podium.records import Completion, Group, Prompt
from podium.rewards import LIBRARY, check_rewards, library_reward, resolve_rewards, score

MODULES = ["podium.rewards", *(f"podium.rewards.{name}" for name in ("answers", "format", "length", "text", "resolve"))]


@pytest.fixture(params=["plain", "chat"])
def wrapped(request):
    """Makes completions of texts, in either form."""
    if request.param == "plain":
        return list
    return lambda texts: [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted > 0


def test_every_reward_has_an_example():
    without = [name for name, function in LIBRARY.items() if ">>> " not in (function.__doc__ or "")]
    assert without == ["reward_model"]  # needs a model; shown in tests/unit/test_reward_models.py


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<answer>7</answer>", "7", 1.0),
        ("so <answer>\n 7 </answer>.", " 7\n", 1.0),
        ("<answer>7</answer>", 7, 1.0),
        ("<answer>6</answer><answer>7</answer>", "7", 1.0),
        ("<answer>7</answer><answer>6</answer>", "7", 0.0),
        ("<answer> <answer>7</answer>", "7", 1.0),
        ("<answer>17</answer>", "7", 0.0),
        ("<answer>07</answer>", "7", 0.0),
        ("<answer></answer>", "", 1.0),
        ("7", "7", 0.0),
        ("</answer>7<answer>", "7", 0.0),
        ("<answer>7", "7", 0.0),
        ("", "", 0.0),
        ("<answer>7</answer>", None, None),
        ("<answer>None</answer>", None, None),
    ],
)
def test_answer_correct(wrapped, text, answer, expected):
    assert library.answer_correct(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer>", 1.0),
        (" <answer> seven\n</answer>\n", 1.0),
        ("<answer></answer>", 0.5),
        ("<answer> </answer>", 0.5),
        ("The answer is <answer>7</answer>", 0.5),
        ("<answer>7</answer><answer>7</answer>", 0.5),
        ("<answer><b>7</b></answer>", 0.5),
        ("<answer>7", 0.25),
        ("7</answer>", 0.25),
        ("answer: 7", 0.0),
        ("", 0.0),
    ],
)
def test_answer_format(wrapped, text, expected):
    assert library.answer_format(wrapped([text])) == [expected]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("42", 42, 1.0),
        ("It is 42.", "42", 1.0),
        ("42.0000001", 42, 1.0),
        ("42.1", 42, 0.0),
        ("1,234.5", 1234.5, 1.0),
        ("first 42, then 43", 42, 0.0),
        ("<answer>42</answer> (not 43)", 42, 1.0),
        ("<answer>none</answer> 42", 42, 0.0),
        ("-5", -5, 1.0),
        ("7-5", 5, 1.0),
        (".5", 0.5, 1.0),
        ("4.2e1", 42, 1.0),
        ("1e999", 42, 0.0),
        ("nothing", 42, 0.0),
        ("72", "48/2 = 24\n48+24 = 72\n#### 72", 1.0),
        ("42", "unknown", None),
        ("42", None, None),
    ],
)
def test_numeric_match(wrapped, text, answer, expected):
    assert library.numeric_match(wrapped([text]), answer=[answer]) == [expected]


def test_numeric_tolerance_is_relative_above_one():
    def near(text, answer):
        return library.numeric_match([text], answer=[answer], tolerance=0.01)[0]

    assert [near("1009", 1000), near("1011", 1000), near("0.009", 0), near("0.011", 0)] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer", "expected"), [("Paris\n", "Paris", 1.0), ("paris", "Paris", 0.0), ("Paris", None, None)]
)
def test_exact_match(wrapped, text, answer, expected):
    assert library.exact_match(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<reasoning>\n3+4\n</reasoning>\n<answer>\n7\n</answer>\n", 1.0),
        ("<reasoning>a < b</reasoning><answer>7</answer>", 1.0),
        ("<reasoning>3+4</reasoning><answer>7</answer> done", 0.0),
        ("so <reasoning>3+4</reasoning><answer>7</answer>", 0.0),
        ("<answer>7</answer><reasoning>3+4</reasoning>", 0.0),
        ("<reasoning></reasoning><answer>7</answer>", 0.0),
        ("<reasoning>x</reasoning><answer> </answer>", 0.0),
        ("<reasoning>x</reasoning><answer>7</answer><answer>8</answer>", 0.0),
        ("<reasoning><answer>6</answer></reasoning><answer>7</answer>", 0.0),
        ("<reasoning>x</reasoning>", 0.0),
    ],
)
def test_xml_format(wrapped, text, expected):
    assert library.xml_format(wrapped([text])) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so</think>7", 1.0),
        ("<think></think> 7", 1.0),
        ("\n<think>a\nb</think>\nc\nd", 1.0),
        ("<think>so</think> ", 0.0),
        ("so <think>x</think> 7", 0.0),
        ("<think>a</think> 7 <think>b</think>", 0.0),
        ("<think>a</think> 7 </think>", 0.0),
        ("<think><think>a</think> 7", 0.0),
        ("<think>a", 0.0),
    ],
)
def test_think_format(wrapped, text, expected):
    assert library.think_format(wrapped([text])) == [expected]


def test_regex_format(wrapped):
    texts = wrapped(["a\nb", " ab ", "abc", "b"])
    assert library.regex_format(texts, pattern="a.*b") == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"])
def test_trls_rewards_take_both_forms(wrapped, name):
    function = library_reward(name, max_len=10) if name.startswith("get_") else library_reward(name)
    ids = {"completion_ids": [[1] * 5] * 2} if name.startswith("get_") else {}
    rewards = function(completions=wrapped([r"<think>x</think> \boxed{4}", ""]), solution=["4", "4"], **ids)
    assert rewards == ([0.75, -0.75] if name.startswith("get_") else [1.0, 0.0])
    assert library.think_format_reward(wrapped(["<think>x</think>", "x"])) == [1.0, 0.0]


@pytest.mark.parametrize("function", [library.answer_format, library.xml_format, library.think_format])
@pytest.mark.parametrize("text", ["<answer>" * 20_000, "<think>" + "x " * 50_000, "<reasoning>" + " " * 100_000])
def test_long_texts_take_no_time(function, text):
    start = time.perf_counter()
    function([text])
    assert time.perf_counter() - start < 2


# --- by name ---------------------------------------------------------------------------------------------------------


def test_settings_by_name_are_used():
    assert library_reward("regex_format", pattern="a+")(completions=["aa", "b"]) == [1.0, 0.0]
    assert library_reward("xml_format", sections=["a"])(completions=["<a>x</a>"]) == [1.0]
    assert library_reward("get_soft_overlong_punishment", max_completion_len=4, soft_punish_cache=2)(
        completion_ids=[[1] * 3]
    ) == [-0.5]
    assert library_reward("reward_model", model="org/judge").__name__ == "judge"
    assert library_reward("answer_correct") is library.answer_correct


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("anser_format", {}, "Did you mean `answer_format`"),
        ("regex_format", {"patern": "x"}, "no setting `patern`. Did you mean `pattern`"),
        ("regex_format", {}, "`regex_format` needs `pattern`"),
        ("answer_format", {"answer": "x"}, "takes no settings"),
        ("get_cosine_scaled_reward", {}, "needs `max_len`"),
    ],
)
def test_wrong_names_and_settings(name, settings, text):
    with pytest.raises(ConfigError, match=text):
        library_reward(name, **settings)


def test_through_the_boundary():
    texts = ["<answer>7</answer>", "<answer>8</answer>", "7"]
    completions = tuple(
        Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in texts
    )
    prompt = Prompt(id=0, row=0, token_ids=(1,), text="", content="3+4=", columns={"answer": "7"})
    functions = [library_reward(name) for name in ("answer_correct", "answer_format", "exact_match", "numeric_match")]
    rewards = resolve_rewards(functions)
    check_rewards(rewards, ["prompt", "answer"])
    (scored,) = score([Group(prompt=prompt, completions=completions)], rewards)
    assert scored.rewards_GK.tolist() == [[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 1, 1]]


def test_the_library_is_light():
    heavy = "import sys, podium.rewards; print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
