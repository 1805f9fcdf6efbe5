"""From a CSV to a chatting model in five commands, as a newcomer types them: the built-in model, no recipe, no hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from podium.models.builtin import BUILTIN, resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SHORT = "--max_steps 2 --per_device_train_batch_size 16 --num_generations 4 --eval_rows 4 --eval_samples 2"
NUMBER = re.compile(r"\d+\n*")
"""A reply in the form of training, a number alone."""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with a table of 200 additions, and no more."""
    resolve_model(BUILTIN)
    rows = [f"What is {a} + {b}?,{a + b}" for a in range(1, 21) for b in range(1, 11)]
    (tmp_path / "questions.csv").write_text("\n".join(["question,expert_answer", *rows]) + "\n")
    return tmp_path


def podium(desk: Path, line: str, typed: str = "") -> tuple[str, str]:
    """What a command prints, on both streams; that it ends well, and without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "podium", *line.split()],
        cwd=desk,
        input=typed,
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, f"podium {line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout, done.stderr


def test_from_a_csv_to_a_chatting_model(desk: Path) -> None:
    checked, complaints = podium(desk, "check --dataset questions.csv --use_peft")
    assert complaints == "Reading the recipe, its rows and its rewards; no weight is loaded ...\n"
    assert "error[" not in checked
    assert "warning[" not in checked
    assert 'prompt "{question}", answer "{expert_answer}"' in checked
    rows = re.search(r"questions\.csv: (\d+) rows;", checked)
    assert rows is not None
    assert 130 <= int(rows[1]) < 190, "a fifth, drawn by the row, is held out, and four rows are examples"

    trained, assumed = podium(desk, f"train --dataset questions.csv --use_peft {SHORT}")
    assert "note[C040] assumed: model" in assumed
    assert f"{rows[1]} prompts" in trained, "as many as the check has said"
    assert "2 steps in" in trained
    assert "Model saved in runs/questions" in trained
    run = desk / "runs" / "questions"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2]
    adapter = load_file(run / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in adapter.items() if "lora_B" in name), "zero before training"

    compared, _ = podium(desk, "compare runs/questions --samples 4 -k 2")
    assert "numeric_match" in compared
    *_, judged, following = compared.splitlines()
    assert re.search(r"[Dd]ifference|better|worse", judged)
    verb = "merge" if judged.startswith(("Better:", "Reward rose:")) else "report"
    assert following.startswith(f"next: podium {verb} runs/questions")

    merged, _ = podium(desk, "merge runs/questions --out merged")
    assert "saved model and trained model differ by at most" in merged
    assert (desk / "merged" / "config.json").is_file()
    assert (desk / "merged" / "model.safetensors").stat().st_size > 100_000_000
    assert not (desk / "merged" / "adapter_config.json").exists()

    question = "What is 2 + 3?\n"
    said, note = podium(desk, "chat merged --temperature 0 --max-tokens 12", typed=question)
    assert NUMBER.fullmatch(said), "in the form that it was trained in, by what training put in front of a question"
    assert "Answer with the number alone." in note
    again, noted = podium(desk, "chat runs/questions --temperature 0 --max-tokens 12", typed=question)
    assert again == said
    assert "Answer with the number alone." in noted
    plain, nothing = podium(desk, "chat merged --system= --temperature 0 --max-tokens 12", typed=question)
    assert not NUMBER.fullmatch(plain)
    assert nothing in ("", "Loading the model ...\n"), "which a slow machine says"
