"""What the other estimators cost: the part of a training step that is theirs, beside GRPO's: `make bench-estimators`.

    python -m benchmarks.estimators --rounds 1    # to see that it works: nothing is kept

Completions of four of the quickstart's prompts, eight each, are sampled once; their rewards are forced, so that every
group has signal. Then each variant in turn makes a training step: it turns the rewards into advantages, adds its
gradient and steps. What differs between variants are advantages, controls and the loss with its gradient by
log-probability; that part is timed for itself, on the same inputs, once more beside the step. Whole steps of one
variant differ by more among each other than variants do, so a variant's ratio is a whole step of GRPO with its part in
place of GRPO's. Sampling is left out: the ratios are those of a training step, and nearer to 1 for a whole one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks import learning
from benchmarks.bench import hardware, save

BEGIN, END = "<!-- estimators -->\n", "<!-- /estimators -->"
PLAIN = "grpo"
PROMPTS = 4
WARM_UP = 4
"""Steps that are not counted."""


class Spent(NamedTuple):
    """Seconds of a training step without the second computation of its own part, and of that part."""

    step: float
    own: float


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


def step(loop: Any, groups: Sequence[Any], rewards_PGK: np.ndarray, variant: Variant) -> Spent:
    """One training step."""
    from podium.algorithm.advantages import AdvantageSettings, advantages
    from podium.algorithm.covariance import CONTROLS, covariances
    from podium.algorithm.losses import LossSettings, policy_loss

    spent = [0.0]

    def timed(inputs: Any, settings: LossSettings, entropy_coef: float) -> Any:
        begin = time.perf_counter()
        alone = replace(inputs, logps_N=inputs.logps_N.detach().requires_grad_(), entropy_N=inputs.entropy_N.detach())
        policy_loss(alone, settings, entropy_coef).loss.backward()
        spent.append(time.perf_counter() - begin)
        return policy_loss(inputs, settings, entropy_coef)

    begin = time.perf_counter()
    lengths_PG = np.array([[len(each.token_ids) for each in group.completions] for group in groups])
    settings = AdvantageSettings(weights_K=np.ones(1), estimator=variant.estimator)
    found_PG = advantages(rewards_PGK, settings, lengths_PG).advantages_PG
    if variant.covariance is not None:
        logps_N = np.concatenate([each.logps for group in groups for each in group.completions])
        cov_N = covariances(np.repeat(found_PG.ravel(), lengths_PG.ravel()), logps_N)
        CONTROLS[variant.covariance](cov_N, 2e-4, np.random.default_rng(0))
    before = time.perf_counter() - begin
    data = loop.data(groups, found_PG)
    with mock.patch("podium.trainer.step.policy_loss", timed):
        loop.forward_backward(data, LossSettings(**variant.loss), divide_by=float(lengths_PG.sum()))
    loop.optim_step(0.0)  # the weights stay: every step does the same work
    return Spent(time.perf_counter() - begin - sum(spent), before + sum(spent))


def measure(rounds: int) -> dict[str, list[Spent]]:
    """Steps of each variant, one a round."""
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
        for _ in range(WARM_UP):
            step(loop, groups, rewards_PGK, made[PLAIN])
        seconds = {name: list[Spent]() for name in made}
        for _ in range(rounds):
            for name, variant in made.items():
                seconds[name].append(step(loop, groups, rewards_PGK, variant))
    return seconds


def ratios(seconds: Mapping[str, Sequence[Spent]]) -> dict[str, float]:
    """A step of GRPO with the part of each variant in place of its own, to one with its own; of medians.

    >>> ratios({"grpo": [Spent(2.0, 0.01)], "rloo": [Spent(1.5, 0.03), Spent(2.5, 0.05)]})
    {'grpo': 1.0, 'rloo': 1.015}
    """
    own = {name: statistics.median(each.own for each in spent) for name, spent in seconds.items()}
    whole = statistics.median(each.step for each in seconds[PLAIN])
    return {name: 1 + (each - own[PLAIN]) / whole for name, each in own.items()}


def table(seconds: Mapping[str, Sequence[Spent]]) -> str:
    """A line for each variant."""
    lines = ["| variant | whole step, s | its own part, ms | step to GRPO's |", "|---|---|---|---|"]
    for name, ratio in ratios(seconds).items():
        step, own = (statistics.median(each) for each in zip(*seconds[name], strict=True))
        lines.append(f"| `{name}` | {step:.3f} | {1000 * own:.2f} | {ratio:.4f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="8 unless given; fewer are not kept")
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
