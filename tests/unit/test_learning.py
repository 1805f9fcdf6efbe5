"""The kept results of `make bench-learning` are those of the page and the pictures; both trainers learn alike."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks import learning

RESULTS: list[dict[str, Any]] = json.loads(learning.RESULTS.read_text(encoding="utf-8"))


def _minutes(trainer: str) -> list[float]:
    """To the level, by seed."""
    found = [each for each in RESULTS if (each["task"], each["trainer"]) == ("quickstart", trainer)]
    assert [each["seed"] for each in found] == [1, 2, 3]
    seconds = [learning.seconds_to(learning.LEVEL, each) for each in found]
    return [x / 60 for x in seconds if x is not None]


def test_the_page_shows_the_results() -> None:
    assert learning.table(RESULTS) in learning.PAGE.read_text(encoding="utf-8")
    readme = (learning.DOCS.parent / "README.md").read_text(encoding="utf-8")
    ours, theirs = (_minutes(name) for name in ("podium", "trl"))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    assert f"0.6 in {min(ours):.1f} to {max(ours):.1f} minutes, TRL in" in readme
    assert f"TRL in {min(theirs):.1f} to {max(theirs):.1f}," in readme
    assert f"{min(ratios):.0f} to {max(ratios):.0f} times as long" in readme
    assert min(ratios) > 8
    for name in ("minutes", "completions"):
        assert (learning.DOCS / "images" / f"learning-{name}.svg").read_text(encoding="utf-8").startswith("<svg")


def test_runs_are_whole_and_of_the_same_questions() -> None:
    assert {each["trainer"] for each in RESULTS} == set(learning.TRAINERS)
    for each in RESULTS:
        steps = [point["step"] for point in each["points"]]
        ends = 45 if each["trainer"] == "podium" or (each["task"], each["seed"]) == learning.WHOLE else steps[-1]
        assert steps == list(range(0, ends + 1, learning.EVERY))
        assert learning.means(each["points"])[-1] >= learning.LEVEL
        assert {len(point["right"]) for point in each["points"]} == {80}
        seconds = [point["seconds"] for point in each["points"]]
        assert seconds == sorted(seconds)


def test_by_completions_both_learn_alike() -> None:
    """At each evaluation up to the level, the means over the seeds are within what seeds differ by."""
    curves = {
        name: [learning.means(r["points"])[:5] for r in RESULTS if (r["task"], r["trainer"]) == ("quickstart", name)]
        for name in learning.TRAINERS
    }
    ours, theirs = ([statistics.mean(values) for values in zip(*curves[name], strict=True)] for name in curves)
    spread = max(max(values) - min(values) for values in zip(*curves["podium"], strict=True))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < spread


def test_the_time_to_a_level_is_on_the_line_between_two_evaluations() -> None:
    points = [{"seconds": s, "right": [[r]]} for s, r in ((0, 0.0), (10, 0.25), (20, 0.75))]
    assert learning.seconds_to(0.5, {"points": points}) == 15
    assert learning.seconds_to(0.9, {"points": points}) is None
