"""Twelve small runs of `podium train`, each of another task, for `benchmarks.recount` to count again.

python -m benchmarks.recount_runs FOLDER

The models have two layers and are first shown answers of which some are wrong, so that a part of what they write is
right: an accuracy of 0 or 1 would be the same for many mistakes in counting. What `podium train` prints is kept in
`printed.txt` of the run's folder.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

ROWS, WARM_UP_STEPS, SHARE_WRONG = 80, 250, 0.35
DEFAULTS = {"max_completion_length": 8, "eval_samples": 1, "learning_rate": 3e-3}
Pair = tuple[str, str]

GAME = '''
from podium import TextEnvironment


class Guess(TextEnvironment):
    """A number from 1 to 4, guessed once."""

    def reset(self, answer, **row):
        self.answer = answer

    def step(self, text):
        return None, float(text.strip() == str(self.answer)), True, {}
'''
PARITY = '''
def parity(completions, answer):
    """1 where the last character is a digit that is even or odd as the answer is."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [float(t[-1:].isdecimal() and int(t[-1]) % 2 == int(a) % 2) for t, a in zip(texts, answer)]


def short(completions):
    """1 for up to three characters."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [float(len(t) <= 3) for t in texts]
'''
FIELDS = "{type: object, properties: {item: {type: string}, count: {type: integer}}, required: [item, count]}"


@dataclass(frozen=True, slots=True)
class Task:
    """Questions with their answers, the rewards of a recipe, and what differs from the other recipes."""

    name: str
    answers: Sequence[str]
    """Answers that occur."""
    ask: Callable[[int, str], str]
    """Question of a row, by its number and its answer."""
    _: KW_ONLY
    accuracy: str = "exact_match"
    rewards: str = ""
    """As in YAML; empty: the one that `accuracy` names."""
    kind: str = "llama"
    forms: Callable[[str], Sequence[str]] = lambda answer: [answer]
    """The forms in which an answer is given."""
    settings: str = ""
    """Further lines of the recipe."""
    files: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False
    """A prompt without a chat template."""

    def rows(self) -> list[Pair]:
        """Questions, all different, and answers in turn."""
        return [(self.ask(i, answer), answer) for i, answer in zip(range(ROWS), itertools.cycle(self.answers))]


def sums(row: int, answer: str) -> str:
    """The addition number `row` of those with this sum."""
    return f"{row}+{int(answer) - row}=" if int(answer) >= row else f"{int(answer) - row}+{row}="


def asks(form: str) -> Callable[[int, str], str]:
    """Questions in a form that holds the number of the row (`i`) and its answer (`a`), or a part of it."""
    return lambda row, answer: form.format(i=row, a=answer)


ANY_CASE = "[{name: exact_match, args: {ignore_case: true}}]"
LISTED = "[{name: exact_match, weight: 2}, answer_f1]"
SHAPED = f"[{{name: json_match, weight: 2}}, {{name: json_schema, args: {{schema: {FIELDS}}}}}]"
TAGGED = "[answer_format, {name: answer_correct, weight: 2}]"
OWN = "[{function: {home}/my_rewards.py:parity}, {function: {home}/my_rewards.py:short, weight: 0.2}]"
COLOURS = ("red, blue", "green", "blue, green")
ORDERS = ('{"item": "pen", "count": 2}', '{"item": "cup", "count": 3}')
NEAR = ("11", "12", "13", "20")
DATED, LISTING, ORDERED = (f"max_completion_length: {tokens}" for tokens in (12, 14, 32))
FOUR_EACH = "max_completion_length: 24\neval_samples: 4"
PLAYED = "environment: {home}/game.py:Guess"
ADAPTED = "lora: {r: 4, target_modules: all-linear}\nlearning_rate: 1.0e-2"

mails, capitals, colours = asks("Mail {i} {a:.2}"), asks("Capital {i} {a:.1}"), asks("Colours {i} {a:.1}")
orders, shelves, tags = (
    asks("Order {i} {a[10]}{a[11]}"),
    asks("Item {i}, shelf {a}: A, B, C or D?"),
    asks("Tag {i} {a}"),
)
guess, near = asks("Game {i}: guess"), asks("Number {i} near {a}")


def spaced(answer: str) -> Sequence[str]:
    """JSON with and without spaces."""
    return answer, answer.replace(" ", "")


def tagged(answer: str) -> Sequence[str]:
    """The answer where `answer_format` looks for it."""
    return [f"<answer>{answer}</answer>"]


def lettered(answer: str) -> Sequence[str]:
    """A letter as people write it."""
    return answer, f"({answer})", f"{answer}."


TASKS = (
    Task("additions", ("3", "5", "12", "-1"), sums, accuracy="numeric_match"),
    Task("labels", ("spam", "ham", "ad"), mails, rewards=ANY_CASE, kind="qwen2", forms=lambda a: (a, a.upper())),
    Task("capitals", ("Rome", "Oslo", "Lima"), capitals, kind="qwen3", forms=lambda a: (a, a, a.lower())),
    Task("dates", ("2024-01-05", "2023-11-30"), asks("Day {i} of {a:.4}"), settings=DATED),
    Task("lists", COLOURS, colours, rewards=LISTED, kind="mistral", settings=LISTING),
    Task("json", ORDERS, orders, accuracy="json_match", rewards=SHAPED, settings=ORDERED, forms=spaced),
    Task("choices", "ABCD", shelves, accuracy="multiple_choice", kind="gemma3", forms=lettered),
    Task("tags", "789", tags, accuracy="answer_correct", rewards=TAGGED, settings=FOUR_EACH, forms=tagged),
    Task("game", "1234", guess, accuracy="Guess", rewards="[]", settings=PLAYED, files={"game.py": GAME}),
    Task("adapter", ("yes", "no"), asks("Is {i} {a:.1}?"), settings=ADAPTED),
    Task("continuations", "bcd", asks("{i}{a}:"), kind="gpt2", plain=True, settings="eval_samples: 2"),
    Task("own", NEAR, near, accuracy="parity", rewards=OWN, files={"my_rewards.py": PARITY}),
)


def main(folder: Path, names: Sequence[str] = ()) -> None:
    """Make the runs of these names, or all."""
    for task in TASKS:
        if not names or task.name in names:
            train(task, folder)


def train(task: Task, folder: Path) -> None:
    """A model that is right at times, two steps of training from a recipe, and a run in `folder/runs/NAME`."""
    from typer.testing import CliRunner

    from podium.cli import app

    home = folder / task.name
    home.mkdir(parents=True)
    rows = task.rows()
    _save_warm_model(task, rows, home / "model")
    key = "prompt" if task.plain else "question"
    (home / "rows.jsonl").write_text("".join(json.dumps({key: q, "answer": a}) + "\n" for q, a in rows))
    for name, text in task.files.items():
        (home / name).write_text(text)
    output = folder / "runs" / task.name
    recipe = [
        f"model: {home}/model",
        f"dataset: {home}/rows.jsonl",
        *(() if task.plain else ('prompt: "{question}"\nsystem: Be brief.',)),
        "held_out: 0.4",
        f"rewards: {task.rewards or f'[{task.accuracy}]'}",
        f"accuracy: {task.accuracy}",
        task.settings,
        *(f"{key}: {value}" for key, value in DEFAULTS.items() if key not in task.settings),
        "per_device_train_batch_size: 16\nnum_generations: 4\nmax_steps: 2\nsave_strategy: 'no'\nreport_to: none",
        f"seed: 1\noutput_dir: {output}",
    ]
    (home / "run.yaml").write_text("\n".join(recipe).replace("{home}", str(home)) + "\n")
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "160"
    try:
        result = CliRunner().invoke(app, ["train", str(home / "run.yaml")])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    if not (output / "evaluation" / "comparison.json").is_file():
        raise RuntimeError(f"{task.name}: {result.output}\n{result.exception!r}")
    (output / "printed.txt").write_text(result.stdout, encoding="utf-8")


def _save_warm_model(task: Task, rows: Sequence[Pair], folder: Path) -> None:
    """Random weights after some steps on answers, of which a share belongs to other rows."""
    import torch

    from podium.testing import tiny_model, tiny_tokenizer

    draw = random.Random(task.name)
    tokenizer, model = tiny_tokenizer(chat_template=None) if task.plain else tiny_tokenizer(), tiny_model(task.kind)
    shown: list[tuple[list[int], int]] = []
    for question, answer in rows:
        told = draw.choice(task.answers) if draw.random() < SHARE_WRONG else answer
        asked: Any = question
        if not task.plain:
            message = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
            asked = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        start = tokenizer(asked)["input_ids"]
        forms = task.forms(told)
        end = tokenizer(draw.choice(forms) if len(forms) > 1 else forms[0])["input_ids"]
        shown.append(([*start, *end, tokenizer.eos_token_id], len(start)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, WARM_UP_STEPS)
    with torch.random.fork_rng(devices=[]):
        for _ in range(WARM_UP_STEPS):
            batch = draw.sample(shown, 16)
            longest = max(len(ids) for ids, _ in batch)
            ids = torch.tensor([x + [tokenizer.pad_token_id] * (longest - len(x)) for x, _ in batch])
            labels = torch.tensor([[-100] * n + x[n:] + [-100] * (longest - len(x)) for x, n in batch])
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
