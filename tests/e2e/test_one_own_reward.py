"""Every verb with one reward of one's own whose name says nothing about accuracy, and no `accuracy:`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.testing import save_tiny_model

Cli = Callable[[str], tuple[int, str]]

RECIPE = """\
model: model
dataset: rows.jsonl
held_out: 0.2
rewards: mine.py:f
eval_rows: 6
eval_samples: 2
num_generations: 4
per_device_train_batch_size: 16
max_completion_length: 6
max_steps: 3
logging_steps: 1
output_dir: out
report_to: none
"""
REWARD = """\
from difflib import SequenceMatcher


def f(completions, answer, **kwargs):
    pairs = [(text.strip(), right) for text, right in zip(completions, answer)]
    return [0.8 * (text == right) + 0.2 * SequenceMatcher(None, text, right).ratio() for text, right in pairs]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, rows, the reward and the recipe."""
    made = tmp_path_factory.mktemp("own")
    save_tiny_model(made / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "mine.py").write_text(REWARD)
    (made / "run.yaml").write_text(RECIPE)
    return made


@pytest.fixture
def cli(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command line in that folder: exit code and output; what a traceback would be is raised."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")

    def run(line: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
        return result.exit_code, result.output

    return run


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("check run.yaml", ["`f` does not count as accuracy: no name suggests", "accuracy: f", "right answer, bare"]),
        ("rewards test mine.py:f --data rows.jsonl", ["f (mine.py:4)", "next: podium "]),
        ("sample run.yaml -n 2", ["not known: no reward says right or wrong (accuracy: NAME)", "next: podium train"]),
        ("cure run.yaml --codes W123 --out cured.yaml", ["accuracy: not set -> f"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_before_training(cli: Cli, line: str, pieces: list[str]) -> None:
    code, out = cli(line)
    assert code in (0, 1), out
    assert "Traceback" not in out
    for piece in pieces:
        assert piece in " ".join(out.split()), out


@pytest.mark.slow
def test_training_and_all_verbs_after_it(cli: Cli) -> None:
    """One test, as each needs the run of the first."""
    for name in ("out", "other"):
        code, out = cli(f"train run.yaml --seed 5 --output_dir {name}")
        assert code == 0, out
        assert "right " not in next(row for row in out.splitlines() if row.startswith("step 3/3")), "no accuracy"
        assert "Held out: 6 prompts, 12 completions" in out
        assert "accuracy (pass@1)" not in out
        for claim in ("Better", "Solved", "solved", "all right"):
            assert claim not in out
    for line, pieces in {
        "eval out --recipe run.yaml": ["  reward ", "next: podium compare out"],
        "doctor out": ["3 steps, reward "],
        "cure out --out again.yaml": ["out: "],
        "report out": ["report.html"],
        "compare out other": ["reward: better on 0 prompts, worse on 0, equal on 6", "No difference shown: reward"],
        "watch out --once": ["out, step 3: Reward"],
        "merge out --out merged": ["nothing to merge"],
    }.items():
        code, out = cli(line)
        assert code in (0, 1), out
        for piece in pieces:
            assert piece in out, (line, out)
