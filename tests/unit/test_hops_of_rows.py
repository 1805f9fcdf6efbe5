"""The way of a prompt's row and of an episode through the product: which functions are given it, and in which forms.

A function is a hop if an argument of it or its result holds the row: a text or a record with the row's words, or tokens
with the one that stands in no other row. An object that holds everything (`TrainingRun`) is none of the forms.

The counts are a reading, never a limit: `python -m pytest tests/unit/test_hops_of_rows.py -s` prints them.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import podium
from podium.agents.chat import ChatFormat
from podium.testing import tiny_model, tiny_tokenizer
from tests.unit.agents_setup import make

PACKAGE = str(Path(podium.__file__).parent)
BESIDE = tuple(f"{PACKAGE}/{each}" for each in ("runs/", "trainer/proof/", "tester/"))
"""What looks at a round, and hands nothing on: records, detectors, the proof and the test of rewards."""
MARK = "~"
TOKENIZER = tiny_tokenizer()
[MARK_ID] = TOKENIZER.encode(MARK, add_special_tokens=False)


def forms_of(found: Any, depth: int = 6) -> set[str]:
    """The forms in which a value holds the row; empty: it does not."""
    if isinstance(found, str):
        return {"text"} if MARK in found else set()
    if isinstance(found, np.ndarray | torch.Tensor):
        is_ids = str(found.dtype).removeprefix("torch.") == "int64"
        return {type(found).__name__} if is_ids and bool((found == MARK_ID).any()) else set()
    if not depth:
        return set()
    if isinstance(found, Mapping):
        return {"mapping"} if any(forms_of(each, depth - 1) for each in [*found.values()][:64]) else set()
    if isinstance(found, list | tuple):
        if found and all(isinstance(each, int) for each in found):
            return {"token ids"} if MARK_ID in found else set()
        inside = set().union(*(forms_of(each, depth - 1) for each in found[:64]))
        return ({type(found).__name__} if hasattr(found, "_fields") else inside) if inside else set()
    if dataclasses.is_dataclass(found) and type(found).__module__.startswith("podium.") and not is_whole(found):
        values = (getattr(found, each.name, None) for each in dataclasses.fields(found))
        return {type(found).__name__} if any(forms_of(each, depth - 1) for each in values) else set()
    return set()


def is_whole(found: Any) -> bool:
    return type(found).__name__ in ("Arguments", "Prepared", "TrainingRun", "Setup", "Agents")


class Trace:
    """A profile function that notes each function of ours that is given or returns the row."""

    def __init__(self) -> None:
        self.hops: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE) or "<" in code.co_name:
            return
        if code.co_filename.startswith(BESIDE):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count] if name not in ("self", "cls")]
        forms = set().union(*map(forms_of, given)) if event == "call" else forms_of(arg)
        if forms:
            name = f"{Path(code.co_filename).relative_to(PACKAGE).with_suffix('')}:{code.co_qualname}"
            self.hops.setdefault(name.replace(".<locals>", ""), set()).update(forms)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {', '.join(sorted(forms))}" for name, forms in self.hops.items())


def traced(name: str, work: Callable[[], Any]) -> Trace:
    """The hops while `work` is done; their number and forms are printed with `name`."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    forms = set().union(*trace.hops.values())
    print(f"\n{name}: {len(trace.hops)} hops in {len(forms)} forms ({', '.join(sorted(forms))})\n{trace!r}")
    return trace


@pytest.fixture
def of_a_row() -> tuple[Trace, Trace]:
    """Hops before the first round, and in a round that trains."""
    made: list[Any] = []
    rows = Dataset.from_list([{"prompt": f"{MARK} say", "answer": "a"}] * 2)
    changes: dict[str, Any] = {"model": tiny_model("llama"), "processing_class": TOKENIZER, "train_dataset": rows}
    before = traced(
        "a row before the first round", lambda: made.append(make(**changes, config={"max_completion_length": 4}))
    )
    return before, traced("a row in a round that trains", made[0].train)


def test_a_row(of_a_row: tuple[Trace, Trace]) -> None:
    before, in_a_round = of_a_row
    assert {"data/prompts:check_row", "data/prompts:PromptBuilder.rendered"} <= before.hops.keys()
    chain = [
        "trainer/rollouts:Rollouts.sample_round",
        "rewards/score:score",
        "models/packing:pack",
        "trainer/rounds:loss_inputs",
    ]
    assert {*chain} <= in_a_round.hops.keys()


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: Anything.
    """
    return text


def test_an_episode_with_one_call_to_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(self: ChatFormat, token_ids: Any, *, prefix: Any, tools: Any = ()) -> dict[str, Any]:
        function = {"name": "echo", "arguments": {"text": MARK}}
        call = {"type": "function", "function": function}
        is_first = MARK_ID not in prefix
        return {"role": "assistant", "content": ""} | ({"tool_calls": [call]} if is_first else {})

    monkeypatch.setattr(ChatFormat, "parse", parse)
    every = {"eos_token_id": [2, *range(3, MARK_ID)]}
    trainer = make(tools=[echo], config={"generation_kwargs": every})
    trace = traced("an episode with one call", trainer.train)
    assert {"agents/episode:Episode.step", "agents/chat:ChatFormat.suffix"} <= trace.hops.keys()
