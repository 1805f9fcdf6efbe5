"""The page as Python makes it: what is in it, what cannot get out of it, and whatever may be missing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from typer.testing import CliRunner

import podium.runs.report
from podium.cli import app
from podium.cli.report import report_of_finished_run
from podium.errors import DataError
from podium.runs.report import page, write_report
from podium.runs.report.page import MAX_CHARACTERS, columns, fewer, in_element, packed, run_data
from podium.runs.run import Run


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
    html = write_report([Run.load(run_folder())], tmp_path / "r.html").read_text()
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
    html = write_report([Run.load(run_folder())], tmp_path / "r.html").read_text()
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
    found = {"code": "X1", "severity": "error", "what": "</script><b>", "why": "", "fix": "", "step": 1}
    (folder / "findings.jsonl").write_text(json.dumps({**found, "changes": {"system": "</script><b>"}}) + "\n")
    html = write_report([Run.load(folder)], tmp_path / "r.html").read_text()
    assert html.count("</script") == 3
    assert "<img" not in html
    assert "<title>a&lt;b&gt; - Podium</title>" in html
    [shown] = data_of(html)["runs"][0]["findings"]
    assert (shown["what"], shown["changes"]) == ("</script><b>", "system: </script><b>")


def test_secrets_are_not_shown(run_folder, tmp_path):
    folder = run_folder()
    (folder / "environment.json").write_text(json.dumps({"command": "podium train x --note hf_" + "c" * 30}))
    html = write_report([Run.load(folder)], tmp_path / "r.html").read_text()
    assert "hf_xxx" not in html
    assert "hf_ccc" not in html


# ---- what is in it ----


def tiles(data):
    return {tile["label"]: (tile["value"], tile["detail"]) for tile in data["summary"]["numbers"]}


def changed(folder, *, steps):
    """The run's log with other values: `steps` gives a step's changes."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["values"] |= steps(line["step"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.defect("H1", "the picture's height is its own")
def test_the_style_does_not_cut_a_picture():
    style = (Path(podium.runs.report.__file__).parent / "assets/page.css").read_text()
    [rule] = re.findall(r"^\.ab \{(.*)\}", style, re.MULTILINE)
    assert "height" not in rule


@pytest.mark.defect("H2", "the interval stands beside the number it is of")
@pytest.mark.defect("F8", "from 1 % [74, 88]")
def test_an_interval_stands_beside_its_number(run_folder, now):
    folder = run_folder(num_steps=3)
    look = json.loads((folder / "evaluation/after.json").read_text())["accuracy"]
    value, detail = tiles(run_data(Run.load(folder)))["Held-out accuracy"]
    assert value == "80 %"
    assert detail == f"{100 * look['low']:.0f} to {100 * look['high']:.0f} %, before 2 %"
    now(f"{value} {detail}")


@pytest.mark.defect("H3", "a median of two, and a first step that took longer than the second")
def test_seconds_of_two_steps(run_folder, now):
    folder = changed(run_folder(num_steps=2), steps=lambda step: {"step_time": {1: 19.9, 2: 9.65}[step]})
    data = run_data(Run.load(folder))
    assert tiles(data)["Seconds a step"] == ("14.8", "median")
    assert data["summary"]["seconds"] == pytest.approx(19.9 + 3.4)
    now(f"{tiles(data)['Seconds a step']}, {data['summary']['seconds']:.1f} s in all")


@pytest.mark.defect("F8", "-1.4e-17, 17 digits, a step at which none ended, ratios that never leave the range")
def test_numbers_that_are_rounding(run_folder, now):
    folder = changed(
        run_folder(num_steps=9),
        steps=lambda step: {
            "reward": -1.4e-17,
            "completions/mean_terminated_length": 0.0 if step == 2 else 7.0,
            "clip_ratio/region_mean": 0.0,
        },
    )
    (folder / "proof.json").write_text(
        json.dumps({"checks": [{"result": "ok", "name": "a", "measured": 0.12345678901234567, "tolerance": 0.0}]})
    )
    data = run_data(Run.load(folder))
    charts = {chart["key"]: chart for chart in data["charts"]}
    assert set(charts["reward"]["curves"][0]["values"]) == {0.0}
    assert tiles(data)["Reward"][0] == "0.00"
    assert charts["length"]["curves"][1]["values"][:3] == [7.0, None, 7.0]
    assert "clip" not in charts
    assert data["proof"]["rows"] == [["ok", "a", "", "0.123", "", ""]]
    now(f"reward {tiles(data)['Reward'][0]}; proof {data['proof']['rows'][0][3]}")


@pytest.mark.defect("F8", "bands above the possible")
def test_a_band_ends_where_rewards_end(run_folder):
    data = run_data(Run.load(run_folder(num_steps=9)))
    [reward] = [chart["curves"][0] for chart in data["charts"] if chart["key"] == "reward"]
    assert max(reward["high"]) <= 3.0
    assert min(reward["low"]) >= 0.0


@pytest.mark.defect("F8", "the headline is of held-out prompts")
def test_the_headline_is_of_held_out_prompts(run_folder, now):
    folder = run_folder(num_steps=40)
    compared = {"verdict": "Better: accuracy ...", "metric": "accuracy", "main": {"a": 0.01, "b": 0.8}}
    (folder / "evaluation/comparison.json").write_text(json.dumps(compared))
    headline = run_data(Run.load(folder))["summary"]["headline"].replace("\xa0", " ")
    assert headline == "Better: held-out accuracy 1 % before, 80 % after."
    now(headline)


