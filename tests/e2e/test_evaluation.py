"""`podium eval` and `podium compare` on tiny models: what is asked, what is written, what is said."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from podium.cli import BEGINS, app
from podium.evaluation.saved import Saved
from podium.isolation.workers import stop_all
from podium.testing import save_tiny_model

Cli = Callable[[str], tuple[int, str, str]]

RECIPE = """\
model: model
dataset: builtin:additions
rewards:
  - mine.py:correct
  - {name: answer_format, weight: 2}
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 4
learning_rate: 1e-3
max_steps: 2
logging_steps: 1
save_strategy: "no"
prove_first_batch: false
eval_rows: 12
eval_samples: 2
eval_temperature: 0.7
output_dir: out
"""
REWARDS = """\
def correct(completions, **columns):
    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]
    return [float(len(text) > 3) for text in texts]
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("eval model")` in a folder with two tiny models, a reward file and a recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    save_tiny_model(tmp_path / "model")
    save_tiny_model(tmp_path / "other", seed=3)
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(RECIPE)

    def run(line: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, line.split())
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def said(cli: Cli, line: str) -> dict[str, Any]:
    code, out, err = cli(line)
    assert code == 0, err
    return json.loads(out)


# ---- eval ----


def test_eval_of_a_run_measures_what_training_measured_after(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("train run.yaml")
    assert code == 0, err
    folder = tmp_path / "out" / "evaluation"
    verdict = json.loads((folder / "comparison.json").read_text())["verdict"]
    assert " ".join(verdict.split()) in " ".join(out.split())
    looked = said(cli, "eval out --json")
    after = json.loads((folder / "after.json").read_text())
    assert {name: value for name, value in looked.items() if name in after} == {
        name: value for name, value in after.items() if name != "temperature"
    }
    assert (looked["num_prompts"], looked["num_completions"]) == (12, 24)
    again = said(cli, "compare out/evaluation/before.parquet out/evaluation/after.parquet --json")
    assert again["main"] == json.loads((folder / "comparison.json").read_text())["main"]
    assert "before" in again["names"][0]


def test_completions_are_written_and_hold_the_same_numbers(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("eval model --recipe run.yaml -k 2 --samples 4 --eval_rows 30")
    assert code == 0, err
    assert "30/30 prompts" in err
    assert "model on builtin:additions (test): 30 prompts, 4 completions each, temperature 0.7" in out
    [path] = (tmp_path / "evaluations").glob("*.parquet")
    table = pd.read_parquet(path)
    assert len(table) == 120
    looked = json.loads(path.with_suffix(".json").read_text())
    right = table["reward/correct"].eq(1)
    assert looked["accuracy"]["value"] == pytest.approx(right.mean())
    assert looked["means"]["correct"]["value"] == pytest.approx(table["reward/correct"].mean())
    assert looked["mean_tokens"]["value"] == pytest.approx(table["num_tokens"].mean())
    assert looked["truncated"]["value"] == pytest.approx(table["finish"].eq("length").mean())
    any_right = right.groupby(table["place"]).any().mean()
    assert looked["pass_at"]["4"]["value"] == pytest.approx(any_right)
    assert list(looked["pass_at"]) == ["1", "2", "4"]
    assert right.mean() < looked["pass_at"]["2"]["value"] < any_right
    odd = said(cli, "eval model --recipe run.yaml -k 3 --samples 4 --eval_rows 4 --json -o odd")
    assert list(odd["pass_at"]) == ["1", "2", "3", "4"]
    assert Saved.load(path).scores().num_prompts == 30
    assert table["column/answer"].iloc[0] == "18"


@pytest.mark.slow
def test_parts_change_nothing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are sampled some at a time; their random numbers do not know."""
    whole = said(cli, "eval model --recipe run.yaml --json -o whole")
    monkeypatch.setattr("podium.evaluation.evaluate.COMPLETIONS_AT_ONCE", 7)
    parts = said(cli, "eval model --recipe run.yaml --json -o parts")
    frames = [pd.read_parquet(looked["completions"]) for looked in (whole, parts)]
    pd.testing.assert_frame_equal(*frames)
    assert len(frames[0]) == 24


@pytest.mark.slow
def test_a_recipe_whose_training_evaluates_nothing(cli: Cli, tmp_path: Path) -> None:
    text = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(re.sub("eval_rows: .*", "eval_rows: 0", text))
    assert said(cli, "eval model --recipe run.yaml --greedy --json")["num_prompts"] == 80


def test_greedy_draws_once_and_repeats(cli: Cli) -> None:
    first = said(cli, "eval model --recipe run.yaml --greedy --json --seed 1")
    again = said(cli, "eval model --recipe run.yaml --greedy --json --seed 2")
    assert first["num_completions"] == 12
    assert first["settings"]["greedy"]
    assert first["accuracy"] == again["accuracy"]
    assert first["mean_tokens"] == again["mean_tokens"]


def test_flags_alone_say_what_to_measure_by(cli: Cli, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looked = said(
        cli,
        "eval model --data rows.jsonl --rewards mine.py:correct answer_format --max_completion_length 3 --json -k 2",
    )
    assert looked["num_prompts"] == 12
    assert looked["settings"]["max_tokens"] == 3
    assert looked["settings"]["temperature"] == 1.0
    assert list(looked["means"]) == ["correct", "answer_format"]


@pytest.mark.slow
def test_checkpoints_and_adapters_are_found_with_their_run(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli('train run.yaml --no-eval --lora {"r":4} --save_strategy steps --save_steps 1')
    assert code == 0, err
    looked = said(cli, "eval out/checkpoint-1 --json")
    assert looked["settings"]["model"] == "out/checkpoint-1"
    assert Path(looked["completions"]).parent == tmp_path / "out" / "evaluation"
    found = said(cli, "compare out/checkpoint-1 out/checkpoint-2 --json")
    assert found["names"] == ["out/checkpoint-1", "out/checkpoint-2"]
    assert found["main"]["num_prompts"] == 12
    one = said(cli, "compare out --json")
    assert one["names"] == ["model", "out"]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_half_written(cli: Cli, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "podium", "eval", "model", "--recipe", "run.yaml", "--samples", "256"]
    command += ["--max_completion_length", "200", "--eval_rows", "80"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert any("prompts, " in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.rstrip().endswith("interrupted")
    assert list((tmp_path / "evaluations").iterdir()) == []


# ---- compare ----


def test_a_model_against_itself(cli: Cli) -> None:
    code, out, err = cli("compare model model --recipe run.yaml")
    assert code == 0, err
    assert "No difference shown: accuracy" in out
    assert "for both, the same on 12 prompts (correct)." in out
    assert "got better" not in out


@pytest.mark.slow
def test_two_models_by_category_and_on_a_second_set(cli: Cli, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "category": "even" if a % 2 == 0 else "odd\x1b[31m"}
        for a in range(8)
        for b in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = "compare model other --recipe run.yaml --eval_rows 40 --data rows.jsonl --also builtin:additions"
    code, out, err = cli(line)
    assert code == 0, err
    assert "accuracy by `category` (intervals hold together at 95 %)" in out
    pieces = ("even", "odd", "McNemar's exact test", "egression", "builtin:additions (test)", "A: model", "B: other")
    for piece in pieces:
        assert piece in out
    assert "\x1b[31m" not in out
    found = said(cli, f"{line} --json --by answer")
    assert sum(each["num_prompts"] for each in found["categories"].values()) == 32
    assert found["also"]["main"]["num_prompts"] == 40
    moved = found["main"]["num_better"], found["main"]["num_worse"]
    assert moved == (len(found["better"]), len(found["worse"]))
    saved = [Path(path) for path in found["completions"]]
    again = said(cli, f"compare {saved[0]} {saved[1].with_suffix('.json')} --by answer --json")
    assert {**again, "also": None} == {**found, "also": None}


@pytest.mark.slow
def test_what_differs_besides_the_models_is_said(cli: Cli) -> None:
    one = said(cli, "eval model --recipe run.yaml --json --temperature 0.5")["completions"]
    other = said(cli, "eval model --recipe run.yaml --json --eval_rows 8 --greedy")["completions"]
    code, out, err = cli(f"compare {one} {other}")
    assert code == 0
    assert "`greedy` differs" not in err
    assert "Not the models alone were compared (other rows; `greedy` False and True; `temperature` 0.5 and " in out
    assert "4 prompts are left out: 4 only A has answered, 0 only B" in err


ASKED = "eval model --recipe asked.yaml --split train --json"


@pytest.fixture
def asked(cli: Cli, tmp_path: Path) -> Path:
    """A recipe with a template of prompts, its rows with a column too long for a label, and an evaluation of both."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "tests": [f"x == {i + 1}"]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = RECIPE.replace(
        "dataset: builtin:additions", 'dataset: rows.jsonl\nprompt: "{question}"\nsystem: Be brief.'
    )
    (tmp_path / "asked.yaml").write_text(recipe)
    return Path(said(cli, f"{ASKED} -o first")["completions"])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("file", "old", "new", "flags", "first"),
    [
        ("rows.jsonl", "x == 3", "x == 4", "", "other rows"),
        ("asked.yaml", '"{question}"', '" {question}"', "", "other prompts of these rows"),
        ("asked.yaml", "Be brief.", "Be long.", "", "other prompts of these rows"),
        (
            "model/chat_template.jinja",
            "<|im_start|>",
            "<|im_start|> ",
            "",
            "another chat template, tools or prompt length",
        ),
        ("asked.yaml", "", "", " --top_p 0.5", "`top_p` 1.0 and 0.5"),
        ("mine.py", "> 3", "> 2", "", "other code of `correct`"),
        ("least_length.py", "1", "2", "", "other code of `correct`"),
    ],
)
def test_what_was_changed_between_two_evaluations_is_said_first(
    cli: Cli, asked: Path, tmp_path: Path, file: str, old: str, new: str, flags: str, first: str
) -> None:
    """A real change of rows, prompt, template, sampling or reward; never a verdict on the models."""
    if file == "least_length.py":
        (tmp_path / file).write_text("LEAST = 1\n")
        (tmp_path / "mine.py").write_text("from least_length import LEAST\n" + REWARDS)
        asked = Path(said(cli, f"{ASKED} -o first")["completions"])
    again = said(cli, f"{ASKED} -o again")["completions"]
    assert " for both, the same on 8 prompts (correct)." in cli(f"compare {asked} {again}")[1]
    changed = tmp_path / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new))
    if file == "least_length.py":
        stop_all()
    other = said(cli, f"{ASKED} -o other{flags}")["completions"]
    code, out, err = cli(f"compare {asked} {other}")
    if first == "other prompts of these rows":
        assert (code, out) == (2, "")
        assert f"have no prompt in common ({first}): " in err
    else:
        assert code == 0, err
        assert out.splitlines()[-1].startswith(f"Not the models alone were compared ({first}): "), out


def test_an_evaluation_of_an_earlier_version_is_compared_with_a_doubt(cli: Cli, asked: Path, tmp_path: Path) -> None:
    table = pq.read_table(asked)
    kept = json.loads(pq.read_metadata(asked).metadata[b"podium.evaluation"])
    for name in ("rows", "prompts", "chat_template", "vocabulary", "top_p", "top_k", "min_p", "repetition_penalty"):
        del kept[name]
    old = tmp_path / "old.parquet"
    pq.write_table(table.replace_schema_metadata({b"podium.evaluation": json.dumps(kept).encode()}), old)
    code, out, err = cli(f"compare {old} {asked}")
    assert code == 0, err
    assert "Without digests of rows and prompts (" in out


# ---- mistakes, before weights ----


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval", "takes one model or run, before any flag (none given)"),
        ("eval model other", "got 2: model, other"),
        ("eval ./nowhere", "There is no folder ./nowhere"),
        ("eval model", "Give --data FILE and --rewards NAME ..., or --recipe FILE"),
        ("eval model --data builtin:additions", "Give --rewards NAME ..."),
        ("eval model --recipe run.yaml --data builtin:additions --split tset", "has no split `tset`"),
        ("eval model --recipe run.yaml --eval_rows 0", "--eval_rows 0 leaves no row to evaluate on"),
        ("eval model --recipe run.yaml --greedy -k 4", "leave out -k, --samples and --temperature"),
        ("eval model --recipe run.yaml -k 8 --samples 4", "pass@8 needs at least 8 completions"),
        ("eval model --recipe run.yaml --rewards nope", "no reward `nope`"),
        ("eval model --recipe run.yaml --data nothing.jsonl", "There is no file or folder nothing.jsonl"),
        ("eval model --recipe run.yaml --sed 4", "unknown key `sed`"),
        ("eval model --recipe run.yaml --data rows.jsonl", "needs `answer`"),
        ("eval model --recipe run.yaml --output run.yaml", "run.yaml cannot be written to"),
        ("compare model", "belongs to no run"),
        ("compare model other --recipe run.yaml --by difficulty", "no such column"),
        ("compare a.parquet model", "Give two saved evaluations, or two models"),
        ("compare a.parquet b.parquet", "There is no file a.parquet"),
        ("compare a.parquet b.parquet --greedy", "compared as they are"),
    ],
)
def test_mistakes_are_one_message_before_weights_load(cli: Cli, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "mine.py").write_text(REWARDS.replace("**columns", "answer, **columns"))
    for name in ("model", "other"):  # loading would fail
        weights = tmp_path / name / "model.safetensors"
        weights.rename(tmp_path / name / "weights.safetensors")
    code, out, err = cli(line)
    assert code == 2
    assert err.startswith(f"{BEGINS[line.split()[0].replace('eval', 'evaluate')]} ...\nerror: ")
    assert message in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "evaluations").exists() or not list((tmp_path / "evaluations").iterdir())


def test_a_parquet_file_that_is_no_evaluation(cli: Cli, tmp_path: Path) -> None:
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_text("text")
    for name, message in (("x", "no evaluation"), ("y", "is not a Parquet file")):
        code, _, err = cli(f"compare {name}.parquet x.parquet")
        assert code == 2
        assert message in err


GAME = """\
from podium import TextEnvironment

class Game(TextEnvironment):
    def reset(self, number, **row):
        self.turns = 0
        return f"Guess {number}."

    def step(self, text):
        self.turns += 1
        return "again", 0.5, self.turns == 2, {}
"""


def test_a_run_with_an_environment_is_evaluated_by_playing(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    rows = [{"number": i, "prompt": [{"role": "user", "content": "Play. "}]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = RECIPE.replace("dataset: builtin:additions", "dataset: rows.jsonl\nenvironment: game.py:Game")
    recipe = recipe.replace("rewards:\n  - mine.py:correct\n  - {name: answer_format, weight: 2}\n", "")
    short = "generation_kwargs: {eos_token_id: [2, " + ", ".join(map(str, range(10, 200))) + "]}\n"
    (tmp_path / "game.yaml").write_text(
        recipe.replace("max_completion_length: 4", "max_completion_length: 200") + short
    )
    code, out, err = cli("eval model --recipe game.yaml --data rows.jsonl")
    assert code == 0, out + err
    [saved] = tmp_path.glob("**/*.parquet")
    table = pd.read_parquet(saved)
    assert table["reward/Game"].max() == 1.0
    assert (table["reward/Game"] >= 0.5).all()
    assert table["completion"].str.contains("\n| again", regex=False).any()  # what was given, behind a bar
    assert not table["completion"].str.contains("assistant").any()  # the template's role words
