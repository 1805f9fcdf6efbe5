"""Real short runs on the built-in model with rewards that are easily outwitted: the end does not call them better."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from podium.models.builtin import BUILTIN, resolve_model
from tests.unit.test_hacks import PRAISE, mood, note

pytestmark = [pytest.mark.slow, pytest.mark.learns, pytest.mark.timeout(3600)]

REWARDS = """
def overlap(prompts, completions, **_):
    asked = [set(prompt[-1]["content"].split()) for prompt in prompts]
    return [len(words & set(c[0]["content"].split())) / len(words) for words, c in zip(asked, completions)]


def label_match(completions, answer, **_):
    return [float(a in c[0]["content"].lower()) for c, a in zip(completions, answer)]


def loud(completions, **_):
    return [sum(x.isupper() for x in c[0]["content"]) / max(len(c[0]["content"]), 1) for c in completions]
"""

RECIPE = """
model: {model}
dataset: notes.jsonl
prompt: "{{question}}"
chat: true
system: "{system}"
rewards: [rewards.py:{reward}]
held_out: 0.2
eval_samples: 2
per_device_train_batch_size: 32
num_generations: 8
max_completion_length: 16
temperature: 1.0
learning_rate: 6e-5
adam_beta2: 0.99
max_grad_norm: 1.0
max_steps: 8
logging_steps: 1
save_strategy: "no"
report_to: none
output_dir: run
"""


@pytest.mark.parametrize(
    ("reward", "system"),
    [
        ("overlap", "Repeat the sentence."),
        ("label_match", "Is it anger, joy, fear or love? Answer with one word."),
        ("loud", "Is it anger, joy, fear or love? Answer LOUDLY."),
    ],
)
def test_training_of_a_hack(reward: str, system: str, tmp_path: Path) -> None:
    resolve_model(BUILTIN)
    rows = [{"question": note(i), "answer": mood(i)} for i in range(120)]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(RECIPE.format(model=BUILTIN, reward=reward, system=system))
    line = [sys.executable, "-m", "podium", "train", "run.yaml"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=3000, env=environment)
    if done.returncode == 2:  # what the test of rewards refuses is not trained at all
        assert re.search(r"\[W1\d\d\]", done.stderr)
        return
    assert done.returncode == 0, done.stderr
    verdict = json.loads((tmp_path / "run/evaluation/comparison.json").read_text())["verdict"]
    assert not PRAISE.search(verdict), verdict
    line = json.loads((tmp_path / "run/evaluation/after.json").read_text())["baselines"]["line"]
    assert line.split() in [done.stdout.split()[i : i + len(line.split())] for i in range(len(done.stdout.split()))]
    findings = tmp_path / "run/findings.jsonl"  # none, where nothing was found
    said = [json.loads(line)["what"] for line in findings.read_text().splitlines()] if findings.exists() else []
    assert not [what for what in said if PRAISE.search(what)]
