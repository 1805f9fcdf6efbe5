"""`--json`: one object on stdout, whatever the verb; findings look alike everywhere."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.console.terminal import print_json
from podium.errors import Finding
from podium.rewards import LIBRARY
from podium.runs import findings
from podium.testing import save_tiny_model

STEPS = [{"step": i, "reward": 0.5, "kl": x} for i, x in enumerate([0.01, 0.02, 0.01, 1.4, 2.6], start=1)]
"""Of another trainer, with a policy that runs away from its reference."""


def spoken(line: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, line.split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = json.loads(result.stdout, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert isinstance(said, dict)
    return result.exit_code, said


@pytest.fixture
def tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe of a tiny model, its data and rewards, and TRL's record of a run."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 4) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.py").write_text("def right(completions, answer):\n    return [None for _ in completions]\n")
    (tmp_path / "run.yaml").write_text(
        "model: model\ndataset: train.jsonl\nrewards: [my.py:right]\nper_device_train_batch_size: 8\n"
        "num_generations: 4\nmax_completion_length: 4\noutput_dir: out\n"
    )
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": STEPS}))
    return tmp_path


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("check run.yaml --json", {"D040"}),
        ("check run.yaml --num_generation 4 --json", {"C009"}),
        ("doctor trainer_state.json --json", {"M132"}),
        ("rewards test my.py:right --data train.jsonl --json", set()),
    ],
)
def test_findings_look_alike(tiny_run: Path, line: str, codes: set[str]) -> None:
    _, said = spoken(line)
    assert codes <= {finding["code"] for finding in said["findings"]}
    for finding in said["findings"]:
        assert list(finding) == [field.name for field in fields(Finding)]


def test_a_sample_has_every_number_and_null_where_a_reward_said_none(tiny_run: Path) -> None:
    code, said = spoken("sample run.yaml -n 2 --json")
    assert code == 0
    assert len(said["groups"]) == 2
    for group in said["groups"]:
        assert group["prompt"].endswith("=")
        assert len(group["completions"]) == 4
        for completion in group["completions"]:
            assert completion["rewards"] == {"right": None}
            assert completion["advantage"] == 0
            assert completion["finish"] in ("stop", "length")


def test_lists() -> None:
    assert {each["name"] for each in spoken("recipes --json")[1]["recipes"]} >= {"quickstart", "code"}
    assert [page["code"] for page in spoken("explain --json")[1]["pages"]] == list(findings.codes())
    assert [each["name"] for each in spoken("rewards list --json")[1]["rewards"]] == list(LIBRARY)


def test_every_page_has_the_three_sections() -> None:
    for page in spoken("explain --json")[1]["pages"]:
        assert set(page) == {"code", "title", "means", "causes", "fix"}
        assert all(page.values()), page["code"]


def test_one_reward() -> None:
    [reward] = spoken("rewards show numeric_match --json")[1]["rewards"]
    assert reward["columns"] == ["answer"]
    assert reward["settings"]["tolerance"] == {"needed": False, "default": None}
    assert "numeric_match" in reward["page"]


def test_hostile_text_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "a\x1b]52;c;aGk=\x07\x9b31m\u202e", "number": float("inf")})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed
    assert json.loads(printed) == {"text": "a\x1b]52;c;aGk=\x07\x9b31m\u202e", "number": None}
