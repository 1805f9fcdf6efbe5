"""Recipes: what they become, and that everything wrong with one is said at once, with file and line."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import trl

from podium.errors import ConfigError, DataError
from podium.recipe import Recipe, load, shipped_recipes
from podium.recipe.schema import key_types
from podium.trainer.settings import call_settings

BASE = """\
model: builtin:smollm2-135m-instruct
dataset: builtin:additions
rewards:
  - answer_format
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`recipe(text, flags)`: the recipe in a file `run.yaml` in the working directory."""
    monkeypatch.chdir(tmp_path)

    def make(text: str, **flags: object) -> Recipe:
        Path("run.yaml").write_text(text)
        return load("run.yaml", flags)

    return make


def problems(make, text: str, **flags: object) -> list[str]:
    """Each with its fix behind it."""
    with pytest.raises(ConfigError) as caught:
        make(text, **flags)
    lines = re.sub(r"\n +fix:", "", str(caught.value)).splitlines()
    return [line.strip() for line in lines[1:]] if lines[0].endswith("problems:") else lines


def test_a_recipe_becomes_what_a_run_needs(recipe):
    made = recipe(BASE + "learning_rate: 1e-5\nnum_generations: 4\nlora: {r: 8, target_modules: all-linear}\n")
    assert made.model == "builtin:smollm2-135m-instruct"
    assert made.lora == {"r": 8, "target_modules": "all-linear"}
    arguments = made.arguments()
    assert (arguments.learning_rate, arguments.num_generations) == (1e-5, 4)
    assert arguments.output_dir == "runs/run"


def test_flags_win_over_the_file(recipe):
    made = recipe(BASE + "learning_rate: 1e-5\n", learning_rate=2e-6, num_generations=4)
    assert made.config["learning_rate"] == 2e-6
    assert made.given["num_generations"] == 4


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file(recipe):
    text = BASE.replace("answer_format", "answer_formt") + (
        "learning_rat: 1e-6\n"
        "num_generations: 4.5\n"
        "learning_rate: [1, 2]\n"
        "loss_type: drgrpo\n"
        "beta: true\n"
        "temperature: 0\n"
        "seed: 1\n"
        "seed: 2\n"
        "lora: {r: x, alpha: 3}\n"
        "eval_strategy: sometimes\n"
    )
    found = problems(recipe, text, num_generation=3)
    assert [line.split(" ")[0].rstrip(":") for line in found] == [
        *(f"run.yaml:{line}" for line in (4, 5, 6, 7, 8, 9, 10, 12, 13, 13, 14)),
        "--num_generation",
    ]
    said = dict(zip((4, 5, 6, 7, 8, 9, 10, 12, 13, 13.5, 14, "flag"), found, strict=True))
    assert "no reward `answer_formt`" in said[4]
    assert "Did you mean `answer_format`?" in said[4]
    assert said[5] == "run.yaml:5: unknown key `learning_rat`. Did you mean `learning_rate`?"
    assert said[6].startswith("run.yaml:6: `num_generations`: expected a whole number")
    assert said[6].endswith("got 4.5 num_generations: 4")
    assert "expected a number, got a list, [1, 2]" in said[7]
    assert "must be one of grpo, " in said[8]
    assert said[8].endswith("Did you mean `dr_grpo`?")
    assert "expected a number, got true" in said[9]
    assert "zero" in said[10] or "nothing can be learnt" in said[10]
    assert said[12] == "run.yaml:12: `seed` is already set at line 11 delete line 12 or line 11: one `seed` is enough"
    assert "`r`: expected a whole number, got `x`" in said[13]
    assert "unknown key `alpha`. Did you mean `lora_alpha`?" in said[13.5]
    assert "must be one of no, steps, epoch" in said[14]
    assert "Did you mean `num_generations`?" in said["flag"]


def test_settings_that_do_not_go_together_name_a_line(recipe):
    made = recipe(BASE + "per_device_train_batch_size: 10\nnum_generations: 4\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:6: .*num_generations"):
        made.arguments()


def test_what_every_recipe_needs(recipe):
    found = problems(recipe, "seed: 1\n")
    assert [any(word in line for line in found) for word in ("no `model`", "no `dataset`", "no `rewards`")] == [
        True
    ] * 3


def test_keys_of_older_versions_say_what_to_write(recipe):
    (line,) = problems(recipe, BASE + "warmup_ratio: 0.1\n")
    assert line == "run.yaml:5: unknown key `warmup_ratio`. write `warmup_steps`; below 1 it is a share of all steps"


def test_missing_data_file_has_line_and_near_name(recipe, tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    (line,) = problems(recipe, BASE.replace("builtin:additions", "./trian.jsonl"))
    assert line.startswith("run.yaml:2: There is no file or folder ./trian.jsonl. Similar: train.jsonl")


# ---- rewards ----

REWARDS = """\
def short(completions, **columns):
    return [float(len(text) < 5) for text in completions]

