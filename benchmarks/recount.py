"""The accuracy of twelve small runs, counted again from their saved completions by code that imports nothing of Podium.

python -m benchmarks.recount            makes the runs in a temporary folder and counts: `make recount`
python -m benchmarks.recount FOLDER     counts the runs in FOLDER/runs, made by `benchmarks.recount_runs`

What is right is written here a second time, in a line or two for each task, from the text of a completion and the
answer of its row. From that follow accuracy, its interval, and how many prompts got better and worse; each is compared
with what `podium train` saved (`before.json`, `after.json`, `comparison.json`) and printed. Exits with 1 where one
differs.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pandas as pd

PRINTED = re.compile(r"accuracy \(pass@1\)\s+(\S+) \[(\S+), (\S+)\]\s+(\S+) \[(\S+), (\S+)\]")
COUNTS = re.compile(r"Held out: (\d+) prompts, (\d+) completions")
NEAR = 1e-9
"""Difference that two orders of the same additions may make."""


def last_number(text: str, answer: str) -> bool:
    """Whether the last number of the text is the answer."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return bool(found) and Fraction(found[-1]) == Fraction(answer)


def same_object(text: str, answer: str) -> bool:
    """Whether a text is JSON and an object with the answer's fields and no others."""
    try:
        return bool(json.loads(text) == json.loads(answer))
    except ValueError:
        return False


RIGHT: Mapping[str, Callable[[str, str], bool]] = {
    "additions": last_number,
    "labels": lambda text, answer: text.strip().lower() == answer,
    "capitals": lambda text, answer: text.strip() == answer,
    "dates": lambda text, answer: text.strip() == answer,
    "lists": lambda text, answer: text.strip() == answer,
    "json": same_object,
    "choices": lambda text, answer: text.strip() in (answer, f"({answer})", f"{answer}.", f"{answer})"),
    "tags": lambda text, answer: re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)[-1:] == [answer],
    "game": lambda text, answer: text.strip() == answer,
    "adapter": lambda text, answer: text.strip() == answer,
    "continuations": lambda text, answer: text.strip() == answer,
    "own": lambda text, answer: text[-1:] in tuple("0123456789") and (int(text[-1]) - int(answer)) % 2 == 0,
}
"""By run, whether a completion's text is right for the answer of its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One number that the product gives, and the same number counted here."""

    run: str
    what: str
    theirs: float
    ours: float
    within: float = NEAR

    @property
    def equal(self) -> bool:
        """Whether both are the same number."""
        return abs(self.theirs - self.ours) <= self.within


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the completions of one file say."""

    num_completions: int
    shares: Mapping[str, Fraction]
    """Share of right completions of each prompt, by the prompt's key."""

    @property
    def accuracy(self) -> float:
        """Mean over the prompts."""
        return float(sum(self.shares.values()) / len(self.shares))

    def interval(self) -> tuple[float, float]:
        """Wilson's interval for the number of independent completions that these are worth (benchmarks/RESULTS.md)."""
        count, share = len(self.shares), self.accuracy
        deviations = sum((float(each) - share) ** 2 for each in self.shares.values())
        error = deviations / (count - 1) / count
        worth = share * (1 - share) / error if error else count
        n, z = min(max(worth, count), self.num_completions), NormalDist().inv_cdf(0.975)
        centre, root = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
        return max(0.0, (centre - root) / (1 + z**2 / n)), min(1.0, (centre + root) / (1 + z**2 / n))


def evaluation(file: Path, right: Callable[[str, str], bool]) -> Evaluation:
    """Count the right completions of each prompt in a saved evaluation."""
    rows = pd.read_parquet(file, columns=["place", "completion", "column/answer"])
    judged = [right(text, answer) for text, answer in zip(rows["completion"], rows["column/answer"], strict=True)]
    grouped = rows.assign(right=judged).groupby("place")["right"]
    shares = {str(place): Fraction(int(each.sum()), len(each)) for place, each in grouped}
    return Evaluation(num_completions=len(rows), shares=shares)


