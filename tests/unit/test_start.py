"""`podium init`: what it writes is right for every answer, and nothing that is there is touched."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from podium.checks import check_recipe
from podium.cli import app
from podium.cli.init import _commands
from podium.cli.start.recipe_file import in_yaml
from podium.cli.start.tasks import MACHINES, TASKS
from podium.errors import Finding
from podium.testing import save_tiny_model


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """`cli("init", "x")` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
        more = ["--no-sample"] * (words[0] == "init" and "--sample" not in words)
        result = CliRunner().invoke(app, [*words, *more], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors and warnings of the recipe in a folder, as its README has it checked; not what this machine lacks."""
    monkeypatch.chdir(folder)
    found = check_recipe("run.yaml")
    return [str(each) for each in found if each.severity != "note" and each.code not in ("M023", "C028", "C038")]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "machine", ["cpu", *(pytest.param(machine, marks=pytest.mark.slow) for machine in MACHINES if machine != "cpu")]
)
@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_passes_its_check_and_its_test(cli, tmp_path, monkeypatch, task, machine):
    code, out, _ = cli("init", "run", "--task", task, "--machine", machine, "--yes")
    assert code == 0
    assert "cd run" in out
    folder, own = tmp_path / "run", TASKS[task].own
    test = f"test_{own}.py"
    assert sorted(file.name for file in folder.iterdir() if not file.name.startswith("data.")) == [
        "README.md",
        *sorted([f"{own}.py", "run.yaml", test]),
    ]
    assert wrong(folder, monkeypatch) == []
    done = subprocess.run([sys.executable, test], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == (folder / test).read_text().count("def test_") >= 3


BREAKS = {
    "rewards": ("    return [", "    return [0.5 + 0.0 * "),
    "tools": ("int(a) * int(b)", "int(a) + int(b)"),
    "game": ("guess < self.number", "guess > self.number"),
}
"""A mistake for each file of the user's own."""


def test_a_game_is_not_asked_for_rows(cli, tmp_path):
    code, out, err = cli("init", "run", "--task", "game", stdin="cpu\n\n")
    assert code == 0, err
    assert "Your rows" not in out
    assert (tmp_path / "run" / "game.py").is_file()


def test_a_question_without_an_answer_stands_on_a_line_of_its_own(cli):
    code, out, err = cli("init", "run", "--task", "exact")
    assert code == 2
    assert out.endswith("\n")
    assert err.startswith("error: not every question was answered.")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "task", [pytest.param(x, marks=[] if x in ("number", "tool", "game") else pytest.mark.slow) for x in TASKS]
)
def test_the_reward_and_its_test_are_tidy_and_can_fail(cli, tmp_path, task):
    cli("init", "run", "--task", task, "--yes")
    folder = tmp_path / "run"
    for command in (["check", "--select", "E,F,W,I,UP,B", "--ignore", "B905,E501"], ["format", "--check"]):
        tidy = [sys.executable, "-m", "ruff", *command, "--line-length", "120", "."]
        done = subprocess.run(tidy, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
    file = folder / f"{TASKS[task].own}.py"
    right, broken = BREAKS[TASKS[task].own]
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, broken, 1))
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{file.name}"]
    done = subprocess.run(pytest_run, cwd=folder, capture_output=True, text=True, timeout=120)
    assert " failed" in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("task", ["number", "exact", "json"])
def test_the_reward_tester_has_nothing_to_say_against_them(cli, tmp_path, monkeypatch, task):
    cli("init", "run", "--task", task, "--yes")
    monkeypatch.chdir(tmp_path / "run")
    code, out, _ = cli("rewards", "test", "run.yaml")
    assert code == 0, out
    assert "error[" not in out


def test_the_readme_names_what_is_there(cli, tmp_path):
    cli("init", "my run", "--yes")
    folder = tmp_path / "my run"
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# my run\n")
    assert "| `data.csv` | 200 rows" in readme
    assert all(f"`{file.name}`" in readme for file in folder.iterdir() if file.name != "README.md")
    recipe = yaml.safe_load((folder / "run.yaml").read_text())
    assert f"podium chat {recipe['output_dir']}" in readme


# ---- rows of one's own ----

