"""Stages of a recipe: what each becomes, and what is wrong with one before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium import Stages, check
from podium.data.completions import Completions
from podium.data.rows import DataSpec, load_data
from podium.data.selection import parse_condition
from podium.errors import ConfigError, DataError
from podium.recipe import Recipe, arguments_of, load
from podium.recipe.stages import reference_start, schedule_steps
from podium.rewards.from_file import file_reward
from podium.testing import save_tiny_model

BASE = """\
model: ./model
dataset: rows.jsonl
learning_rate: 1.0e-5
per_device_train_batch_size: 32
num_generations: 8
max_completion_length: 16
output_dir: out
stages:
"""
TWO = """\
  - name: first
    rewards: [mine.py:digits]
    until: rewards/digits/mean >= 0.9 for 3 steps
    max_steps: 5
  - name: second
    rewards:
      - mine.py:digits
      - function: mine.py:right
        weight: 2
    max_steps: 7
    learning_rate: 2.0e-6
"""
MINE = """
def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def right(completions, answer, **_):
    return [float(a == text.strip()) for text, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture(scope="module")
def folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose reward file stays loaded in its worker process while a test of this file runs."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "mine.py").write_text(MINE)
    loaded = file_reward(f"{folder / 'mine.py'}:right")
    yield folder
    del loaded


@pytest.fixture
def tmp_path(folder_of_all: Path) -> Path:
    """The same folder for every test, empty: another one would start a worker for its reward file."""
    for path in folder_of_all.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder_of_all


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 4} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(text: str, flags: dict[str, Any] | None = None) -> Recipe:
    Path("run.yaml").write_text(text)
    return load("run.yaml", flags)


def problems(text: str) -> str:
    """Each with its fix behind it."""
    with pytest.raises(ConfigError) as error:
        recipe(text)
    return re.sub(r"\n +fix:", "", str(error.value))


# ---- what a stage is ----


def test_a_stage_is_the_base_with_its_own_keys_over_it(here: Path) -> None:
    made = recipe(BASE + TWO)
    first, second = made.stages
    assert (first.folder, second.folder) == ("01-first", "02-second")
    assert first.recipe.config["output_dir"] == str(Path("out/01-first"))
    assert first.recipe.config["learning_rate"] == 1e-5
    assert second.recipe.config["learning_rate"] == 2e-6
    assert [spec.name for spec in first.recipe.rewards] == ["mine.py:digits"]
    assert second.recipe.config["reward_weights"] == [1.0, 2.0]
    assert first.until is not None
    assert first.until.steps == 3
    assert (first.max_steps, second.max_steps) == (5, 7)
    assert arguments_of(second.recipe).max_steps == 7


def test_the_whole_is_judged_as_its_last_stage(here: Path) -> None:
    made = recipe(BASE + "  # accuracy of the whole\n" + TWO + "accuracy: mine.py:right\n".replace("mine.py:", ""))
    assert made.accuracy == "right"
    assert made.config["output_dir"] == "out"
    assert len(made.rewards) == 2
    with pytest.raises(ConfigError, match="podium train"):
        made.trainer()


def test_a_flag_wins_over_the_base_and_every_stage(here: Path) -> None:
    made = recipe(BASE + TWO, {"max_steps": 2, "output_dir": "elsewhere"})
    assert [stage.max_steps for stage in made.stages] == [2, 2]
    assert made.stages[1].recipe.config["output_dir"] == str(Path("elsewhere/02-second"))


def test_rewards_of_a_stage_replace_weights_of_the_base(here: Path) -> None:
    base = BASE.replace("stages:", "rewards: [mine.py:digits]\nreward_weights: [3.0]\nstages:")
    made = recipe(base + "  - {name: a, max_steps: 1}\n  - {name: b, max_steps: 1, rewards: [mine.py:right]}\n")
    assert made.stages[0].recipe.config["reward_weights"] == [3.0]
    assert "reward_weights" not in made.stages[1].recipe.config


def test_epochs_replace_the_steps_of_the_base(here: Path) -> None:
    base = BASE.replace("stages:", "max_steps: 9\nrewards: [mine.py:digits]\nstages:")
    [stage] = recipe(base + "  - {name: a, epochs: 2}\n").stages
    assert stage.max_steps is None
    assert stage.recipe.config["num_train_epochs"] == 2


