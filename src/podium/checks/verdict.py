"""Findings R001 to R010 about sampled groups: one function each, of a `Diagnosis` alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium.errors import Finding, Severity
from podium.errors.texts import as_lines, listed
from podium.trainer.config import GRPOConfig

FLAT_SHARE = 0.5
"""Share of groups without spread, from which on there is a finding."""
HOPELESS_SHARE = 0.8
"""Share of groups without spread, from which on a run should not start: too few are left to learn from."""
FEW_GROUPS = 8
TRUNCATED_SHARE = 0.3
LEARNS_TO_END = 0.3
"""Standard deviations of reward that an end must be worth, so that completions that are cut off learn to end. First
steps of ten recorded runs that learnt: 0.8 to 1.6; of a limit too short for the answer -0.5, of a reward for length
-1.9."""
DUPLICATE_SHARE = 0.3
CORRELATION = 0.7
SAME = 0.95
SLOW_SHARE = 0.5
LONGER = 4
"""Factor of the limit at which a few completions are sampled again, to see how long they become."""
CERTAIN = 0.5
"""Nats a token, below which a higher temperature makes completions differ; above it, it makes them worse."""
EXAMPLES = 2
"""Rows of the dataset that the cure of a poor start puts into the prompt."""
UNSURE = 3.0
"""Nats a token, above which a temperature over 1 is one of the causes of a poor start."""
NOISE = 5.0
"""Nats a token, as of 150 equal tokens, above which completions are hardly text. The built-in model has 2 at
temperature 1; a fresh recipe without an example 4.8 at 1.15, and at 1.45 a word salad of 7.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSummary:
    """One reward over all completions."""

    name: str
    mean: float
    std: float
    low: float
    high: float
    histogram: tuple[int, ...]
    """Counts in ten equal steps from low to high."""
    none_share: float
    length_correlation: float
    """Pearson's, with the number of tokens; NaN where one of the two never changes."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Numbers of sampled groups, and the findings that follow."""

    num_prompts: int
    num_completions: int
    spread_share: float
    """Groups whose completions differ in their weighted reward; DAPO's filter drops the others."""
    flat_reward: float
    """Mean weighted reward of the groups without spread; NaN: there are none."""
    mean_reward: float
    """Mean weighted reward of all groups."""
    pass_rates: tuple[float, ...]
    """By prompt, of the reward that tells right from wrong; empty where none does."""
    rewards: tuple[RewardSummary, ...]
    correlations: Mapping[str, float]
    """Between rewards, by `a ~ b`."""
    tokens: tuple[int, int, int]
    """Lengths of completions at 5 %, 50 % and 95 %."""
    truncated_share: float
    end_gain: float
    """Mean reward of the completions that ended less that of those cut off, in standard deviations; NaN where all or
    none were cut off, or all rewards are equal."""
    empty_share: float
    duplicate_share: float
    """Completions with the same tokens as an earlier one of their group."""
    entropy: float
    """Nats a token: the mean of -log p of the tokens that were drawn."""
    unjudged_share: float
    tokens_per_second: float
    generate_seconds: float
    has_examples: bool = False
    """Whether the prompts have worked examples already: earlier turns of an assistant."""
    longer_lengths: tuple[int, ...] = ()
    """Tokens of a few completions that were allowed more; empty where few were cut off, or it was not measured."""
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {k: value for k, value in dataclasses.asdict(self).items() if k not in ("findings", "longer_lengths")}


