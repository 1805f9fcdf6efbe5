"""Example tasks and machines of `podium init`, and the settings that follow from both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podium.data.tasks import ORDER_EXAMPLE
from podium.models.builtin import BUILTIN
from podium.planning.propose import SMALL_MODEL
from podium.planning.shapes import CODE_STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of answer to reward."""

    about: str
    """For the question, and the first line of the recipe."""
    recipe: Mapping[str, Any]
    """Keys of the recipe; a function in `rewards.py` is the user's own."""
    tokens: int
    """Longest completion of a model that answers at once."""
    example: tuple[str, str] | None = None
    """A question and its answer in full, for the data that is written: a turn in front of every prompt."""
    own: str = "rewards"
    """The Python file that is the user's own, without its suffix."""
    shape: str = ""
    """The shape in `podium.planning.shapes` that the word stands for with a table of one's own; empty: none, the form
    alone is rewarded."""


_OWN_REWARD = {"function": "rewards.py:right", "weight": 2}
_TAGS_IN_PLACE = {"name": "xml_format_partial", "args": {"sections": ["answer"], "penalty_per_character": 0.01}}


def _worked_call(a: int, b: int) -> dict[str, Any]:
    """An example of the use of the tool."""
    call = {"name": "multiply", "arguments": {"a": a, "b": b}, "result": a * b}
    return {"question": f"What is {a} * {b}?", "calls": [call], "answer": str(a * b)}


TASKS: Mapping[str, Task] = {
    "number": Task(
        about="the right number inside answer tags",
        example=("What is 3 + 4?", "<answer>7</answer>"),
        tokens=24,
        shape="number",
        recipe={
            "system": "Give the answer as a number inside tags, like this: <answer>7</answer>",
            "rewards": (_OWN_REWARD, _TAGS_IN_PLACE),
            "accuracy": "right",
        },
    ),
    "exact": Task(
        about="the right word or phrase inside answer tags",
        example=("Which word comes first in the alphabet, sea or car?", "<answer>car</answer>"),
        tokens=24,
        shape="text",
        recipe={
            "system": "Give the answer inside tags, like this: <answer>blue</answer>",
            "rewards": (_OWN_REWARD, _TAGS_IN_PLACE),
            "accuracy": "right",
        },
    ),
    "json": Task(
        about="a JSON object whose fields are right",
        example=ORDER_EXAMPLE,
        tokens=48,
        shape="json",
        recipe={
            "system": "Answer with one JSON object and nothing else.",
            "rewards": (_OWN_REWARD, "json_format"),
            "accuracy": "right",
        },
    ),
    "code": Task(
        about="Python code that passes tests",
        example=(
            "Write a Python function half(x) that returns x divided by 2.",
            "```python\ndef half(x):\n    return x / 2\n```",
        ),
        tokens=48,
        shape="code",
        recipe={
            "system": "Answer with one Python function in a code block.",
            "rewards": (CODE_STAGES, {"function": "rewards.py:short", "weight": 0.1}),
            "accuracy": "code_stages",
        },
    ),
    "format": Task(
        about="the form alone: reasoning tags, then answer tags",
        example=(
            "What is a key used for?",
            "<reasoning>A key fits into a lock and turns it.</reasoning><answer>To open a lock.</answer>",
        ),
        tokens=96,
        recipe={
            "system": "Think, then answer, in this form: "
            "<reasoning>your thoughts</reasoning><answer>your answer</answer>",
            "rewards": ("xml_format", "xml_format_partial", {"function": "rewards.py:reasons", "weight": 0.5}),
            "accuracy": "xml_format",
        },
    ),
    "tool": Task(
        about="the product of two numbers, which the model computes by calling a tool",
        own="tools",
        tokens=96,
        recipe={
            "system": "Compute with the tool. Then answer with the result alone.",
            "rewards": ("tool_use", {"name": "exact_match", "weight": 2}),
            "accuracy": "exact_match",
            "tools": ["tools.py:multiply"],
            "examples": [_worked_call(12, 7), _worked_call(30, 4)],
            "max_tool_calling_iterations": 1,
            "temperature": 1.0,  # calls are exact: above it most of them are malformed at first
        },
    ),
    "game": Task(
        about="a hidden number, found in three guesses that are answered with higher or lower",
        own="game",
        tokens=48,
        recipe={
            "system": "Find the number. Answer with one number each time.",
            "accuracy": "Guess",
            "environment": "game.py:Guess",
            "examples": [
                {"question": "An example. Guess a number from 1 to 7.", "answer": "4"},
                {"question": "higher", "answer": "6"},
                {"question": "lower", "answer": "5"},
            ],
            "eval_dataset": "data.csv",
            "temperature": 1.0,
        },
    ),
}
"""By the word that is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine to train on. Settings of GPUs are estimates: they were not measured."""

    about: str
    model: str
    recipe: Mapping[str, Any]
    """Keys of the recipe."""
    tokens: int = 256
    """Least length of a completion: a larger model is given room to think."""
    temperature: float = 1.0


_LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}

MACHINES: Mapping[str, Machine] = {
    "cpu": Machine(
        about="no GPU: minutes on two cores with the built-in model",
        model=BUILTIN,
        recipe={"learning_rate": 3e-5, "max_steps": 60},
        tokens=0,
        temperature=1.15,
    ),
    "small-gpu": Machine(
        about="a GPU with 8 GB or more: an adapter for half a billion parameters",
        model="Qwen/Qwen2.5-0.5B-Instruct",
        recipe={"learning_rate": 2e-5, "max_steps": 200, "dtype": "bfloat16", "tokens_per_pack": 1024, "lora": _LORA},
    ),
    "large-gpu": Machine(
        about="a GPU with 40 GB or more: all of 1.5 billion parameters",
        model="Qwen/Qwen2.5-1.5B-Instruct",
        recipe={"learning_rate": 1e-6, "max_steps": 300, "tokens_per_pack": 2048},
    ),
}
"""By the word that is typed."""
_ADAPTER_RATE = 2e-5
"""Least learning rate of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The answers, but for the data."""

    task: str
    machine: str
    model: str

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of a recipe that the machine and the model decide: another model than its own is trained by an adapter.

        The built-in model is small enough to be trained whole anywhere.
        """
        machine = MACHINES[self.machine]
        made = {**SMALL_MODEL, **machine.recipe}
        if self.model not in (BUILTIN, machine.model):
            made |= {"learning_rate": max(made["learning_rate"], _ADAPTER_RATE), "lora": _LORA}
        return made
