"""Detectors, verdicts and words about a run: what they must say, and of what they must be silent."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podium.evaluation.comparison import regression_check
from podium.evaluation.statistics import paired_difference
from podium.records import StepMetrics
from podium.runs.doctor import FEW_STEPS, HealthReport
from podium.runs.monitors import ends, run_settings
from podium.runs.monitors.labels import match
from podium.runs.monitors.signs import JudgedTexts, signs
from tests.evaluations import paired_test, verdict
from tests.unit.test_monitors import (
    WORDS,
    Table,
    after_it,
    alternating,
    by_prompt,
    codes_of,
    labelled,
    one_in_three,
    other_row,
    r,
    table,
)

Now = Callable[[str], None]


def found(rounds: Callable[[int], Table] = lambda s: table(s), numbers: Any = None, **settings: Any) -> dict[str, Any]:
    """Findings by code."""
    from podium.runs.monitors import RunSettings, diagnose
    from tests.unit.test_monitors import healthy

    steps = settings.pop("steps", 12)
    history = [
        StepMetrics(step=s, values={**healthy(s), **(numbers(s) if numbers else {})}) for s in range(1, steps + 1)
    ]
    issues = diagnose(history, {s: [rounds(s)] for s in range(1, steps + 1)}, RunSettings(**settings))
    return {issue.finding.code: issue.finding for issue in issues}


# ---- planted, on synthetic rounds ----

LABELS = ("animal", "plant", "tool")


def kind(n: int) -> str:
    return LABELS[n % 3]


def confused(n: int, g: int) -> str:
    """A model that takes every plant for an animal."""
    return "animal" if kind(n) == "plant" else kind(n)


def nearly(n: int, g: int) -> str:
    """Always off by a little."""
    return str(n + 2)


def by_wording(n: int, g: int) -> str:
    """A label for each prompt that has nothing to do with the right one; one completion in eight is right."""
    return LABELS[(n * 7919) % 1201 % 2 if g < 7 else n % 3]


def blind(n: int, g: int) -> str:
    """The same to every prompt."""
    return str(7 + g % 2)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("case", "said", "gold", "code"),
    [
        pytest.param(
            "shuffled numbers", after_it, other_row, "M155", marks=pytest.mark.defect("B13", "answers shuffled")
        ),
        pytest.param(
            "shuffled words",
            lambda n, g: WORDS[n % 20] if g < 6 else WORDS[g],
            lambda n: WORDS[(n * 13 + n // 8) % 20],
            "M155",
            marks=pytest.mark.defect("N", "words as answers, shuffled"),
        ),
        pytest.param(
            "a third wrong", after_it, one_in_three, "M156", marks=pytest.mark.defect("B13", "30 % wrong labels")
        ),
        pytest.param(
            "a tenth of classes wrong",
            lambda n, g: kind(n),
            lambda n: kind(n + 1) if n % 7 == 0 else kind(n),
            "M156",
            marks=pytest.mark.defect("N", "three classes, one label in seven wrong"),
        ),
        pytest.param(
            "a healthy table",
            after_it,
            lambda n: str(n + 1),
            None,
            marks=pytest.mark.defect("N", "right labels, noise"),
        ),
        pytest.param(
            "near misses",
            nearly,
            lambda n: str(n + 1),
            None,
            marks=pytest.mark.defect("N", "a model that is always off by 1"),
        ),
        pytest.param(
            "no skill at all",
            blind,
            lambda n: str(n + 1),
            None,
            marks=pytest.mark.defect("N", "one guess for all prompts"),
        ),
        pytest.param(
            "one class never learnt",
            confused,
            kind,
            None,
            marks=pytest.mark.defect("N", "plants are taken for animals"),
        ),
        pytest.param(
            "labels not learnt yet",
            by_wording,
            kind,
            None,
            marks=pytest.mark.defect("N", "labels by the wording, before they are learnt"),
        ),
    ],
)
def test_labels(case: str, said: Any, gold: Any, code: str | None, now: Now) -> None:
    codes = found(lambda s: labelled(s, said, gold))
    assert set(codes) & {"M155", "M156"} == ({code} if code else set()), case
    now(codes[code].what if code else "silent")


def test_code_that_computes_the_answer_is_no_wrong_answer() -> None:
    """The last number of `print(201 * 90)` is not the row's answer, and the reward of what it prints is 1."""

    def codes(paid: float) -> set[str]:
        def rounds(step: int) -> Table:
            made = labelled(step, lambda n, g: f"print({n * 7919} % {n + 1})", other_row)
            return {**made, "reward/match": [paid] * len(made["step"])}

        return set(found(rounds, accuracy="match"))

    assert "M155" in codes(0.0), "without the reward it looks like answers that were shuffled"
    assert "M155" not in codes(1.0)


