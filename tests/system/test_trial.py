"""Architectures tried from their configuration alone, against the trial of a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from transformers.integrations import is_deepspeed_zero3_enabled

import podium
from benchmarks.families import FAMILIES, tiny
from benchmarks.models import RESULTS
from podium.models import trial
from podium.models.forward import choose_method
from podium.models.trial import MEASURED, try_architecture
from podium.planning.memory import meta_model

FAST = ("cohere2", "olmoe", "stablelm")
"""Local and global layers, experts, and one whose attention is its own."""


def test_measured_architectures_are_those_of_the_table() -> None:
    assert set(json.loads(RESULTS.read_text())) == MEASURED


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_a_small_model_takes_the_path_of_the_model(name: str) -> None:
    """Of every family whose tiny configuration can be reduced further; more than half of them can."""
    model = tiny(name)
    tried = try_architecture(model.config)
    assert tried is None or tried.path == choose_method(model).path
    assert tried is not None or name not in FAST


def test_each_kind_of_layer_is_tried() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 26
    config = AutoConfig.for_model("cohere2", num_hidden_layers=32, layer_types=kinds)
    assert try_architecture(config) == ("shared", "", 6)


@pytest.mark.parametrize(
    ("name", "says"), [("olmoe", "live engine, shared prefixes"), ("stablelm", "a padded row for each"), ("qwen3", "")]
)
def test_check_says_what_a_new_architecture_does(name: str, says: str, tmp_path: Path) -> None:
    FAMILIES[name](tmp_path / name)
    args = podium.GRPOConfig(str(tmp_path), per_device_train_batch_size=2, num_generations=2, report_to="none")
    found = podium.check(str(tmp_path / name), lambda completions, **_: [0.0] * 2, args, [{"prompt": "1+1="}])
    tried = [finding for finding in found if finding.code == "M026"]
    assert [finding.severity for finding in tried] == ["note"] * bool(says)
    assert not says or (says in tried[0].what and f"{name} is not among" in tried[0].what)


def test_a_check_makes_whole_models_where_the_run_divides_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ZeRO-3 transformers makes parts of models, which all processes must do together; checks differ in time."""
    config = tiny("llava").config
    divides = SimpleNamespace(is_zero3=lambda: True)
    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", lambda: divides)
    args = podium.GRPOConfig(str(tmp_path), report_to="none")
    assert try_architecture(config) is not None
    assert all(parameter.numel() for parameter in meta_model(config, args).parameters())
    assert is_deepspeed_zero3_enabled()


def test_a_model_too_large_to_be_tried_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("olmoe")
    assert try_architecture(config) is not None
    monkeypatch.setattr(trial, "MOST_PARAMETERS", 1000)
    assert try_architecture(config) is None
