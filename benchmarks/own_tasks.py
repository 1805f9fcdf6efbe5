"""Twelve tasks that no recipe of Podium contains: a table each, begun with `podium init` and one sentence.

python -m benchmarks.own_tasks                        all tasks, seeds 1 to 3: `make bench-own-tasks`
python -m benchmarks.own_tasks labels dates --seeds 1
python -m benchmarks.own_tasks --tables DIR           write the tables alone
python -m benchmarks.own_tasks yes-no --balance_column answer       flags that are not its own go to `podium train`
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.bench import save
from podium.evaluation.statistics import paired_difference
from podium.runs.run import Run

Pair = tuple[str, str]
"""A question and its answer."""


def words(text: str) -> list[str]:
    """Split at spaces."""
    return text.split()


ANIMALS = words(
    "cat dog horse mouse rabbit lion tiger bear wolf fox sheep goat cow duck goose hen owl frog snake whale"
)
FRUITS = words("apple pear plum fig cherry grape lemon lime mango melon orange peach banana kiwi date")
NAMES = words("Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Liam Mia Noah Olga Paul Rosa Sam Tina Will")
CITIES = words("Rome Paris Oslo Berlin Madrid Lisbon Vienna Prague Athens Dublin Cairo Tokyo Delhi Lima")
MONTHS = words("January February March April May June July August September October November December")
SMALL = words("zero one two three four five six seven eight nine ten eleven twelve")
GOOD = words("wonderful great lovely excellent delicious friendly perfect brilliant charming superb")
BAD = words("terrible awful boring dirty rude broken horrible disgusting useless disappointing")
THINGS = words("film hotel soup book phone room service concert car teacher coffee garden")


def labels(draw: random.Random) -> Iterator[Pair]:
    """One of few labels."""
    while True:
        thing, (label, words) = draw.choice(THINGS), draw.choice([("positive", GOOD), ("negative", BAD)])
        frame = draw.choice(["The {} was {}.", "What a {1} {0}!", "I found the {} {}.", "Our {} is really {}."])
        yield "Is this review positive or negative? " + frame.format(thing, draw.choice(words)), label


def yes_no(draw: random.Random) -> Iterator[Pair]:
    """Yes or no."""
    while True:
        word, letter = draw.choice(ANIMALS + FRUITS), draw.choice("aeiorsnl")
        yield f"Does the word {word} contain the letter {letter}?", "yes" if letter in word else "no"


def extraction(draw: random.Random) -> Iterator[Pair]:
    """A sentence as JSON."""
    while True:
        name, city, age = draw.choice(NAMES), draw.choice(CITIES), draw.randint(18, 80)
        frame = draw.choice(
            ["{} is {} years old and lives in {}.", "{}, {}, comes from {}.", "My friend {} is {}, from {}."]
        )
        yield frame.format(name, age, city), json.dumps({"name": name, "age": age, "city": city})


def ordering(draw: random.Random) -> Iterator[Pair]:
    """Three words in the order of the alphabet."""
    while True:
        words = draw.sample(ANIMALS + FRUITS, 3)
        yield f"Put these words in alphabetical order: {', '.join(words)}", ", ".join(sorted(words))


def spelling(draw: random.Random) -> Iterator[Pair]:
    """A word, letter by letter."""
    words = ANIMALS + FRUITS + [name.lower() for name in NAMES + CITIES] + THINGS + GOOD + BAD
    while True:
        word = draw.choice([word for word in words if len(word) <= 6])
        extra = draw.choice(["Spell the word {} with hyphens.", "How do you spell {}? Use hyphens."])
        yield extra.format(word), "-".join(word)


def counting(draw: random.Random) -> Iterator[Pair]:
    """How often a word occurs."""
    while True:
        wanted, other = draw.sample(FRUITS, 2)
        times, more = draw.randint(1, 4), draw.randint(0, 3)
        words = [wanted] * times + [other] * more
        draw.shuffle(words)
        yield f"How many times does {wanted} occur? {' '.join(words)}", str(times)


def units(draw: random.Random) -> Iterator[Pair]:
    """A length in another unit."""
    factors = {
        ("kilometres", "metres"): 1000,
        ("metres", "centimetres"): 100,
        ("hours", "minutes"): 60,
        ("dozens", "pieces"): 12,
    }
    while True:
        (big, small), factor = draw.choice(list(factors.items()))
        number = draw.randint(2, 9) if factor in (60, 12) else draw.randint(2, 90)
        yield f"How many {small} are {number} {big}?", f"{number * factor} {small}"


def dates(draw: random.Random) -> Iterator[Pair]:
    """A date as year-month-day."""
    while True:
        year, month, day = draw.randint(1950, 2030), draw.randint(1, 12), draw.randint(1, 28)
        frame = draw.choice(["{1} {0}, {2}", "{0} {1} {2}", "the {0}th of {1} {2}" if 3 < day < 21 else "{0} {1} {2}"])
        yield (
            f"Write this date in ISO format: {frame.format(day, MONTHS[month - 1], year)}",
            f"{year}-{month:02}-{day:02}",
        )


def choices(draw: random.Random) -> Iterator[Pair]:
    """The letter of a choice."""
    kinds = {"an animal": ANIMALS, "a fruit": FRUITS, "a city": CITIES, "a month": MONTHS}
    while True:
        kind = draw.choice(list(kinds))
        others = [draw.choice(kinds[each]) for each in draw.sample([k for k in kinds if k != kind], 2)]
        options = [draw.choice(kinds[kind]), *others]
        draw.shuffle(options)
        letter = "ABC"[next(n for n, word in enumerate(options) if word in kinds[kind])]
        yield f"Which of these is {kind}? A) {options[0]} B) {options[1]} C) {options[2]}", letter


def exact_length(draw: random.Random) -> Iterator[Pair]:
    """As many words as asked for."""
    while True:
        number, word = draw.randint(2, 6), draw.choice(ANIMALS + FRUITS)
        yield f"Write the word {word} {SMALL[number]} times.", " ".join([word] * number)


def rewriting(draw: random.Random) -> Iterator[Pair]:
    """A sentence about another person."""
    verbs = {
        "like": "likes",
        "see": "sees",
        "want": "wants",
        "buy": "buys",
        "need": "needs",
        "love": "loves",
        "eat": "eats",
    }
    while True:
        name, verb, thing = draw.choice(NAMES), draw.choice(list(verbs)), draw.choice(ANIMALS + FRUITS)
        yield f"Rewrite with {name} instead of I: I {verb} the {thing}.", f"{name} {verbs[verb]} the {thing}."


def worded_sums(draw: random.Random) -> Iterator[Pair]:
    """Arithmetic in words."""
    while True:
        one, other = draw.randint(0, 12), draw.randint(0, 12)
        if draw.random() < 0.5:
            yield f"What is {SMALL[one]} plus {SMALL[other]}?", str(one + other)
        else:
            yield f"What is {SMALL[max(one, other)]} minus {SMALL[min(one, other)]}?", str(abs(one - other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows and the one sentence that a user gives."""

    rows: Callable[[random.Random], Iterator[Pair]]
    sentence: str
    count: int = 300
    columns: tuple[str, str] = ("question", "answer")


