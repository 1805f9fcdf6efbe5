"""Scripts in the shape of those that are published: each runs, at most after the one message is followed.

`published_scripts.yaml` has them. What a message says is applied by program: its call in place of the script's, its
changes in a recipe.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from podium import GRPOTrainer, check
from podium.checks import as_error
from podium.errors import PodiumError
from podium.recipe import load
from podium.recipe.changes import apply_changes
from podium.recipe.cure import prescribe
from podium.testing import save_tiny_model

CASES = yaml.safe_load((Path(__file__).parent / "published_scripts.yaml").read_text(encoding="utf-8"))
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "texts": lambda n: {"prompt": f"A sentence about {n} birds:"},
    "chats": lambda n: {"prompt": [{"role": "user", "content": f"Count to {n}."}]},
    "gsm8k": lambda n: {"question": f"Ann has {n} pens and buys 3. How many now?", "answer": f"{n}+3\n#### {n + 3}"},
    "math": lambda n: {"problem": f"What is {n} times 2?", "solution": f"${2 * n}$"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and the files of rows."""
    folder = tmp_path_factory.mktemp("published")
    save_tiny_model(folder / "model")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(40)))
    (folder / "my_rewards.py").write_text(
        "def length(completions, **kw):\n    return [len(str(c)) for c in completions]\n"
    )
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


class Reached(Exception):
    """Training would begin."""


def run(code: str) -> None:
    module = sys.modules["published_script"] = ModuleType("published_script")  # where pickle looks its classes up
    with contextlib.suppress(Reached):
        exec(compile(code, "script.py", "exec"), module.__dict__)


def corrected(code: str, error: PodiumError) -> str:
    """The script with the call that a message shows in place of its own; `...` stands for what was there."""
    [shown] = re.findall(r"^\w+\(\n(?:    .*\n)+\)$", str(error), re.MULTILINE)
    [new] = ast.parse(shown).body
    assert isinstance(new, ast.Expr)
    assert isinstance(new.value, ast.Call)
    name = ast.unparse(new.value.func)
    tree = ast.parse(code)
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func).endswith(name)]
    [old] = [each for each in calls if any(keyword.arg for keyword in each.keywords)]
    there = {keyword.arg: keyword.value for keyword in old.keywords}
    if new.value.args:  # `...`: the arguments of the trainer, of which some have other names
        moved = [each.changes for each in error.findings] or [error.changes]
        names = {gone: key for change in moved for gone in change for key in change if change[key] is not None}
        old.keywords = [ast.keyword(names.get(key, key), value) for key, value in there.items()]
    else:
        literal = {each.arg: each.value for each in new.value.keywords}
        hidden = {key: there[key] for key, each in literal.items() if ast.unparse(each) == "..."}
        old.args, old.keywords = [], [ast.keyword(key, hidden.get(key, each)) for key, each in literal.items()]
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=pytest.mark.defect("PS1", name)) for name, case in CASES["python"].items()],
)
def test_script_runs_after_one_round(
    case: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, now: Callable
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    if not case.get("trains"):
        monkeypatch.setattr(GRPOTrainer, "train", reached)
    if "says" not in case:
        run(case["code"])
        now("runs")
        return
    with pytest.raises(PodiumError) as error:
        run(case["code"])
    now(str(error.value))
    assert case["says"] in str(error.value)
    run(corrected(case["code"], error.value))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.defect("PS1", f"{name}, a recipe"))
        for name, case in CASES["recipes"].items()
    ],
)
def test_recipe_runs_after_one_round(case: dict[str, Any], folder: Path, now: Callable) -> None:
    path = folder / "run.yaml"
    path.write_text(case["recipe"])
    found = [finding for finding in check(path) if finding.severity == "error" or finding.code == "C032"]
    now(str(as_error("run.yaml", found)) if found else "nothing is wrong")
    assert bool(found) == ("says" in case)
    if found:
        assert case["says"] in str(as_error("run.yaml", found))
        path.write_text(apply_changes(case["recipe"], prescribe(found).changes))
    assert not [finding for finding in check(path) if finding.severity == "error" or finding.code == "C032"]
    assert load(path).arguments()
