"""The page as Python makes it: what is in it, what cannot get out of it, and whatever may be missing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.cli.report import report_of_finished_run
from podium.errors import DataError
from podium.report import write_report
from podium.report.columns import MAX_CHARACTERS, columns, fewer, packed
from podium.report.page import in_element, run_data
from podium.run import Run


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def elements(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)


def data_of(html: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def unpacked(completions: dict[str, Any]) -> dict[str, Any]:
    return json.loads(gzip.decompress(base64.b64decode(completions["gzip"])))


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---- the file ----


def test_the_policy_names_what_is_there_and_nothing_else(run_folder, tmp_path):
    html = write_report([run_folder()], tmp_path / "r.html").read_text()
    policy = dict(
        rule.split(" ", 1)
        for rule in re.search(r'Policy" content="([^"]*)"', html)[1].replace("&#39;", "'").split("; ")
    )
    plotly = gzip.decompress(base64.b64decode(re.search(r'id="plotly">(.*?)</script>', html)[1])).decode()
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].split() == [sha256(script), sha256(plotly)]
    assert policy["style-src"].split() == [sha256(elements(html, "style")[0]), sha256("")]
    assert "unsafe" not in str(policy)
    assert "connect-src" not in policy


def test_nothing_in_the_page_points_anywhere(run_folder, tmp_path):
    html = write_report([run_folder()], tmp_path / "r.html").read_text()
    assert not re.findall(r'(?:src|href|action)="(?!#)[^"]*"', html)
    assert "url(" not in elements(html, "style")[0]
    assert "innerHTML" not in re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "\u2028\u2029", "&lt;"])
def test_no_text_ends_its_element(text):
    written = in_element({text: text})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {text: text}


def test_hostile_words_stay_inside_their_json(run_folder, tmp_path):
    folder = run_folder("a<b>", texts=("</script><img src=x onerror=alert(1)>",))
    (folder / "findings.jsonl").write_text(
        json.dumps({"code": "X1", "severity": "error", "what": "</script><b>", "why": "", "fix": "", "step": 1}) + "\n"
    )
    html = write_report([folder], tmp_path / "r.html").read_text()
    assert html.count("</script") == 3
    assert "<img" not in html
    assert "<title>a&lt;b&gt; - Podium</title>" in html
    assert data_of(html)["runs"][0]["findings"][0]["what"] == "</script><b>"


def test_secrets_are_not_shown(run_folder, tmp_path):
    folder = run_folder()
    (folder / "environment.json").write_text(json.dumps({"command": "podium train x --note hf_" + "c" * 30}))
    html = write_report([folder], tmp_path / "r.html").read_text()
    assert "hf_xxx" not in html
    assert "hf_ccc" not in html


# ---- what is in it ----


def test_a_run_s_numbers(run_folder):
    data = run_data(Run.load(run_folder(num_steps=40)))
    assert data["summary"]["headline"].startswith("Reward rose from ")
    assert data["summary"]["level"] == "warning"
    assert [tile["value"] for tile in data["summary"]["numbers"] if tile["label"] == "Held-out accuracy"] == ["80 %"]
    charts = {chart["key"]: chart for chart in data["charts"]}
    assert list(charts)[:3] == ["reward", "functions", "signal"]
    assert [curve["name"] for curve in charts["functions"]["curves"]] == ["format", "correct"]
    assert charts["memory/peak_gb"]["other"]
    assert charts["kl"]["curves"][0]["values"][6] is None  # null in the file
    assert data["evaluation"]["rows"][0]["cells"][1] == {"value": 0.8, "low": 0.72, "high": 0.86}
    assert data["evaluation"]["verdict"] == "Better: accuracy rose from 0.020 (before) to 0.800 (after)."
    assert data["proof"]["rows"] == [["ok", "loss", "as TRL computes it", "1e-08", "", "P001"]]


def test_seconds_of_a_step_count_rounds_and_micro_steps(run_folder):
    folder = run_folder(num_steps=3)
    (folder / "config.yaml").write_text("gradient_accumulation_steps: 4\nsteps_per_generation: 8\n")
    [chart] = [chart for chart in run_data(Run.load(folder))["charts"] if chart["key"] == "time"]
    seconds = {curve["name"]: curve["values"][0] for curve in chart["curves"]}
    assert seconds == {"sampling": 0.95, "rewards": 0.05, "training": 4.8, "the rest": 0.0}


def test_every_completion_is_there(run_folder):
    run = Run.load(run_folder(num_steps=5))
    table = unpacked(run_data(run)["completions"])
    assert [table["prompts"][p] for p in table["prompt"]] == run.rollouts["prompt"].tolist()
    assert table["text"] == run.rollouts["completion"].tolist()
    assert table["rewards"]["format"] == run.rollouts["reward/format"].tolist()
    assert table["rewards"]["correct"].count(None) == run.rollouts["reward/correct"].isna().sum()


def test_news_are_later_steps_only(run_folder):
    run = Run.load(run_folder(num_steps=5))
    assert set(unpacked(run_data(run, after_step=3)["completions"])["step"]) == {4, 5}
    assert run_data(run, after_step=5)["completions"]["gzip"] == ""


def test_a_large_run_is_sampled_by_prompt_and_says_so(run_folder):
    rollouts = Run.load(run_folder(num_steps=60)).rollouts
    made = packed(rollouts, max_bytes=20_000)
    table = unpacked(made)
    assert len(made["gzip"]) <= 20_000
    assert made["kept"] == len(table["text"]) < made["total"] == len(rollouts)
    for prompt in table["prompts"]:
        assert table["prompt"].count(table["prompts"].index(prompt)) == (rollouts["prompt"] == prompt).sum()


def test_a_run_of_one_prompt_is_sampled_by_step(run_folder):
    rollouts = Run.load(run_folder(num_steps=30)).rollouts.assign(prompt="one")
    kept = fewer(rollouts, 0.5)
    assert 0 < len(kept) <= len(rollouts) / 2
    assert kept["step"].min() == 1
    assert kept["step"].max() == 30
    assert len(fewer(kept[kept["step"] == 1], 0.5)) == 32


def test_a_huge_completion_is_cut():
    rollouts = pandas.DataFrame(
        {"prompt": ["p"], "completion": ["x" * 5_000_000], "finish": ["stop"], "trained": [True]}
    )
    for name in ("step", "policy_step", "prompt_id", "row", "completion_index", "num_tokens"):
        rollouts[name] = 1
    for name in ("mean_logp", "reward", "advantage"):
        rollouts[name] = float("nan")
    [text] = columns(rollouts)["text"]
    assert len(text) < MAX_CHARACTERS + 100
    assert "4,980,000 more characters" in text


@pytest.mark.parametrize(
    "missing",
    ["rollouts", "findings.jsonl", "evaluation", "proof.json", "config.yaml", "environment.json", "metrics.jsonl"],
)
def test_whatever_is_missing_is_left_out(run_folder, tmp_path, missing):
    folder = run_folder(num_steps=3)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert write_report([folder], tmp_path / "r.html").stat().st_size > 1_000_000


def test_a_run_that_goes_on_may_have_half_a_line(run_folder, tmp_path):
    folder = run_folder(num_steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "val')
    data = data_of(write_report([folder], tmp_path / "r.html").read_text())
    assert data["runs"][0]["summary"]["last_step"] == 3


# ---- the verb ----


def test_the_verb_writes_into_the_run_s_folder(cli, run_folder):
    folder = run_folder()
    result = cli("report", folder)
    assert result.exit_code == 0, result.output
    assert data_of((folder / "report.html").read_text())["runs"][0]["name"] == "sums"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_two_runs_side_by_side(cli, run_folder, tmp_path):
    result = cli("report", run_folder("one"), run_folder("two", num_steps=9, seed=1), "-o", "both.html")
    assert result.exit_code == 0, result.output
    assert [run["name"] for run in data_of((tmp_path / "both.html").read_text())["runs"]] == ["one", "two"]


def test_mistakes_are_said(cli, run_folder, tmp_path):
    result = cli("report", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert cli("report", *[run_folder(name) for name in "abc"]).exit_code == 2
    with pytest.raises(DataError):
        write_report([tmp_path], tmp_path / "r.html")


def test_a_report_that_fails_is_one_line(run_folder, tmp_path):
    folder = run_folder()
    assert report_of_finished_run(folder) == f"Report: {folder / 'report.html'}"
    (folder / "rollouts" / "rollouts-0.parquet").unlink()
    pandas.DataFrame({"step": [1], "prompt_id": [1], "completion_index": [0]}).to_parquet(
        folder / "rollouts" / "b.parquet"
    )
    said = report_of_finished_run(folder)
    assert said.startswith("No report was written: KeyError")
    assert "\n" not in said


def test_a_report_of_nothing(tmp_path):
    assert "DataError" in report_of_finished_run(tmp_path / "no")
    assert not Path(tmp_path / "no").exists()
