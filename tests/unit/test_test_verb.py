"""`podium test` sees what a name stands for, says so, and tests it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.cli.subjects import subjects_of, target_of
from podium.errors import ConfigError

FILE = """
from functools import partial

def correct(completions, answer): ...
def anything(**kwargs): ...
def compute_score(data_source, solution_str, ground_truth): ...
class Judge:
    def __call__(self, completions): ...
class Guess:
    def reset(self, **row): ...
class Child(Guess): ...
def multiply(a: int, b: int) -> int: ...
def make(): ...
async def run(base_url, api_key, row): ...
made = partial(correct)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        *((f"mine.py:{each}", "reward") for each in ("correct", "anything", "compute_score", "Judge")),
        *((f"mine.py:{each}", "environment") for each in ("Guess", "Child", "multiply", "make", "Guess?number=3")),
        ("mine.py:run?env=KEY", "program"),
        ("command: python mine.py", "program"),
        ("builtin:calculator", "environment"),
        ("gymnasium:FrozenLake-v1?is_slippery=false", "environment"),
        ("reasoning-gym:chain_sum", "environment"),
        ("answer_correct", "reward"),
        ("my_package.rewards:correct", "reward"),
        ("org/reward-model", "reward"),
    ],
)
def test_a_name_shows_what_it_stands_for(name: str, subject: str) -> None:
    assert subjects_of(target_of(name)) == (subject,)


def test_of_a_name_that_does_not_show_it_the_user_says_it() -> None:
    with pytest.raises(ConfigError, match="cannot be seen") as refused:
        subjects_of(target_of("mine.py:made"))
    assert "--as reward" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "near"),
    [("quickstrat", "quickstart"), ("answer_corect", "answer_correct"), ("mine.py:corect", "correct")],
)
def test_a_name_of_nothing_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as refused:
        subjects_of(target_of(name))
    assert refused.value.fix == f"Did you mean `{near}`?"


RECIPE = "model: builtin:smollm2-135m-instruct\ndataset: rows.jsonl\nmax_steps: 5\n"


@pytest.mark.usefixtures("tested_here")
def test_all_of_a_recipe_is_tested(folder: Path) -> None:
    (folder / "own.py").write_text(
        "def right(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n\n"
        'def double(x: int) -> int:\n    """\n    Double.\n\n    Args:\n        x: It.\n    """\n    return 2 * x\n'
    )
    rows = [{"prompt": f"{n} + 90", "answer": str(n + 90)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(f"{RECIPE}rewards: [own.py:right]\ntools: [own.py:double]\n")
    done = CliRunner().invoke(app, ["test", "run.yaml", "--json"])
    tests = json.loads(done.stdout)["tests"]
    assert [each["subject"] for each in tests] == ["reward", "environment"]
    assert [each["name"] for each in tests[0]["rewards"]] == ["right"]
    assert [each["name"] for each in tests[1]["tested"]] == ["double"]
    alone = CliRunner().invoke(app, ["rewards", "test", "run.yaml", "--json"])
    assert json.loads(alone.stdout)["rewards"][0]["table"] == tests[0]["rewards"][0]["table"]


@pytest.mark.usefixtures("tested_here")
def test_it_says_what_it_took_the_name_for() -> None:
    done = CliRunner().invoke(app, ["test", "mine.py:multiply"])
    assert done.stdout.startswith("mine.py:multiply is taken for a tool or an environment.")
    assert done.exit_code == 1  # without a docstring it has no schema
    assert "[E002]" in done.stdout
    done = CliRunner().invoke(app, ["test", "mine.py:multiply", "--ignore", "E002", "--as", "environment"])
    assert done.exit_code == 0
    assert CliRunner().invoke(app, ["test", "mine.py:multiply", "--as", "game"]).exit_code == 2