OWN = {
    "numbers": ("question,expert_answer", ["2+2?,4", "3+4?,7"], "a number", {"answer": "{expert_answer}"}),
    "words": (
        "Prompt,Response",
        ["Capital of France?,Paris", "Of Italy?,Rome"],
        "a short text",
        {"prompt": "{Prompt}"},
    ),
    "solutions": ("problem,solution", ["2+2?,it is #### 4", "3+4?,so #### 7"], "####", {"answer_from": "after ####"}),
    "objects": ("query,output", ['Ana 4,"{""name"": ""Ana""}"', 'Ben 7,"{""name"": ""Ben""}"'], "a JSON object", {}),
    "no answers": ("id,query", ["1,Why?", "2,What for?"], TASKS["format"].about, {"prompt": "{query}"}),
    "other names": ("src,tgt", ["Wie viel ist 2+2?,4", "Und 3+4?,7"], "a number", {"prompt": "{src}"}),
}


@pytest.mark.parametrize("name", OWN)
def test_columns_and_shape_are_found_in_rows_of_ones_own(cli, tmp_path, monkeypatch, name):
    header, rows, about, keys = OWN[name]
    (tmp_path / "mine.csv").write_text("\n".join([header, *rows * 1]) + "\n")
    code, out, err = cli("init", "run", "--data", "mine.csv", "--yes")
    assert code == 0, err
    recipe = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert recipe["dataset"] == "../mine.csv"
    assert keys.items() <= recipe.items()
    assert (tmp_path / "run" / "README.md").read_text().count(about) == 1
    assert ("question: {src}, such as `Wie viel ist 2+2?`" in out) is (name == "other names")
    assert "In doubt" not in out
    assert not list((tmp_path / "run").glob("data.*"))


@pytest.mark.slow
def test_a_recipe_for_rows_of_ones_own_passes_its_check(cli, tmp_path, monkeypatch):
    (tmp_path / "über mich.csv").write_text(
        "question,expert_answer\n" + "".join(f"What is {n} + {n}?,{2 * n}\n" for n in range(200))
    )
    assert cli("init", "a/b", "--data", "über mich.csv", "--yes")[0] == 0
    assert wrong(tmp_path / "a" / "b", monkeypatch) == []


def test_conversations_get_no_template(cli, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": str(2 * n)} for n in range(100)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli("init", "run", "--data", "mine.jsonl", "--yes")[0] == 0
    assert "prompt" not in yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())


def test_a_folder_as_the_hub_has_it_is_data(cli, tmp_path):
    """Files in `data/`, which check and train read, too; with `--to` a name that is not there is no example's."""
    (tmp_path / "sums" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(20)]
        file = tmp_path / "sums" / "data" / f"{split}-00000-of-00001.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = cli("init", "sums", "--yes")
    assert (code, "What sums was taken for:" in out) == (0, True)
    assert yaml.safe_load((tmp_path / "sums-run" / "run.yaml").read_text())["dataset"] == "../sums"
    code, _, err = cli("init", "sum", "--to", "run", "--yes")
    assert (code, "`sum` is no file or folder here" in err) == (2, True)


