"""`podium train --dataset qa.csv`: a file of questions and answers alone is a run, and its record is one again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from podium.cli import app
from podium.errors import ConfigError
from podium.recipe import load
from podium.recipe.document import Document
from podium.testing import save_tiny_model

SMALL = (
    "--model model --per_device_train_batch_size 16 --num_generations 4 --max_completion_length 4 --eval_rows 3 "
    "--learning_rate 1e-3"
)
"""What makes the run of a tiny model a quick one."""

REWARD = "def right(completions, **columns):\n    return [float(len(str(c)) % 2) for c in completions]\n"

Cli = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """In a folder with a tiny model and a CSV of 200 additions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    save_tiny_model(tmp_path / "model")
    lines = [f"What is {n // 20} + {n % 20}?,{n // 20 + n % 20}" for n in range(200)]
    Path("qa.csv").write_text("\n".join(["question,expert_answer", *lines]) + "\n")

    def run(line: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return run


def assumed(rows: str, name: str, **flags: object) -> dict[str, object]:
    Path(name).write_text(rows)
    document = Document(name=name, folder=Path(), values={}, lines={}, is_file=False)
    return dict(load(document, {"dataset": name, **flags}).assumed)


def test_check_says_what_was_assumed_and_finds_nothing_wrong(cli: Cli) -> None:
    code, out, err = cli(f"check --dataset qa.csv {SMALL}")
    assert (code, err) == (0, "Reading the recipe, its rows and its rewards; no weight is loaded ...\n"), out
    for piece in (
        'note[C040] assumed: prompt "{question}", answer "{expert_answer}", system',
        '"numeric_match", "weight": 2',
        "held_out 0.2",
        "qa.csv: 161 rows",
    ):
        assert piece in out


@pytest.mark.slow
def test_train_and_its_record_trained_again_give_the_same_weights(cli: Cli) -> None:
    Path("mine.py").write_text(REWARD)  # noise of a random model is never right, and nothing would be learnt
    code, out, err = cli(f"train --dataset qa.csv --max_steps 2 --rewards mine.py:right {SMALL}")
    assert code == 0, err
    assert "note[C040] assumed: prompt" in err
    assert "model: 161 prompts, rewards right" in out
    assert "before training: 3 of 35 held-out prompts" in out
    record = yaml.safe_load(Path("runs/qa/config.yaml").read_text())
    assert (record["prompt"], record["answer"], record["held_out"]) == ("{question}", "{expert_answer}", 0.2)
    code, _, err = cli("train runs/qa/config.yaml --no-eval --output_dir again")
    assert code == 0, err
    assert "assumed" not in err
    ours, theirs = (Path(folder, "model.safetensors").read_bytes() for folder in ("runs/qa", "again"))
    assert ours == theirs
    assert ours != Path("model/model.safetensors").read_bytes()


def test_sample_shows_prompts_of_the_file(cli: Cli) -> None:
    code, out, err = cli(f"sample --dataset qa.csv -n 2 {SMALL}")
    assert code == 0, err
    assert len(re.findall(r"What is \d+ \+ \d+\?", out)) == 2
    assert "numeric_match" in out
    assert "assumed: prompt" in err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_measured_pass_rates_filter_and_order_the_next_run(cli: Cli) -> None:
    Path("mine.py").write_text(REWARD)
    base = f"--dataset qa.csv {SMALL} --rewards mine.py:right --accuracy right"
    code, out, err = cli(f"sample {base} -n 200 --save rates.jsonl")
    assert code == 0, err
    rows = [json.loads(line) for line in Path("rates.jsonl").read_text().splitlines()]
    assert len(rows) == 161
    assert all(row["pass_rate"] == row["right"] / 4 and row["completions"] == 4 for row in rows)
    solved = sum(row["pass_rate"] in (0, 1) for row in rows)
    assert 0 < solved < 161
    code, out, err = cli(f"check {base} --pass_rates rates.jsonl")
    assert code == 0, err
    assert f"note[D051] qa.csv: {solved} of 161 rows are left out by their pass rates" in out
    code, out, err = cli(f"train {base} --pass_rates rates.jsonl --order easy_first --no-eval --max_steps 1")
    assert code == 0, err
    assert f"{solved} of 161 rows are left out by their pass rates" in err
    assert f"{161 - solved} prompts" in out


@pytest.mark.slow
def test_reasoning_gym_brings_its_verifier(cli: Cli) -> None:
    pytest.importorskip("reasoning_gym")
    code, out, err = cli(f"check --dataset reasoning-gym:chain_sum?size=40 {SMALL}")
    assert code == 0, err
    assert 'rewards [{"name": "reasoning_gym", "args": {"dataset": "chain_sum"}}]' in " ".join(out.split())


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train", "podium train --dataset qa.csv"),
        ("train --dataset none.csv", "There is no file or folder none.csv. Similar: "),
        ("train --dataset odd.csv", "no `prompt` column; the columns are `alpha`, `beta`, `gamma`"),
        ("sample --dataset qa.csv -n 2 --save none/rates.jsonl", "there is no folder none"),
    ],
)
def test_mistakes_are_one_message(cli: Cli, line: str, message: str) -> None:
    Path("odd.csv").write_text("alpha,beta,gamma\n" + "1,2,3\n" * 40)
    code, out, err = cli(line)
    assert code == 2
    assert message.replace("Similar: ", "") in err
    assert "Traceback" not in out + err