def limited(completions, *, limit):
    return [float(len(text) < limit) for text in completions]

class Counter:
    def __init__(self, letter):
        self.letter = letter
    def __call__(self, completions, **columns):
        return [float(text.count(self.letter)) for text in completions]

number = 3
"""


def with_rewards(entries: str) -> str:
    return BASE.replace("  - answer_format\n", entries)


def test_rewards_from_library_file_and_module_with_weights_and_arguments(recipe, tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(REWARDS)
    made = recipe(
        with_rewards(
            "  - answer_format\n"
            "  - {name: regex_format, args: {pattern: '[0-9]+'}, weight: 2}\n"
            "  - mine.py:short\n"
            "  - {function: mine.py:limited, args: {limit: 3}}\n"
            "  - {function: mine.py:Counter, args: {letter: e}}\n"
            "  - package.inner:short\n"
            "  - package.inner.short\n"
            "  - org/reward-model\n"
        )
    )
    *functions, model = [spec.function for spec in made.rewards]
    scores = [function(completions=["eel", "77"]) for function in functions]
    assert scores == [[0, 0], [0, 1], [1, 1], [0, 1], [2, 0], [1, 1], [1, 1]]
    assert model == "org/reward-model"
    assert made.config["reward_weights"] == [1, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("mine.py:shrt", r"mine.py has no function `shrt`. It has .* Did you mean `short`\?"),
        ("mine.py:number", "`number` in mine.py is int; a reward is a function"),
        ("mime.py:short", r"there is no file mime.py .*Similar: mine.py"),
        ("mine.py", "which function"),
        ("nowhere.rewards:short", "there is no module `nowhere.rewards`"),
        ("broken.py:f", r"importing broken.py failed at .*broken.py:2: ZeroDivisionError"),
        ("syntax.py:f", r"syntax.py:1: "),
        ("{function: mine.py:limited, args: {limt: 3}}", r"no argument `limt`. It takes: limit Did you mean `limit`\?"),
        ("{name: answer_format, wait: 3}", "unknown key `wait` of a reward"),
        ("{name: answer_format, weight: heavy}", "`weight` must be a number"),
        ("{weight: 2}", "a reward needs one of"),
        ("3", "a reward is a name or a mapping"),
    ],
)
def test_rewards_that_cannot_be_found_have_a_line_and_near_names(recipe, tmp_path, entry, message):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    found = problems(recipe, with_rewards(f"  - {entry}\n"))
    assert found[0].startswith("run.yaml:4: ")
    assert re.search(message, found[0])


def test_what_a_reward_from_a_file_and_an_adaptive_one_may_say(recipe, tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    made = recipe(
        with_rewards(
            "  - {name: answer_correct, weight: 2, adaptive: true}\n"
            "  - {function: mine.py:short, row_wise: true, env: [JUDGE_KEY], adaptive: {low: 0.1}}\n"
            "  - mine.py:short\n"
        )
        + "reward_timeout: 5\nreward_workers: 2\non_reward_error: none\n"
    )
    first, second, third = made.rewards
    assert (second.function.row_wise, second.function.env) == (True, ("JUDGE_KEY",))
    assert (third.function.row_wise, third.function.env) == (False, ())
    assert made.config["adaptive_rewards"] == {"answer_correct": True, "short": {"low": 0.1}}
    settings = call_settings(made.arguments())
    assert (settings.limit, settings.on_error, settings.num_workers) == (5, "none", 2)
    assert first.adaptive is True


@pytest.mark.parametrize(
    ("value", "expected"), [("0", 0.0), ("-1.5", -1.5), ("none", "none"), ("raise", "raise"), ("'0.5'", 0.5)]
)
def test_what_errors_of_rewards_become(recipe, value, expected):
    made = recipe(BASE + f"on_reward_error: {value}\nreward_timeout: 0\n")
    settings = call_settings(made.arguments())
    assert (settings.on_error, settings.limit) == (expected, None)


@pytest.mark.parametrize("value", ["nun", "nan", "true"])
def test_what_errors_of_rewards_cannot_become(recipe, value):
    with pytest.raises(ConfigError, match="on_reward_error"):
        recipe(BASE + f"on_reward_error: {value}\n").arguments()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: answer_format, row_wise: true}", "`row_wise` is for functions in files"),
        ("{name: answer_format, adaptive: {lo: 1}}", "Did you mean `low`"),
        ("{name: answer_format, adaptive: 3}", "`adaptive` must be true or a mapping of settings"),
        ("{function: mine.py:short, env: KEY}", "`env` must be a list of variable names"),
    ],
)
def test_settings_of_a_reward_that_cannot_work(recipe, tmp_path, entry, message):
    (tmp_path / "mine.py").write_text(REWARDS)
    [line] = problems(recipe, with_rewards(f"  - {entry}\n"))
    assert message in line
    assert line.startswith("run.yaml:4: ")


def test_weights_said_twice_are_refused(recipe):
    (line,) = problems(recipe, with_rewards("  - {name: answer_format, weight: 2}\n") + "reward_weights: [1]\n")
    assert "say the same twice" in line


def test_accuracy_must_name_a_reward(recipe):
    (line,) = problems(recipe, BASE + "accuracy: answer_formt\n")
    assert line.startswith("run.yaml:5: `accuracy` names no reward here")


def test_a_folder_in_place_of_a_recipe_names_the_recipe_in_it(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    assert raised.value.fix == f"Did you mean `{tmp_path / 'run.yaml'}`?"


# ---- files written for `trl grpo` ----

TRL = """\
model_name_or_path: org/model
model_revision: v1
dtype: bfloat16
attn_implementation: eager
dataset_name: org/data
dataset_config: main
dataset_test_split: validation
reward_funcs:
  - accuracy_reward
  - get_soft_overlong_punishment
