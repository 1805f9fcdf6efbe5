"""Every detector sees what it is for in a made-up history, and nothing in a healthy one; each thing is said once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium import GRPOConfig
from podium.records import StepMetrics
from podium.runs import findings
from podium.runs.monitors import DETECTORS, Monitor, RunSettings, diagnose, labels
from podium.runs.monitors.history import run_settings
from tests.cures import assert_agree
from tests.unit.test_agent_monitors import FAILURES

Table = dict[str, list[Any]]

WORDS = [*"abcdefghij", "red", "green", "blue", "tall", "short", "warm", "cold", "old", "new", "far"]


def table(
    step: int,
    reward: Callable[[int, int, str], float] = lambda p, g, text: float((p * 7 + g * 3) % 5 > 2),
    *,
    text: Callable[[int, int, int], str] | None = None,
    prompts: int = 4,
    completions: int = 8,
    prompt: Callable[[int, int], str] = lambda step, p: f"question {step * 10 + p}",
    rewards: dict[str, Callable[[int, int, str], float]] | None = None,
    **columns: Callable[[int, int, str], Any],
) -> Table:
    """A generation round; every value is a function of prompt, completion and text."""
    rng = np.random.default_rng(step)
    write = text or (lambda s, p, g: " ".join(rng.choice(WORDS, size=5 + (g * 5 + p) % 7)))
    cells = [(p, g, write(step, p, g)) for p in range(prompts) for g in range(completions)]
    rewards = rewards or {"score": reward}
    made: Table = {
        "step": [step] * len(cells),
        "prompt_id": [p for p, _, _ in cells],
        "row": [step * 10 + p for p, _, _ in cells],
        "completion_index": [g for _, g, _ in cells],
        "prompt": [prompt(step, p) for p, _, _ in cells],
        "completion": [t for _, _, t in cells],
        "num_tokens": [len(t.split()) for _, _, t in cells],
        "finish": ["stop"] * len(cells),
        "reward": [sum(f(p, g, t) for f in rewards.values()) for p, g, t in cells],
        "advantage": [float(g - completions / 2) for _, g, _ in cells],
        "contains_answer": [None] * len(cells),
    }
    made |= {f"reward/{name}": [f(p, g, t) for p, g, t in cells] for name, f in rewards.items()}
    return made | {name: [f(p, g, t) for p, g, t in cells] for name, f in columns.items()}


def healthy(step: int) -> dict[str, float]:
    """The numbers of a step, with some noise."""
    noise = math.sin(step * 12.9898) * 0.05
    return {
        "reward": 0.3 + 0.01 * step + noise,
        "reward_std": 0.4 + noise,
        "frac_reward_zero_std": 0.25,
        "entropy": 1.0 + noise,
        "kl": 0.01 + 0.001 * noise,
        "loss": noise,
        "grad_norm": 1.0 + noise,
        "learning_rate": 1e-5,
        "completions/mean_length": 50 + 10 * noise,
        "completions/clipped_ratio": 0.1,
        "clip_ratio/region_mean": 0.01,
        "step_time": 2.0,
        "time/reward_seconds": 0.01,
        "health/update_ratio": 5e-5,
        "health/moved_share": 1.0,
        "health/resident_bytes": 3e9 + 1e7 * noise,
        "health/logp_gap_mean": 0.01,
        "health/tokens_per_second": 1000 + 100 * noise,
    }


def codes_of(
    numbers: Callable[[int], dict[str, float]] = lambda step: {},
    rounds: Callable[[int], Table | None] = lambda step: None,
    *,
    steps: int = 12,
    **settings: Any,
) -> dict[str, str]:
    """Codes and severities, most important first."""
    history = [StepMetrics(step=s, values={**healthy(s), **numbers(s)}) for s in range(1, steps + 1)]
    tables = {s: [t] for s in range(1, steps + 1) if (t := rounds(s)) is not None}
    found = diagnose(history, tables, RunSettings(**settings))
    for issue in found:
        assert_agree(issue.finding)
    return {issue.finding.code: issue.finding.severity for issue in found}


def after(step: int, early: float, late: float) -> Callable[[int], float]:
    return lambda s: early if s <= step else late


def test_groups_that_are_all_right_are_a_note_and_all_wrong_a_warning() -> None:
    def flat_from_the_second_step(end: float) -> Callable[[int], Table]:
        return lambda step: table(step) if step == 1 else table(step, lambda p, g, text: end)

    def flat(step: int) -> dict[str, float]:
        return {"frac_reward_zero_std": 0.25 if step == 1 else 1.0}

    assert codes_of(flat, flat_from_the_second_step(1.0))["M101"] == "note"
    assert codes_of(flat, flat_from_the_second_step(0.0))["M101"] == "warning"


def paid_by_length(step: int) -> Table:
    """Completions that run on to the limit, paid by their characters; the right answer is the shortest."""
    return table(
        step,
        rewards={"answer_length": lambda p, g, t: len(t) / 100},
        finish=lambda p, g, t: "length",
        contains_answer=lambda p, g, t: float(g == 0),
        num_tokens=lambda p, g, t: 32,
        text=lambda s, p, g: "word" + " and more" * g + "." * ((p + s) % 3),
    )


def test_a_reward_paid_by_length_is_called_so_and_gets_no_more_room() -> None:
    cut = {"completions/clipped_ratio": 1.0}
    history = [StepMetrics(step=s, values={**healthy(s), **cut}) for s in range(1, 13)]
    tables = {s: [paid_by_length(s)] for s in range(1, 13)}
    found = {each.finding.code: each.finding for each in diagnose(history, tables, RunSettings(**KNOWN))}
    assert {"M141", "M152"} <= set(found)
    assert "M107" not in found, "no sign is to be flipped"
    assert "max_completion_length" not in found["M141"].changes
    short = {s: [{**tables[s][0], "reward": [-x for x in tables[s][0]["reward"]]}] for s in tables}
    assert "M152" in {each.finding.code for each in diagnose(history, short, RunSettings(**KNOWN))}


def test_what_is_paid_without_an_end_gets_no_more_room() -> None:
    def rounds(end: float) -> Callable[[int], Table]:
        return lambda step: table(
            step, lambda p, g, t: end if g % 2 else 0.4, finish=lambda p, g, t: "length" if g % 2 else "stop"
        )

    history = [StepMetrics(step=s, values={**healthy(s), "completions/clipped_ratio": 0.7}) for s in range(1, 13)]
    for end, raised in ((1.0, False), (0.0, True)):
        found = diagnose(history, {s: [rounds(end)(s)] for s in range(1, 13)}, RunSettings(**KNOWN))
        [finding] = [each.finding for each in found if each.finding.code == "M141"]
        assert ("max_completion_length" in finding.changes) is raised


def test_groups_that_are_paid_without_their_answer_are_not_all_wrong() -> None:
    def rounds(step: int) -> Table:
        return table(step, lambda p, g, t: 1.0 if step > 1 else float(g % 2), contains_answer=lambda p, g, t: 0.0)

    history = [StepMetrics(step=s, values={**healthy(s), "frac_reward_zero_std": 1.0}) for s in range(1, 9)]
    found = diagnose(history, {s: [rounds(s)] for s in range(1, 9)}, RunSettings(**KNOWN))
    [finding] = [each.finding for each in found if each.finding.code == "M101"]
    assert "without their row's answer" in finding.what
    assert "wrong" not in finding.what
    assert not finding.changes


@pytest.mark.parametrize("scored", [0, 1])
def test_groups_of_one_reward_are_told_from_equal_ones(scored: int) -> None:
    def rounds(step: int) -> Table:
        made = table(step, rewards={"score": lambda p, g, text: 1.0 if g < scored else math.nan})
        return {**made, "reward": made["reward/score"]}

    history = [StepMetrics(step=s, values={**healthy(s), "frac_reward_zero_std": 1.0}) for s in range(1, 7)]
    found = diagnose(history, {s: [rounds(s)] for s in range(1, 7)}, RunSettings())
    [finding] = [each.finding for each in found if each.finding.code == "M101"]
    assert finding.what == "In 100 % of groups fewer than two completions have a reward, over 5 steps."
    assert not finding.changes


@pytest.mark.parametrize(("norm", "severity"), [(1.0, "error"), (0.0, "warning")])
def test_weights_that_do_not_move_are_an_error_only_under_a_gradient(norm: float, severity: str) -> None:
    still = {"health/update_ratio": 0.0, "health/moved_share": 0.0, "grad_norm": norm}
    assert codes_of(lambda s: still)["M138"] == severity


@pytest.mark.parametrize("odd", [None, "x", [None], {"a": [1]}, 1e400])
def test_settings_that_somebody_edited_are_read_as_unknown(odd: Any) -> None:
    given = dict.fromkeys(("generation_kwargs", "top_k", "top_p", "min_p", "learning_rate"), odd)
    settings = run_settings({"settings": given, "model": {"parameters": odd}, "reward_weights": {"exact": odd}})
    assert (settings.narrowed, settings.num_parameters, settings.weights) == ({}, 0, {"exact": 0.0})
    diagnose([StepMetrics(step=s, values=healthy(s)) for s in range(1, 12)], {}, settings)


def test_an_update_that_half_precision_may_have_rounded_away_is_no_error() -> None:
    still = {"health/update_ratio": 0.0, "health/moved_share": 0.0, "grad_norm": 1.0}
    history = [StepMetrics(step=s, values={**healthy(s), **still}) for s in range(1, 7)]
    settings = run_settings({"trained_dtype": "bfloat16"})
    [finding] = [each.finding for each in diagnose(history, {}, settings) if each.finding.code == "M138"]
    assert finding.severity == "warning"
    assert finding.changes == {"model_init_kwargs": {"dtype": "float32"}}


def test_masked_completions_move_no_weight() -> None:
    """The mask of those that are cut off leaves nothing to train on: no parameter is frozen."""
    still = {"health/update_ratio": 0.0, "health/moved_share": 0.0, "grad_norm": 0.0, "completions/clipped_ratio": 1.0}
    for mask, says in ((True, False), (False, True)):
        present = {"mask_truncated_completions": mask}
        assert ("M138" in codes_of(lambda s: still, present=present)) is says
    assert "M138" not in codes_of(lambda s: still)
    assert "M138" in codes_of(lambda s: {**still, "completions/clipped_ratio": 0.9})


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("reward", "first"), [(1.0, "M102"), (0.0, "M103")], ids=["constant reward", "reward that never fires"]
)
def test_among_warnings_the_cause_comes_first(reward: float, first: str) -> None:
    """However long they last: equal rewards in all groups (M101), clipped ratios (M133)."""
    later = lambda s: {"frac_reward_zero_std": 1.0, "reward": reward, "kl": 0.01, "clip_ratio/region_mean": 0.5}  # noqa: E731
    found = codes_of(later, lambda s: table(s, r(reward)), steps=40)
    assert next(iter(found)) == first, found
    assert set(found) == {first, "M101", "M133"}


def test_a_constant_reward_comes_before_completions_that_are_cut_off() -> None:
    found = codes_of(lambda s: {"completions/clipped_ratio": 0.99}, lambda s: table(s, r(1.0)))
    assert [*found] == ["M102", "M141"]


def cures(numbers: Callable[[int], dict[str, float]], **settings: Any) -> dict[str, Any]:
    """The changes of each finding, by its code."""
    history = [StepMetrics(step=s, values={**healthy(s), **numbers(s)}) for s in range(1, 41)]
    return {issue.finding.code: issue.finding.changes for issue in diagnose(history, {}, RunSettings(**settings))}


def test_a_reward_that_falls_is_not_called_flat_and_an_unknown_rate_gets_no_direction() -> None:
    def wavy(slope: float) -> Callable[[int], dict[str, float]]:
        return lambda s: {"reward": 0.5 + slope * s + 0.05 * math.sin(s * 7.1), "grad_norm": 1.0}

    assert not {"M104", "M111"} & set(codes_of(wavy(0.005), steps=60))
    assert "M104" in codes_of(wavy(0.0), steps=60)
    falling = codes_of(wavy(-0.003), steps=60)
    assert "M104" not in falling
    assert [code for code in codes_of(wavy(-0.01), steps=60) if code in {"M104", "M111"}] == ["M111"]
    log = [StepMetrics(step=s, values=wavy(0.0)(s)) for s in range(1, 61)]
    [flat] = [issue.finding for issue in diagnose(log, {}) if issue.finding.code == "M104"]
    assert not flat.changes
    assert "There is signal" not in flat.why
    assert "learning_rate" not in flat.fix


@pytest.mark.cases(4)
@pytest.mark.parametrize(("examples", "advised"), [(None, True), (1, True), ([{}, {}, {}, {}], False), (2, False)])
@pytest.mark.parametrize("code", ["M101", "M103", "M146"])
def test_what_the_recipe_has_is_not_advised(code: str, examples: Any, advised: bool) -> None:
    settings = run_settings({"settings": {}}, {"model": "m", "examples": examples} if examples else {})
    numbers = {"frac_reward_zero_std": 1.0}
    history = [StepMetrics(step=s, values={**healthy(s), **numbers}) for s in range(1, 13)]
    named = {"tag_format": r(0.0)}
    found = diagnose(history, {s: [table(s, rewards=named)] for s in range(1, 13)}, settings)
    [finding] = [issue.finding for issue in found if issue.finding.code == code]
    assert (finding.changes.get("examples") == 2) is advised
    assert ("examples: 2" in finding.fix) is advised


def test_a_limit_is_not_raised_for_noise() -> None:
    def cut_off(step: int, entropy: float) -> dict[str, float]:
        return {"completions/clipped_ratio": 0.99 * (step > 4), "entropy": entropy if step > 4 else 1.0}

    assert cures(lambda s: cut_off(s, 1.0), max_completion_length=16)["M141"] == {"max_completion_length": 64}
    assert cures(lambda s: cut_off(s, 8.0), max_completion_length=16)["M141"] == {}


def test_the_sampler_that_disagrees_is_the_one_replaced() -> None:
    gap = "sampling/sampling_logp_difference/mean"
    assert cures(lambda s: {"health/logp_gap_mean": 0.8})["M135"] == {"rollout_engine": "live"}
    assert cures(lambda s: {"health/logp_gap_mean": 0.8, gap: 0.8})["M135"] == {"use_vllm": False}
    assert cures(lambda s: {"health/logp_gap_mean": 0.8}, dropout=0.1)["M135"] == {"disable_dropout": True}


def test_the_best_evaluation_is_kept_as_often_as_there_is_one() -> None:
    numbers = NUMBERS["M151"][0]
    settings = {"eval_strategy": "steps", "eval_steps": 5}
    kept = run_settings({"settings": settings}).best_kept
    assert cures(numbers, best_kept=kept)["M151"] == kept
    assert GRPOConfig("out", **settings, **kept).load_best_model_at_end
    assert cures(numbers, best_kept=run_settings({"settings": {"eval_strategy": "no"}}).best_kept)["M151"] == {}


def test_a_healthy_history_is_left_in_peace() -> None:
    assert codes_of(steps=120) == {}
    assert codes_of(rounds=table, steps=60) == {}


NUMBERS: dict[str, tuple[Callable[[int], dict[str, float]], dict[str, Any]]] = {
    "M101": (lambda s: {"frac_reward_zero_std": 1.0}, {}),
    "M104": (lambda s: {"reward": 0.3 + 0.05 * math.sin(s * 7.1)}, {"steps": 60}),
    "M111": (lambda s: {"reward": 1 - 0.08 * s}, {}),
    "M121": (lambda s: {"reward_std": 0.5 if s < 7 else 0.01, "reward": 0.3}, {}),
    "M124": (lambda s: {"entropy": 1.0 if s < 5 else 0.02, "reward": 0.3}, {}),
    "M126": (lambda s: {"entropy": 1.0 if s < 5 else 6.0}, {}),
    "M131": (lambda s: {"grad_norm": math.nan if s > 4 else 1.0}, {}),
    "M132": (lambda s: {"kl": 0.01 if s < 4 else 2.0}, {}),
    "M133": (lambda s: {"clip_ratio/region_mean": 0.5}, {}),
    "M134": (lambda s: {"grad_norm": 30.0 if s % 6 == 0 else 1.0}, {"steps": 20}),
    "M135": (lambda s: {"health/logp_gap_mean": 0.8}, {}),
    "M136": (lambda s: {"health/update_ratio": 0.1}, {}),
    "M137": (lambda s: {"health/update_ratio": 5e-8}, {}),
    "M138": (lambda s: {"health/update_ratio": 0.0, "health/moved_share": 0.0}, {}),
    "M139": (lambda s: {}, {"adapter": True, "learning_rate": 1e-6}),
    "M141": (lambda s: {"completions/clipped_ratio": 0.99}, {}),
    "M142": (lambda s: {"completions/mean_length": 50.0 + 10 * s, "reward": 0.1 * s}, {}),
    "M151": (lambda s: {"reward": 0.05 * s, **({"eval_reward": 1 - 0.02 * s} if s % 5 == 0 else {})}, {"steps": 40}),
    "M161": (lambda s: {"health/resident_bytes": 3e9 + 1e8 * s}, {"steps": 14}),
    "M163": (lambda s: {"time/reward_seconds": 1.5}, {}),
}


KNOWN = {
    "learning_rate": 2e-5,
    "temperature": 1.2,
    "max_completion_length": 64,
    "num_generations": 8,
    "generation_batch_size": 64,
    "best_kept": {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 5},
}
"""Settings of a run of Podium's own; a foreign log has none."""


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_show_it(code: str) -> None:
    numbers, settings = NUMBERS[code]
    found = codes_of(numbers, **settings)
    assert next(iter(found)) == code, found
    assert {code for code, severity in found.items() if severity == "error"} <= {"M131", "M138"}
    assert code in codes_of(numbers, **{**KNOWN, **settings})


