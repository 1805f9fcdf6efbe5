"""The way of a reward's value, from the user's `return` to `rewards_GK`: which functions hand it on, in which forms."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import podium
from podium.records import Completion, Group, Prompt, ScoredGroup
from podium.rewards import resolve_rewards, score
from podium.rewards.from_file import file_reward

PACKAGE = str(Path(podium.__file__).parent)
VALUE = 0.8125003
MOST_HOPS = 14
MOST_FORMS = 4

COMPLETION = Completion(token_ids=(1,), logps=(0.0,), finish="stop", text="a", policy_step=0)
GROUP = Group(prompt=Prompt(id=0, row=0, token_ids=(1,), text="q", content="q"), completions=(COMPLETION,) * 2)


def forms_of(found: Any) -> set[str]:
    """The forms in which a return value holds the number: a number, a record, JSON, an array; empty: it does not."""
    if isinstance(found, float):
        return {"number"} if found == VALUE else set()
    if isinstance(found, np.ndarray):
        return {"array"} if VALUE in found else set()
    if isinstance(found, ScoredGroup):  # the table itself
        return forms_of(found.rewards_GK)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        inside = [forms_of(getattr(found, each.name)) for each in dataclasses.fields(found)]
        return {type(found).__name__} if any(inside) else set()
    if isinstance(found, dict):
        return {"JSON"} if any(map(forms_of, found.values())) else set()
    if isinstance(found, (list, tuple)):
        return set().union(*map(forms_of, found))
    return set()


class Trace:
    """A profile function that notes each function of ours that returns or yields the value."""

    def __init__(self) -> None:
        self.hops: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith((PACKAGE, "<reward "))  # the last is the frame that names the function
        if event == "return" and is_ours and (forms := forms_of(arg)):
            name = code.co_qualname.removesuffix(".<locals>.<genexpr>").removesuffix(".<locals>.<listcomp>")
            self.hops.setdefault(
                f"{Path(code.co_filename).stem if code.co_filename.startswith(PACKAGE) else 'limits'}.{name}", set()
            ).update(forms)


def traced_score(function: Any) -> Trace:
    rewards, trace = resolve_rewards([function]), Trace()
    score([GROUP], rewards)  # imports, and the worker's start
    sys.setprofile(trace)
    try:
        [scored] = score([GROUP], rewards)
    finally:
        sys.setprofile(None)
    assert scored.rewards_GK.tolist() == [[VALUE]] * 2
    return trace


REWARD_IN_A_FILE = """
import json, os, sys
sys.path[:0] = [{folder!r}]
from test_hops_of_rewards import VALUE, Trace

def reward(completions):
    trace = Trace()
    sys.setprofile(lambda *event: (trace(*event), write(trace)))
    return [VALUE] * len(completions)

def write(trace, written=[]):
    hops = json.dumps({{name: sorted(forms) for name, forms in trace.hops.items()}})
    if hops not in written:
        written.append(hops)
        with open({log!r} + ".new", "w") as file:
            file.write(hops)
        os.replace({log!r} + ".new", {log!r})
"""


@pytest.fixture
def in_a_file(tmp_path: Path) -> tuple[Path, Path]:
    source, log = tmp_path / "hops.py", tmp_path / "hops.json"
    source.write_text(REWARD_IN_A_FILE.format(folder=str(Path(__file__).parent), log=str(log)))
    return source, log


def test_a_value_from_a_function_in_this_process() -> None:
    trace = traced_score(lambda completions: [VALUE] * len(completions))
    assert "score.score" in trace.hops
    assert len(trace.hops) <= MOST_HOPS, sorted(trace.hops)
    assert set().union(*trace.hops.values()) == {"number", "CallResult", "array"}


def test_a_value_from_a_function_in_a_file(in_a_file: tuple[Path, Path]) -> None:
    """In the worker the profile is the user's function's own; `serve` sends the value and returns nothing."""
    source, log = in_a_file
    trace = traced_score(file_reward(f"{source}:reward"))
    there = json.loads(log.read_text())
    assert "calls.call" in there
    assert "process.Worker.reply" in trace.hops
    hops = {*trace.hops, *there, "child.serve"}
    assert len(hops) <= MOST_HOPS, sorted(hops)
    forms = set().union(*trace.hops.values(), *there.values())
    assert forms <= {"number", "CallResult", "JSON", "array"}
    assert len(forms) <= MOST_FORMS