def counts(run: Path) -> Iterator[Count]:
    """Every number of a run that is counted again."""
    folder, right = run / "evaluation", RIGHT[run.name]
    sides = {when: evaluation(folder / f"{when}.parquet", right) for when in ("before", "after")}
    printed = (run / "printed.txt").read_text(encoding="utf-8")
    table, sizes = PRINTED.search(printed), COUNTS.search(printed)
    if table is None or sizes is None:
        raise SystemExit(f"{run}: printed.txt has no table of accuracy before and after.")
    for place, (when, ours) in enumerate(sides.items()):
        saved = json.loads((folder / f"{when}.json").read_text(encoding="utf-8"))
        ends = ours.interval()
        pairs = {
            "prompts": (saved["num_prompts"], len(ours.shares)),
            "completions": (saved["num_completions"], ours.num_completions),
            "accuracy": (saved["accuracy"]["value"], ours.accuracy),
            "low end": (saved["accuracy"]["low"], ends[0]),
            "high end": (saved["accuracy"]["high"], ends[1]),
        }
        for what, (theirs, counted) in pairs.items():
            yield Count(run=run.name, what=f"{what} {when}", theirs=theirs, ours=counted)
        for shown, counted, what in zip(
            table.groups()[3 * place :], (ours.accuracy, *ends), ("accuracy", "low end", "high end"), strict=False
        ):
            yield Count(
                run=run.name, what=f"{what} {when}, printed", theirs=float(shown), ours=counted, within=0.0005 + NEAR
            )
        for shown, counted, what in zip(
            sizes.groups(), (len(ours.shares), ours.num_completions), ("prompts", "completions"), strict=True
        ):
            yield Count(run=run.name, what=f"{what} {when}, printed", theirs=float(shown), ours=counted)
    yield from compared(run, *sides.values())


def compared(run: Path, before: Evaluation, after: Evaluation) -> Iterator[Count]:
    """The numbers of the comparison of both, and McNemar's exact test where each prompt has one completion."""
    saved: Mapping[str, Any] = json.loads((run / "evaluation" / "comparison.json").read_text(encoding="utf-8"))["main"]
    moves = [after.shares[key] - share for key, share in before.shares.items()]
    better, worse = sum(move > 0 for move in moves), sum(move < 0 for move in moves)
    yield Count(run=run.name, what="prompts that got better", theirs=saved["num_better"], ours=better)
    yield Count(run=run.name, what="prompts that got worse", theirs=saved["num_worse"], ours=worse)
    change = float(sum(moves) / len(moves))
    yield Count(run=run.name, what="difference", theirs=saved["change"]["value"], ours=change)
    if before.num_completions == len(before.shares):
        n, fewer = better + worse, min(better, worse)
        p_value = min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)
        yield Count(run=run.name, what="p-value", theirs=saved["p_value"], ours=p_value)


def main(folder: Path) -> int:
    """Count every run, print a table and what differs, and return the exit code."""
    found = [each for name in RIGHT if (folder / "runs" / name).is_dir() for each in counts(folder / "runs" / name)]
    if not found:
        raise SystemExit(f"There are no runs in {folder / 'runs'}.")
    print(f"{'run':15}{'accuracy before':>24}{'accuracy after':>24}{'numbers':>10}{'equal':>8}")
    print(f"{'':15}{'product':>12}{'recounted':>12}{'product':>12}{'recounted':>12}")
    for name in dict.fromkeys(each.run for each in found):
        own = [each for each in found if each.run == name]
        shown = [each for when in ("before", "after") for each in own if each.what == f"accuracy {when}"]
        numbers = "".join(f"{each.theirs:12.6f}{each.ours:12.6f}" for each in shown)
        print(f"{name:15}{numbers}{len(own):10}{sum(each.equal for each in own):8}")
    different = [each for each in found if not each.equal]
    for each in different:
        print(f"{each.run}: {each.what}: the product has {each.theirs}, counted again it is {each.ours}")
    runs = len({each.run for each in found})
    between = sum(0 < each.ours < 1 for each in found if each.what == "accuracy after")
    print(f"Accuracy after training is above 0 and below 1 in {between} runs; elsewhere little is shown.")
    print(f"{len(found) - len(different)} of {len(found)} numbers of {runs} runs are equal.")
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, "-m", "benchmarks.recount_runs", made], check=True)
        raise SystemExit(main(Path(made)))
