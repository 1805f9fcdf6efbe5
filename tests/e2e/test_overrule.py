"""Every stop that is a judgement names the line that overrules it, which works in a recipe, as a flag and in Python.

A stop by the proof, by `podium check`, by resuming; what was overruled stands in the run's folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import podium.trainer.proof.evidence as evidence
from podium import GRPOConfig, GRPOTrainer, Run
from podium.checks import check_recipe
from podium.cli import app
from podium.errors import NOTHING_RUNS, Finding, PodiumError, overrule
from podium.runs.doctor import examine
from podium.runs.findings import codes
from podium.runs.report import write_report
from podium.testing import save_tiny_model
from podium.trainer.rules import heeded, ignored_codes
from tests.unit.test_checks import CASES, Case, lay_out

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "max_steps": 2,
    "save_steps": 1,
    "optim": "adamw_torch",
    "report_to": "none",
    "output_dir": "run",
    "use_cpu": True,
}
DOORS = ("recipe", "flag", "python")


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model("model")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("mine.py").write_text(
        "def digits(completions, **_):\n"
        "    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]\n"
    )


def train(door: str, ignore: str = "", resume: bool = False, **changed: Any) -> str:
    """Train in the way of `door`; the message of the stop, empty where the run ended well."""
    wishes = {"on_finding": {ignore: "ignore"}} if ignore else {}
    settings = {**SETTINGS, **changed}
    if door == "python":
        try:
            trainer = GRPOTrainer("./model", digits, GRPOConfig(**settings, **wishes), ROWS)
            trainer.train(resume_from_checkpoint=resume or None)
        except PodiumError as error:
            return str(error)
        return ""
    flags = ["--on_finding", f"{{{ignore}: ignore}}"] if ignore and door == "flag" else []
    values = {"model": "./model", "dataset": "rows.jsonl", "rewards": ["mine.py:digits"], **settings}
    values |= ({"resume_from_checkpoint": True} if resume else {}) | (wishes if door == "recipe" else {})
    Path("run.yaml").write_text(yaml.safe_dump(values))
    result = CliRunner().invoke(app, ["train", "run.yaml", "--no-eval", *flags])
    assert result.exit_code == 0 or isinstance(result.exception, (SystemExit, PodiumError)), result.output
    return "" if result.exit_code == 0 else f"{result.output}{result.exception}"


def overruled(code: str) -> Finding:
    """The finding of that code in the run's folder; the doctor and the page show it, too."""
    [row] = [row for row in Run.load("run").findings.to_dict("records") if row["code"] == code]
    assert row["severity"] == "warning"
    assert row["what"].startswith("overruled: ")
    assert row["what"] in [issue.finding.what for issue in examine("run").issues]
    assert "overruled: " in write_report([Run.load("run")], Path("page.html")).read_text(encoding="utf-8")
    return row


