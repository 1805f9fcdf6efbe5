"""Planted mistakes of beginners, in rewards, data and settings: each a difference from a healthy recipe.

Four tasks learn on the built-in model within 8 or 12 steps. A mistake changes the recipe, the reward file or the
training rows of one of them. Held-out rows are those of the task, and stay right. `benchmarks.cures` runs them.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.planted import MODEL, WORDS
from podium.data.extract import tagged

Row = dict[str, str]
HELD_OUT = 40
"""Rows of each task."""
STEPS = 8
STEADY: Mapping[str, Any] = {"learning_rate": 1e-5, "per_device_train_batch_size": 128, "max_steps": 12}
"""For tasks with few answers, or few forms of them: with larger steps some seeds end in one answer for every prompt."""

# ---- tasks ----


@dataclass(frozen=True, kw_only=True)
class Task:
    """A healthy run: rows of `question` and `answer`, the first of them worked examples."""

    rows: Callable[[], list[Row]]
    system: str
    num_examples: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)

    def split(self) -> tuple[list[Row], list[Row], list[Row]]:
        """Worked examples, training rows, held-out rows; the same every time."""
        rows = self.rows()
        random.Random(5).shuffle(rows)
        examples, others = rows[: self.num_examples], rows[self.num_examples :]
        return examples, others[HELD_OUT:], others[:HELD_OUT]


def _rows(pairs: Sequence[tuple[str, str]]) -> list[Row]:
    return [{"question": question, "answer": answer} for question, answer in dict(pairs).items()]


def numbers() -> list[Row]:
    """A number, and the next one."""
    return _rows([(str(n), str(n + 1)) for n in range(10, 200)])


def plurals() -> list[Row]:
    """A word, and its plural."""
    return _rows([(word, f"{word}s") for word in WORDS.split() if not word.endswith(("s", "x"))])


def labels() -> list[Row]:
    """A review, and whether it is good."""
    things = "film hotel soup book phone room service concert car teacher coffee garden"
    kinds = {
        "positive": "wonderful great lovely excellent perfect brilliant charming superb",
        "negative": "terrible awful boring dirty rude broken horrible useless disappointing",
    }
    frames = ("The {} was {}.", "I found the {} {}.", "Our {} is really {}.")
    every = [
        (f"Is this review positive or negative? {frame.format(thing, word)}", label)
        for label, words in kinds.items()
        for word in words.split()
        for thing in things.split()
        for frame in frames
    ]
    return _rows(random.Random(3).sample(every, 240))


def units() -> list[Row]:
    """A length or a time, in a smaller unit."""
    factors = (("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("hours", "minutes", 60))
    return _rows(
        [
            (f"How many {small} are {n} {big}?", f"{n * factor} {small}")
            for big, small, factor in factors
            for n in range(2, 10 if factor == 60 else 91)
        ]
    )


TASKS: Mapping[str, Task] = {
    "numbers": Task(rows=numbers, system="Say which number comes next. Answer with the number alone."),
    "plurals": Task(rows=plurals, system="Give the plural of a word. Answer with one word."),
    "labels": Task(
        rows=labels,
        system="Say whether a review is positive or negative. Answer with one word.",
        settings=STEADY,
    ),
    "units": Task(
        rows=units,
        system="Convert between units; answer with number and unit.",
        settings={"max_completion_length": 12, **STEADY},
    ),
}

REWARD = """\
def correct(completions, answer, **kwargs):
    texts = [completion[-1]["content"] for completion in completions]
    return [float(text.strip().rstrip(".").lower() == right.lower()) for text, right in zip(texts, answer)]
