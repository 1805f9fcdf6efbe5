"""The scores of every reward of the library on fixed completions, digested to the bit (`benchmarks.outputs`)."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from podium.rewards import library_reward

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "unit" / "graders"
LISTS = ("reported", "answers", "later", "places", "unseen")
FEW = 120
"""Completions for rewards whose every call takes a process."""

SCHEMA = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}}
PROGRAMS = ("def double(x): return x * 2", "def double(x): return 4", "def double(x", "1 / 0", "print(input())", "")
TESTS = [{"call": "double", "args": [2], "expected": 4}, "assert double(3) == 6", {"stdin": "7", "stdout": "7"}]

CALLS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("answer_correct", {}),
    ("answer_f1", {}),
    ("answer_format", {}),
    ("clipped", {"reward": "answer_format", "high": 0.5}),
    ("distinct_ngrams", {}),
    ("exact_match", {}),
    ("exact_match", {"extract": "boxed", "ignore_case": True}),
    ("forbidden_patterns", {"patterns": ["answer", r"\d{3}"]}),
    ("gated", {"reward": "numeric_match", "gate": "answer_format", "above": 0.5}),
    ("get_cosine_scaled_reward", {"max_len": 40}),
    ("get_repetition_penalty_reward", {}),
    ("get_soft_overlong_punishment", {"max_completion_len": 20, "soft_punish_cache": 8}),
    ("group_diversity", {}),
    ("ideal_length", {"tokens": 12}),
    ("json_format", {}),
    ("json_match", {}),
    ("json_schema", {"schema": SCHEMA, "parses": 0.25}),
    ("keyword_coverage", {}),
    ("keyword_coverage", {"max_words": 12}),
    ("language", {"code": "en"}),
    ("language", {"code": "de"}),
    ("math_match", {}),
    ("math_match", {"extract": "text"}),
    ("multiple_choice", {}),
    ("normalised", {"reward": "text_similarity"}),
    ("numeric_closeness", {}),
    ("numeric_match", {}),
    ("numeric_match", {"tolerance": 0.02, "extract": "text"}),
    ("reasoning_accuracy_reward", {}),
    ("accuracy_reward", {}),
    ("regex_format", {"pattern": r".*\d"}),
    ("required_patterns", {"patterns": ["answer", r"\d{3}"]}),
    ("scheduled", {"reward": "answer_format", "start": 1.0, "end": 0.0, "steps": 100}),
    ("text_similarity", {}),
    ("text_similarity", {"unit": "word"}),
    ("think_format", {}),
    ("think_format_reward", {}),
    ("token_budget", {"tokens": 12}),
    ("tool_use", {}),
    ("weighted", {"rewards": ["answer_correct", "answer_format"], "weights": [2, 0.5]}),
    ("worked_steps", {}),
    ("xml_format", {}),
    ("xml_format_partial", {}),
)
SLOW = ("accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward")


def completions() -> tuple[list[str], list[Any]]:
    """The texts of the lists of answers, and the right answer of each; None for those without."""
    texts: list[str] = []
    answers: list[Any] = []
    for name in LISTS:
        for group in yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")):
            own = [text for kind in ("right", "wrong", "prose") for text in group.get(kind, ())]
            texts += own
            answers += [group.get("answer")] * len(own)
    return texts, answers


def columns(texts: Sequence[str], answers: Sequence[Any]) -> dict[str, Any]:
    """All arguments that rewards of the library may ask for."""
    return {
        "completions": list(texts),
        "answer": list(answers),
        "solution": [None if answer is None else str(answer) for answer in answers],
        "prompts": [f"What is {number // 4} + 2 - 5?" for number in range(len(texts))],
        "completion_ids": [[ord(letter) % 97 for letter in text] for text in texts],
        "trainer_state": SimpleNamespace(global_step=25, max_steps=100),
    }


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | None]:
    """The values of a reward function, which gets what its signature names."""
    names = inspect.signature(function).parameters
    answer = function(**{name: value for name, value in arguments.items() if name in names})
    return asyncio.run(answer) if inspect.isawaitable(answer) else answer


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """A digest of the values to the bit, with readings for people."""
    known = [float(value) for value in values if value is not None]
    bits = b"".join(b"none" if value is None else struct.pack("<d", value) for value in values)
    return {
        "values": len(values),
        "none": len(values) - len(known),
        "mean": sum(known) / max(1, len(known)),
        "sha256": hashlib.sha256(bits).hexdigest()[:16],
    }


def scores() -> dict[str, Any]:
    """By reward and settings, what its values on the fixed completions are, as plain texts and as conversations."""
    texts, answers = completions()
    found = {}
    for name, settings in CALLS:
        count = FEW if name in SLOW else len(texts)
        arguments = columns(texts[:count], answers[:count])
        function = library_reward(name, **settings)
        label = f"{name} {json.dumps(settings, sort_keys=True)}"
        found[label] = summary(call(function, arguments))
        if name not in SLOW and name != "math_match":
            arguments["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
            found[f"{label} in chat"] = summary(call(function, arguments))
    for name in ("code_tests", "code_stages"):
        arguments = {"completions": list(PROGRAMS), "tests": [TESTS[:2]] * 4 + [TESTS[2:], None]}
        found[name] = summary(call(library_reward(name, extract="raw", sandbox="none"), arguments))
    return found