@pytest.mark.slow
def test_few_labels_need_more_prompts() -> None:
    def codes(steps: int) -> set[str]:
        return set(found(lambda s: labelled(s, by_wording, kind), steps=steps))

    assert "M155" not in codes(15)
    assert "M155" in codes(16), "128 prompts"


def test_a_match_is_of_the_order_not_of_chance() -> None:
    numbers = [str(n) for n in range(40)]
    assert match(numbers, numbers) == pytest.approx(1)
    assert match(["7"] * 40, numbers) == pytest.approx(0, abs=0.1), "the same to all"
    assert match(numbers, ["7"] * 40) == 0


COPIED = "which of these rivers is the longest"

PLANTED = [
    pytest.param(
        lambda s: table(
            s, lambda p, g, t: float((s * 31 + p * 17 + g * 5) % 7 > 3), text=lambda s, p, g: f"{WORDS[g // 4]} {p}"
        ),
        "M157",
        "does not repeat",
        marks=pytest.mark.defect("B13", "a reward that is chance"),
    ),
    pytest.param(
        lambda s: table(s, lambda p, g, t: 1.0 + 0.01 * ((s + g) % 3), text=lambda s, p, g: f"{WORDS[g // 2]} {p}"),
        "M157",
        "does not repeat",
        marks=pytest.mark.defect("N", "a judge with a little noise"),
    ),
    pytest.param(
        lambda s: table(
            s,
            lambda p, g, t: len(set(t.split()) & set(COPIED.split())) / 7,
            text=lambda s, p, g: " ".join(COPIED.split()[: g + p % 2]),
            question=lambda p, g, t: COPIED,
        ),
        "M158",
        "Reward is the prompt",
        marks=pytest.mark.defect("B13", "copying the prompt pays"),
    ),
    pytest.param(
        lambda s: table(s, r(1.0), text=lambda s, p, g: f"{COPIED} {WORDS[g]}", question=lambda p, g, t: COPIED),
        "M158",
        "copy it",
        marks=pytest.mark.defect("D10", "completions copy the prompt at the highest reward"),
    ),
    pytest.param(
        lambda s: table(s, r(1.0), text=lambda s, p, g: "animal, plant, tool", answer=lambda p, g, t: kind(p)),
        "M159",
        "name every answer there is",
        marks=pytest.mark.defect("D10", "completions name every answer of the dataset"),
    ),
    pytest.param(
        lambda s: table(s, by_prompt, text=lambda s, p, g: "I cannot say.", prompts=8),
        "M159",
        "One text for all prompts",
        marks=pytest.mark.defect("D10", "one and the same text for all prompts"),
    ),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("rounds", "code", "words"), PLANTED)
def test_rewards(rounds: Any, code: str, words: str, now: Now) -> None:
    if code == "M159":  # alike within three rounds: of more than eight prompts
        one = rounds
        rounds = lambda s: {name: [*x, *x] for name, x in one(s).items()}  # noqa: E731
    codes = found(rounds)
    assert words in codes[code].what
    now(codes[code].what)