def test_what_is_carried_over_has_defaults_that_differ_behind_sft(here: Path) -> None:
    sft = "  - {name: warm, type: sft, max_steps: 2, max_length: 64, per_device_train_batch_size: 4}\n"
    warm, first, second = recipe(BASE + sft + TWO).stages
    assert warm.kind == "sft"
    assert warm.recipe.config["max_length"] == 64
    assert warm.recipe.config["per_device_train_batch_size"] == 4
    assert "num_generations" not in warm.recipe.config
    carried = [(each.optimizer, each.reference, each.schedule, each.adaptive_weights) for each in (first, second)]
    assert carried == [("reset", "last_stage", "restart", "keep"), ("keep", "keep", "restart", "keep")]
    assert [reference_start(recipe(BASE + sft + TWO).stages, index) for index in range(3)] == [0, 1, 1]


def test_a_schedule_spans_the_stages_that_continue_it(here: Path) -> None:
    more = "  - {name: c, rewards: [mine.py:right], max_steps: 4, schedule: continue, learning_rate: 2.0e-6}\n"
    stages = recipe(BASE + TWO + more).stages
    assert [schedule_steps(stages, index) for index in range(3)] == [None, 11, 11]


# ---- mistakes ----

SFT = "  - {name: warm, type: sft, max_steps: 2}\n"


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("rewards/digits", "rewards/digit"), "run.yaml:11: stage first: there is no metric `rewards/digit/mean`"),
        (("rewards/digits", "eval_rewards/digits"), "eval_strategy: steps"),
        ((">= 0.9 for 3 steps", "is good"), "run.yaml:11: stage first: `until: rewards/digits/mean is good`"),
        (("    max_steps: 5\n", ""), "a gate may never be met: the stage needs `max_steps`"),
        (("name: first", "name: second"), "the name `second` is that of stage 1, too"),
        (("name: first", "name: ../up"), "`name` must be made of letters"),
        (("- name: first\n    rewards", "- rewards"), "a stage needs a `name`"),
        (("max_steps: 7", "max_step: 7"), "run.yaml:18: stage second: unknown key `max_step`. Did you mean"),
        (("max_steps: 7", "untill: x"), "unknown key `untill`. Did you mean `until`?"),
        (("max_steps: 7", "max_steps: 7.5"), "`max_steps`: expected a whole number"),
        (("max_steps: 7", "optimizer: new"), "`optimizer`: expected keep or reset, got `new`"),
        (("max_steps: 7", "model: other"), "`model` is the same for the whole run"),
        (("max_steps: 7", "lora: {r: 4}"), "`lora` is the same for the whole run"),
        (("max_steps: 7", "save_only_model: true"), "`save_only_model` leaves out"),
        (("max_steps: 7", "load_best_model_at_end: true"), "`load_best_model_at_end` would hand on"),
        (("max_steps: 7", "push_to_hub: true"), "`push_to_hub` is the same for the whole run"),
        (("max_steps: 7", "completion: answer"), "`completion` is for a stage of `type: sft`"),
        (("max_steps: 7", "type: sft"), "an sft stage must be the first"),
        (("max_steps: 5", "max_steps: 5\n    optimizer: keep"), "this is the first"),
        (("max_steps: 5", "max_steps: 5\n    epochs: 1"), "`epochs` and `max_steps` are two ends"),
        (("max_steps: 7", "max_steps: 7\n    schedule: continue"), "but learning_rate differ"),
        (("mine.py:right", "mine.py:wrong"), "stage second: "),
    ],
)
def test_a_mistake_is_said_with_its_line_and_stage(here: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in BASE + TWO
    assert said in problems(BASE + (TWO.replace(*change)))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("  - warm\n", "`stages` must be a list of mappings"),
        ("  {a: 1}\n", "`stages` must be a list of mappings"),
        (SFT, "behind an sft stage comes at least one"),
        (SFT.replace("max_steps: 2", "rewards: [mine.py:digits]") + TWO, "`rewards` says nothing to an sft stage"),
        (SFT.replace("max_steps: 2", "max_length: long") + TWO, "`max_length`: expected a whole number"),
        (
            SFT + TWO.replace("    max_steps: 5\n", "    max_steps: 5\n    schedule: continue\n"),
            "the schedule of an sft stage does not go on",
        ),
    ],
)
def test_a_mistake_with_the_stages_themselves(here: Path, stages: str, said: str) -> None:
    assert said in problems(BASE + stages)


def test_a_run_in_stages_is_not_published_stage_by_stage(here: Path) -> None:
    said = problems(BASE.replace("learning_rate: 1.0e-5", "push_to_hub: true") + TWO)
    assert said.startswith("run.yaml:3: `push_to_hub` would publish every stage by itself")


def test_what_is_wrong_everywhere_is_said_once(here: Path) -> None:
    said = problems(BASE.replace("learning_rate: 1.0e-5", "learning_rat: 1") + TWO)
    assert said == "run.yaml:3: unknown key `learning_rat`. Did you mean `learning_rate`?"


# ---- checks ----