def verdict(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    """Findings, each with its fix, and last whether a run would learn: "not ready", "ready, but", "ready"."""
    found = [finding for rule in _VERDICTS for finding in rule(seen, args)]
    yield from found
    warned = dict.fromkeys(finding.code for finding in found if finding.severity == "warning")
    blocking = [code for code in warned if code not in _BEARABLE or not _BEARABLE[code](seen)]
    ready = "ready" if not warned else f"ready, but see {', '.join(warned)}"
    if seen.num_prompts < FEW_GROUPS:
        ready += f"; {seen.num_prompts} groups are few to judge by: --rollouts 32"
    alone = "" if seen.pass_rates else "of the reward alone: none is known to say right or wrong (accuracy: NAME)"
    yield Finding(
        code="R009",
        severity="note",
        what=(
            f"{seen.num_prompts} groups of {args.num_generations}: {seen.spread_share:.0%} have spread; "
            + (f"not ready: {listed(blocking)} first" if blocking else f"{ready}")
            + (f"; {alone}" if alone else "")
        ),
        facts={
            "blocking": blocking,
            "num_prompts": seen.num_prompts,
            "num_generations": args.num_generations,
            "spread_share": seen.spread_share,
            "ready": ready,
            "alone": alone,
        },
    )


_BEARABLE: Mapping[str, Callable[[Diagnosis], bool]] = {
    "R001": lambda seen: 1 - seen.spread_share <= HOPELESS_SHARE,
    "R002": lambda seen: seen.end_gain >= LEARNS_TO_END,
    # One of a few words is often the same; the rewards of the groups decide whether that leaves anything to compare.
    "R003": lambda seen: seen.empty_share <= DUPLICATE_SHARE and 1 - seen.spread_share <= HOPELESS_SHARE,
}
"""Warnings with which a run may start, and when."""


def _flat(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    if 1 - seen.spread_share <= FLAT_SHARE:
        return
    rate = np.mean(seen.pass_rates) if seen.pass_rates else np.nan
    easy, hard = rate > 0.5, rate < 0.1
    what = f"{1 - seen.spread_share:.0%} of the groups have equal rewards ({seen.flat_reward:.2f} on average); "
    what += "DAPO's filter drops them" + (": nearly all right" if easy else ": nearly all wrong" if hard else "")
    changes = {**({} if easy or seen.has_examples else {"examples": EXAMPLES}), **_temperature(seen, args)}
    cure = _EASY if easy else _HARD_WITH_EXAMPLES if seen.has_examples else _HARD
    fix = f"{cure}{_tempered(seen, args)}; then dynamic_sampling: true"
    why = "their advantages are 0: they cost sampling and teach nothing"
    yield Finding(severity="warning", code="R001", what=what, why=why, fix=fix, changes=changes)


_EASY = "harder prompts"
_HARD = (
    "worked examples in the prompt, in the form that the reward looks for (`examples: 2` takes two short rows); then "
    "partial credit in the reward, or easier prompts"
)
_HARD_WITH_EXAMPLES = "other worked examples, or more of them; then partial credit in the reward, or easier prompts"


def _temperature(seen: Diagnosis, args: GRPOConfig) -> dict[str, Any]:
    """The temperature as a change: higher where the policy is too sure to differ, and never higher than 1 elsewhere."""
    hotter = round(min(args.temperature + 0.3, 1.5), 2)
    if seen.entropy < CERTAIN:
        return {"temperature": hotter} if hotter > args.temperature else {}
    return {"temperature": 1.0} if seen.entropy > UNSURE and args.temperature > 1 else {}


def _tempered(seen: Diagnosis, args: GRPOConfig) -> str:
    changes = _temperature(seen, args)
    only = "only " if seen.entropy < CERTAIN else ""
    return f"; {as_lines(changes)}, as entropy is {only}{seen.entropy:.2f} nats a token" if changes else ""


def _cut_off(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    if seen.truncated_share <= TRUNCATED_SHARE:
        return
    limit = args.max_completion_length
    what = f"{seen.truncated_share:.0%} of the completions are cut off at max_completion_length {limit}"
    lengths = np.array(seen.longer_lengths or [limit])
    needed = int(np.quantile(lengths, 0.95))
    still = float((lengths >= lengths.max()).mean()) if lengths.max() >= LONGER * limit else 0.0
    ends = f"95 % end within {needed:,}" if still < 0.05 else f"{still:.0%} still do not end"
    learns = _BEARABLE["R002"](seen)
    why = "without an end, and often without an answer, they are judged by where they were cut"
    if learns:
        why = f"those that end are worth {seen.end_gain:.1f} standard deviations more, so the policy will learn to end"
    if not seen.longer_lengths:
        fix = _WATCH if learns else "a longer limit (`podium check --rollouts 8` measures it), or a prompt for less"
        yield Finding(severity="warning", code="R002", what=what, why=why, fix=fix)
        return
    longer = f"max_completion_length: {needed}"
    shorter = "mask_truncated_completions: true, or a prompt that asks for less; see M018: does the model stop at all?"
    changes = {"max_completion_length": needed} if still < 0.05 else {}
    if not changes and not learns:
        changes = {"mask_truncated_completions": True}
    fix = longer if still < 0.05 else _WATCH if learns else shorter
    what += f"; with {lengths.max():,} allowed, {ends}"
    yield Finding(severity="warning", code="R002", what=what, why=why, fix=fix, changes=changes)


_WATCH = "nothing yet; watch completions/clipped_ratio fall"


def _alike(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    share = max(seen.duplicate_share, seen.empty_share)
    if share <= DUPLICATE_SHARE:
        return
    kind = "empty" if seen.empty_share >= seen.duplicate_share else "the same as another of their group"
    severity: Severity = "note" if seen.spread_share >= 1 - FLAT_SHARE and kind != "empty" else "warning"
    why = "there is less to compare than num_generations says"
    changes = _temperature(seen, args) if kind != "empty" else {}
    fix = (_tempered(seen, args).removeprefix("; ") if changes else "") or (
        "look at a prompt's end with `podium sample`" if kind == "empty" else "more different prompts or answers"
    )
    what = f"{share:.0%} of the completions are {kind}"
    yield Finding(severity=severity, code="R003", what=what, why=why, fix=fix, changes=changes)


def _noise(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    if seen.entropy > NOISE:
        cooler = f"temperature: 1.0 (it is {args.temperature:g}); " if args.temperature > 1 else ""
        what = f"completions are close to noise: {seen.entropy:.1f} nats a token, as of {np.exp(seen.entropy):,.0f} "
        what += "equal tokens"
        why = "groups differ by accident, so a run would learn from accidents"
        shown = "" if seen.has_examples else "worked examples in the prompt (`examples: 2`); "
        fix = f"{cooler}{shown}look at completions with `podium sample`"
        changes = {**({} if seen.has_examples else {"examples": EXAMPLES}), **({"temperature": 1.0} if cooler else {})}
        yield Finding(severity="warning", code="R010", what=what, why=why, fix=fix, changes=changes)


def _constant(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    for reward in seen.rewards:
        if reward.none_share < 1 and reward.high - reward.low < 1e-9:
            severity: Severity = "warning" if len(seen.rewards) == 1 else "note"
            what = f"reward `{reward.name}` gave {reward.low:g} to every one of {seen.num_completions} completions"
            why = "a reward that never changes adds nothing to an advantage"
            fix = "look at completions with `podium sample`, then at the reward"
            yield Finding(severity=severity, code="R004", what=what, why=why, fix=fix)


def _by_length(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    for reward in seen.rewards:
        if abs(reward.length_correlation) > CORRELATION:
            kind = "longer" if reward.length_correlation > 0 else "shorter"
            what = f"reward `{reward.name}` is higher for {kind} completions "
            what += f"(correlation {reward.length_correlation:+.2f})"
            fix = "look at both ends with `podium sample`; get_soft_overlong_punishment limits length"
            yield Finding(
                severity="note", code="R005", what=what, why="length is the easiest thing to learn; watch it", fix=fix
            )


def _doubled(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    for pair, correlation in seen.correlations.items():
        if abs(correlation) > SAME:
            what = f"the rewards {pair} {'say the same' if correlation > 0 else 'cancel out'} "
            what += f"(correlation {correlation:+.2f})"
            yield Finding(severity="note", code="R006", what=what, fix="leave one out, or lower its weight")


def _slow(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    slowest = max(seen.rewards, key=lambda reward: reward.seconds)
    total = seen.generate_seconds + sum(reward.seconds for reward in seen.rewards)
    if slowest.seconds > SLOW_SHARE * total:
        yield Finding(
            code="R007",
            severity="note",
            what=f"reward `{slowest.name}` took {slowest.seconds:.1f} s of {total:.1f} s of sampling and scoring",
            fix="write it with `async def`, or do the slow part once for all completions",
            facts={"slowest_name": slowest.name, "seconds": slowest.seconds, "total": total},
        )


def _unjudged(seen: Diagnosis, args: GRPOConfig) -> Iterator[Finding]:
    if seen.unjudged_share:
        severity: Severity = "warning" if seen.unjudged_share > FLAT_SHARE else "note"
        what = f"every reward returned None for {seen.unjudged_share:.0%} of the completions"
        fix = "give those rows a reward, or leave them out"
        yield Finding(severity=severity, code="R008", what=what, why="they are not trained on", fix=fix)


_VERDICTS = (_flat, _cut_off, _noise, _alike, _constant, _by_length, _doubled, _slow, _unjudged)
"""All but R009, in this order."""