def says(*texts: str) -> Callable[[int, int, int], str]:
    return lambda step, p, g: texts[(g + p + step) % len(texts)]


def r(value: float) -> Callable[[int, int, str], float]:
    return lambda p, g, text: value


def alternating(p: int, g: int, text: str) -> float:
    return float((p * 7 + g * 3) % 5 > 2)


def by_prompt(p: int, g: int, text: str) -> float:
    return 0.1 * p


def labelled(step: int, said: Callable[[int, int], str], gold: Callable[[int], str]) -> Table:
    """Prompts `number n`, n = 100 step + p: what completions say of it, the row's answer, and a reward for a match."""
    number = lambda p: 100 * step + 11 * p  # noqa: E731
    return table(
        step,
        lambda p, g, t: float(t == gold(number(p))),
        text=lambda s, p, g: said(number(p), g),
        prompt=lambda s, p: f"number {100 * s + 11 * p}",
        prompts=8,
        answer=lambda p, g, t: gold(number(p)),
    )


def after_it(n: int, g: int) -> str:
    """The next number; one completion in eight says another one."""
    return str(n + 1 + (g == 7) * (n % 7))


def other_row(n: int) -> str:
    """An answer that does not go with n."""
    return str((n * 7919) % 1201)


def one_in_three(n: int) -> str:
    return other_row(n) if n % 3 == 0 else str(n + 1)


