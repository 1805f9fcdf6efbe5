"""A pilot: a few minutes over a small grid of settings, to choose those that a run is worth starting with.

    result = pilot("run.yaml", {}, PilotSettings(), folder=Path("runs/first-pilot"))

Rung 0 trains nothing: it samples every candidate that differs in sampling and drops those that cannot learn. The rungs
after it are successive halving by the score of `score`: every rung trains the better half of the rung before for more
steps. Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed bandits" (ICML 2013), algorithm 3; Jamieson
and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (arXiv:1502.07943). Each rung
starts from the initial weights, as a candidate's optimizer state is three times as large as the weights that it trains.
The model is loaded once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from podium.algorithm.advantages import combine
from podium.checks.rollouts import diagnose, sample
from podium.checks.verdict import Diagnosis
from podium.errors import ConfigError, PodiumError
from podium.pilot.grid import SAMPLING, WITH, WITHOUT, Candidate, around, product
from podium.pilot.records import Entry, PilotResult, PilotSettings, hopeless
from podium.pilot.score import promise
from podium.pilot.session import Session, changed, clock
from podium.recipe.document import Document
from podium.trainer.assembly import plan_of

__all__ = ["PilotResult", "PilotSettings", "pilot"]

SAMPLED = 64
"""Completions of a candidate before training, in at least `FEWEST_GROUPS` groups."""
FEWEST_GROUPS = 8
STEP_BY_SAMPLING = 2.5
"""Time of an optimizer step over that of sampling its completions, until steps have been timed."""


def pilot(
    document: str | Path | Document,
    overrides: Mapping[str, Any],
    settings: PilotSettings,
    *,
    folder: Path,
    report: Callable[[str], None] = lambda text: None,
    keep: Callable[[PilotResult], None] = lambda result: None,
) -> PilotResult:
    """Choose among candidates.

    Args:
        document: a recipe; `overrides` are values that win over its own.
        folder: of files that trainers write.
        report: takes lines about the progress.
        keep: takes the result so far after every rung, so that an interrupted pilot leaves it.

    Raises:
        ConfigError: several processes, stages, an axis that the data cannot vary, or too few rows.
        PodiumError: what a trainer of the recipe raises.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("pilot.pilot_process_several")
    return _Pilot(document, overrides, settings, folder, report, keep).run()


