"""The kept results of `make bench-learning` are those of the page and the pictures; both trainers learn alike."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks import learning

RESULTS: list[dict[str, Any]] = json.loads(learning.RESULTS.read_text(encoding="utf-8"))


def _minutes_of_seed_1(trainer: str) -> float:
    [found] = [each for each in RESULTS if (each["task"], each["trainer"], each["seed"]) == ("quickstart", trainer, 1)]
    seconds = learning.seconds_to(learning.LEVEL, found)
    assert seconds is not None
    return seconds / 60


def test_the_page_shows_the_results() -> None:
    assert learning.table(RESULTS) in learning.PAGE.read_text(encoding="utf-8")
    readme = (learning.DOCS.parent / "README.md").read_text(encoding="utf-8")
    ours, theirs = (_minutes_of_seed_1(name) for name in ("podium", "trl"))
    assert f"To 0.6 it takes {ours:.1f} minutes here and {theirs:.1f} with TRL" in readme
    for name in ("minutes", "completions"):
        assert (learning.DOCS / "images" / f"learning-{name}.svg").read_text(encoding="utf-8").startswith("<svg")


def test_runs_are_whole_and_of_the_same_questions() -> None:
    assert {each["trainer"] for each in RESULTS} == set(learning.TRAINERS)
    for each in RESULTS:
        steps = [point["step"] for point in each["points"]]
        assert steps == list(range(0, 46, learning.EVERY))
        assert {len(point["right"]) for point in each["points"]} == {80}
        seconds = [point["seconds"] for point in each["points"]]
        assert seconds == sorted(seconds)


def test_by_completions_both_learn_alike() -> None:
    """At each evaluation the means of the trainers are within the spread that a single run has between evaluations."""
    curves = {
        name: [learning.means(each["points"]) for each in RESULTS if each["trainer"] == name]
        for name in learning.TRAINERS
    }
    ours, theirs = ([statistics.mean(values) for values in zip(*curves[name], strict=True)] for name in curves)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.25


def test_the_time_to_a_level_is_on_the_line_between_two_evaluations() -> None:
    points = [{"seconds": s, "right": [[r]]} for s, r in ((0, 0.0), (10, 0.25), (20, 0.75))]
    assert learning.seconds_to(0.5, {"points": points}) == 15
    assert learning.seconds_to(0.9, {"points": points}) is None
