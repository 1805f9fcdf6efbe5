"""The registry of planted mistakes (`benchmarks.mistakes`): consistent, and named by `podium check` where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cures import cured, named, record, verdict
from benchmarks.mistakes import MISTAKES, REWARD, TASKS, Job, healthy
from podium.checks import examine
from podium.recipe.schema import key_types
from podium.runs.findings import codes

QUICK = ["the sign is wrong", "empty questions", "learning rate 1e-2", "a misspelt key"]


def checked(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The result of a run that ends after its check."""
    job.write(folder)
    monkeypatch.chdir(folder)
    return {"findings": [record(finding, "check") for finding in examine("run.yaml").findings]}


def test_the_registry_is_consistent() -> None:
    assert len(MISTAKES) >= 30
    assert {mistake.kind for mistake in MISTAKES.values()} == {"reward", "data", "settings"}
    for name, mistake in MISTAKES.items():
        assert mistake.codes, name
        assert set(mistake.codes) <= set(codes()), name
        well, planted = healthy(mistake.task, 1), mistake.job(1)
        assert (planted.recipe, planted.rewards, planted.rows) != (well.recipe, well.rewards, well.rows), name
        unknown = planted.recipe.keys() - key_types().keys()
        assert not unknown or "C001" in mistake.codes, name


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_healthy_recipe_has_no_finding(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(healthy(task, 1), tmp_path, monkeypatch)["findings"]
    # W122 is a matter of the clock: a busy machine has no time for the whole test of a reward.
    assert [each for each in found if each["severity"] != "note" and each["code"] != "W122"] == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, mistake in MISTAKES.items()
        if mistake.before
    ],
)
def test_a_mistake_is_named_before_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = checked(MISTAKES[name].job(1), tmp_path / "planted", monkeypatch)
    assert named(MISTAKES[name], result), result["findings"]
    cure, words = cured(MISTAKES[name], 1, result)
    assert cure is not None, result["findings"]
    after = checked(cure, tmp_path / "cured", monkeypatch)
    assert named(MISTAKES[name], after) is None, words


def test_a_repair_needs_a_finding_that_describes_it() -> None:
    mistake = MISTAKES["the sign is wrong"]
    vague = {"code": "W102", "severity": "error", "what": "", "fix": "look at it", "changes": {}, "when": "check"}
    assert cured(mistake, 1, {"findings": [vague]}) == (None, "")
    cure, words = cured(mistake, 1, {"findings": [{**vague, "fix": "turn the sign round"}]})
    assert cure is not None
    assert cure.rewards == REWARD
    assert words == "by hand: turn the sign round"


def test_changes_are_applied_to_the_recipe() -> None:
    mistake = MISTAKES["temperature 2.5"]
    hot = {
        "code": "C027",
        "severity": "warning",
        "what": "",
        "fix": "temperature: 1.0",
        "changes": {"temperature": 1.0},
    }
    later = {**hot, "code": "M141", "severity": "error", "changes": {"max_completion_length": 24}, "when": "step 3"}
    cure, words = cured(mistake, 1, {"findings": [{**hot, "when": "check"}, later]})
    assert cure == healthy(mistake.task, 1)
    assert words == "{temperature: 1.0}"
    cure, words = cured(mistake, 1, {"findings": [{**hot, "when": "step 2"}, later]})
    assert cure is not None
    assert (cure.recipe["temperature"], cure.recipe["max_completion_length"]) == (1.0, 24)


def test_a_late_finding_does_not_name() -> None:
    late = {"code": "M155", "severity": "error", "what": "", "fix": "", "changes": {}, "when": "step 6"}
    mistake = MISTAKES["answers shuffled"]
    assert named(mistake, {"findings": [late]}) is None
    assert named(mistake, {"findings": [{**late, "severity": "note", "when": "step 5"}]}) is None
    assert named(mistake, {"findings": [{**late, "when": "step 5"}]}) is not None


def test_better_needs_every_seed() -> None:
    def runs(*pairs: tuple[float, float | None]) -> list[dict[str, Any]]:
        return [{"named": True, "before": before, "after": after} for before, after in pairs]

    assert verdict(runs((0.4, 0.9), (0.4, 0.9), (0.4, 0.4)))["better"]
    assert not verdict(runs((0.4, 0.9), (0.4, 0.9), (0.4, 0.39)))["better"]
    assert not verdict(runs((0.4, 0.44), (0.4, 0.44)))["better"]
    assert not verdict(runs((0.4, 0.9), (0.4, None)))["better"]
