"""What newcomers met: a message that names the cause first, in one place, with something to type that works."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.checks import check_recipe
from podium.cli import app
from podium.cli.words import recipe_and_flags
from podium.testing import save_tiny_model

Say = Callable[[str], None]

QUESTIONS = [(f"What is {n} + {n % 7}?", str(n + n % 7)) for n in range(40)]
CSV = "question,answer\n" + "".join(f"{question},{answer}\n" for question, answer in QUESTIONS)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234567\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.csv").write_text(CSV)
    return tmp_path


def case(line: str, text: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.defect(line, text), id=f"{line} {text}")


def run(words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, shlex.split(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


# ---- verbs and names ----

WORDS = [
    case("NC1", "a recipe", "run.yaml --beta 0.1", "fix: podium train run.yaml --beta 0.1"),
    case("NC1", "a table", "q.csv", "fix: podium train --dataset q.csv"),
    case("NC1", "a flag", "--model x", "fix: podium train --model x"),
    case("NC1", "grpo", "grpo run.yaml", "fix: podium train run.yaml"),
    case("NC1", "sft", "sft run.yaml", "fix: podium train run.yaml"),
    case("NC1", "a reward's file", "r.py:f", "fix: podium rewards test r.py:f"),
    case("NC1", "in capitals", "Train run.yaml", "fix: podium train run.yaml"),
    case("NC1", "a verb of rewards", "rewards tset r.py:f", "fix: podium rewards test r.py:f"),
    case("NC1", "resume", "resume runs/x", "--resume_from_checkpoint"),
    case("NC1", "nothing like it", "xyzzy", "fix: podium -h"),
    case("NC2", "a table as the recipe", "train q.csv", "fix: --dataset q.csv"),
    case("NC2", "a model's folder as the recipe", "train model", "fix: --model model"),
    case("NC2", "a program as the recipe", "train r.py", "fix: python r.py"),
    case("NC2", "a recipe as the model", "chat run.yaml", "fix: the `output_dir` of run.yaml"),
    case("NC2", "a recipe as the run", "watch run.yaml", "There is no folder run.yaml."),
    case("NC3", "nonsense", "explain nonsense", "no rule `NONSENSE`"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WORDS)
def test_a_word_that_is_no_verb_is_answered_with_the_line_to_type(
    folder: Path, now: Say, words: str, says: str
) -> None:
    (folder / "run.yaml").write_text("model: model\n")
    (folder / "r.py").write_text("def f(completions, **kwargs): return [0.0] * len(completions)\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    code, printed = run(words)
    now(printed)
    assert code == 2
    assert says in printed


@pytest.mark.defect("NC1", "help VERB")
def test_help_of_a_verb() -> None:
    code, printed = run("help train")
    assert (code, printed) == run("train --help")


EXPLAINED = [
    case("NC3", "a setting", "num_generations", "a setting (a whole number or null; default 8)"),
    case("NC3", "a setting of choices", "loss_type", "default dapo"),
    case("NC3", "a metric", "reward_std", "a metric (reward)"),
    case("NC3", "a metric of a reward", "rewards/mine/mean", "a metric (reward)"),
    case("NC3", "a code", "d001", "no prompt column"),
    case("NC3", "a default that the run chooses", "eval_rows", "None: 200"),
]


@pytest.mark.parametrize(("name", "says"), EXPLAINED)
def test_settings_and_metrics_are_explained_as_codes_are(now: Say, name: str, says: str) -> None:
    code, printed = run(f"explain {name}")
    now(printed[:100])
    assert code == 0
    assert says in printed
    assert run(f"explain {name} --json")[0] == 0


@pytest.mark.parametrize("name", ["accuracy", "entropy_coef"])
def test_what_is_a_setting_and_a_metric_is_explained_as_both(name: str) -> None:
    _, printed = run(f"explain {name}")
    setting, metric = printed.splitlines()
    assert setting.startswith(f"{name}, a setting (")
    assert metric.startswith(f"{name}, a metric (")


# ---- the cause first, and nothing that only follows from it ----

COLUMNS = {name: [row[at] for row in QUESTIONS] for at, name in enumerate(("question", "answer"))}
DATA = [
    case("NC4", "a title row", "t.csv", "My questions,\n" + CSV, "D027", "line 2 has the names of the columns"),
    case("NC4", "comment lines", "t.csv", "# mine\n# of May\n" + CSV, "D027", "line 3 has the names of the columns"),
    case("NC4", "ShareGPT with other keys", "t.jsonl", json.dumps({"conversations": [{"from": "human", "text": "a"}, {"from": "gpt", "text": "b"}]}), "D009", "`role` missing"),
    case("NC4", "Python quotes", "t.jsonl", str({"question": "a", "answer": "b"}), "D004", "not valid JSON"),
    case("NC4", "JSONL of strings", "t.jsonl", '"a"\n"b"\n', "D031", "expected an object"),
    case("NC4", "an empty answer column", "t.csv", "question,answer\n" + "".join(f"{q},\n" for q, _ in QUESTIONS), "D018", "`answer` is empty in every row"),
    case("NC4", "columns in a JSON object", "t.json", json.dumps(COLUMNS), "D031", "one object with the keys"),
    case("NC4", "a pointer of Git LFS", "t.csv", POINTER, "D039", "a pointer of Git LFS"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "code", "says"), DATA)
def test_a_table_that_cannot_be_used_is_the_only_error(
    folder: Path, model: Path, now: Say, name: str, content: str, code: str, says: str
) -> None:
    (folder / name).write_text(content)
    found = check_recipe(*recipe_and_flags(["--dataset", name, "--model", str(model)], "check"))
    now("; ".join(each.what for each in found))
    assert {each.code for each in found if each.severity == "error"} == {code}
    assert says in found[0].what
    assert found[-1].fix
    assert "podium explain" not in found[-1].fix


# ---- rewards ----

RECIPE = "model: {model}\nmax_completion_length: 32\ndataset: q.csv\nprompt: '{{question}}'\nrewards: ['r.py:f']\n"
REWARDS = [
    case("NC6", "def f()", "def f(): return [0.0]", "error", "W001", "def f(completions, **kwargs)"),
    case("NC6", "asterisks that are lost", "def f(args, *kwargs): return [0.0] * len(args)", "error", "W002", "def f(completions, **kwargs): asterisks are lost"),
    case("NC6", "text compared with int(answer)", "def f(completions, answer, **k): return [float(t.strip() == int(a)) for t, a in zip(completions, answer)]", "warning", "W008", "a text never equals a number"),
    case("NC6", "a package that is missing", "import nowhere_at_all\ndef f(completions, **k): return [0.0]", "error", "W013", "pip install nowhere-at-all"),
]  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize(("code_text", "severity", "code", "fix"), REWARDS)
def test_a_reward_that_cannot_work_is_told_by_its_cause(
    folder: Path, model: Path, now: Say, code_text: str, severity: str, code: str, fix: str
) -> None:
    (folder / "r.py").write_text(code_text + "\n")
    (folder / "run.yaml").write_text(RECIPE.format(model=model))
    found = [each for each in check_recipe("run.yaml") if each.code.startswith("W") and each.severity != "note"]
    now(f"{found[0].what} -> {found[0].fix}")
    assert [(each.severity, each.code) for each in found] == [(severity, code)]
    assert fix in found[0].fix


@pytest.mark.defect("NC6", "a random.py of one's own beside the recipe")
def test_the_standard_library_stays_in_front_of_users_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.isolation.user_files import make_importable

    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    (folder / "random.py").write_text("raise SystemExit(3)\n")
    (folder / "mine_alone.py").write_text("here = True\n")
    make_importable(str(folder))
    from importlib.machinery import PathFinder

    assert Path(str(PathFinder.find_spec("random").origin)).parent != folder  # type: ignore[union-attr]
    assert Path(str(PathFinder.find_spec("mine_alone").origin)).parent == folder  # type: ignore[union-attr]
    packages = next(at for at, entry in enumerate(sys.path) if "site-packages" in entry)
    assert sys.path.index(str(folder)) < packages


@pytest.mark.defect("NC6", "the name of a reward of the library, in Python")
def test_a_name_of_the_library_is_no_reward_model(now: Say) -> None:
    from podium.errors import ConfigError
    from podium.trainer.assembly import reward_records

    with pytest.raises(ConfigError) as caught:
        reward_records("answer_format", None, None)
    now(str(caught.value))
    assert caught.value.fix == "from podium.rewards import answer_format; reward_funcs=answer_format"


# ---- the machine ----


@pytest.mark.defect("NC7", "the working directory was deleted")
def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: Say) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, printed = run("check quickstart")
    now(printed)
    assert (code, "fix: cd to a folder that is there" in printed) == (2, True)


@pytest.mark.defect("NC7", "a full disk")
def test_a_full_disk_is_one_message(folder: Path, now: Say) -> None:
    from podium.cli import _guarded

    def write() -> None:
        with Path("/dev/full").open("w") as stream:
            stream.write("x" * 100_000)

    import typer

    full = typer.Typer()
    full.command()(_guarded(write, "write"))
    result = CliRunner().invoke(full, [])
    now(result.output)
    assert result.exit_code == 2
    assert "No space is left" in result.output
    assert "df -h" in result.output


# ---- what works by now ----


@pytest.mark.defect("NC8", "messages in a CSV: examples are their texts")
def test_examples_of_messages_are_texts(folder: Path) -> None:
    from podium.recipe.assume import assume

    rows = ['"' + json.dumps([{"role": "user", "content": q}]).replace('"', '""') + f'",{a}' for q, a in QUESTIONS]
    (folder / "t.csv").write_text("prompt,answer\n" + "\n".join(rows) + "\n")
    made = assume({"dataset": "t.csv"}, alone=True)
    assert made["examples"][0]["prompt"].startswith("What is")


NOW = [
    case("NC8", "a table without a header", "".join(f"{q},{a}\n" for q, a in QUESTIONS), "", "D048", None),
    case("NC8", "prompt: question", CSV, "prompt: question", "D052", 'prompt: "{question}"'),
    case("NC8", "prompt: {{question}}", CSV, 'prompt: "{{question}}"', "D052", 'prompt: "{question}"'),
    case("NC8", "answer: answer", CSV, 'prompt: "{question}"\nanswer: answer', "D052", 'answer: "{answer}"'),
    case("NC8", "max_steps with num_train_epochs", CSV, 'prompt: "{question}"\nmax_steps: 5\nnum_train_epochs: 2', "C030", "keep one of the two"),
    case("NC8", "lora: true", CSV, 'prompt: "{question}"\nlora: true', "C003", "lora: {r: 16}"),
    case("NC8", "optim: adam", CSV, 'prompt: "{question}"\noptim: adam', "C004", "optim: adamw_torch"),
    case("NC8", "a weight by a mapping", CSV, 'prompt: "{question}"\nrewards: {numeric_match: 1.0}', "C003", "rewards: [{name: numeric_match, weight: 1.0}]"),
    case("NC8", "a dataset by a mapping", CSV, 'prompt: "{question}"\ndataset: {path: t.csv}', "C003", "dataset: t.csv"),
]  # fmt: skip


@pytest.mark.cases(3)
@pytest.mark.parametrize(("table", "keys", "code", "fix"), NOW)
def test_wrong_verdicts_of_once(
    folder: Path, model: Path, now: Say, table: str, keys: str, code: str, fix: str | None
) -> None:
    (folder / "t.csv").write_text(table)
    text = f"model: {model}\nmax_completion_length: 32\n{keys}\n"
    text += "" if "dataset:" in keys else "dataset: t.csv\n"
    text += "" if "rewards:" in keys else "rewards: [numeric_match]\n"
    text += "" if "prompt:" in keys else 'prompt: "{What is 0 + 0?}"\nanswer: "{0}"\n'
    (folder / "run.yaml").write_text(text)
    found = [each for each in check_recipe("run.yaml") if each.code == code]
    assert found, code
    now(f"{found[0].what} -> {found[0].fix}")
    assert fix is None or found[0].fix == fix


@pytest.mark.defect("NC8", "a fifo, a device, a link")
def test_what_is_no_file_is_named(folder: Path, now: Say) -> None:
    from podium.errors import odd_path

    os.mkfifo("pipe")
    for name in ("pipe", "/dev/stdin", "/dev/zero"):
        what, fix = odd_path(name)
        if Path(name).is_file():
            continue  # standard input may be a file
        now(what)
        assert "what is read from it once is gone" in what
        assert fix.startswith(f"cat {name} > ")