reward_weights: [1.0, 0.5]
output_dir: out
learning_rate: 1.0e-5
per_device_train_batch_size: 8
num_generations: 4
use_peft: true
lora_r: 8
lora_target_modules: [all-linear]
load_in_4bit: false
eval_strategy: steps
eval_steps: 10
per_device_eval_batch_size: 4
report_to: [none]
bf16: false
scale_rewards: false
max_steps: null
env:
  PODIUM_TEST_VARIABLE: hello
"""


def test_a_trl_file_means_what_it_means_to_trl(recipe, monkeypatch):
    monkeypatch.delenv("PODIUM_TEST_VARIABLE", raising=False)
    made = recipe(TRL)
    assert os.environ["PODIUM_TEST_VARIABLE"] == "hello"
    assert made.model == "org/model"
    assert [spec.name for spec in made.rewards] == ["accuracy_reward", "get_soft_overlong_punishment"]
    assert made.lora == {
        "r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
        "use_dora": False,
    }
    assert made.config["model_init_kwargs"] == {
        "revision": "v1",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
    }
    assert (made.data.dataset, made.data.dataset_config) == ("org/data", "main")
    assert (made.data.dataset_test_split, made.data.use_test_split) == ("validation", "needed")
    arguments = made.arguments()
    assert (arguments.scale_rewards, arguments.max_steps, arguments.reward_weights) == ("none", -1, [1.0, 0.5])


def test_a_trl_file_without_evaluation_leaves_the_test_split_alone(recipe):
    assert recipe(TRL.replace("eval_strategy: steps\n", "")).data.use_test_split == "no"


def test_every_key_of_trl_s_command_line_is_known():
    from trl.scripts.grpo import GRPOScriptArguments

    for cls in (GRPOScriptArguments, trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig):
        assert {field.name for field in dataclasses.fields(cls) if field.init} <= set(key_types())


def test_trl_s_own_peft_config_is_the_same(recipe):
    model_arguments = trl.ModelConfig(use_peft=True, lora_r=8, lora_target_modules=["q_proj", "v_proj"])
    ours = recipe(TRL.replace("[all-linear]", "[q_proj, v_proj]")).peft_config()
    assert ours.to_dict() == trl.get_peft_config(model_arguments).to_dict()


def test_a_mixture_is_checked_part_by_part(recipe):
    text = TRL.replace("dataset_name: org/data\n", "datasets:\n  - {path: a, splt: train}\n  - {name: b}\n")
    found = problems(recipe, text)
    assert found == [
        "run.yaml:6: unknown key `splt`. Did you mean `split`?",
        "run.yaml:7: a part of `datasets` needs `path` path: FILE, or a hub id",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("use_peft: true\n", ""), "`lora_r` does nothing without `use_peft: true`"),
        (("dataset_name", "dataset: x/y\ndataset_name"), "mean the same keep one of them"),
        (("load_in_4bit: false", "load_in_4bit: true\nload_in_8bit: true"), "exclude each other"),
    ],
)
def test_contradictions_are_named(recipe, change, message):
    assert any(message in line for line in problems(recipe, TRL.replace(*change)))


# ---- recipes that come with Podium ----


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_right(name, tmp_path, monkeypatch):
    if name in ("chain-sum", "countdown"):
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    made = load(name)
    made.arguments()
    assert made.accuracy in ([spec.name for spec in made.rewards] or ["Guess"])


def test_unknown_recipe_lists_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no recipe quickstrt.*\n  fix: Did you mean `quickstart`\?"):
        load("quickstrt")
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)


def test_hub_dataset_that_cannot_be_reached_is_one_message(recipe, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    from podium.data.rows import load_data

    with pytest.raises(DataError, match="`org/data` is no file or folder here"):
        load_data(recipe(TRL).data)