"""


def is_right(text: str, truth: str) -> bool:
    """The accuracy by which all runs are compared, whatever their own reward is; an answer in its tags counts, too."""
    final = tagged(text, "answer") or text.strip()
    return final.rstrip(".").lower() == truth.lower()


def recipe_of(task: str, seed: int) -> dict[str, Any]:
    """The healthy recipe."""
    return {
        "model": MODEL,
        "dataset": "train.csv",
        "eval_dataset": "test.csv",
        "prompt": "{question}",
        "answer": "{answer}",
        "system": TASKS[task].system,
        "examples": TASKS[task].split()[0],
        "rewards": ["rewards.py:correct"],
        "accuracy": "correct",
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 6,
        "temperature": 1.0,
        "loss_type": "dapo",
        "learning_rate": 3e-5,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "eval_samples": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        "output_dir": "out",
        **TASKS[task].settings,
    }


# ---- runs ----


@dataclass(frozen=True, kw_only=True)
class Job:
    """All files of one run."""

    task: str
    recipe: Mapping[str, Any]
    rewards: str
    rows: Sequence[Row]
    trains: bool = True
    """False: the model is measured as it is."""

    def write(self, folder: Path) -> None:
        """`run.yaml`, `rewards.py`, `train.csv`, `test.csv`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(dict(self.recipe), sort_keys=False), encoding="utf-8")
        (folder / "rewards.py").write_text(self.rewards, encoding="utf-8")
        for name, rows in (("train.csv", self.rows), ("test.csv", TASKS[self.task].split()[2])):
            with (folder / name).open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


def healthy(task: str, seed: int) -> Job:
    """A run without any mistake."""
    return Job(task=task, recipe=recipe_of(task, seed), rewards=REWARD, rows=TASKS[task].split()[1])