ROUNDS: dict[str, tuple[Callable[[int], Table], dict[str, Any]]] = {
    "M102": (lambda s: table(s, r(1.0)), {}),
    "M103": (lambda s: table(s, r(0.0)), {}),
    "M105": (lambda s: table(s, rewards={"a": alternating, "b": lambda p, g, t: 0.01 * (g % 3)}), {"steps": 20}),
    "M107": (
        lambda s: table(
            s, rewards={"match": lambda p, g, t: -float(g < 2)}, contains_answer=lambda p, g, t: float(g < 2)
        ),
        {},
    ),
    "M108": (lambda s: table(s, advantage=lambda p, g, t: float((g - 4) * (p == 0))), {}),
    "M109": (lambda s: table(s, prompt=lambda step, p: "the same"), {}),
    "M110": (
        lambda s: table(s, lambda p, g, t: float(p if p < 2 else g % 2), prompt=lambda s, p: f"{s % 3} {p}"),
        {"steps": 12},
    ),
    "M122": (lambda s: table(s, by_prompt, text=lambda s, p, g: f"it always has been and will be {p}"), {}),
    "M123": (lambda s: table(s, by_prompt, text=lambda s, p, g: f"always {p}"), {"temperature": 0.05}),
    "M125": (
        lambda s: table(s, text=lambda s, p, g: f"{WORDS[g]} tell me of the warm days " + "and again so it goes " * 6),
        {},
    ),
    "M144": (
        lambda s: table(s, lambda p, g, t: float(g > 4) * len(t), text=lambda s, p, g: WORDS[g] * (g % 2)),
        {},
    ),
    "M146": (
        lambda s: table(
            s,
            text=lambda s, p, g: f"<answer>{WORDS[(g + s + p) % 20]} {g}</answer>",
            rewards={"tag_format": r(0.0), "right": alternating},
        ),
        {},
    ),
    "M152": (lambda s: table(s, lambda p, g, t: len(t) / 100), {}),
    "M153": (
        lambda s: table(
            s,
            lambda p, g, t: float("great question" in t),
            text=lambda s, p, g: (
                f"{'great question' if (g + s) % 2 else 'empty sentence'} {WORDS[g]} {WORDS[(p + s) % 20]}"
            ),
        ),
        {},
    ),
    "M155": (lambda s: labelled(s, after_it, other_row), {}),
    "M156": (lambda s: labelled(s, after_it, one_in_three), {}),
    "M157": (lambda s: table(s, alternating, text=lambda s, p, g: f"{WORDS[g // 4]} {p}"), {}),
    "M158": (
        lambda s: table(
            s,
            lambda p, g, t: len(set(t.split()) & {"which", "of", "these", "rivers", "is", "longest"}) / 6,
            text=lambda s, p, g: " ".join(["which of these rivers is longest".rsplit(" ", g % 6)[0], WORDS[g], "well"]),
            question=lambda p, g, t: "which of these rivers is longest",
        ),
        {},
    ),
    "M159": (
        lambda s: table(
            s,
            r(1.0 * (s > 1)),
            text=lambda s, p, g: "red green blue",
            answer=lambda p, g, t: ["red", "green", "blue"][p % 3],
        ),
        {},
    ),
    "M160": (
        lambda s: table(
            s,
            lambda p, g, t: float("<answer>" in t),
            text=lambda s, p, g: ["<answer></answer>", "<think> </think> <answer>...</answer>", WORDS[p]][(g + s) % 3],
            answer=lambda p, g, t: WORDS[p],
        ),
        {},
    ),
    "M112": (
        lambda s: table(
            s,
            lambda p, g, t: float(t == WORDS[(p + 1) % 20]),
            text=lambda s, p, g: WORDS[(p + (g % 4)) % 20] + " " * (g % 4 == 0),
            answer=lambda p, g, t: WORDS[p] + " ",
        ),
        {"accuracy": "score"},
    ),
}