def plant_mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = evidence.micro_batches
    monkeypatch.setattr(
        evidence,
        "micro_batches",
        lambda shares, **settings: [batch for share in shares for batch in counted([share], **settings)],
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("door", DOORS)
def test_a_stop_by_the_proof(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_mean_of_means(monkeypatch)
    assert overrule("P007") in train(door)
    [recorded] = [issue.finding for issue in examine("run").issues if issue.finding.severity == "error"]
    assert recorded.code == "P007"
    assert train(door, "P007", max_steps=1) == ""
    proof = json.loads(Path("run/proof.json").read_text())
    [check] = [check for check in proof["checks"] if check["overruled"]]
    assert (check["code"], check["passed"], check["result"]) == ("P007", False, "overruled")
    assert not proof["passed"]
    overruled("P007")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("door", ["python", "flag", "recipe"])
def test_a_stop_by_a_check(door: str) -> None:
    weights = load_file("model/model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, "model/model.safetensors", {"format": "pt"})
    assert overrule("M022") in train(door)
    assert train(door, "M022", max_steps=1) == ""
    overruled("M022")


JUDGEMENTS = [case for case in CASES if case.severity == "error" and overrule(case.code)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if number % 4 else []) for number, case in enumerate(JUDGEMENTS)],
    ids=[f"{case.code} {case.name}".strip() for case in JUDGEMENTS],
)
def test_every_judgement_of_a_check(case: Case) -> None:
    """What `podium check` refuses without being sure of it is a warning with the line that the message prints."""
    Path("case").mkdir()
    lay_out(case, Path("case"), Path("model"))
    os.chdir("case")
    line = yaml.safe_load(overrule(case.code).split(", --on_finding")[0])
    severities = [
        [
            finding.severity
            for finding in check_recipe("run.yaml", {**case.flags, **wishes})
            if finding.code == case.code
        ]
        for wishes in ({}, line)
    ]
    assert "error" in severities[0]
    assert "error" not in severities[1]
    assert severities[1] == ["warning"] * severities[0].count("error"), "warnings of an ignored code are left out"


@pytest.mark.cases(8)
@pytest.mark.parametrize("code", sorted(set(codes()) - NOTHING_RUNS))
def test_the_line_in_its_three_spellings(code: str) -> None:
    recipe, flag, python = re.fullmatch(r"(.+), --on_finding '(.+)' or GRPOConfig\((.+)\)", overrule(code)).groups()
    wish = {code: "ignore"}
    assert yaml.safe_load(recipe) == {"on_finding": wish}
    assert yaml.safe_load(flag) == wish
    config = GRPOConfig(**eval(f"dict({python})", {}), report_to="none", use_cpu=True)
    assert config.on_finding == wish
    assert ignored_codes(config) == {code}
    [left] = heeded([Finding(code=code, severity="error", what="x", fix="y")], ignored_codes(config))
    assert left.severity == "warning"


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("door", ["flag", "python", "recipe"])
def test_a_stop_by_resuming(door: str) -> None:
    assert train(door, max_steps=1) == ""
    message = train(door, resume=True, optim="adafactor")
    assert overrule("K004") in message
    assert "optim is adafactor" in message
    assert train(door, "K004", resume=True, optim="adafactor") == ""
    overruled("K004")
    assert [metrics.step for metrics in Run.load("run").history] == [1, 2]


@pytest.mark.parametrize("door", DOORS)
def test_what_cannot_be_overruled_says_so(door: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing could run; the line that would overrule it is not printed."""
    message = train(door, "C010", num_generations=3)
    assert "on_finding: {" not in message
    assert "divisible" in message
    assert "cannot overrule an error of C010" in caplog.text


def test_codes_that_cannot_be_overruled_are_codes() -> None:
    assert set(codes()) > NOTHING_RUNS
    assert all(not overrule(code) for code in NOTHING_RUNS)


@pytest.mark.parametrize(("code", "left"), [("P007", "warning"), ("C019", "error")])
def test_only_judgements_are_overruled(code: str, left: str) -> None:
    finding = Finding(code=code, severity="error", what="x", fix="y")
    assert [each.severity for each in heeded([finding], {code})] == [left]
    assert [*heeded([Finding(code=code, severity="note", what="x")], {code})] == []


def test_strict_and_a_monitor(make_trainer: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """A stop by `strict` prints the line; with it the run goes on, and the finding stays as a warning."""

    def frozen(**settings: Any) -> Any:
        trainer = make_trainer(max_steps=3, strict=True, **settings)
        trainer.create_optimizer()
        trainer.optimizer.step = lambda *_, **__: None
        trainer.train()
        return trainer

    trainer = frozen()
    assert trainer.health.decision == "stop"
    [code] = {finding.code for finding in trainer.health.found if finding.severity == "error"}
    assert overrule(code) in caplog.text
    trainer = frozen(on_finding={code: "ignore"})
    assert [f.severity for f in trainer.health.found if f.code == code] == ["warning"]