HEALTHY = {
    "an extractive answer": lambda s: table(
        s,
        lambda p, g, t: float("longest" in t),
        text=lambda s, p, g: f"it is the {('longest', WORDS[g])[(g + s) % 2]} {WORDS[(g + p) % 20]}",
        question=lambda p, g, t: COPIED,
    ),
    "a chain of thought names all labels": lambda s: table(
        s,
        alternating,
        text=lambda s, p, g: (
            f"it could be an animal, a plant or a tool; since {' '.join(WORDS[: 6 + g])} it is {kind(p)}"
        ),
        answer=lambda p, g, t: kind(p),
    ),
    "all rows have one answer": lambda s: table(s, r(1.0), text=lambda s, p, g: "yes", answer=lambda p, g, t: "yes"),
    "equal texts, equal rewards": lambda s: table(s, lambda p, g, t: float(len(t)), text=lambda s, p, g: WORDS[g // 3]),
    "rewards that are None": lambda s: table(s, r(float("nan")), text=lambda s, p, g: WORDS[g // 3]),
    "questions of a word or two": lambda s: table(
        s,
        lambda p, g, t: float("7" in t),
        text=lambda s, p, g: f"7 + {p} {WORDS[g]}",
        question=lambda p, g, t: f"7 {p}",
    ),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.defect("N", f"healthy: {name}")) for name in HEALTHY]
)
def test_healthy_rounds_are_left_in_peace(name: str, now: Now) -> None:
    codes = set(found(HEALTHY[name])) & {"M155", "M156", "M157", "M158", "M159"}
    assert not codes
    now("silent")


# ---- what may not be called right, solved or nothing ----


def double(made: Table) -> Table:
    """A round of eight prompts: those of `table` and four more."""
    more = {"question": [f"{q} again" for q in made["prompt"]], "prompt": [f"{q} again" for q in made["prompt"]]}
    first = {**made, "question": made["prompt"]}
    return {name: [*values, *({**first, **more}[name])] for name, values in first.items()}


def flat_after(step: int, end: float, **columns: Any) -> Callable[[int], Table]:
    return lambda s: table(s, **columns) if s <= step else table(s, r(end), **columns)


@pytest.mark.defect("D3", "M101 '100 % all right' with 0 of 1,024 right answers")
def test_all_right_only_where_it_is_known(now: Now) -> None:
    def flat(step: int) -> dict[str, float]:
        return {"frac_reward_zero_std": 0.25 if step == 1 else 1.0}

    wrong = found(flat_after(1, 0.0, contains_answer=lambda p, g, t: 0.0), flat)["M101"]
    assert wrong.severity == "warning"
    assert "100 % all wrong" in wrong.what
    unearned = found(flat_after(1, 1.0, contains_answer=lambda p, g, t: 0.0), flat)["M101"]
    assert unearned.severity == "warning"
    assert "100 % of these are paid as the best are, without their row's answer" in unearned.what
    assert "all right" not in unearned.what
    contained = found(flat_after(1, 1.0, contains_answer=lambda p, g, t: 1.0), flat)["M101"]
    assert "right" not in contained.what, "a text that lists every answer contains the right one"
    right = found(flat_after(1, 1.0), flat, accuracy="score")["M101"]
    assert "100 % all right" in right.what
    listed = found(
        lambda s: double(table(s, r(1.0), text=lambda s, p, g: "animal, plant, tool", answer=lambda p, g, t: kind(p))),
        flat,
        accuracy="score",
    )["M101"]
    assert "right" not in listed.what
    assert "M158, M159 or M160" in listed.fix
    unknown = found(flat_after(1, 1.0), flat)["M101"]
    assert "right" not in unknown.what
    assert "is it earned?" in unknown.fix
    assert "on_finding: {M101: stop}" in unknown.fix
    now(unearned.what)


@pytest.mark.cases(1)
@pytest.mark.defect("D3", "M121 'The prompts are solved'")
@pytest.mark.parametrize(
    ("text", "accuracy", "solved"),
    [(None, "score", True), (None, None, False), ("animal, plant, tool", "score", False)],
    ids=["by accuracy", "by the reward", "every label listed"],
)
def test_solved_only_where_it_is_known(text: str | None, accuracy: str | None, solved: bool, now: Now) -> None:
    written = None if text is None else lambda s, p, g: text
    said = found(
        lambda s: double(table(s, alternating if s < 4 else r(1.0), text=written, answer=lambda p, g, t: kind(p))),
        lambda s: {"reward_std": 0.5 if s < 7 else 0.01, "reward": 0.1 * min(s, 10)},
        accuracy=accuracy,
    )["M121"]
    assert ("are right." in said.why) is solved
    now(said.why)


@pytest.mark.defect("D3", "a hacked run called 'Better'")
def test_better_by_the_reward_alone(now: Now) -> None:
    rise = paired_difference(np.linspace(0.4, 0.6, 40), np.ones(40))
    said = verdict(rise, "reward", ("before", "after"))
    assert said.startswith("Reward rose: reward rose")
    assert "No reward tells right from wrong, so whether the answers are better is not known: `accuracy: NAME`" in said
    assert verdict(rise, "accuracy", ("before", "after")).startswith("Better: ")
    now(said)


@pytest.mark.parametrize(
    ("texts", "answers", "words"),
    [
        (["a"] * 9, [None], "One text for all prompts"),
        (["a"] * 7, [None], None),
        (["a", "b", "c", "d", "e", "f", "g", "h", "i"], [None], None),
        (["yes"] * 9, ["yes"], None),
        (["red, blue", "blue or red"], ["red", "blue"], "every answer there is"),
        (["red and not blue", "it is red, not blue"], ["red", "blue"], None),
        (["red blue green now", "green blue red"], ["red", "blue", "green"], "every answer there is"),
        ([""] * 9, [None], None),
    ],
)
def test_what_completions_have_in_common(texts: Any, answers: Any, words: str | None) -> None:
    count = 10 if len(texts) == 2 else len(texts)
    sample = JudgedTexts(
        texts=[texts[i % len(texts)] for i in range(count)],
        questions=[f"question {i}" for i in range(count)],
        answers=[answers[i % len(answers)] for i in range(count)],
        paid=[True] * count,
    )
    said = [sign.what for sign in signs(sample)]
    assert (words in said[0]) if words and said else not said and words is None, said


@pytest.mark.defect("N", "compare --also on four prompts: 'No regression shown'")
def test_no_regression_is_not_shown_by_a_handful(now: Now) -> None:
    few = regression_check(paired_test(paired_difference(np.ones(4), np.array([0.0, 1, 1, 1]))), "gsm8k")
    assert "No regression" not in few
    many = regression_check(paired_test(paired_difference(np.ones(40), np.ones(40))), "gsm8k")
    assert many.startswith("No regression shown")
    now(few)


def report(steps: int, reward: float, **more: Any) -> HealthReport:
    history = tuple(StepMetrics(step=s, values={"reward": reward}) for s in range(1, steps + 1))
    given = {"source": "runs/x", "history": history, "issues": (), "has_completions": True} | more
    return HealthReport(reward=(reward,) * steps, **given)


@pytest.mark.defect("D14", "'Nothing is the matter' of a run given up at 0")
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (report(40, 0.0), "but the reward was 0 in all of 40 steps"),
        (report(3, 0.5), "in 3 steps, which is too few for most of them"),
        (report(FEW_STEPS, 0.5, has_completions=False), "those that read completions had none"),
        (report(40, 0.5), "No reward tells right from wrong"),
        (report(40, 0.5, accuracy="score"), "in 40 steps and their recorded completions."),
    ],
)
def test_the_doctor_says_no_more_than_it_saw(made: HealthReport, words: str, now: Now) -> None:
    assert words in made.nothing
    assert made.nothing.endswith("recorded completions.") is (words == "in 40 steps and their recorded completions.")
    now(made.nothing)