class _Pilot:
    def __init__(
        self,
        document: str | Path | Document,
        overrides: Mapping[str, Any],
        settings: PilotSettings,
        folder: Path,
        report: Callable[[str], None],
        keep: Callable[[PilotResult], None],
    ) -> None:
        self.settings, self.report, self.keep = settings, report, keep
        self.session = Session(document, overrides, rows=settings.rows, folder=folder)
        self.started = clock(self.session.device)
        self.stopped = ""
        self.step_seconds = 0.0
        self.entries = [
            Entry(candidate=each, changes=changed(each.values, self.session.examples)) for each in self._candidates()
        ]

    @property
    def spent(self) -> float:
        """Seconds since the model was loaded."""
        return clock(self.session.device) - self.started

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.settings.budget - self.spent

    def _candidates(self) -> list[Candidate]:
        session, args = self.session, self.session.arguments(self.session.recipe)
        wanted = self.settings.grid is None or WITH in self.settings.grid.get("examples", ())
        if wanted:
            session.examples = session.find_examples()
        if self.settings.grid is not None:
            if wanted and "examples" in self.settings.grid and not session.examples:
                raise ConfigError("pilot.grid_examples_no")
            return product(self.settings.grid)
        base = {name: getattr(args, name) for name in ("temperature", "learning_rate", "max_completion_length")}
        plan = plan_of(args)
        base["num_generations"] = args.num_generations
        return around(
            base,
            examples=[WITH, WITHOUT] if session.examples else [WITHOUT],
            completions=plan.prompts_per_round * args.num_generations,
        )

    # ---- rungs ----

    def run(self) -> PilotResult:
        """All rungs."""
        self.report(f"{len(self.entries)} candidates; rung 0 samples, and trains nothing.")
        self.sample_all()
        self.keep(self.result())
        alive = [each for each in self.entries if not each.dropped]
        if not alive:  # what is nearly hopeless may still learn, and that is seen only by training
            alive = [each for each in self.entries if each.diagnosis is not None and each.diagnosis.spread_share > 0]
        plan = rungs(len(self.entries), len(alive), self.session.full_steps)
        scores = {each.candidate.number: each.promise for each in alive}
        for number, rung in enumerate(plan, start=1):
            chosen = best(scores, rung.candidates)
            steps = self._affordable(len(chosen), rung.steps)
            if steps < 1:
                break
            self.report(f"rung {number}: {len(chosen)} candidates, {steps} steps each")
            self.train_all(chosen, number, steps)
            done = [each for each in self.entries if each.rung == number]
            scores = {each.candidate.number: each.score for each in done}
            self.keep(self.result())
            if self.stopped:
                break
        return self.result()

    def sample_all(self) -> None:
        """Rung 0: one sample for all candidates that share their sampling settings.

        A candidate that cannot be sampled is dropped: examples make a conversation of a plain prompt, which a reward
        function may not take. Raises its `PodiumError` where no candidate can be sampled.
        """
        seen: dict[Any, tuple[Diagnosis, float] | PodiumError] = {}
        rewards: list[np.ndarray] = []
        for entry in self.entries:
            key = entry.candidate.sampling
            if key not in seen:
                if seen and self.left <= 0:
                    self.stopped = f"the budget of {self.settings.budget:g} s was spent"
                    break
                try:
                    seen[key] = self._sampled(entry, rewards)
                except PodiumError as error:
                    seen[key] = error
                    self.report(f"  {entry.candidate.name}: {error.what}")
            found = seen[key]
            if isinstance(found, PodiumError):
                entry.dropped = "cannot be sampled"
                continue
            entry.diagnosis, share = found
            entry.promise = promise(share, entry.diagnosis.spread_share)
            entry.dropped = hopeless(entry.diagnosis, share)
        errors = [found for found in seen.values() if isinstance(found, PodiumError)]
        if errors and not rewards:
            raise errors[0]
        self.session.set_scale(np.concatenate(rewards))

    def _sampled(self, entry: Entry, rewards: list[np.ndarray]) -> tuple[Diagnosis, float]:
        changes = {key: value for key, value in entry.changes.items() if key in SAMPLING}
        recipe = self.session.variant(changes)
        trainer = self.session.trainer(recipe)
        size = trainer.args.num_generations
        rows, count, begun = self.session.rows(recipe)[0], max(FEWEST_GROUPS, SAMPLED // size), self.spent
        sampled = sample(trainer, rows, count, longer_too=False)
        found = diagnose(sampled, trainer.args, recipe.accuracy)
        rewards.extend(combine(each.rewards_GK, sampled.weights_K) for each in sampled.groups)
        completions = trainer.parts.plan.prompts_per_round * size
        seconds = (self.spent - begun) * completions / found.num_completions * STEP_BY_SAMPLING
        self.step_seconds = max(self.step_seconds, seconds)
        share = float(np.mean(found.pass_rates)) if found.pass_rates else 0.0
        self.report(
            f"  {entry.candidate.name}: {found.spread_share:.0%} of the groups have spread, {share:.0%} right, "
            f"{found.entropy:.2f} nats a token, {found.truncated_share:.0%} cut off"
        )
        return found, share

    def _affordable(self, count: int, steps: int) -> int:
        """Steps that the rest of the budget pays for; 0: fewer than tell candidates apart."""
        fits = int(self.left / max(self.step_seconds * count * self.settings.seeds, 1e-9))
        if fits >= steps:
            return steps
        self.stopped = f"the budget of {self.settings.budget:g} s allows {max(fits, 0)} of {steps} steps"
        return fits if fits >= min(FEWEST_STEPS, steps) else 0

    def train_all(self, chosen: list[int], rung: int, steps: int) -> None:
        """One rung; it ends early where the budget is spent."""
        by_number = {each.candidate.number: each for each in self.entries}
        for number in chosen:
            entry, begun = by_number[number], self.spent
            if self.left <= 0:
                self.stopped = f"the budget of {self.settings.budget:g} s was spent in rung {rung}"
                return
            signal = self.session.train(entry.changes, steps, self.settings.seeds)
            took = self.spent - begun
            entry.seconds += took
            self.step_seconds = took / steps / self.settings.seeds
            entry.measured(signal, rung, self.session.full_steps)
            self.report(f"  {entry.candidate.name}: {signal.before:.2f} -> {signal.after:.2f}, score {entry.score:.2f}")

    def result(self) -> PilotResult:
        """The result so far: the best of the last rung."""
        last = max(each.rung for each in self.entries)
        scores = {
            each.candidate.number: each.score if last else each.promise for each in self.entries if each.rung == last
        }
        [number] = best(scores, 1)
        return PilotResult(
            name=str(self.session.recipe.name),
            entries=tuple(self.entries),
            winner=next(each for each in self.entries if each.candidate.number == number),
            full_steps=self.session.full_steps,
            accuracy=self.session.accuracy,
            seconds=self.spent,
            stopped=self.stopped,
            seed=int(self.session.recipe.config.get("seed", 42)),
            seeds=self.settings.seeds,
            num_rows=self.session.num_rows,
        )


STEP_SHARE = 0.08
"""Optimizer steps of a pilot, as a share of those of the whole grid, so that it takes at most 0.2 of the time in which
that is trained: first steps take about twice as long as later ones, and sampling, evaluations and loading the rest."""
LAST = 3
"""Most candidates of the last rung; every rung starts from the initial weights, so one more would cost more than it
tells."""
FEWEST_STEPS = 3
"""Steps of a first rung below which one candidate cannot be told from another."""


@dataclass(frozen=True, slots=True)
class Rung:
    """Training of `candidates` for `steps` optimizer steps each."""

    candidates: int
    steps: int


def rungs(grid: int, alive: int, full_steps: int) -> tuple[Rung, ...]:
    """The rungs of a pilot: as many candidates as the steps allow, halved until at most `LAST` are left.

    Args:
        grid: number of candidates before any was dropped, whose full training is the measure of the steps.
        alive: candidates that may be trained.
        full_steps: optimizer steps of the recipe.

    >>> rungs(8, 6, 30), rungs(2, 2, 30)
    ((Rung(candidates=3, steps=6),), (Rung(candidates=2, steps=3),))
    >>> rungs(12, 12, 60)
    (Rung(candidates=6, steps=4), Rung(candidates=3, steps=9))
    """
    steps = STEP_SHARE * grid * full_steps
    for first in range(alive, 1, -1):
        made = _halved(first, steps, full_steps)
        if made[0].steps >= FEWEST_STEPS:
            return made
    return (Rung(min(alive, 2), min(FEWEST_STEPS, full_steps)),) if alive else ()


def _halved(first: int, steps: float, full_steps: int) -> tuple[Rung, ...]:
    """Rungs of equal cost, as in Karnin's algorithm."""
    sizes = [first]
    while sizes[-1] > LAST:
        sizes.append(math.ceil(sizes[-1] / 2))
    return tuple(Rung(size, min(int(steps / len(sizes) / size), full_steps)) for size in sizes)


def best(scores: Mapping[int, float], count: int) -> list[int]:
    """The `count` candidates with the highest scores, best first; of equal scores the smaller number. NaN is lowest.

    >>> best({1: 0.5, 2: 0.9, 3: 0.9, 4: float("nan")}, 3)
    [2, 3, 1]
    """
    order: Sequence[int] = sorted(scores, key=lambda n: (-scores[n] if scores[n] == scores[n] else math.inf, n))
    return list(order[:count])
