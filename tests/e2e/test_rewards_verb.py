"""`podium rewards list, show, test` as typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from podium.cli import app
from podium.rewards import LIBRARY, audit
from podium.runs.findings import codes, page

LENIENT = """
def correct(completions, answer):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if gold in text else 0.0 for text, gold in zip(texts, answer)]
"""
RECIPE = """
model: builtin:smollm2-135m-instruct
dataset: train.jsonl
rewards:
  - name: answer_correct
    weight: 1
  - name: answer_format
    weight: 3
output_dir: runs/x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset, a reward with a mistake, a recipe."""
    pairs = [(13 + 7 * i, 25 + 3 * i) for i in range(8)]
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(LENIENT)
    (tmp_path / "run.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["rewards", *words])


def test_list_has_every_reward() -> None:
    listed = typed("list").stdout
    assert all(name in listed for name in LIBRARY)


@pytest.mark.parametrize("name", LIBRARY)
def test_show_has_docstring_settings_and_examples(name: str) -> None:
    shown = typed("show", name)
    assert shown.exit_code == 0
    assert "In a recipe:" in shown.stdout
    assert "In Python:" in shown.stdout


def test_show_knows_near_names() -> None:
    assert typed("show", "numeric_mach").exit_code == 2


def test_a_mistake_gives_exit_code_1_and_its_code(folder: Path) -> None:
    result = typed("test", "my_rewards.py:correct", "--data", "train.jsonl")
    assert result.exit_code == 1
    assert "error[W107]" in result.stdout
    assert "right answer: bare" in result.stdout


def test_a_sound_reward_gives_exit_code_0_and_json(folder: Path) -> None:
    result = typed("test", "numeric_match", "--data", "train.jsonl", "--args", "tolerance=0.001", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["errors"] == 0
    assert report["rewards"][0]["kind"] == "correctness"
    assert report["rewards"][0]["answer_column"] == "answer"


@pytest.mark.slow
def test_columns_are_found_by_their_usual_names(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    own = [{"question": row["prompt"], "expert_answer": row["answer"]} for row in rows]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    result = typed("test", "numeric_match", "--data", "own.jsonl", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rewards"][0]["kind"] == "correctness"
    odd = [{"frage": row["prompt"], "thema": row["prompt"][::-1], "answer": row["answer"]} for row in rows]
    (folder / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    result = typed("test", "numeric_match", "--data", "odd.jsonl")
    assert result.exit_code == 0, "the left column is the question"
    (folder / "none.jsonl").write_text("".join(json.dumps({"answer": row["answer"]}) + "\n" for row in rows))
    result = typed("test", "numeric_match", "--data", "none.jsonl")
    assert result.exit_code == 2
    assert "rows have no `prompt`, but answer.\n  fix: Rename the column" in result.stderr


@pytest.mark.slow
def test_rows_for_a_recipe_have_its_columns(folder: Path) -> None:
    (folder / "own.jsonl").write_text("".join(f'{{"q": "{n} + 1", "a": "{n + 1}"}}\n' for n in range(8)))
    one = RECIPE.replace("  - name: answer_format\n    weight: 3\n", "")
    (folder / "run.yaml").write_text(one + 'prompt: "{q}"\nanswer: "{a}"\n')
    result = typed("test", "run.yaml", "--data", "own.jsonl", "--json")
    assert {each["answer_column"] for each in json.loads(result.stdout)["rewards"]} == {"answer"}


@pytest.mark.slow
def test_a_signature_with_names_of_its_own_is_told_the_right_one(folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def correct(text, gold):\n    return 1.0\n")
    result = typed("test", "my_rewards.py:correct", "--data", "train.jsonl", "--json")
    assert result.exit_code == 1
    [finding] = json.loads(result.stdout)["rewards"][0]["findings"]
    assert finding["code"] == "W001"
    assert "asks for text, gold, and for none of" in finding["what"]
    assert finding["fix"].startswith("write `def correct(completions, **kwargs):`")


def test_a_file_that_is_not_there_is_a_finding(folder: Path) -> None:
    result = typed("test", "my_reward.py:correct", "--data", "train.jsonl", "--json")
    assert result.exit_code == 1
    [finding] = json.loads(result.stdout)["rewards"][0]["findings"]
    assert finding["code"] == "W013"
    assert "my_rewards.py" in finding["what"]


@pytest.mark.slow
def test_a_recipe_whose_sum_prefers_the_format_is_found(folder: Path) -> None:
    """Wrong answers in tags: 3 for the form; the right answer as bare text would be nothing beside it."""
    result = typed("test", "run.yaml", "--json")
    report = json.loads(result.stdout)
    assert [each["name"] for each in report["rewards"]] == ["answer_correct", "answer_format"]
    assert report["together"] == []  # right in tags 4, wrong in tags 3
    (folder / "run.yaml").write_text(RECIPE.replace("answer_format", "my_rewards.py:longer"))
    longer = "\ndef longer(completions):\n    return [len(each[0]['content']) / 1000 for each in completions]\n"
    (folder / "my_rewards.py").write_text(LENIENT + longer)
    result = typed("test", "run.yaml", "--json")
    found = json.loads(result.stdout)["together"]
    assert [(finding["code"], finding["severity"]) for finding in found] == [("W121", "warning")]


def test_a_negative_weight_of_a_sound_reward_is_found() -> None:
    def exact(completions, answer):  # type: ignore[no-untyped-def]
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    rows = [{"prompt": f"{n} + 90", "answer": str(n + 90)} for n in range(8)]
    assert {finding.code for finding in audit(exact, rows, weights=[-1.0])} >= {"W102"}
    assert [finding.code for finding in audit([exact, exact], rows, weights=[1.0])] == ["W015"]


def test_every_code_of_the_tester_has_its_page() -> None:
    import re

    import podium.tester

    folder = Path(podium.tester.__file__).parent
    said = {code for file in folder.glob("*.py") for code in re.findall(r'"(W\d{3})"', file.read_text())}
    assert said <= set(codes())
    assert all("## What to do" in page(code) for code in said)


@pytest.mark.slow
@pytest.mark.defect("H7", "rewards test of a plain function imports no torch and no transformers")
def test_a_plain_function_is_tested_without_torch(tmp_path, now):
    (tmp_path / "r.py").write_text(
        "def right(completions, answer):\n    return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    rows = [{"prompt": f"{n} + 1 = ", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = (
        "import sys\nfrom podium.cli import main\n"
        "sys.argv = ['podium', 'rewards', 'test', 'r.py:right', '--data', 't.jsonl']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr
    now("neither is imported")
