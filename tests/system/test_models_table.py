"""The architectures that were tried: the pages have the kept results, and what they must show holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES, WITH_IMAGES
from benchmarks.hybrids import RESULTS as HYBRIDS_RESULTS
from benchmarks.models import MEASURES, NAMES, PAGE, RESULTS, SPEEDS, adapter, exactness, full, listed, speeds

KEPT = json.loads(RESULTS.read_text())
HYBRIDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "granitemoehybrid", "nemotron_h", "lfm2")


def test_the_pages_have_the_kept_results() -> None:
    assert KEPT.keys() == NAMES.keys() <= FAMILIES.keys()
    assert listed(KEPT) in PAGE.read_text()
    assert speeds(KEPT) in SPEEDS.read_text()


def test_what_the_kept_results_show() -> None:
    """All are proved, saved, read back and resumed; at least 24 share prefixes in sampling and in training."""
    for name in NAMES:
        whole, lora = KEPT[name]["full"], KEPT[name]["lora"]
        assert (whole["proved"], whole["read back"], whole["resumed"]) == (True, "", True), name
        assert (lora["proved"], lora["merged"]) == (True, ""), name
    shared = [name for name in NAMES if KEPT[name]["exactness"].get("path") == "shared"]
    assert sum(KEPT[name]["full"]["engine"] == "live" for name in shared) >= 24
    for name in HYBRIDS:  # experts of Qwen3-Next weigh the rounding of the delta rule
        assert KEPT[name]["exactness"]["nats"] < (1e-5 if name != "qwen3_next" else 3e-5), name
        assert KEPT[name]["exactness"]["gradients"] < 1e-4, name
    for name in NAMES.keys() & WITH_IMAGES.keys():
        assert KEPT[name]["full"]["read back"] == "", name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid", "gpt_oss"])
def test_it_measures(name: str, tmp_path: Path) -> None:
    FAMILIES[name](tmp_path / "base")
    for key, measure in (("exactness", exactness), ("full", full), ("lora", adapter)):
        assert measure is MEASURES[key]
        found, kept = measure(name, tmp_path / "base", tmp_path), KEPT[name][key]
        assert {k: v for k, v in found.items() if not isinstance(v, float)} == {
            k: v for k, v in kept.items() if not isinstance(v, float)
        }


def test_the_measurements_have_what_shared_prefixes_save() -> None:
    kept = json.loads(HYBRIDS_RESULTS.read_text())
    part = (Path(__file__).parents[2] / "benchmarks" / "RESULTS.md").read_text().split("### Layers with a state")[1]
    text = " ".join(part.split("\n### ")[0].split())
    for kind, least in (("training", 2.5), ("sampling", 2.0)):
        ratios = [each[kind]["ratio"] for each in kept.values()]
        assert min(ratios) > least
        assert all(f"{ratio:.1f}" in text for ratio in ratios)