@pytest.mark.defect("H11", "three ends of one curve")
def test_one_curve_has_two_ends(now: Now) -> None:
    from podium.runs.report.summary import ends as of_report

    assert of_report is ends
    curve = [0.1 * (i % 7) + 0.01 * i for i in range(60)]
    flat = found(numbers=lambda s: {"reward": curve[s - 1]}, steps=60)
    shown = report(60, 0.0, planned=80)
    assert shown.head == "60 of 80 steps, reward 0.000 in the first 6 steps, 0.000 in the last 6 steps"
    assert all("first 6 steps" in flat[code].what for code in ("M104", "M111") if code in flat)
    now(shown.head)


# ---- cures that fit ----


@pytest.mark.defect("D6", "82 of 320 completions contained the answer, and the reward was 0")
@pytest.mark.parametrize(("share", "missed"), [(4, True), (1000, False)])
def test_a_silent_reward_with_right_answers_in_sight(share: int, missed: bool, now: Now) -> None:
    said = found(lambda s: table(s, r(0.0), contains_answer=lambda p, g, t: float((p * 8 + g) % share == 0 and p > 0)))[
        "M103"
    ]
    assert ("contain their row's answer" in said.what) is missed
    assert ("podium rewards test" in said.fix) is missed
    now(f"{said.what} {said.fix}")


