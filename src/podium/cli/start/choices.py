"""The choices of `podium init`, their settings (two tables), and the questions for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from podium.data.tasks import ORDER_EXAMPLE
from podium.errors import ConfigError
from podium.errors.texts import listed, nearest
from podium.models.builtin import BUILTIN
from podium.planning.propose import SMALL_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of answer to reward."""

    about: str
    """For the question, and the first line of the recipe."""
    system: str
    """The system message."""
    example: tuple[str, str] | None = None
    """A question and its answer in full, for the data that is written: a turn in front of every prompt."""
    accuracy: str
    """The reward that says right or wrong."""
    tokens: int
    """Longest completion of a model that answers at once."""
    rewards: tuple[Any, ...]
    """As in a recipe; a function in `rewards.py` is the user's own."""
    own: str = "rewards"
    """The Python file that is the user's own, without its suffix."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the recipe."""
    shape: str = ""
    """The shape of answers in `podium.planning.propose` that the word stands for with a table of one's own; empty:
    none, the form alone is rewarded."""


_TAGS_IN_PLACE = {"name": "xml_format_partial", "args": {"sections": ["answer"], "penalty_per_character": 0.01}}


def _shown(a: int, b: int) -> dict[str, Any]:
    """A worked call of the tool."""
    return {"name": "multiply", "arguments": {"a": a, "b": b}, "result": a * b}


