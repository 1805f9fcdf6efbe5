"""The table of architectures: that of the page is made from the kept results, and what they must show holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES, WITH_IMAGES
from benchmarks.hybrids import RESULTS as HYBRIDS_RESULTS
from benchmarks.models import MEASURES, NAMES, PAGE, RESULTS, adapter, exactness, full, problems, table

KEPT = json.loads(RESULTS.read_text())
HYBRIDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "granitemoehybrid", "nemotron_h", "lfm2")


def test_the_page_has_the_kept_results() -> None:
    assert KEPT.keys() == NAMES.keys() <= FAMILIES.keys()
    assert table(KEPT) in PAGE.read_text()
    assert problems(KEPT) in PAGE.read_text()


def test_what_the_kept_results_show() -> None:
    """In sampling and in training at least 24 architectures share prefixes, proved, saved and read back whole."""

    def good(name: str) -> bool:
        exact, whole, lora = (KEPT[name].get(key, {}) for key in ("exactness", "full", "lora"))
        saved = (whole.get("read back"), lora.get("merged")) == ("", "")
        return saved and all((exact.get("path") == "shared", whole.get("proved"), lora.get("proved"), whole["resumed"]))

    assert sum(good(name) and KEPT[name]["full"]["engine"] == "live" for name in NAMES) >= 24
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


def test_the_page_has_what_shared_prefixes_save() -> None:
    kept = json.loads(HYBRIDS_RESULTS.read_text())
    text = " ".join(PAGE.read_text().split())
    for kind, least in (("training", 2.5), ("sampling", 2.0)):
        ratios = [each[kind]["ratio"] for each in kept.values()]
        assert min(ratios) > least
        assert all(f"{ratio:.1f}" in text for ratio in ratios)