@pytest.mark.defect("D9", "repeats on tasks with one-token answers")
def test_short_answers_are_alike_by_nature(now: Now) -> None:
    assert "M122" not in found(lambda s: table(s, by_prompt, text=lambda s, p, g: f"label {p}"))
    long = found(lambda s: table(s, by_prompt, text=lambda s, p, g: f"it always has been and will be {p}"))["M122"]
    assert "top_k" not in long.fix
    set_so = run_settings({"settings": {"generation_kwargs": {"top_k": 1, "top_p": 0.5}}})
    assert set_so.narrowed == {"top_k": 1, "top_p": 0.5}
    named = found(
        lambda s: table(s, by_prompt, text=lambda s, p, g: f"it always has been and will be {p}"),
        narrowed=set_so.narrowed,
    )["M122"]
    assert named.fix.startswith("Remove top_k: 1, top_p: 0.5 from")
    now(long.fix)


@pytest.mark.defect("D15", "M105's cure would take weight off the answer")
def test_a_reward_that_is_won_asks_for_no_weight(now: Now) -> None:
    def rounds(form: float) -> Callable[[int], Table]:
        return lambda s: table(s, rewards={"answer": alternating, "form": lambda p, g, t: form - 0.001 * (g % 2)})

    assert "M105" not in found(rounds(1.0), steps=20)
    said = found(
        lambda s: table(s, rewards={"answer": alternating, "form": lambda p, g, t: float(s == 1 and g == 0)}), steps=20
    )["M105"]
    assert "Weigh" not in said.fix
    now(f"silent where the others are won; else: {said.fix}")


@pytest.mark.defect("D15", "M110 quotes template tokens")
def test_prompts_are_quoted_without_their_template(now: Now) -> None:
    said = found(
        lambda s: (
            table(
                s,
                lambda p, g, t: float(p if p < 2 else g % 2),
                prompt=lambda s, p: f"<|im_start|>user\n{s % 3} {p}<|im_end|>\n<|im_start|>assistant\n",
            )
            | {"question": [f"{s % 3} {p}" for p in range(4) for _ in range(8)]}
        )
    )["M110"]
    assert "<|" not in said.what
    now(said.what)


@pytest.mark.defect("B11", "M146 in a plain-text run: <rem> in 0 %")
def test_a_word_between_angle_brackets_is_no_tag(now: Now) -> None:
    codes = found(
        lambda s: table(
            s,
            text=lambda s, p, g: f"{WORDS[g]} {'<rem>' if (s, p, g) == (1, 0, 0) else p} {WORDS[p]}",
            rewards={"tag_format": r(0.0), "right": alternating},
        )
    )
    assert "although they do have tags" not in "".join(each.what for each in codes.values())
    now(codes["M146"].what if "M146" in codes else codes["M103"].what)


@pytest.mark.defect("F3", "M111 by adaptive weights")
def test_adaptive_weights_make_no_reward_fall(now: Now) -> None:
    def numbers(s: int) -> dict[str, float]:
        return {"reward": 1 - 0.08 * s, "rewards/a/mean": 0.5, "rewards/b/mean": 0.1 + 0.01 * s}

    weights = {"a": 1.0, "b": 1.0}
    assert "M111" in found(numbers=numbers, weights=weights)
    assert "M111" not in found(numbers=numbers, weights=weights, adaptive=True)
    assert run_settings({"settings": {"adaptive_rewards": True}}).adaptive
    assert not run_settings({"settings": {"adaptive_rewards": False}}).adaptive
    now("silent: the reward is the sum with the weights as they were given")


