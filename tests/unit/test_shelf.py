"""The recipes that come with Podium: each passes its check without a hub, and the page that lists them is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from podium.checks import check_recipe
from podium.checks.public import DATASETS, MODELS, public_config
from podium.checks.table import NOT_HERE
from podium.cli import app
from podium.cli.recipes import heading
from podium.models.stored import auto_class
from podium.recipe import shipped_recipes
from podium.recipe.assume import SPELLINGS
from podium.recipe.schema import MEANINGS, about, key_types

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
NAMES = {
    *("quickstart", "gsm8k", "gsm8k-1.5b", "countdown", "xml-reasoning", "json", "code", "csv", "composed"),
    *("small-gpu", "large-gpu"),
}


def values(name: str) -> dict:
    return yaml.safe_load(shipped_recipes()[name].read_text())


def test_what_people_look_for_is_there() -> None:
    assert set(shipped_recipes()) >= NAMES


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_passes_its_check_without_a_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warned of is only what this machine lacks: the hub, packages, memory."""
    if "reasoning-gym" in str(values(name)["dataset"]):
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    found = [each for each in check_recipe(name) if each.severity != "note"]
    assert [str(each) for each in found if each.code not in (*NOT_HERE, "C028", "C038")] == []
    if str(values(name)["model"]).startswith("builtin:"):
        assert found == []


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_begins_with_what_it_is_for_and_what_it_needs(name: str) -> None:
    first, second, third = shipped_recipes()[name].read_text().splitlines()[:3]
    assert re.fullmatch(r"# \S.{20,}\.", first)
    assert re.fullmatch(r"# Needs: \S.{10,}\.", second)
    assert third == ""
    said = heading(shipped_recipes()[name])
    assert ("GPU" in said["needs"]) is not str(values(name)["model"]).startswith("builtin:")
    assert ("hub" in said["needs"]) is not str(values(name)["model"]).startswith("builtin:")


def test_the_page_lists_the_folder() -> None:
    table = "\n".join(f"| `{name}` | {heading(file)['about']} |" for name, file in shipped_recipes().items())
    marked = re.search(r"<!-- recipes -->\n.*?\n\|---\|---\|\n(.*?)\n<!-- /recipes -->", PAGE.read_text(), re.DOTALL)
    assert marked
    assert marked[1] == table


def test_the_page_names_the_keys() -> None:
    part = PAGE.read_text().split("## Keys")[1].split("## Commands")[0]
    assert set(MEANINGS) <= set(re.findall(r"`(\w+)`", part))


def test_every_key_is_described() -> None:
    assert all(re.fullmatch(rf"{key}, a setting \(.+\): .+", about(key)) for key in {*key_types()} - {*SPELLINGS})


# ---- what is known of models without the hub ----

PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
}
"""As the models' pages on the hub have it."""


def test_the_configurations_make_models_of_the_published_size() -> None:
    assert set(PARAMETERS) == set(MODELS)
    for name, expected in PARAMETERS.items():
        with torch.device("meta"):
            model = auto_class(public_config(name)).from_config(public_config(name))
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_every_hub_name_in_a_recipe_is_known() -> None:
    for name in shipped_recipes():
        model, dataset = values(name)["model"], values(name)["dataset"]
        assert model.startswith("builtin:") or model in MODELS
        assert dataset.startswith(("builtin:", "reasoning-gym:")) or dataset in DATASETS


def test_memory_is_estimated_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("podium.planning.memory.available_memory", lambda _: 10**12)
    found = check_recipe("gsm8k", {"dataset": "builtin:additions", "prompt": "{prompt}", "answer_from": None})
    assert any("494,032,768 of 494,032,768 parameters" in each.what for each in found if each.code == "C029")


def test_training_stops_for_what_the_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["train", "gsm8k"])
    assert result.exit_code == 2
    assert "gsm8k has 2 problems" in result.stderr
    assert "Qwen/Qwen2.5-0.5B-Instruct is not on this machine" in result.stderr
    assert "openai/gsm8k (7,473 rows" in result.stderr
    assert not (tmp_path / "runs").exists()


# ---- podium recipes ----


def test_a_recipe_is_printed_to_begin_ones_own_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["recipes", "json"])
    assert result.exit_code == 0
    (tmp_path / "run.yaml").write_text(result.stdout)
    assert [each for each in check_recipe("run.yaml") if each.severity != "note"] == []


def test_the_list_says_what_each_needs_and_near_names_are_found() -> None:
    out = CliRunner().invoke(app, ["recipes"]).stdout
    for name, file in shipped_recipes().items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(heading(file)['about'])}$", out, re.MULTILINE)
    assert out.count("Needs ") == len(shipped_recipes())
    result = CliRunner().invoke(app, ["recipes", "gsm9k"])
    assert result.exit_code == 2
    assert "Did you mean `gsm8k`" in result.stderr
