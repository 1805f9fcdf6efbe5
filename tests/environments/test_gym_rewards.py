from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

pytest.importorskip("reasoning_gym")

from podium.agents.adapters.reasoning_gym import ReasoningGym, gym_rows
from podium.agents.adapters.reasoning_gym_scorer import checked_formula
from podium.errors import ConfigError, DataError, RewardError
from podium.isolation.sandbox import probe
from podium.rewards import library_reward


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request):
    if complaint := probe(request.param):
        pytest.skip(f"{request.param} does not work here: {complaint}")
    return request.param


def score(name, backend, answers, row):
    reward = ReasoningGym(dataset=name, extract="raw", timeout=1, workers=1, sandbox=backend)
    count = len(answers)
    return reward(completions=answers, metadata=[row["metadata"]] * count, answer=[row["answer"]] * count)


@pytest.mark.cases(1)
def test_scores_are_reasoning_gym_s_and_hostile_answers_get_nothing(backend, tmp_path):
    row = gym_rows("countdown", size=1, seed=1)[0]
    right = json.loads(row["metadata"])["expression"]
    marker = tmp_path / "marker"
    hostile = [
        "9**9**9",
        f"__import__('os').system('touch {marker}')",
        f"open('{marker}', 'w')",
        "exit()",
        "(" * 5000,
        "entry['metadata']['target']",
        "9" * 100_000,
    ]
    start = time.monotonic()
    scores = score("countdown", backend, [right, "1", *hostile, right], row)
    assert (scores[0], scores[1], scores[-1]) == (1.0, 0.05, 1.0)
    assert all(value <= 0.05 for value in scores[2:-1])
    assert not marker.exists()
    assert time.monotonic() - start < 60


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["string_insertion", "spiral_matrix"])
def test_answers_that_look_the_answer_up_get_nothing(backend, name):
    """These scorers evaluate what they are given, in a function that knows the right answer."""
    row = gym_rows(name, size=1, seed=1)[0]
    hacks = ["[oracle_answer]", "[entry['answer']]", "list(oracle_answer)", "oracle_answer.split()"]
    assert score(name, backend, [row["answer"], *hacks], row) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_scorer_keeps_its_worker_and_comes_back_after_a_kill():
    row = gym_rows("chain_sum", size=1, seed=1)[0]
    reward = library_reward("reasoning_gym", dataset="chain_sum", workers=1)
    given = {"metadata": [row["metadata"]] * 2, "answer": [row["answer"]] * 2}
    completions = [f"<answer>{row['answer']}</answer>", "no tags"]
    assert reward(completions=completions, **given) == [1.0, 0.0]
    from podium.isolation import workers

    (worker,) = workers._recent[-1].workers
    first = worker.sandbox.process
    chat = [[{"role": "assistant", "content": text}] for text in completions]
    assert reward(completions=chat, **given) == [1.0, 0.0]
    assert worker.sandbox.process is first
    first.kill()
    assert reward(completions=completions, **given) == [1.0, 0.0]


def test_rows_without_metadata_are_no_opinion():
    assert ReasoningGym(dataset="chain_sum")(completions=["<answer>1</answer>"], metadata=[None]) == [None]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, "Did you mean `chain_sum`"),
        ({"dataset": "chain_sum", "timeout": 0}, "timeout is 0"),
        ({"dataset": "chain_sum", "extract": "fence"}, "extract is 'fence'"),
        ({}, "needs `dataset`"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        library_reward("reasoning_gym", **settings)


def test_metadata_that_is_not_json_is_named():
    with pytest.raises(RewardError, match="metadata"):
        ReasoningGym(dataset="chain_sum")(completions=["<answer>1</answer>"], metadata=["{"])


def test_rows_are_text_and_the_same_for_a_seed():
    rows = gym_rows("n_queens", size=2, seed=3)
    assert rows == gym_rows("n_queens", size=2, seed=3)
    assert all(isinstance(value, str) for row in rows for value in row.values())
    with pytest.raises(DataError, match="`chain_sum` has no argument `colour`"):
        gym_rows("chain_sum", size=2, colour="red")


@pytest.mark.parametrize("text", ["x**2/2 + C", "-3*sin(2*x)", "log(x) + exp(-x)", "(8 - 2)*4 + 0", "5!", "1.5e3*x"])
def test_formulas_pass(text):
    assert checked_formula(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "x.y",
        "().__class__",
        "open(x)",
        "chr(1)",
        "x[0]",
        "'a'",
        "lambda: 1",
        "eval(x)",
        "a if b else c",
        "S(x)",
        "x" * 3000,
    ],
)
def test_what_is_no_formula_does_not(text):
    with pytest.raises(ValueError, match="not a formula"):
        checked_formula(text)


def test_a_task_that_the_generator_repeats_is_there_once():
    rows = gym_rows("coin_flip", size=60, seed=1, min_trials=1, max_trials=3)
    prompts = [row["prompt"] for row in rows]
    assert len(set(prompts)) == len(prompts) < 60


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "task",
    [pytest.param(t, marks=pytest.mark.defect("B3", t)) for t in ("arc_agi", "rearc", "intermediate_integration")],
)
def test_the_right_answer_gets_all(task: str, now: Callable[[str], None]) -> None:
    rows = gym_rows(task, size=3, seed=5)
    golds = [
        row["answer"] or "\n".join(" ".join(map(str, line)) for line in json.loads(row["metadata"])["output"])
        for row in rows
    ]
    reward = ReasoningGym(dataset=task, sandbox="none", timeout=20)
    completions = [f"<answer>{gold}</answer>" for gold in golds]
    scores = reward(completions, [row["metadata"] for row in rows], [row["answer"] for row in rows])
    now(str(scores))
    assert scores == [1.0] * len(rows)


@pytest.mark.defect("B3", "a scorer that pays for nothing is named; complex_arithmetic takes no nan")
def test_generous_scorers_are_named(caplog: pytest.LogCaptureFixture, now: Callable[[str], None]) -> None:
    ReasoningGym(dataset="game_of_life_halting", sandbox="none")
    assert "gives credit to every text that is not empty" in caplog.text
    now(caplog.messages[-1])
    [row] = gym_rows("complex_arithmetic", size=1, seed=1)
    reward = ReasoningGym(dataset="complex_arithmetic", sandbox="none", timeout=20)
    texts = ["nan", "nan + nanj", "inf", row["answer"]]
    scores = reward([f"<answer>{text}</answer>" for text in texts], [row["metadata"]] * 4, [row["answer"]] * 4)
    assert scores[:3] == [0.0] * 3
    assert scores[3] == pytest.approx(1.0, abs=0.01)