TASKS = {
    "labels": Task(rows=labels, sentence="Say whether a review is positive or negative.", columns=("review", "label")),
    "yes-no": Task(rows=yes_no, sentence="Answer yes or no.", count=240),
    "extraction": Task(rows=extraction, sentence="Extract name, age and city as JSON.", columns=("text", "record")),
    "ordering": Task(rows=ordering, sentence="Sort the words alphabetically, with commas between them."),
    "spelling": Task(rows=spelling, sentence="Spell the word with hyphens between the letters.", count=150),
    "counting": Task(rows=counting, sentence="Count how often the word occurs and answer with a number."),
    "units": Task(rows=units, sentence="Convert between units; answer with number and unit.", count=170),
    "dates": Task(rows=dates, sentence="Write the date as year-month-day.", columns=("date", "iso")),
    "choices": Task(rows=choices, sentence="Answer with the letter of the right choice."),
    "exact-length": Task(rows=exact_length, sentence="Write the word exactly as often as asked.", count=150),
    "rewriting": Task(rows=rewriting, sentence="Rewrite the sentence with the name as its subject."),
    "worded-sums": Task(rows=worded_sums, sentence="Solve the sum and answer with a number.", count=200),
}


def table(name: str, folder: Path) -> Path:
    """Write the CSV of a task; equal questions occur once."""
    task, draw = TASKS[name], random.Random(name)
    rows: dict[str, str] = {}
    for question, answer in task.rows(draw):
        rows.setdefault(question, answer)
        if len(rows) == task.count:
            break
    path = folder / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(task.columns)
        writer.writerows(rows.items())
    return path


# ---- runs ----