# ---- what is assumed ----


@pytest.mark.parametrize(
    ("header", "prompt", "answer"),
    [
        ("question,expert_answer", "{question}", "{expert_answer}"),
        ("question,answer", "{question}", None),
        ("prompt,completion", None, "{completion}"),
        ("instruction,output", "{instruction}", "{output}"),
        ("problem,solution", "{problem}", "{solution}"),
    ],
)
def test_usual_names(cli: Cli, header: str, prompt: str | None, answer: str | None) -> None:
    made = assumed(f"{header}\nWhat is 1+1?,2\nWhat is 2+2?,4\n", "x.csv")
    assert (made.get("prompt"), made.get("answer")) == (prompt, answer)


@pytest.mark.parametrize(
    ("answers", "accuracy", "answer_from"),
    [
        (["7", "1,000", "-2.5"], "numeric_match", None),
        (["Paris", "7"], "exact_match", None),
        (["3 + 4 = 7\\n#### 7", "so\\n#### 8"], "numeric_match", "after ####"),
    ],
)
def test_rewards_by_the_answers(cli: Cli, answers: list[str], accuracy: str, answer_from: str | None) -> None:
    rows = "".join(f'{{"question": "q{n}", "answer": "{answer}"}}\n' for n, answer in enumerate(answers))
    made = assumed(rows, "x.jsonl")
    assert (made["accuracy"], made.get("answer_from")) == (accuracy, answer_from)
    assert ("examples" in made) is (answer_from is None)


def test_what_was_written_is_not_assumed(cli: Cli) -> None:
    rows = "question,answer\n1+1,2\n2+2,4\n"
    made = assumed(rows, "x.csv", model="model", held_out=0.5, learning_rate=1e-6, rewards=["answer_correct"])
    assert not {"model", "held_out", "learning_rate", "rewards", "accuracy", "adam_beta2"} & made.keys()
    assert "eval_dataset" not in made
    assert "held_out" not in assumed(rows, "x.csv", eval_dataset="qa.csv")
    with pytest.raises(ConfigError, match="no `rewards`"):
        assumed("alpha,beta,gamma\n1,2,3\n", "odd.csv")


@pytest.mark.parametrize("dataset", ["reasoning-gym:chain_sum?size=40", "asked.csv"])
def test_the_built_in_model_has_a_rate_and_a_length_of_its_own_whatever_the_answers(cli: Cli, dataset: str) -> None:
    """Without them TRL's rate of 1e-6 would teach nothing: a verifier in place of answers, and no answers at all."""
    from podium.recipe.assume import assume

    Path("asked.csv").write_text("prompt\n" + "".join(f"Describe a thing of size {n}.\n" for n in range(20)))
    made = assume({"dataset": dataset}, alone=True)
    assert (made["learning_rate"], made["max_steps"]) == (2e-5, 40)


@pytest.mark.parametrize(("flags", "rate"), [({}, 1e-5), ({"use_peft": True}, 3e-4), ({"lora": {"r": 8}}, 3e-4)])
def test_an_adapter_of_the_built_in_model_learns_at_a_higher_rate(
    cli: Cli, flags: dict[str, object], rate: float
) -> None:
    made = assumed("question,answer\n1+1,2\n", "x.csv", **flags)
    assert made["learning_rate"] == rate
    assert made.get("lora_target_modules") == ("all-linear" if "use_peft" in flags else None)
