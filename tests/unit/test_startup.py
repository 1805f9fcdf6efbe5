"""What is imported before it is needed, and what is known of classes that are not imported."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import podium
from podium.cli import BEGINS, app
from podium.recipe import open_document, shipped_recipes
from podium.recipe.schema import check_type
from podium.trainer import fields

HEAVY = ("torch", "trl", "transformers", "peft", "accelerate", "scipy", "sympy")
TABLES = ("datasets", "pandas", "pyarrow")
"""Libraries of tables, which rows that are read one by one do not need."""


def spelled(annotation: Any) -> Any:
    """An annotation in a form in which two that mean the same are equal."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation.__name__, tuple(each.value for each in annotation)
    origin = get_origin(annotation)
    if origin is None:
        return annotation
    parts = [spelled(each) if isinstance(each, type) or get_origin(each) else each for each in get_args(annotation)]
    return "union" if type(None) in parts or "Union" in str(origin) else origin, frozenset(map(repr, parts))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    caches = (fields._table, fields.options, fields.arguments, fields._type)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for each in caches:
        each.cache_clear()
    yield tmp_path
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize("owner", fields.CLASSES)
def test_fields_from_the_file_are_those_of_the_class(owner: str, empty_cache: Path) -> None:
    fields._table()
    [file] = (empty_cache / "podium").iterdir()
    fields._table.cache_clear()  # from here on the file is read
    cls = getattr(import_module(fields.CLASSES[owner]), owner)
    hints, own = get_type_hints(cls), {each.name: each for each in dataclasses.fields(cls)}
    known = fields.options(owner)
    assert list(known) == list(own)
    assert set(fields.arguments(owner)) == {name for name, each in own.items() if each.init}
    for name, each in own.items():
        assert spelled(known[name].type) == spelled(hints[name]), name
        assert (known[name].default, type(known[name].default)) == (each.default, type(each.default)), name
        assert known[name].help == str(each.metadata.get("help") or ""), name
        assert known[name].choices == tuple(each.metadata.get("choices") or ()), name
    assert [file] == list((empty_cache / "podium").iterdir())


WRONG: tuple[tuple[str, Any], ...] = (
    ("learning_rate", "small"),
    ("learning_rate", True),
    ("learning_rate", [1e-5]),
    ("learning_rate", None),
    ("max_steps", 4.5),
    ("num_generations", "eight"),
    ("num_generations", True),
    ("per_device_train_batch_size", {"a": 1}),
    ("gradient_checkpointing", "maybe"),
    ("bf16", 2),
    ("beta", "x"),
    ("reward_weights", "1, 2"),
    ("reward_weights", ["a"]),
    ("generation_kwargs", [1]),
    ("lr_scheduler_type", [1]),
    ("optim", ["adamw_torch"]),
    ("eval_strategy", {}),
    ("save_strategy", False),
    ("seed", 1.5),
    ("output_dir", ["a"]),
    ("adaptive_rewards", "all"),
    ("top_k", "many"),
    ("logging_steps", "often"),
    ("num_iterations", [2]),
)


def test_values_are_judged_by_the_file_as_by_the_classes(empty_cache: Path) -> None:
    fields._table()
    fields._table.cache_clear()
    cls = import_module(fields.CLASSES["GRPOConfig"]).GRPOConfig
    hints, known = get_type_hints(cls), fields.arguments("GRPOConfig")
    recipes = [open_document(name).values for name in shipped_recipes()]
    right = [(key, value) for values in recipes for key, value in values.items() if key in known]
    assert len(right) > 100
    refused = []
    for key, value in (*WRONG, *right):
        checked, error = check_type(key, value, known[key])
        expected, expected_error = check_type(key, value, hints[key])
        assert (checked, type(checked), str(error)) == (expected, type(expected), str(expected_error)), (key, value)
        refused += [(key, value)] * (error is not None)
    assert refused == list(WRONG)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"GRPOConfig": {}}'])
def test_a_broken_file_is_written_again(text: str, empty_cache: Path) -> None:
    whole = fields._table()
    [file] = (empty_cache / "podium").iterdir()
    file.write_text(text)
    fields._table.cache_clear()
    assert fields._table() == whole
    assert file.read_text() != text


def imported(names: tuple[str, ...], *words: str) -> set[str]:
    """Those modules of these names that a command imports in a fresh process."""
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('imported', *({set(names)} & sys.modules.keys()), file=sys.stderr))\n"
        "from podium.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("imported")]
    return set(line.split()[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["recipes"],
        ["explain", "C010"],
        ["explain", "learning_rate"],
        ["rewards", "test", "quickstart"],
        ["rewards", "test", "answer_correct", "--data", "builtin:additions"],
    ],
    ids=" ".join,
)
def test_commands_that_compute_nothing_import_nothing_heavy(words: list[str]) -> None:
    fields._table()  # written by whatever needs it first
    assert imported(HEAVY, *words) == set()


@pytest.mark.slow
def test_a_check_of_a_built_in_task_imports_no_library_of_tables() -> None:
    assert imported(TABLES, "check", "quickstart") == set()


SAID_FIRST = """
import os, sys
class FirstLine:
    def write(self, text):
        print(f"{text.strip()}|{sorted(HEAVY & sys.modules.keys())}", flush=True)
        os._exit(0)
    def flush(self):
        pass
    def isatty(self):
        return False
from podium.cli import main
sys.stderr = FirstLine()
main()
""".replace("HEAVY", repr(set(HEAVY)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("words", [["check", "quickstart"], ["train", "quickstart"], ["doctor", "x"], ["report", "x"]])
def test_a_verb_says_what_it_does_before_anything_heavy_is_imported(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SAID_FIRST, *words], capture_output=True, text=True, check=True)
    assert done.stdout == f"{BEGINS[words[0]]} ...|[]\n"


def test_every_slow_verb_begins_with_a_line() -> None:
    functions = {"eval": "evaluate", "test": "try_out"}
    verbs = {functions.get(name, name) for name in typer.main.get_command(app).commands}  # type: ignore[attr-defined]
    tests = {"rewards test", "environments test", "agents test"}
    groups = {"rewards", "environments", "agents"}
    at_once = {"init", "recipes", "explain", "version"}  # the first one says it where it has read what to read
    assert BEGINS.keys() == verbs - groups - at_once | tests


def test_completion_shows_public_names_alone() -> None:
    for module in (podium, podium.data, podium.rewards):
        assert dir(module) == sorted(module.__all__)


def test_help_explains_every_field() -> None:
    shown = inspect.getdoc(podium.GRPOConfig) or ""
    for each in dataclasses.fields(podium.GRPOConfig):
        said = shown.partition(f"\n    {each.name}")[2]
        assert " ".join(str(each.metadata["help"]).split())[:40] in " ".join(said.split()), each.name


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("group", [[], ["rewards"]])
def test_help_cuts_no_description(group: list[str], width: int) -> None:
    shown = CliRunner().invoke(app, [*group, "--help"], terminal_width=width).output
    assert "..." not in shown.partition("Commands:")[2]
    assert all(len(line) <= width for line in shown.splitlines())