TASKS: Mapping[str, Task] = {
    "number": Task(
        about="the right number inside answer tags",
        system="Give the answer as a number inside tags, like this: <answer>7</answer>",
        example=("What is 3 + 4?", "<answer>7</answer>"),
        accuracy="right",
        tokens=24,
        rewards=({"function": "rewards.py:right", "weight": 2}, _TAGS_IN_PLACE),
        shape="number",
    ),
    "exact": Task(
        about="the right word or phrase inside answer tags",
        system="Give the answer inside tags, like this: <answer>blue</answer>",
        example=("Which word comes first in the alphabet, sea or car?", "<answer>car</answer>"),
        accuracy="right",
        tokens=24,
        rewards=({"function": "rewards.py:right", "weight": 2}, _TAGS_IN_PLACE),
        shape="text",
    ),
    "json": Task(
        about="a JSON object whose fields are right",
        system="Answer with one JSON object and nothing else.",
        example=ORDER_EXAMPLE,
        accuracy="right",
        tokens=48,
        rewards=({"function": "rewards.py:right", "weight": 2}, "json_format"),
        shape="json",
    ),
    "code": Task(
        about="Python code that passes tests",
        system="Answer with one Python function in a code block.",
        example=(
            "Write a Python function half(x) that returns x divided by 2.",
            "```python\ndef half(x):\n    return x / 2\n```",
        ),
        accuracy="code_stages",
        tokens=48,
        rewards=(
            {"name": "code_stages", "args": {"extract": "fence", "timeout": 1, "sandbox": "auto"}},
            {"function": "rewards.py:short", "weight": 0.1},
        ),
        shape="code",
    ),
    "format": Task(
        about="the form alone: reasoning tags, then answer tags",
        system="Think, then answer, in this form: <reasoning>your thoughts</reasoning><answer>your answer</answer>",
        example=(
            "What is a key used for?",
            "<reasoning>A key fits into a lock and turns it.</reasoning><answer>To open a lock.</answer>",
        ),
        accuracy="xml_format",
        tokens=96,
        rewards=("xml_format", "xml_format_partial", {"function": "rewards.py:reasons", "weight": 0.5}),
    ),
    "tool": Task(
        about="the product of two numbers, which the model computes by calling a tool",
        system="Compute with the tool. Then answer with the result alone.",
        accuracy="exact_match",
        tokens=96,
        rewards=("tool_use", {"name": "exact_match", "weight": 2}),
        own="tools",
        settings={
            "tools": ["tools.py:multiply"],
            "examples": [
                {"question": f"What is {a} * {b}?", "calls": [_shown(a, b)], "answer": str(a * b)}
                for a, b in ((12, 7), (30, 4))
            ],
            "max_tool_calling_iterations": 1,
            "temperature": 1.0,  # calls are exact: above it most of them are malformed at first
        },
    ),
    "game": Task(
        about="a hidden number, found in three guesses that are answered with higher or lower",
        system="Find the number. Answer with one number each time.",
        accuracy="Guess",
        tokens=48,
        rewards=(),
        own="game",
        settings={
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
    learning_rate: float
    max_steps: int
    tokens: int = 256
    """Least length of a completion: a larger model is given room to think."""
    lora: bool = False
    """Whether an adapter is trained; the built-in model is small enough to be trained whole anywhere."""
    temperature: float = 1.0
    dtype: str = ""
    """Type of the weights; empty: float32."""
    tokens_per_pack: int = 0
    """Most tokens in one forward and backward, for its memory; 0: Podium's own choice."""


MACHINES: Mapping[str, Machine] = {
    "cpu": Machine(
        about="no GPU: minutes on two cores with the built-in model",
        model=BUILTIN,
        learning_rate=3e-5,
        max_steps=60,
        tokens=0,
        temperature=1.15,
    ),
    "small-gpu": Machine(
        about="a GPU with 8 GB or more: an adapter for half a billion parameters",
        model="Qwen/Qwen2.5-0.5B-Instruct",
        learning_rate=2e-5,
        max_steps=200,
        lora=True,
        dtype="bfloat16",
        tokens_per_pack=1024,
    ),
    "large-gpu": Machine(
        about="a GPU with 40 GB or more: all of 1.5 billion parameters",
        model="Qwen/Qwen2.5-1.5B-Instruct",
        learning_rate=1e-6,
        max_steps=300,
        tokens_per_pack=2048,
    ),
}
"""By the word that is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The answers, but for the data."""

    task: str
    machine: str
    model: str

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of a recipe that the machine and the model decide."""
        machine = MACHINES[self.machine]
        made = dict[str, Any](SMALL_MODEL)
        lora = machine.lora or self.model not in (BUILTIN, machine.model)
        rate = machine.learning_rate
        made |= {"learning_rate": max(rate, 2e-5) if lora else rate, "max_steps": machine.max_steps}
        if machine.dtype:
            made["dtype"] = machine.dtype
        if machine.tokens_per_pack:
            made["tokens_per_pack"] = machine.tokens_per_pack
        if lora:
            made["lora"] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
        return made


def known(word: str | None, table: Mapping[str, Any], flag: str) -> str | None:
    """A word of a table, or None where nothing was given. Raises `ConfigError` for another word."""
    if word is not None and word not in table:
        near = nearest(word, table)
        raise ConfigError(
            f"{flag} is one of {listed(table)}; got `{word}`.",
            fix=f"Did you mean `{near}`?" if near else "",
            flag=flag,
            table=table,
            word=word,
            near=near,
        )
    return word


def at_terminal(*, yes: bool) -> bool:
    """Whether questions can be asked."""
    return not yes and sys.stdin.isatty()


def ask(question: str, usual: str, *, yes: bool) -> str:
    """Read an answer; `usual` for an empty line, and with --yes. Raises `ConfigError` where the input has ended."""
    if yes:
        return usual
    try:
        return str(typer.prompt(question, default=usual, show_default=bool(usual))).strip()
    except typer.Abort:
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
        typer.echo()  # behind the question
        raise ConfigError(
            "not every question was answered.",
            fix="Give the name of your table, or --task, --machine and --model, or --yes for what is usual.",
        ) from None


def choose(question: str, table: Mapping[str, Any], usual: str, *, yes: bool) -> str:
    """Read a word of a table; each entry has a text `about` itself."""
    if yes:
        return usual
    typer.echo("\n".join([question, *(f"  {word:<10} {each.about}" for word, each in table.items())]))
    return one_of("Type one of them", list(table), usual)


def one_of(question: str, words: Sequence[str], usual: str = "") -> str:
    """Read one of some words."""
    while (word := ask(question, usual, yes=False)) not in words:
        typer.echo(f"`{word}` is none of {', '.join(words)}.")
    return word