def carries(slips: Callable[[int], int], gold: Callable[[int], int]) -> Callable[[int], Table]:
    """Rounds of `n + 1`; in some groups all completions are off by `slips(n)`, in others one of eight is."""

    def said(n: int, g: int) -> str:
        off = slips(n)
        return str(n + 1 + (off if n % 5 == 0 or g == 0 else 0))

    return lambda s: labelled(s, said, lambda n: str(gold(n)))


def slip(n: int) -> int:
    return (-200, 300, -400, 600)[n // 100 % 4]


def planted(n: int) -> int:
    """A wrong answer in one row of five, each wrong by another amount."""
    return n + 1 + (13 + 7 * (n % 41) if n % 5 == 0 else 0)


@pytest.mark.slow
def test_own_mistakes_of_a_model_are_no_wrong_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that lose a carry in some groups always, in others now and then: of right answers, and of wrong ones."""
    assert "M156" not in codes_of(rounds=carries(slip, lambda n: n + 1), steps=16)
    with monkeypatch.context() as unlimited:
        unlimited.setattr(labels, "OWN_MISTAKES", 10**9)
        assert "M156" in codes_of(rounds=carries(slip, lambda n: n + 1), steps=16), "this rule alone is silent"
    assert "M156" in codes_of(rounds=carries(lambda n: 0, planted), steps=16)
    assert "M156" in codes_of(rounds=carries(lambda n: slip(n) * (n % 5 > 0), planted), steps=16)


@pytest.mark.cases(1)
@pytest.mark.parametrize("code", ROUNDS)
def test_groups_show_it(code: str) -> None:
    rounds, settings = ROUNDS[code]
    found = codes_of(rounds=rounds, **settings)
    assert next(iter(found)) == code, found
    assert "error" not in found.values(), "a threshold or a trend is no error"
    assert code in codes_of(rounds=rounds, **{**KNOWN, **settings})


@pytest.mark.parametrize(("early", "said"), [(1.0, True), (0.4, False)], ids=["never differed", "learnt"])
def test_a_reward_that_was_learnt_is_not_constant(early: float, said: bool) -> None:
    both = {"form": r(1.0), "score": alternating}
    found = codes_of(
        numbers=lambda s: {"rewards/form/mean": early if s < 4 else 1.0}, rounds=lambda s: table(s, rewards=both)
    )
    assert ("M102" in found) is said


@pytest.mark.parametrize(("column", "text"), [("token_digest", int), ("prompt", str)])
def test_other_tokens_or_another_prompt_may_have_another_reward(column: str, text: Callable[[int], Any]) -> None:
    def tables(step: int) -> Table:
        by_tokens = {"by_tokens": lambda p, g, t: float(g % 4 > 1)}
        return table(step, rewards=by_tokens, text=lambda s, p, g: WORDS[p])

    def told_apart(step: int) -> Table:
        made = tables(step)
        return {**made, column: [text(index % 4) for index in made["completion_index"]]}

    assert "M157" in codes_of(rounds=tables)
    assert "M157" not in codes_of(rounds=told_apart)


def test_every_detector_is_tried_and_has_a_page() -> None:
    assert set(NUMBERS) | set(ROUNDS) | set(FAILURES) == set(DETECTORS)
    pages = {code for code in findings.codes() if code.startswith("M") and int(code[1:]) > 100}
    assert pages == set(DETECTORS) | {"M191"}
    for code in DETECTORS:
        for section in ("What it means", "Usual causes", "What to do"):
            assert f"## {section}" in findings.page(code), code


def test_ranks_are_distinct() -> None:
    ranks = [rule.rank for rule in DETECTORS.values()]
    assert len(set(ranks)) == len(ranks)


def test_each_thing_is_said_once_until_it_changes() -> None:
    monitor = Monitor()
    flat = [0.25] * 4 + [0.9] * 25 + [0.25] * 25 + [0.9] * 6
    said = [
        (finding.code, finding.severity, step)
        for step, share in enumerate(flat, start=1)
        for finding in monitor.step(StepMetrics(step=step, values={**healthy(step), "frac_reward_zero_std": share}))
    ]
    assert [(code, severity) for code, severity, _ in said] == [
        ("M101", "warning"),  # and, however long it lasts, no more
        ("M101", "warning"),  # it was gone for long
    ]


def test_what_is_ignored_is_not_said() -> None:
    monitor = Monitor(ignored=frozenset({"M101"}))
    values = {**healthy(1), "frac_reward_zero_std": 1.0}
    assert not [f for s in range(1, 9) for f in monitor.step(StepMetrics(step=s, values=values)) if f.code == "M101"]


def test_evaluations_reach_the_step_they_are_of() -> None:
    monitor = Monitor()
    monitor.step(StepMetrics(step=1, values={"reward": 0.0}))
    monitor.add_evaluation({"eval_reward": 0.5})
    assert monitor._steps[-1].values == {"reward": 0.0, "eval_reward": 0.5}


@pytest.mark.parametrize("column", ["reward", "advantage", "contains_answer"])
def test_missing_values_break_no_detector(column: str) -> None:
    def rounds(step: int) -> Table:
        made = table(step)
        made[column] = [None] * len(made[column])
        return made

    codes_of(rounds=rounds)


def test_empty_and_strange_numbers_break_no_detector() -> None:
    history: Sequence[StepMetrics] = [
        StepMetrics(step=1, values={}),
        StepMetrics(step=2, values=dict.fromkeys(healthy(1), math.nan)),
        StepMetrics(step=3, values=dict.fromkeys(healthy(1), math.inf)),
    ]
    diagnose(list(history) * 6, {})


def test_a_step_without_trained_tokens_is_no_accident() -> None:
    """All groups were flat in it: means over trained tokens do not exist."""
    nothing = {"kl": math.nan, "entropy": math.nan, "loss": 0.0, "grad_norm": 0.0, "frac_reward_zero_std": 1.0}
    assert codes_of(lambda s: nothing if s % 4 == 0 else {}, steps=40) == {}


def test_pages_say_when_to_expect_it() -> None:
    folder = Path(findings.__file__).parent / "pages"
    texts = {code: (folder / f"{code}.md").read_text() for code in DETECTORS}
    assert not [code for code, text in texts.items() if not any(w in text for w in ("step", "round", "note", "cores"))]


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lost", [lambda p: True, lambda p: p == 0], ids=["always", "for one prompt"])
def test_a_reward_without_an_opinion_carries_nothing(lost: Callable[[int], bool]) -> None:
    varied = lambda p, g, t: float((g + p) % 3)  # noqa: E731
    rewards = {"a": alternating, "b": lambda p, g, t: math.nan if lost(p) else float(g > 2), "c": varied}
    assert "M105" not in codes_of(rounds=lambda s: table(s, rewards=rewards), steps=14)
    alone = {"a": lambda p, g, t: math.nan if lost(p) else float(g % 2)}
    codes_of(rounds=lambda s: table(s, rewards=alone), steps=14, accuracy="a")


@pytest.mark.cases(1)
@pytest.mark.parametrize("plays", ["agent", "environment", "rollout_func"])
def test_prompts_that_code_sees_more_than_are_not_the_same(plays: str) -> None:
    same = lambda s: table(s, prompt=lambda step, p: "the same")  # noqa: E731
    assert "M109" in codes_of(rounds=same)
    assert "M109" not in codes_of(rounds=same, **{plays: True})


@pytest.mark.parametrize("name", ["environment", "environment of_numbers"])
def test_a_run_with_an_environment(name: str) -> None:
    assert run_settings({"agents": {name: "game.py:Game"}}).environment
    assert not run_settings({"agents": {"agent": "game.py:play", "look_up": "game.py:look_up"}}).environment


def test_what_differs_in_reward_and_text_is_no_repetition() -> None:
    """Two texts in a group of eight, one right and one wrong: sampling has found what there is to compare."""

    def text(s: int, p: int, g: int) -> str:
        return f"it always has been and will be {p if g % 2 else p + 1}"

    assert "M122" not in codes_of(rounds=lambda s: table(s, lambda p, g, text: float(g % 2), text=text))
    same = codes_of(rounds=lambda s: table(s, lambda p, g, text: float(p), text=text))
    assert "M122" in same, "and where all rewards are equal it still is"
    few = codes_of(rounds=lambda s: table(s, lambda p, g, text: float(p < 3 and g % 2), text=text))
    assert "M122" not in few, "one group of four says the same"


@pytest.mark.parametrize(
    ("given", "changed"),
    [({}, "temperature"), ({"num_iterations": 2}, "epsilon_high"), ({"steps_per_generation": 4}, "epsilon_high")],
)
def test_the_clip_is_raised_where_something_is_clipped(given: dict[str, int], changed: str) -> None:
    """In the first step on a round the ratio is 1, whatever the clip."""
    numbers = NUMBERS["M124"][0]
    history = [StepMetrics(step=s, values={**healthy(s), **numbers(s)}) for s in range(1, 13)]
    settings = run_settings({"settings": {"learning_rate": 3e-5, "temperature": 1.0, **given}})
    [issue] = [each for each in diagnose(history, {}, settings) if each.finding.code == "M124"]
    assert set(issue.finding.changes) == {"learning_rate", changed}
    assert changed in issue.finding.fix


@pytest.mark.parametrize(("late", "expected"), [(0.4, True), (0.9, False)])
def test_a_policy_that_is_sure_and_mostly_right_is_no_collapse(late: float, expected: bool) -> None:
    found = codes_of(
        lambda s: {"entropy": 1.0 if s < 5 else 0.02, "reward": 0.03 if s < 5 else late},
        lambda s: table(s, lambda p, g, text: float(g % 2)),  # rewards go from 0 to 1
    )
    assert ("M124" in found) is expected