@pytest.mark.defect("F8", "a finished staged run reads step 14 of 22, and tiles span stages")
def test_a_run_in_stages_that_has_ended(make_folder, tmp_path, now):
    run = tmp_path / "run"
    entries = []
    for name, steps in (("form", 12), ("right", 9)):
        make_folder(run, name, num_steps=steps)
        entries.append(
            {"name": name, "folder": name, "type": "grpo", "max_steps": 20, "steps": steps, "ended_by": "gate"}
        )
    changed(run / "form", steps=lambda step: {"reward": -5.0})
    (run / "stages.json").write_text(json.dumps({"stages": entries}))
    data = run_data(Run.load(run))
    assert (data["summary"]["last_step"], data["summary"]["max_steps"]) == (21, 21)
    assert "-5" not in "".join(tiles(data)["Reward"])
    entries[1] |= {"ended_by": None, "steps": None}
    (run / "stages.json").write_text(json.dumps({"stages": entries}))
    assert run_data(Run.load(run))["summary"]["max_steps"] == 40
    now(f"step {data['summary']['last_step']} of {data['summary']['max_steps']}; reward {tiles(data)['Reward']}")


@pytest.mark.defect("N", "a run of which nothing is recorded is not one without findings")
def test_nothing_recorded_is_not_nothing_found(run_folder, now):
    folder = run_folder(num_steps=3)
    (folder / "metrics.jsonl").write_text("")
    (folder / "findings.jsonl").write_text("")
    said = run_data(Run.load(folder))["summary"]
    assert (said["level"], said["word"]) == ("note", "Nothing recorded")
    now(said["word"])


@pytest.mark.defect("F8", "M141 twice, as a warning and as an error")
def test_a_finding_that_was_said_again_stands_there_once(run_folder):
    folder = run_folder(num_steps=3)
    found = {"code": "M141", "what": "w", "why": "", "fix": "", "step": 1}
    (folder / "findings.jsonl").write_text(
        "".join(json.dumps({**found, "severity": word}) + "\n" for word in ("warning", "error"))
    )
    assert [each["severity"] for each in run_data(Run.load(folder))["findings"]] == ["error"]


@pytest.mark.defect("F8", "the curve of adaptive weights, and the right answer beside a completion")
def test_weights_and_answers_are_shown(run_folder):
    folder = changed(run_folder(num_steps=3), steps=lambda step: {"reward_weights/format": 1.1**step})
    [path] = (folder / "rollouts").glob("*.parquet")
    rows = pandas.read_parquet(path)
    rows.assign(answer="7").to_parquet(path)
    data = run_data(Run.load(folder))
    assert [chart["title"] for chart in data["charts"] if chart["key"] == "weights"] == ["Reward weights"]
    assert not [chart for chart in data["charts"] if chart["other"] and "weights" in chart["key"]]
    assert set(columns(Run.load(folder).rollouts)["answer"]) == {"7"}


def test_rows_without_answers_have_none(run_folder):
    rollouts = Run.load(run_folder()).rollouts
    rollouts["answer"] = pandas.Series([None] * len(rollouts), dtype="str")  # read as NaN
    assert set(columns(rollouts)["answer"]) == {None}
    rollouts["turns"] = pandas.Series([None] * len(rollouts), dtype="str")
    assert set(columns(rollouts)["turns"]) == {None}


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


def test_a_large_run_is_sampled_by_prompt_and_says_so(run_folder, monkeypatch):
    rollouts = Run.load(run_folder(num_steps=60)).rollouts
    monkeypatch.setattr(page, "MAX_BYTES", 20_000)
    made = packed(rollouts, {})
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
    assert write_report([Run.load(folder)], tmp_path / "r.html").stat().st_size > 1_000_000


def test_a_run_that_goes_on_may_have_half_a_line(run_folder, tmp_path):
    folder = run_folder(num_steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "val')
    data = data_of(write_report([Run.load(folder)], tmp_path / "r.html").read_text())
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
        write_report([Run.load(tmp_path)], tmp_path / "r.html")


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


@pytest.fixture
def no_plotly(monkeypatch):
    """Plotly is not installed."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page._plotly.cache_clear()
    yield
    page._plotly.cache_clear()


def test_without_plotly_the_page_has_all_but_its_curves(no_plotly, cli, run_folder):
    folder = run_folder()
    result = cli("report", folder)
    assert result.exit_code == 0, result.output
    assert "pip install 'podium[report]'" in result.output
    html = (folder / "report.html").read_text()
    data = data_of(html)
    assert "pip install 'podium[report]'" in data["uncharted"]
    assert data["runs"][0]["completions"]["kept"] > 0
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    assert f"script-src {sha256(script)};" in html.replace("&#39;", "'")


def test_without_plotly_a_run_that_has_ended_says_how_to_get_the_curves(no_plotly, run_folder):
    folder = run_folder()
    written, advice = report_of_finished_run(folder).splitlines()
    assert written == f"Report: {folder / 'report.html'}"
    assert advice.endswith(f"pip install 'podium[report]'; then podium report {folder}")


def test_a_report_of_nothing(tmp_path):
    assert "DataError" in report_of_finished_run(tmp_path / "no")
    assert not Path(tmp_path / "no").exists()