@pytest.mark.slow
def test_a_check_looks_at_every_stage_without_weights(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("podium.models.loading.load_policy", loads)
    sft = '  - {name: warm, type: sft, max_steps: 2, completion: "<{anser}>"}\n'
    two = TWO.replace("learning_rate: 2.0e-6", "learning_rate: 2.0e-6\n    temperature: 0.1\n    num_generations: 7")
    Path("run.yaml").write_text(BASE + sft + two)
    found = {finding.code: finding.what for finding in check("run.yaml")}
    assert "`completion: <{anser}>` names no column" in found["D060"]
    assert found["D060"].startswith("stage warm: ")
    assert found["C010"].startswith("stage second: ")
    assert found["C027"].startswith("stage second: ")


def test_a_check_of_healthy_stages_finds_nothing_wrong(here: Path) -> None:
    Path("run.yaml").write_text(BASE + SFT + TWO)
    assert [finding for finding in check("run.yaml") if finding.severity == "error"] == []


def test_a_stage_with_a_filter_is_checked_on_what_is_left(here: Path) -> None:
    Path("run.yaml").write_text(BASE + TWO.replace("    max_steps: 7\n", "    max_steps: 7\n    filter: levl == 1\n"))
    [said] = [finding.what for finding in check("run.yaml") if finding.severity == "error"]
    assert "stage second: " in said
    assert "no column `levl`" in said


# ---- filters ----


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("n <= 1", [0, 1]),
        ("n != 2", [0, 1, 3]),
        ("n == 2", [2]),
        ("kind == odd", [1, 3]),
        ("kind == 'odd'", [1, 3]),
        ("text == '2'", [2]),
        ("flag == true", [3]),
        ("maybe > 0", [3]),
    ],
)
def test_rows_are_kept_by_what_stands_in_them(text: str, kept: list[int]) -> None:
    from datasets import Dataset

    rows = Dataset.from_list(
        [
            {"n": n, "kind": ("even", "odd")[n % 2], "text": str(n), "flag": n == 3, "maybe": n if n == 3 else None}
            for n in range(4)
        ]
    )
    assert load_data(DataSpec(dataset=rows, filter=(parse_condition(text),))).train["n"] == kept


def test_a_filter_that_cannot_work_is_one_message() -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"n": 1, "text": "a"}])
    for text, said in {"m < 2": "no column `m`", "n > 5": "keeps none of the 1 rows", "text < 2": "cannot be"}.items():
        with pytest.raises(DataError, match=said):
            load_data(DataSpec(dataset=rows, filter=(parse_condition(text),)))
    with pytest.raises(ValueError, match="such as `level <= 2`"):
        parse_condition("level")


def test_a_recipe_without_stages_has_filters_too(here: Path) -> None:
    plain = BASE.replace("stages:\n", "rewards: [mine.py:digits]\nfilter: [level >= 1, level != 3]\n")
    made = recipe(plain)
    rows, _ = load_data(made.data)
    assert set(rows["level"]) == {1, 2}
    assert "run.yaml:9: `filter`: expected a comparison" in problems(plain.replace("level >= 1", "level"))


def test_rows_that_are_given_are_shaped_by_the_keys_of_a_stage(here: Path) -> None:
    rows = [{"question": f"{n}+{n}", "level": n % 3} for n in range(60)]
    made = Stages(
        [
            {"name": "all", "rewards": [len], "held_out": 0.2},
            {"name": "easy", "rewards": [len], "filter": "level <= 0", "eval_dataset": rows[:5]},
        ],
        model="./model",
        train_dataset=rows,
        prompt="{question} = ",
        max_steps=1,
    )
    (train, held_out), (easy, own) = (stage.load_rows() for stage in made.stages)
    assert len(train) + len(held_out) == 60
    assert 30 < len(train) < 60
    assert not set(train["prompt"]) & set(held_out["prompt"])
    assert set(easy["level"]) == {0}
    assert easy["prompt"][1] == "3+3 = "
    assert own["prompt"][:2] == ["0+0 = ", "1+1 = "]


def test_a_stage_that_names_its_dataset_has_that_one(here: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}]
    second = {"name": "named", "rewards": [len], "dataset": "rows.jsonl", "eval_dataset": rows}
    made = Stages([{"name": "given", "rewards": [len]}, second], model="./model", train_dataset=rows, max_steps=1)
    assert [len(stage.load_rows()[0]) for stage in made.stages] == [1, 40]
    held_out = made.stages[1].load_rows()[1]
    assert list(held_out["prompt"]) == ["a"]


DATA = BASE.replace("stages:\n", 'rewards: [mine.py:digits]\nprompt: "{prompt} Now:"\nheld_out: 0.2\nstages:\n')