def test_conversations_beside_other_columns(cli, tmp_path):
    """They end with the answer; so do those of preferences, whose rejected one is never the right answer."""
    turns = [[{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": str(n + 1)}] for n in range(60)]
    tables = {
        "shared": [{"messages": each, "system": "Add.", "model": "m"} for each in turns],
        "pairs": [{"chosen": each, "rejected": [each[0], {**each[1], "content": "?"}]} for each in turns],
    }
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        code, out, _ = cli("init", f"{name}.jsonl", "--yes")
        assert (code, "answer: the last turn, a number, such as `1`" in out) == (0, True)
    code, out, _ = cli("init", "pairs.jsonl", "--prompt", "{chosen}", "--to", "again", "--yes")
    assert (code, "answer: the last turn, a number, such as `1`" in out) == (0, True)
    (tmp_path / "texts.jsonl").write_text('{"chosen": "Human: 1+1 AI: 2", "rejected": "Human: 1+1 AI: 3"}\n' * 9)
    code, _, err = cli("init", "texts.jsonl", "--prompt", "{chosen}", "--yes")
    assert (code, "has no column with answers" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("a,b,c\n1,2,3\n", (), 'cannot be told; the columns are `a`, `b`, `c`.\n  fix: --prompt "{a} {b}" --answer'),
        ("a,b\n1,2\n", ("--prompt", "d"), "--prompt: there is no column `d`; the columns are `a`, `b`."),
        (
            "question,a,b\nWhy?,1,2\n",
            (),
            "has no column with answers (its columns: question, a, b).\n  fix: name it: --answer",
        ),
        ("question\nWhy?\n", ("--task", "exact"), "has no column with answers"),
        ("question,answer\nWhy?,because\n", ("--task", "number"), "`because` is no number"),
        ("question,answer\nWhy?,because\n", ("--task", "json"), "Take --task exact"),
        ("question,answer\nWhy?,because\n", ("--task", "code"), "no column `tests`"),
        ("question,answer\nWhy?\n", (), "line 2 has 1 fields"),
    ],
)
def test_rows_that_do_not_fit_are_one_message(cli, tmp_path, text, flags, message):
    (tmp_path / "mine.csv").write_text(text)
    code, _, err = cli("init", "run", "--data", "mine.csv", "--yes", *flags)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_own_model_is_trained_with_an_adapter(cli, tmp_path, monkeypatch):
    folder = save_tiny_model(tmp_path / "model")
    assert cli("init", "run", "--model", str(folder), "--yes")[0] == 0
    recipe = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert recipe["lora"]["r"] == 16
    assert wrong(tmp_path / "run", monkeypatch) == []


# ---- a table and a sentence ----

SENTENCE = "Say whether a review is good or bad"


def reviews(folder: Path, name: str = "reviews.csv") -> None:
    rows = [
        f"The {thing} was {word}.,{label}"
        for thing in ("film", "soup", "book", "hotel", "car")
        for word, label in WORDS
    ]
    (folder / name).write_text("\n".join(["review,label", *rows]) + "\n")


WORDS = [
    *((word, "good") for word in ("great", "fine", "lovely", "superb", "charming", "nice")),
    *((word, "bad") for word in ("awful", "dirty", "boring", "rude", "broken", "poor")),
]


def test_a_table_and_a_sentence_are_a_recipe_in_a_folder_of_its_name(cli, tmp_path, monkeypatch):
    reviews(tmp_path)
    code, out, err = cli("init", "reviews.csv", "--task", SENTENCE, "-y")
    assert code == 0, err
    assert "question: {review}, such as `The film was great.`" in out
    assert "answer: {label}, one of few labels (bad, good), such as `good`" in out
    assert "right: equal to the answer, capitals included" in out
    text = (tmp_path / "reviews" / "run.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["system"] == f"{SENTENCE}."  # it names both labels
    assert {each["label"] for each in recipe["examples"]} == {"good", "bad"}
    assert recipe["accuracy"] == "exact_match"
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#", "rewards:"))]
    assert all(" # " in line for line in lines)
    assert wrong(tmp_path / "reviews", monkeypatch) == []


def test_both_ways_to_begin_with_a_table_have_the_same_settings(cli, tmp_path):
    from podium.recipe.assume import assume

    reviews(tmp_path)
    assert cli("init", "reviews.csv", "-y")[0] == 0
    written = yaml.safe_load((tmp_path / "reviews" / "run.yaml").read_text())
    assumed = assume({"dataset": "reviews.csv"}, alone=True)
    assert {*written} - {*assumed} == {"dataset", "output_dir"}
    written["learning_rate"] = float(written["learning_rate"])
    assert {key: written[key] for key in assumed} == assumed


def test_what_is_in_doubt_is_said_with_a_command_that_takes_the_other_way(cli, tmp_path):
    nouns = [f"{word}{n},{word}{n}s\n" for word in ("cat", "dog", "cow", "hen") for n in "abcdefghij"]
    (tmp_path / "nouns.csv").write_text("noun,plural\n" + "".join(nouns))
    code, out, err = cli("init", "nouns.csv", "-y")
    assert code == 0, err
    text = (tmp_path / "nouns" / "run.yaml").read_text()
    assert "# question: {noun}, such as `cata`" in text
    [command] = [line.partition(": ")[2] for line in out.splitlines() if "the other way" in line]
    assert command == 'podium init nouns.csv --prompt "{plural}" --answer "{noun}" --to nouns-2'
    assert cli(*shlex.split(command)[1:], "-y")[0] == 0
    turned = yaml.safe_load((tmp_path / "nouns-2" / "run.yaml").read_text())
    assert (turned["prompt"], turned["answer"]) == ("{plural}", "{noun}")
    sure = cli("init", "nouns.csv", "-y", "--question", "noun", "--answer", "plural", "--to", "sure")
    assert (sure[0], "In doubt" in sure[1]) == (0, False)


def test_two_readings_are_asked_about_at_a_terminal(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["podium.cli.init"], "at_terminal", lambda *, yes: not yes)
    nouns = [f"{word}{n},{word}{n}s\n" for word in ("cat", "dog", "cow", "hen") for n in "abcdefghij"]
    (tmp_path / "nouns.csv").write_text("noun,plural\n" + "".join(nouns))
    for typed, asked in (("\n\n\n", "{noun}"), ("\nplural\n\n", "{plural}")):
        folder = tmp_path / asked.strip("{}")
        code, out, err = cli("init", "nouns.csv", "--to", str(folder), stdin=typed)
        assert code == 0, err
        assert "Which column is the question" in out
        assert yaml.safe_load((folder / "run.yaml").read_text())["prompt"] == asked


def test_a_file_without_a_header_is_said(cli, tmp_path):
    rows = "".join(f"What is {n} + {n % 7}?,{n + n % 7}\n" for n in range(60))
    (tmp_path / "sums.csv").write_text(rows)
    code, out, err = cli("init", "sums.csv", "-y")
    assert code == 0, err
    assert "In doubt: the first line of sums.csv was taken for the names" in out


LENGTHS = [
    f"Write a sentence of {n} words about {thing}.,{n}" for n in range(3, 12) for thing in ("rain", "tea", "art")
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("unit", ["words", "letters", "characters", "sentences", "lines"])
def test_a_number_that_stands_in_the_question_needs_a_reward_of_its_own(cli, tmp_path, monkeypatch, unit):
    (tmp_path / "n.csv").write_text("\n".join(["question,n_words", *LENGTHS]) + "\n")
    sentence = f"Write a text with exactly the number of {unit} that is asked for."
    code, _, err = cli("init", "n.csv", "-y", "--task", sentence)
    assert code == 2
    assert "not ready" in err
    [command] = [line.partition("fix: ")[2].partition(";")[0] for line in err.splitlines() if "fix: " in line]
    assert not (tmp_path / "n").exists()
    assert cli("init", "n.csv", "-y", "--task", "number", "--to", "copied")[0] == 0
    code, _, err = cli(*shlex.split(command)[1:], "-y")
    assert code == 0, err
    recipe = yaml.safe_load((tmp_path / "n" / "run.yaml").read_text())
    assert "number alone" not in recipe["system"]
    assert recipe["accuracy"] == "right"
    assert subprocess.run([sys.executable, "test_rewards.py"], cwd=tmp_path / "n", timeout=60).returncode == 0
    tidy = [sys.executable, "-m", "ruff", "check", "--select", "E,F,W,I,UP,B", "--ignore", "B905,E501", "."]
    assert subprocess.run(tidy, cwd=tmp_path / "n", timeout=60).returncode == 0
    if unit == "words":
        assert not [finding for finding in wrong(tmp_path / "n", monkeypatch) if finding.startswith("error")]


@pytest.mark.slow
def test_a_reward_file_takes_the_place_of_the_accuracy_reward(cli, tmp_path, monkeypatch):
    reviews(tmp_path)
    assert cli("init", "reviews.csv", "-y", "--reward-file", "--to", "mine")[0] == 0
    recipe = yaml.safe_load((tmp_path / "mine" / "run.yaml").read_text())
    assert recipe["rewards"] == [{"function": "rewards.py:right", "weight": 2}]
    assert recipe["accuracy"] == "right"
    for line in ([sys.executable, "test_rewards.py"], [sys.executable, "-m", "ruff", "check", "."]):
        assert subprocess.run(line, cwd=tmp_path / "mine", capture_output=True, timeout=60).returncode == 0
    assert wrong(tmp_path / "mine", monkeypatch) == []


@pytest.mark.parametrize("shape", ["plain", "bare-number"])
def test_reward_files_for_tables_pass_their_tests_and_can_fail(tmp_path, shape):
    from podium.cli.start import own_function

    for name, text in own_function("rewards", shape, {}).items():
        (tmp_path / name).write_text(text)
    run = [sys.executable, "test_rewards.py"]
    assert subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0
    rewards = tmp_path / "rewards.py"
    rewards.write_text(rewards.read_text().replace("    return [", "    return [0.5 + 0.0 * ", 1))
    assert subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=60).returncode == 1


def test_a_folder_of_data_is_a_table_and_its_run_stands_beside_it(cli, tmp_path):
    (tmp_path / "mine").mkdir()
    reviews(tmp_path / "mine", "train.csv")
    code, _, err = cli("init", "mine", "-y")
    assert code == 0, err
    assert yaml.safe_load((tmp_path / "mine-run" / "run.yaml").read_text())["dataset"] == "../mine"


def test_a_template_may_name_several_columns(cli, tmp_path):
    rows = "".join(f"{n},{n % 7},{n * 2}\n" for n in range(60))
    (tmp_path / "sums.csv").write_text("a,b,c\n" + rows)
    code, _, err = cli("init", "sums.csv", "-y", "--question", "{a} and {b}?", "--answer", "c")
    assert code == 0, err
    recipe = yaml.safe_load((tmp_path / "sums" / "run.yaml").read_text())
    assert (recipe["prompt"], recipe["answer"]) == ("{a} and {b}?", "{c}")
    assert recipe["examples"][0].keys() == {"a", "b", "c"}


def test_text_of_a_table_is_data_in_the_recipe(cli, tmp_path):
    rows = [{"question": f"{n}: {{x}} \x7f\u2028 # '\" ü 😀\n- a", "answer": f"{n} {{y}}: z"} for n in range(40)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = cli("init", "odd.jsonl", "-y", "--task", "Write {braces} as they are.")
    assert code == 0, err
    recipe = yaml.safe_load((tmp_path / "odd" / "run.yaml").read_text())
    assert all(example in rows for example in recipe["examples"])
    assert recipe["system"].startswith("Write {{braces}} as they are.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.csv", "-y"), "There is no file or folder none.csv."),
        (("-y",), "podium init TABLE.csv --task"),
        ((), "podium init TABLE.csv --task"),
        (("new", "-y", "--task", "Sort the words."), "a sentence and columns are for a table of yours"),
    ],
)
def test_a_table_that_is_missing_is_one_message(cli, words, message):
    code, _, err = cli("init", *words)
    assert code == 2
    assert message in err


def test_a_folder_that_is_there_gets_another_name(cli, tmp_path):
    reviews(tmp_path)
    assert cli("init", "reviews.csv", "-y")[0] == 0
    assert "Take another name: podium init reviews.csv --to reviews-2" in cli("init", "reviews.csv", "-y")[2]


def test_columns_and_the_sentence_are_asked_for_at_a_terminal(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["podium.cli.init"], "at_terminal", lambda *, yes: not yes)
    (tmp_path / "t.csv").write_text("a,b,c\n" + "".join(f"{n} red?,{n % 2},x\n" for n in range(40)))
    code, out, err = cli("init", "t.csv", stdin="Answer with 0 or 1.\nd\na\nb\n")
    assert code == 0, err
    assert "`d` is none of a, b, c" in out
    recipe = yaml.safe_load((tmp_path / "t" / "run.yaml").read_text())
    assert (recipe["prompt"], recipe["answer"]) == ("{a}", "{b}")
    assert recipe["system"].startswith("Answer with 0 or 1. Answer with the number")


@pytest.mark.slow
def test_a_small_model_is_sampled_at_the_end(cli, tmp_path):
    reviews(tmp_path)
    folder = save_tiny_model(tmp_path / "model")
    code, out, err = cli("init", "reviews.csv", "-y", "--model", str(folder), "--sample")
    assert code == 0, err
    assert "Before training" in out
    assert re.search(r"groups with spread +\d of 8 ", out)
    assert re.search(r"cut off at the limit +\d+ of 64 \(max_completion_length: ", out)
    assert "cd reviews" in out
    code, out, _ = cli("init", "reviews.csv", "-y", "--model", "not/here", "--sample", "--to", "other")
    assert (code, "Nothing was sampled" in out) == (0, True)


def test_two_episodes_of_two_rows_are_shown_at_the_end(cli, tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    code, out, err = cli("init", "first", "--task", "game", "-y", "--model", str(folder), "--sample")
    assert code == 0, err
    assert out.count(": Guess a number from 1 to 7.") == 2
    assert "Before training" not in out


@pytest.mark.parametrize(
    ("findings", "commands"),
    [
        ([], ("podium check run.yaml", "podium train run.yaml")),
        ([("error", "D023", {})], ("podium check run.yaml",)),
        ([("error", "C024", {"num_generations": 4})], ("podium cure run.yaml",)),
    ],
)
def test_the_next_commands_follow_from_the_findings(findings, commands):
    found = [Finding(severity=severity, code=code, what="", changes=changes) for severity, code, changes in findings]
    assert _commands(found) == commands


@pytest.mark.slow
def test_a_folder_with_both_sides_is_read_from_the_folder_of_the_run(cli, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    for name, numbers in (("train", range(40)), ("test", range(40, 60))):
        rows = "".join(f"What is {n} + 1?,{n + 1}\n" for n in numbers)
        (tmp_path / "mine" / f"{name}.csv").write_text(f"question,answer\n{rows}")
    assert cli("init", "mine", "-y")[0] == 0
    [missing] = [each for each in check_recipe("mine-run/run.yaml") if each.severity == "error"]
    assert missing.fix == "cd mine-run, then the same command with run.yaml"
    config = tmp_path / "mine-run" / "runs" / "one" / "config.yaml"  # a run keeps its recipe as it was written
    config.parent.mkdir(parents=True)
    config.write_bytes((tmp_path / "mine-run" / "run.yaml").read_bytes())
    [missing] = [each for each in check_recipe(str(config)) if each.code == "D025"]
    assert missing.fix == f"cd {tmp_path / 'mine-run'}, then the same command with runs/one/config.yaml"
    assert wrong(tmp_path / "mine-run", monkeypatch) == []


@pytest.mark.slow
def test_init_check_and_sample_each_take_at_most_20_s_of_one_core(tmp_path):
    # Answers of many tokens, of which many completions are cut off.
    words = ["bread", "stone", "window", "garden", "silver", "rabbit", "candle", "bridge"]
    rows = "".join(f"How is {word}{n} spelled?,{'-'.join(f'{word}{n}')}\n" for word in words for n in range(20))
    (tmp_path / "spelling.csv").write_text(f"question,answer\n{rows}")
    for folder, words in (
        (".", ["init", "spelling.csv", "--task", "Spell with hyphens."]),
        ("spelling", ["check", "run.yaml"]),
        ("spelling", ["sample", "run.yaml", "-n", "2"]),
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        program = [sys.executable, "-m", "podium", *words]
        subprocess.run(
            program,
            cwd=tmp_path / folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdin=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert spent < 20, f"{words[0]}: {spent:.1f} s"


# ---- nothing is overwritten ----


def test_a_folder_that_is_not_empty_is_left_alone(cli, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("mine")
    code, _, err = cli("init", "run", "--yes")
    assert code == 2
    assert "nothing is ever overwritten. Take another name: podium init run-2" in err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.yaml"]
    assert (tmp_path / "run" / "run.yaml").read_text() == "mine"


def test_a_file_is_left_alone_and_an_empty_folder_is_filled(cli, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file is a file" in cli("init", "file", "--yes")[2]
    (tmp_path / "empty").mkdir()
    assert cli("init", "empty", "--yes")[0] == 0
    assert (tmp_path / "empty" / "run.yaml").is_file()


# ---- questions ----


def test_questions_are_asked_for_what_is_not_given(cli, tmp_path):
    code, out, _ = cli("init", "run", "--task", "exact", stdin="\nlaptop\nsmall-gpu\nQwen/Qwen2.5-1.5B-Instruct\n")
    assert code == 0
    assert "What is rewarded?" not in out
    assert "`laptop` is none of cpu, small-gpu, large-gpu" in out
    recipe = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert recipe["model"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert recipe["dtype"] == "bfloat16"


def test_an_input_that_ends_names_the_flags(cli, tmp_path):
    code, _, err = cli("init", "run", stdin="\nnumber\n")
    assert code == 2
    assert "or --task, --machine and --model, or --yes" in err
    assert not (tmp_path / "run").exists()


def test_unknown_words_are_one_message(cli):
    known = "number, exact, json, code, format, tool, game"
    message = cli("init", "run", "--task", "nmber")[2]
    assert f"--task is a sentence of two words or more, or one of {known}; got `nmber`.\n" in message
    assert "--machine is one of cpu, small-gpu, large-gpu; got `tpu`." in cli("init", "run", "--machine", "tpu")[2]


def test_the_help_names_every_task_and_machine(cli):
    _, out, _ = cli("init", "--help")
    assert all(word in "".join(out.split()) for word in (*TASKS, *MACHINES))


@pytest.mark.parametrize(
    "text", ["a.csv", "", "#x", "x #y", "on", "No", "1e3", "-", "a: b", "ü", "a\nb", "'", "~/x", "builtin:x"]
)
def test_any_text_comes_back_from_yaml(text):
    from podium.recipe.document import scalar

    written = in_yaml(text)
    assert yaml.safe_load(f"key: {written}  # comment") == {"key": text}
    assert written.startswith('"') or scalar(written) == text