def merged(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with other settings; None takes a key out."""
    return {key: value for key, value in {**recipe, **changes}.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A cure that the findings give in words alone.

    It counts only where a finding describes it: one of the mistake's codes, with these words in its fix.
    """

    words: tuple[str, ...]
    """One of them stands in the fix."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that the fix describes; empty: all files become those of the healthy run."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake, and by what it should be named."""

    kind: Literal["reward", "data", "settings"]
    codes: tuple[str, ...]
    """Any of them names it."""
    task: str = "numbers"
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward: str = ""
    """The reward file; empty: the right one."""
    rows: Callable[[list[Row]], list[Row]] | None = None
    """What is done to the training rows."""
    repair: Repair | None = None
    """For findings without `changes`; None: only those are the cure."""
    before: bool = True
    """Whether it is named before weights are loaded."""

    def job(self, seed: int) -> Job:
        """The run with the mistake."""
        well = healthy(self.task, seed)
        rows = list(well.rows)
        return Job(
            task=self.task,
            recipe=merged(well.recipe, self.settings),
            rewards=self.reward or REWARD,
            rows=self.rows(rows) if self.rows else rows,
        )


# ---- rewards ----

HEAD = """\
def correct(completions, answer, **kwargs):
    texts = [completion[-1]["content"] for completion in completions]
"""


def judged(expression: str, head: str = HEAD) -> str:
    """A reward file whose value for each `text` and `right` is the expression."""
    return f"{head}    return [{expression} for text, right in zip(texts, answer)]\n"


_COMPARE = Repair(words=("compare with", "better completions"))

REWARDS: Mapping[str, Mistake] = {
    "reads the question column": Mistake(
        kind="reward",
        codes=("W101", "W104", "W113", "W117"),
        reward=judged("float(text.strip() == right)", HEAD.replace("answer,", "question,")).replace(
            "zip(texts, answer)", "zip(texts, question)"
        ),
        repair=Repair(words=("`answer`", "answer from its form")),
    ),
    "compares with a line end": Mistake(
        kind="reward",
        codes=("W101", "W119", "W008"),
        reward=judged(r'float(text == right + "\n")'),
        repair=Repair(words=("white space", "strip")),
    ),
    "labels in capitals": Mistake(
        kind="reward",
        codes=("W101", "W119", "W008"),
        task="labels",
        reward=judged("float(text.strip() == right.upper())"),
        repair=Repair(words=("case", "capitals")),
    ),
    "a part is enough": Mistake(
        kind="reward",
        codes=("W106", "W107", "W117", "W105"),
        task="labels",
        reward=judged("float(any(word in text for word in (right, right[:3])))"),
        settings={"examples": None, "max_completion_length": 16},
        repair=Repair(words=("compare it alone", "`==`")),
    ),
    "the same for everything": Mistake(kind="reward", codes=("W008", "W120"), reward=judged("1.0"), repair=_COMPARE),
    "None for everything": Mistake(
        kind="reward", codes=("W008", "W101", "W120"), reward=judged("None"), repair=_COMPARE
    ),
    "the sign is wrong": Mistake(
        kind="reward",
        codes=("W102", "W101"),
        reward=judged("-float(text.strip() == right)"),
        repair=Repair(words=("sign",)),
    ),
    "length is paid": Mistake(
        kind="reward",
        codes=("W120", "W102", "W115"),
        reward=judged("len(text) / 10"),
        settings={"max_completion_length": 16},
        repair=_COMPARE,
    ),
    "raises for an empty text": Mistake(
        kind="reward",
        codes=("W010",),
        reward=judged("float(text.split()[0] == right)"),
        repair=Repair(words=("such texts", "correct line")),
    ),
    "raises for a text without a number": Mistake(
        kind="reward",
        codes=("W010",),
        reward=judged("float(float(text) == float(right))"),
        repair=Repair(words=("such texts", "correct line")),
    ),
    "gives words for numbers": Mistake(
        kind="reward",
        codes=("W004",),
        reward=judged('"yes" if text.strip() == right else "no"'),
        repair=Repair(words=("return numbers", "return a number")),
    ),
    "gives one number for the batch": Mistake(
        kind="reward",
        codes=("W003", "W005"),
        reward=HEAD + "    return sum(text.strip() == right for text, right in zip(texts, answer)) / len(texts)\n",
        repair=Repair(words=("return a list",)),
    ),
    "messages taken for texts": Mistake(
        kind="reward",
        codes=("W010", "W012"),
        reward="""\
def correct(completions, answer, **kwargs):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
""",
        repair=Repair(words=("content", "such texts", "correct line")),
    ),
    "asks for a column that is not there": Mistake(
        kind="reward",
        codes=("W002",),
        reward=REWARD.replace("answer,", "solution,").replace("texts, answer", "texts, solution"),
        repair=Repair(words=("rename", "`answer`")),
    ),
    "a function of another name": Mistake(
        kind="reward",
        codes=("W013",),
        reward=REWARD.replace("correct(", "is_correct("),
        repair=Repair(words=("`is_correct`",)),
    ),
    "tags that no prompt asks for": Mistake(
        kind="reward",
        codes=("W124",),
        settings={"rewards": ["answer_format", {"name": "answer_correct", "weight": 2}], "accuracy": "answer_correct"},
    ),
    "two rewards cancel": Mistake(
        kind="reward",
        codes=("W121", "W102"),
        reward=REWARD + REWARD.replace("correct(", "brief(").replace("[float(", "[1 - float("),
        settings={"rewards": ["rewards.py:correct", "rewards.py:brief"]},
        repair=Repair(words=("sign", "leave one out")),
    ),
    "a negative weight": Mistake(
        kind="reward",
        codes=("W102", "W101", "W121", "M107"),
        settings={"rewards": [{"function": "rewards.py:correct", "weight": -1.0}]},
    ),
    "weight 0": Mistake(
        kind="reward",
        codes=("W121", "W008"),
        reward=REWARD + "def brief(completions, **kwargs):\n    return [1.0 for _ in completions]\n",
        settings={"rewards": [{"function": "rewards.py:correct", "weight": 0.0}, "rewards.py:brief"]},
        repair=Repair(words=("raise the weight",)),
    ),
}

# ---- data ----


def _each(**changed: Callable[[Row], str]) -> Callable[[list[Row]], list[Row]]:
    """Other texts in these columns."""
    return lambda rows: [{**row, **{name: make(row) for name, make in changed.items()}} for row in rows]


def _shuffled(rows: list[Row]) -> list[Row]:
    answers = [row["answer"] for row in rows]
    random.Random(1).shuffle(answers)
    return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def _half(change: Callable[[Row], Row]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [change(row) if index % 2 else row for index, row in enumerate(rows)]


DATA: Mapping[str, Mistake] = {
    "answers shuffled": Mistake(
        kind="data", codes=("M155",), rows=_shuffled, before=False, repair=Repair(words=("columns were put together",))
    ),
    "answers are sentences": Mistake(
        kind="data",
        codes=("D047",),
        rows=_each(answer=lambda row: f"The answer is {row['answer']}"),
    ),
    "the answer stands in the question": Mistake(
        kind="data",
        codes=("W116",),
        rows=_each(question=lambda row: f"{row['question']} (answer: {row['answer']})"),
        repair=Repair(words=("out of the `prompt`",)),
    ),
    "empty questions": Mistake(
        kind="data",
        codes=("D002", "D005"),
        rows=_half(lambda row: {**row, "question": ""}),
    ),
    "answers missing": Mistake(
        kind="data",
        codes=("D018",),
        rows=_half(lambda row: {**row, "answer": ""}),
    ),
    "rows that contradict": Mistake(
        kind="data",
        codes=("D041",),
        rows=lambda rows: [*rows, *_shuffled(rows), *_shuffled(_shuffled(rows))],
        repair=Repair(words=("wrong rows",)),
    ),
    "one label alone": Mistake(
        kind="data",
        codes=("D046",),
        task="labels",
        rows=lambda rows: [row for row in rows if row["answer"] == "positive"],
        repair=Repair(words=("rows with other answers",)),
    ),
    "plain prompts for a chat model": Mistake(
        kind="data",
        codes=("D045", "M101", "M103"),
        task="labels",
        settings={"system": None, "examples": None},
        reward=REWARD.replace('completion[-1]["content"]', "completion"),
    ),
    "no worked example": Mistake(
        kind="data", codes=("M101", "M103"), task="units", settings={"examples": None}, before=False
    ),
    "the instruction contradicts the reward": Mistake(
        kind="data",
        codes=("M101", "M103", "M141"),
        settings={"examples": None, "system": "Tell a long and friendly story about the number."},
        before=False,
    ),
    "examples in another form": Mistake(
        kind="data",
        codes=("W124",),
        settings={
            "examples": [
                {"question": "17", "answer": "The next number is 18."},
                {"question": "41", "answer": "The next number is 42."},
            ],
            "max_completion_length": 12,
        },
    ),
    "a column that is not there": Mistake(
        kind="data", codes=("D052",), settings={"prompt": "{questions}"}, repair=Repair(words=("`question`",))
    ),
    "a file that is not there": Mistake(
        kind="data", codes=("D025",), settings={"dataset": "trian.csv"}, repair=Repair(words=("train.csv",))
    ),
    "prompts cut": Mistake(
        kind="data",
        codes=("D014",),
        task="labels",
        settings={"max_prompt_length": 40},
    ),
}

# ---- settings ----


def setting(*codes: str, task: str = "numbers", before: bool = True, **settings: Any) -> Mistake:
    """A mistake in settings alone."""
    return Mistake(kind="settings", codes=codes, task=task, settings=settings, before=before)


SETTINGS: Mapping[str, Mistake] = {
    "learning rate 1e-7": setting("C037", learning_rate=1e-7),
    "learning rate 1e-2": setting("C022", learning_rate=1e-2),
    "learning rate 0": setting("C026", learning_rate=0.0),
    "adapter at 1e-6": setting("C021", learning_rate=1e-6, lora={"r": 8}),
    "temperature 0.05": setting("C027", temperature=0.05),
    "temperature 2.5": setting("C027", temperature=2.5),
    "greedy by top_k 1": setting("C037", "C016", "M122", "M123", "M101", top_k=1),
    "groups of two": setting("C023", task="units", num_generations=2, per_device_train_batch_size=8),
    "one prompt a step": setting("C024", task="units", per_device_train_batch_size=8),
    "completions of 2 tokens": setting("D037", task="units", max_completion_length=2),
    "beta 5": setting("C037", "M132", task="units", beta=5.0),
    "gradients clipped to 1e-6": setting("C037", "M137", max_grad_norm=1e-6),
    "epsilon 0": setting("C037", epsilon=0.0, num_iterations=2),
    "a warm-up longer than the run": setting("C037", "C030", warmup_steps=1000),
    "weight decay 1000": setting("C037", "M136", "M132", weight_decay=1000.0),
    "a misspelt key": Mistake(
        kind="settings",
        codes=("C001",),
        settings={"learning_rate": None, "learningrate": 3e-5},
    ),
    "batch no multiple of the group": Mistake(
        kind="settings",
        codes=("C010",),
        settings={"per_device_train_batch_size": 60},
    ),
}

MISTAKES: Mapping[str, Mistake] = {**REWARDS, **DATA, **SETTINGS}