def test_a_stage_with_a_dataset_of_its_own_has_none_of_the_templates_of_another(here: Path) -> None:
    (here / "other.jsonl").write_text('{"prompt": "1+1", "hard": 2}\n{"prompt": "2+1", "hard": 1}\n')
    own = "name: own, dataset: [{path: other.jsonl, weight: 2}], order: easy_first, difficulty: hard, max_steps: 1"
    first, second = recipe(DATA + f"  - {{name: base, max_steps: 1}}\n  - {{{own}}}\n").stages
    assert first.load_rows()[0]["prompt"][0].endswith(" Now:")
    assert first.recipe.data.held_out == second.recipe.data.held_out == 0.2
    assert set(second.load_rows()[0]["prompt"]) <= {"1+1", "2+1"}
    assert (second.recipe.data.order, first.recipe.data.order) == ("easy_first", None)


def test_what_a_stage_holds_out_takes_the_place_of_the_base(here: Path) -> None:
    made = recipe(DATA + "  - {name: a, max_steps: 1}\n  - {name: b, eval_dataset: rows.jsonl, max_steps: 1}\n")
    assert [(each.recipe.data.held_out, each.recipe.data.eval_dataset) for each in made.stages] == [
        (0.2, None),
        (None, "rows.jsonl"),
    ]


def test_an_sft_stage_keeps_an_order_and_is_not_trained_on_what_is_held_out(here: Path) -> None:
    sft = "  - {name: s, type: sft, order: hard_first, difficulty: level, max_steps: 1}\n"
    made = recipe(DATA + sft + "  - {name: g, max_steps: 1}\n").stages
    levels = made[0].load_rows()[0]["level"]
    assert levels == sorted(levels, reverse=True)
    assert made[0].sft_arguments().train_sampling_strategy == "sequential"
    assert not set(made[0].load_rows()[0]["prompt"]) & set(made[1].load_rows()[1]["prompt"])


def test_nothing_is_assumed_in_a_stage(here: Path) -> None:
    plain = BASE.replace("rows.jsonl", "reasoning-gym:chain_sum")
    assert "no `rewards`" in problems(plain + "  - {name: a, max_steps: 1}\n")


# ---- right completions ----


def test_the_right_completion_comes_from_a_column_or_a_text() -> None:
    row = {"prompt": "2+2=", "answer": "4", "unit": "km"}
    chat = {**row, "prompt": [{"role": "user", "content": "2+2="}]}
    assert Completions.of(None, row)(row)["completion"] == "4"
    assert Completions.of("unit", row)(row)["completion"] == "km"
    text = Completions.of("<a>{answer} {unit}</a> {{}}", row)
    assert text(row)["completion"] == "<a>4 km</a> {}"
    assert text(chat)["completion"] == [{"role": "assistant", "content": "<a>4 km</a> {}"}]
    said = [{"role": "assistant", "content": "four"}]
    assert Completions.of(None, ["prompt", "completion"])({**chat, "completion": said})["completion"] == said


@pytest.mark.parametrize(
    ("written", "said"),
    [("anser", "Did you mean `answer`"), ("{answer.__class__}", "names no column"), ("{answer", "has no other half")],
)
def test_a_completion_that_cannot_be_made_is_said(written: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Completions.of(written, ["prompt", "answer"])


def test_rows_without_a_right_completion() -> None:
    with pytest.raises(DataError, match="Write `completion: my_column`"):
        Completions.of(None, ["prompt", "hint"])
    with pytest.raises(DataError, match="`answer` is null"):
        Completions.of(None, ["prompt", "answer"])({"prompt": "x", "answer": None})


# ---- in Python ----


def test_stages_in_python_take_functions_and_rows(here: Path, model: str) -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(16)]
    made = Stages(
        [
            {"name": "a", "rewards": short, "max_steps": 2},
            {"name": "b", "rewards": [{"function": short, "weight": 2}], "max_steps": 3, "train_dataset": rows[:8]},
        ],
        model=model,
        train_dataset=rows,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=8,
        output_dir="out",
    )
    first, second = made.stages
    assert first.recipe.rewards[0].function is short
    assert second.recipe.config["reward_weights"] == [2.0]
    assert [len(stage.load_rows()[0]) for stage in made.stages] == [16, 8]
    assert not [finding for finding in made.check() if finding.severity == "error"]


def test_a_mistake_in_python_is_one_message(model: str) -> None:
    with pytest.raises(ConfigError, match=r"stages: stage a: unknown key `rewardz`"):
        Stages([{"name": "a", "rewardz": []}, {"name": "b", "rewards": ["answer_format"]}], model=model, dataset="x")
    with pytest.raises(ConfigError, match="`model` must be a name or a folder"):
        Stages([{"name": "a"}])
    with pytest.raises(ConfigError, match="has no `stages`"):
        Stages.load("quickstart")