def train(name: str, seed: int, folder: Path, *, python: bool = False, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Begin and train a task on one thread; held-out accuracy by our own comparison, and seconds of processor time."""
    path = table(name, folder)
    run, kept = folder / f"{name}-{seed}", folder / f"{name}-{seed}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    if python:
        script = Path(__file__).parents[1] / "examples" / "own_table.py"
        spent = called([sys.executable, str(script), str(path), TASKS[name].sentence, str(run), str(seed)], folder)
    else:
        for half_done in (folder / f"begun-{name}-{seed}", run):
            shutil.rmtree(half_done, ignore_errors=True)
        begin = [sys.executable, "-m", "podium", "init", str(path), "--task", TASKS[name].sentence]
        called([*begin, "--to", str(folder / f"begun-{name}-{seed}"), "-y", "--no-sample"], folder)
        recipe = folder / f"begun-{name}-{seed}" / "run.yaml"
        command = [
            sys.executable,
            "-m",
            "podium",
            "train",
            str(recipe),
            "--seed",
            str(seed),
            "--output_dir",
            str(run),
            *flags,
        ]
        spent = called(command, folder)
    before, after = (scores(run, moment, name) for moment in ("before", "after"))
    found = {
        "task": name,
        "seed": seed,
        "before": before,
        "after": after,
        "commonest": commonest(run, path, name),
        "seconds": round(spent, 1),
        "steps": len(Run.load(run).history),
        "verdict": Run.load(run).evaluations["comparison"]["verdict"],
        "findings": sorted(set(Run.load(run).findings["code"])),
    }
    kept.write_text(json.dumps(found))
    return found


def called(command: Sequence[str], folder: Path) -> float:
    """Run a command on one thread; seconds of processor time. Exits with its words where it fails."""
    with tempfile.TemporaryFile("w+") as words:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=words, stderr=words, env=environment, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status):
            words.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{words.read()[-3000:]}")
    return usage.ru_utime + usage.ru_stime


def is_right(completion: str, answer: str) -> bool:
    """Whether a completion is the answer, white space around it aside; objects by their contents."""
    one, other = completion.strip(), answer.strip()
    if other.startswith("{"):
        try:
            return bool(json.loads(one) == json.loads(other))
        except ValueError:
            return False
    return one == other


def scores(run: Path, moment: str, name: str) -> dict[str, float]:
    """Share of right completions by held-out question."""
    frame = pd.read_parquet(run / "evaluation" / f"{moment}.parquet")
    gold = dict(answers(run.parent / f"{name}.csv"))
    asked = [
        next(question for question in (row["question"], row.get("column/question")) if question in gold)
        for row in frame.to_dict("records")
    ]
    right = [is_right(text, gold[question]) for text, question in zip(frame["completion"], asked, strict=True)]
    return pd.Series(right, index=asked, dtype=float).groupby(level=0).mean().to_dict()


def answers(path: Path) -> list[Pair]:
    """Questions and answers of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return [(row[0], row[1]) for row in list(csv.reader(file))[1:]]


def commonest(run: Path, path: Path, name: str) -> dict[str, float]:
    """The same for the answer that occurs most often among the rows that are not held out."""
    held_out, gold = set(scores(run, "before", name)), dict(answers(path))
    [(best, _)] = Counter(answer for question, answer in gold.items() if question not in held_out).most_common(1)
    return {question: float(is_right(best, gold[question])) for question in held_out}


# ---- the table ----


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A task over its seeds: means, and the sign-flip tests of the means of each question over the seeds."""
    columns = {key: pd.DataFrame([run[key] for run in runs]).mean() for key in ("before", "after", "commonest")}
    questions = sorted(set.intersection(*(set(column.index) for column in columns.values())))
    by_question = {key: column[questions].to_numpy() for key, column in columns.items()}
    above = {key: paired_difference(by_question[key], by_question["after"]) for key in ("before", "commonest")}
    return {
        "task": runs[0]["task"],
        "questions": len(questions),
        **{key: round(float(column.mean()), 3) for key, column in by_question.items()},
        "seeds": [round(float(np.mean(list(run["after"].values()))), 2) for run in runs],
        "better": all(each.shown and each.change.value > 0 for each in above.values()),
        "seconds": max(run["seconds"] for run in runs),
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of benchmarks/RESULTS.md."""
    lines = [
        "| task | commonest answer | before | after | seeds | better than both | processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seeds = ", ".join(f"{value:.2f}" for value in row["seeds"])
        lines.append(
            f"| {row['task']} | {row['commonest']:.2f} | {row['before']:.2f} | {row['after']:.2f} | {seeds} | "
            f"{'yes' if row['better'] else 'no'} | {row['seconds']:.0f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    """Every task with every seed, the table, a JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    parser.add_argument("--python", action="store_true", help="by examples/own_table.py instead of `podium init`")
    parser.add_argument("--tables", type=Path, help="write the tables into this folder, and no more")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and not repeated; else a temporary one")
    options, flags = parser.parse_known_args()
    names = options.tasks or list(TASKS)
    if options.tables:
        options.tables.mkdir(parents=True, exist_ok=True)
        for name in names:
            print(table(name, options.tables))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)

        def one(pair: tuple[str, int]) -> dict[str, Any]:
            found = train(*pair, folder.resolve(), python=options.python, flags=flags)
            means = [np.mean(list(found[key].values())) for key in ("commonest", "before", "after")]
            print(*pair, *(f"{mean:.2f}" for mean in means), f"{found['seconds']} s", found["verdict"], flush=True)
            return found

        with ThreadPoolExecutor(options.jobs) as pool:
            runs = list(pool.map(one, itertools.product(names, options.seeds)))
    rows = [summary([run for run in runs if run["task"] == name]) for name in names]
    print(markdown(rows))
    print(
        f"{sum(row['better'] for row in rows)} of {len(rows)} tasks: better than before and than the commonest answer"
    )
    if not flags:
        print(save("own-tasks-python" if options.python else "own-tasks", {"tasks": rows, "runs": runs}))


if __name__ == "__main__":
    main()