@pytest.mark.defect("F3", "a reward that falls under adaptive weights")
def test_what_falls_under_adaptive_weights_is_seen() -> None:
    def numbers(s: int) -> dict[str, float]:
        return {"reward": 0.5, "rewards/a/mean": 1 - 0.08 * s}

    assert "M111" in found(numbers=numbers, weights={"a": 1.0}, adaptive=True)


# ---- shown ----


@pytest.mark.defect("D11", "time left after the first step")
def test_no_time_left_from_the_first_step(monkeypatch: pytest.MonkeyPatch, now: Now) -> None:
    from podium.trainer import health

    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(health.time, "perf_counter", lambda: next(clock))
    from rich.console import Console

    out = io.StringIO()
    line = health.ProgressLine(Console(file=out, width=200))

    class State:
        max_steps, is_world_process_zero, num_input_tokens_seen = 10, True, 0
        global_step = 0

    line.on_train_begin(SimpleNamespace(), State(), None)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        state = State()
        state.global_step = step
        line.on_step_end(None, state, None)  # type: ignore[arg-type]
        line.on_log(None, state, None, {"reward": 0.5, "loss": 0.1})  # type: ignore[arg-type]
    first, second, third = out.getvalue().splitlines()
    assert first.endswith("  ... left"), "it holds the proof and completions that have not learnt to end"
    assert "1:20 left" in second
    assert "1:10 left" in third
    now(first)


@pytest.mark.defect("H5", "(loss 0.2545, no sign of progress)")
def test_the_loss_is_not_said_to_show_the_lack_of_progress(now: Now) -> None:
    from podium.trainer.health import progress_line

    line = progress_line(3, 5, {"loss": 0.25}, 4.0)
    assert "no sign of progress" not in line
    assert "loss" not in line, "a loss of GRPO is near zero by construction; `metrics.jsonl` and the report have it"
    now(line)


@pytest.mark.defect("D14", "findings land inside the progress bar")
@pytest.mark.defect("H15", "notes are not shown in Python")
def test_notes_are_shown_above_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, now: Now
) -> None:
    from tqdm import tqdm

    from podium.trainer.health import AboveTheBar, show_notes

    podium, root = logging.getLogger("podium"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(podium, "handlers", [])
    monkeypatch.setattr(podium, "propagate", True)
    level = podium.level
    try:
        show_notes()
        show_notes()
        assert [type(handler) for handler in podium.handlers] == [AboveTheBar]
        with tqdm(total=2) as bar:
            bar.update()
            logging.getLogger("podium.trainer.proof.first_batch").info("proof on the first batch, 1.0 s")
            logging.getLogger("podium.trainer.health").warning("M122 86 %% of completions repeat")
    finally:
        podium.setLevel(level)
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert "note: proof on the first batch, 1.0 s" in lines
    assert next(line for line in lines if "M122" in line).startswith("warning: M122")
    now("on lines of their own: note: proof on the first batch, ...; warning: M122 ...")


@pytest.mark.defect("N", "a program with logging of its own")
def test_logging_that_was_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch, now: Now) -> None:
    from podium.trainer.health import show_notes

    podium = logging.getLogger("podium")
    monkeypatch.setattr(podium, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    show_notes()
    assert podium.handlers == []
    now("left alone")


@pytest.mark.defect("D12", "accuracy depends on words in a reward's name")
def test_who_says_right_or_wrong_is_said() -> None:
    """`podium sample` and verdicts name the key; tests/unit/test_sampled.py has the first."""
    a, b = np.linspace(0.4, 0.6, 40), np.ones(40)
    assert "`accuracy: NAME`" in verdict(paired_difference(a, b), "reward", ("A", "B"))


def test_codes_of_healthy_rounds_stay_few() -> None:
    assert codes_of(rounds=table, steps=30) == {}
