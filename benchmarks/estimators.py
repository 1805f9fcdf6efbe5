"""What the other estimators cost: a training step with each, beside one with GRPO: `make bench-estimators`.

    python -m benchmarks.estimators --rounds 1    # to see that it works: nothing is kept

Completions of four of the quickstart's prompts, eight each, are sampled once; their rewards are forced, so that every
group has signal. Then each variant turns the rewards into advantages, adds its gradient and steps. Every step stands
beside one with GRPO, first or second in turn, and a variant's ratio is that of the shortest of its steps and the
shortest of those beside them: what else a machine does can only make a step longer. Sampling is the same for all and is
left out, so the ratios are those of a training step, and further from 1 than those of a whole one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import learning
from benchmarks.bench import hardware, save

BEGIN, END = "<!-- estimators -->\n", "<!-- /estimators -->"
PLAIN = "grpo"
PROMPTS = 4
WARM_UP = 4
"""Steps that are not counted."""
Pair = tuple[float, float]
"""Seconds of processor time of a variant's step and of the one with GRPO beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs from GRPO with the mean over all tokens."""

    estimator: str = "grpo"
    loss: Mapping[str, Any] = field(default_factory=dict)
    covariance: str | None = None


def variants() -> dict[str, Variant]:
    """Every estimator of advantages, loss and control; a correction needs a sampler that is not the policy."""
    from podium.algorithm.advantages import ESTIMATORS
    from podium.algorithm.covariance import CONTROLS
    from podium.algorithm.losses import OBJECTIVES

    return {
        **{name: Variant(estimator=name) for name in ESTIMATORS},
        **{f"loss {name}": Variant(loss={"loss_type": name}) for name in OBJECTIVES if name != "dapo"},
        "dual clip": Variant(loss={"delta": 3.0}),
        **{f"{name} covariance": Variant(covariance=name) for name in CONTROLS},
    }


def forced(prompts: int, completions: int) -> np.ndarray:
    """Rewards [P, G, 1]: a different share of each group is right."""
    place_G = np.arange(completions)
    return np.stack([place_G < 1 + p % (completions - 1) for p in range(prompts)]).astype(np.float64)[..., None]


def step(loop: Any, groups: Sequence[Any], rewards_PGK: np.ndarray, variant: Variant) -> float:
    """Seconds of processor time of one training step: other processes count for less in it than on a clock."""
    from podium.algorithm.advantages import AdvantageSettings, advantages
    from podium.algorithm.covariance import CONTROLS, covariances
    from podium.algorithm.losses import LossSettings

    begin = time.process_time()
    lengths_PG = np.array([[len(each.token_ids) for each in group.completions] for group in groups])
    settings = AdvantageSettings(weights_K=np.ones(1), estimator=variant.estimator)
    found_PG = advantages(rewards_PGK, settings, lengths_PG).advantages_PG
    if variant.covariance is not None:
        logps_N = np.concatenate([each.logps for group in groups for each in group.completions])
        cov_N = covariances(np.repeat(found_PG.ravel(), lengths_PG.ravel()), logps_N)
        CONTROLS[variant.covariance](cov_N, 2e-4, np.random.default_rng(0))
    data = loop.data(groups, found_PG)
    loop.forward_backward(data, LossSettings(**variant.loss), divide_by=float(lengths_PG.sum()))
    loop.optim_step(0.0)  # the weights stay: every step does the same work
    return time.process_time() - begin


def measure(rounds: int) -> dict[str, list[Pair]]:
    """Pairs of each variant, one a round; those of GRPO with itself show what chance does."""
    import podium
    from podium.recipe import load

    recipe = load("quickstart", {})
    known = podium.GRPOConfig.__dataclass_fields__
    with tempfile.TemporaryDirectory() as out:
        given = {**recipe.config, "output_dir": out, "reward_weights": None, "accuracy": None}  # a loop has no rewards
        settings = {name: x for name, x in given.items() if name in known}
        loop = podium.Loop(recipe.model, podium.GRPOConfig(**settings))
        groups = loop.sample(list(recipe.load_rows()[0])[:PROMPTS])
        rewards_PGK = forced(len(groups), settings["num_generations"])
        made = variants()
        seconds = {name: list[Pair]() for name in made}
        for _ in range(WARM_UP):
            step(loop, groups, rewards_PGK, made[PLAIN])
        for number in range(rounds):
            for name, variant in made.items():
                own, plain = (variant, made[PLAIN]) if number % 2 else (made[PLAIN], variant)
                spent = [step(loop, groups, rewards_PGK, each) for each in (own, plain)]
                seconds[name].append((spent[0], spent[1]) if number % 2 else (spent[1], spent[0]))
    return seconds


def ratios(seconds: Mapping[str, Sequence[Pair]]) -> dict[str, float]:
    """Each variant's shortest step over the shortest with GRPO beside it.

    >>> ratios({"rloo": [(1.5, 1.0), (2.0, 2.0), (1.1, 1.0)]})
    {'rloo': 1.1}
    """
    return {name: min(own for own, _ in pairs) / min(plain for _, plain in pairs) for name, pairs in seconds.items()}


def table(seconds: Mapping[str, Sequence[Pair]]) -> str:
    """A line for each variant."""
    lines = ["| variant | seconds | to GRPO's |", "|---|---|---|"]
    for name, ratio in ratios(seconds).items():
        lines.append(f"| `{name}` | {min(own for own, _ in seconds[name]):.3f} | {ratio:.3f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="24 unless given; fewer are not kept")
    options = parser.parse_args()
    seconds = measure(options.rounds)
    shown = table(seconds)
    print(shown)
    slowest = max(ratios(seconds).items(), key=lambda pair: pair[1])
    print(json.dumps({"slowest": slowest, "hardware": hardware()}))
    if options.rounds >= parser.get_default("rounds"):
        save("estimators", {"seconds": seconds})
        learning.write_between(BEGIN, shown, END)


if __name__ == "__main__":
    main()
