"""The test of rewards before training: bad rewards that must be named, healthy ones that must not be warned of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.legitimate_rewards import REWARDS
from podium import GRPOConfig, GRPOTrainer, check
from podium.cli.tested import nothing
from podium.console.terminal import counted
from podium.data import PromptBuilder
from podium.errors import Finding, RewardError, overrule
from podium.rewards import library_reward, resolve_rewards
from podium.tester import pretest as pretests
from podium.tester.pretest import SHAPES, RewardTest, pretest, refuse_shapes
from podium.tester.reach import reach_of
from podium.tester.rewards import RewardReport, examine
from podium.testing import CHATML, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("pretest_each_time")

MOODS = ("positive", "negative", "mixed")
ROWS = [
    {"prompt": f"Sentiment of: film {n} was {word}.", "label": MOODS[n % 3], "town": f"Town{n % 5}"}
    for n, word in enumerate(["dull", "great", "odd", "fine", "poor", "lovely"] * 3)
]
SUMS = [{"prompt": f"{n} + 7 = ", "answer": str(n + 7)} for n in range(10, 30)]


def result_of(*rewards: Any, rows: Any = ROWS, weights: Any = None) -> RewardTest:
    return pretest(resolve_rewards(list(rewards)), weights or [1.0] * len(rewards), rows)


def codes(test: RewardTest, *severities: str) -> set[str]:
    return {finding.code for finding in test.findings if not severities or finding.severity in severities}


# ---- bad ones ----


def pays_copies(prompts, completions, label):
    return [float(p in c or c.strip() == g) for p, c, g in zip(prompts, completions, label, strict=True)]


def two_columns(completions, label, town):
    return [float(a in c and b in c) for c, a, b in zip(completions, label, town, strict=True)]


def constant(completions, label):
    return [1.0] * len(completions)


def always_true(completions, label):
    return [float("" in c and g in g) for c, g in zip(completions, label, strict=True)]


def listing(completions, label):
    return [float(g in re.findall(r"\w+", c)) for c, g in zip(completions, label, strict=True)]


def case_sensitive(completions, label):
    return [float(c.strip() == g) for c, g in zip(completions, label, strict=True)]


def trailing_space(completions, label):
    return [float(c == g + " ") for c, g in zip(completions, label, strict=True)]


def raises_on_empty(completions, label):
    return [float(c.split()[0] == g) for c, g in zip(completions, label, strict=True)]


def none_always(completions, label):
    return [None for _ in completions]


def slow(completions, label):
    time.sleep(2.0)
    return case_sensitive(completions, label)


async def asks_a_service(completions, label):
    await asyncio.sleep(0)
    return case_sensitive(completions, label)


BAD = {
    "pays_copies": (pays_copies, {"W117"}, "error"),
    "two_columns": (two_columns, {"W106"}, "error"),
    "constant": (constant, {"W008"}, "warning"),
    "always_true": (always_true, {"W008"}, "warning"),
    "listing": (listing, {"W106"}, "error"),
    "case_sensitive": (case_sensitive, {"W119"}, "note"),
    "trailing_space": (trailing_space, {"W008"}, "warning"),
    "raises_on_empty": (raises_on_empty, {"W010"}, "warning"),
    "none_always": (none_always, {"W008"}, "warning"),
    "slow": (slow, {"W122"}, "warning"),
    "asks_a_service": (asks_a_service, {"W122"}, "warning"),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_reward_is_never_nothing_found(name: str) -> None:
    reward, expected, severity = BAD[name]
    test = result_of(reward)
    assert expected <= codes(test, severity)
    assert counted(test.findings)


def test_nothing_found_counts_the_scores() -> None:
    """And without a score it is not said."""
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20, 40)]
    tested = examine(library_reward("exact_match"), rows)
    assert not tested.findings
    known = sum(value == value for line in tested.lines for value in line.values)
    assert nothing([tested]).startswith(
        f"nothing found in {known:,} scores of {len(tested.lines)} kinds of completions"
    )
    assert nothing([tested]).endswith("for 8 rows")
    for empty in ([], [RewardReport(name="refused")], [replace(tested, lines=())]):
        assert "nothing found" not in nothing(empty)


# ---- healthy ones ----


def stripped(completions, label):
    return [float(c.strip().casefold() == g) for c, g in zip(completions, label, strict=True)]


def in_tags(completions, label):
    found = [re.findall(r"<answer>(.*?)</answer>", c, re.DOTALL) for c in completions]
    return [float(bool(f) and f[-1].strip().lower() == g) for f, g in zip(found, label, strict=True)]


def own_form(completions, label):
    """Read `MOOD=positive`, a form that no list of usual ones has."""
    found = [re.findall(r"MOOD=\s*(\w+)\s*$", c) for c in completions]
    return [float(bool(f) and f[-1].lower() == g) for f, g in zip(found, label, strict=True)]


def as_json(completions, label, town):
    def read(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return None

    return [float(read(c) == {"label": a, "town": b}) for c, a, b in zip(completions, label, town, strict=True)]


def last_number(completions, answer):
    found = [re.findall(r"-?\d+(?:\.\d+)?", c) for c in completions]
    return [float(bool(f) and float(f[-1]) == float(g)) for f, g in zip(found, answer, strict=True)]


def whole_number(completions, answer):
    return [float(c.strip() == g) for c, g in zip(completions, answer, strict=True)]


def brevity(completions):
    return [-min(len(c), 200) / 200 for c in completions]


def partial(completions, label):
    right = stripped(completions, label)
    return [max(value, 0.1 * c.strip().isalpha()) for c, value in zip(completions, right, strict=True)]


def from_kwargs(completions, **kwargs):
    return stripped(completions, kwargs["label"])


class Remembers:
    """As `stripped`, with a count of its calls."""

    __name__ = "remembers"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions, label):
        self.calls += 1
        return stripped(completions, label)


HEALTHY = {
    "stripped": (stripped, ROWS),
    "in_tags": (in_tags, ROWS),
    "own_form": (own_form, ROWS),
    "as_json": (as_json, ROWS),
    "last_number": (last_number, SUMS),
    "whole_number": (whole_number, SUMS),
    "brevity": (brevity, ROWS),
    "partial": (partial, ROWS),
    "from_kwargs": (from_kwargs, ROWS),
    "remembers": (Remembers(), ROWS),
    "library": (library_reward("answer_correct"), SUMS),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_reward_is_not_warned_of(name: str) -> None:
    reward, rows = HEALTHY[name]
    test = result_of(reward, rows=rows)
    assert [finding for finding in test.findings if finding.severity != "note"] == []


ODD = ("brevity", "exact_count", "length_modulo", "cosine_length", "keyword_share", "tiny", "penalty_only")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.partition(",")[0] in ODD else [pytest.mark.slow]) for n in REWARDS]
)
def test_a_legitimate_reward_is_never_called_wrong(name: str) -> None:
    assert codes(result_of(REWARDS[name].make(), rows=REWARDS[name].rows()), "error") == set()


# ---- what it leaves behind, and how long it takes ----


def test_a_function_with_a_memory_is_as_before() -> None:
    counts = Remembers()
    assert codes(result_of(counts), "error", "warning") == set()
    assert counts.calls == 0


@pytest.mark.slow
def test_it_takes_under_three_seconds_of_the_processor() -> None:
    started = time.process_time(), _children()
    result_of(in_tags, stripped, as_json, brevity)
    assert time.process_time() - started[0] + _children() - started[1] < 3.0


def _children() -> float:
    used = os.times()
    return used.children_user + used.children_system


def test_a_hang_is_ended_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(completions, label):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)

    monkeypatch.setattr(pretests, "SECONDS", 0.3)
    [finding] = result_of(hangs).findings
    assert (finding.code, finding.severity) == ("W122", "warning")
    assert "did not end within 0.3 s" in finding.what


def test_code_that_ends_its_process_ends_no_other() -> None:
    def leaves(completions, label):
        os.kill(os.getpid(), signal.SIGKILL)

    [finding] = result_of(leaves).findings
    assert finding.code == "W122"
    assert "its process ended" in finding.what


# ---- the table ----


@pytest.mark.slow
def test_the_table_has_what_each_text_scores() -> None:
    table = result_of(listing, brevity, weights=[1.0, 0.1]).table
    assert table is not None
    assert table.columns == ("listing", "brevity", "sum")
    by_text = {line.text: line for line in table.lines}
    assert by_text["every answer listed"].means[0] == by_text["right answer, bare"].means[0] == 1.0
    assert by_text["every answer listed"].marks == ("!", "", "!")
    assert by_text["right, in other case"].marks[0] == "?"
    assert by_text["no answer: empty text"].marks == ("", "", "")
    assert len(table.lines) <= 9
    assert len({line.index("1.00") for line in table.as_text() if "1.00" in line}) == 1


def test_the_form_of_the_table_is_the_one_that_scores() -> None:
    table = result_of(in_tags).table
    assert table is not None
    assert table.form == "<answer> tags"
    assert [line.means[0] for line in table.lines][:3] == [0.0, 1.0, 0.0]


@pytest.mark.slow
def test_a_sum_that_pays_for_nothing_is_named_where_each_reward_is_healthy() -> None:
    assert codes(result_of(in_tags, brevity, weights=[1.0, 1.0]), "error", "warning") == set()
    assert codes(result_of(in_tags, brevity, weights=[0.1, 5.0]), "error") == set()
    assert codes(result_of(in_tags, brevity, weights=[0.1, 5.0]), "warning") == {"W121"}


def test_a_reward_of_the_library_that_cannot_read_the_answers_is_named() -> None:
    rows = [{"prompt": row["prompt"], "answer": row["label"]} for row in ROWS]
    assert codes(result_of(library_reward("numeric_match"), rows=rows), "warning") == {"W101"}
    assert codes(result_of(library_reward("answer_correct"), rows=SUMS), "warning") == set()


@pytest.mark.slow
def test_examples_in_the_prompt_show_the_form() -> None:
    def arrow(completions, label):
        pattern = "Result" + " => "
        return [float(c[0]["content"] == pattern + g) for c, g in zip(completions, label, strict=True)]

    turns = [{"role": "assistant", "content": f"Result => {mood}"} for mood in ("positive", "mixed")]

    def chats(before: list[dict[str, str]]) -> list[dict[str, Any]]:
        return [{**row, "prompt": [*before, {"role": "user", "content": row["prompt"]}]} for row in ROWS]

    assert codes(result_of(arrow, rows=chats([])), "warning", "error") == {"W008"}
    assert codes(result_of(arrow, rows=chats(turns)), "warning", "error") == set()


# ---- the same verdict each time ----

FILE = """\
from helper import is_right

def right(completions, label):
    return [float(is_right(text, gold)) for text, gold in zip(completions, label)]
"""


@pytest.mark.slow
def test_a_changed_module_below_the_file_changes_the_verdict(tmp_path: Path) -> None:
    """Another folder for each version, as this process keeps the workers of a file."""

    def verdict(folder: str, expression: str) -> set[str]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"def is_right(text, gold):\n    return {expression}\n")
        (tmp_path / folder / "r.py").write_text(FILE)
        return codes(result_of(f"{tmp_path}/{folder}/r.py:right"), "error")

    assert verdict("one", "gold in text") == {"W106", "W107"}
    assert verdict("two", "gold == text.strip().lower()") == set()


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    result_of(library_reward("answer_correct"), rows=SUMS)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_waiting_calls_change_no_verdict() -> None:
    """Calls that take 3 ms longer for each completion, at first: a fixed number of rows is tried all the same."""

    def waits(reward: Any) -> Any:
        left = [6]

        def slowly(completions, label):
            left[0] -= 1
            time.sleep(0.003 * len(completions) * (left[0] >= 0))
            return reward(completions, label=label) if reward is listing else reward(completions)

        return slowly

    for reward in (listing, brevity):
        quick, slowly = result_of(reward), result_of(waits(reward))
        assert {(each.code, each.severity) for each in slowly.findings} >= {
            (each.code, each.severity) for each in quick.findings if each.severity != "note"
        }
        assert codes(slowly, "error") == codes(quick, "error")


def test_three_rows_call_no_function_wrong() -> None:
    assert codes(result_of(listing, rows=ROWS[:3]), "error") == set()
    assert codes(result_of(listing, rows=ROWS[:3]), "warning") == {"W106"}


# ---- check, and the trainer ----


def found_by_check(reward: Any, rows: Any = ROWS, **more: Any) -> list[Finding]:
    args = GRPOConfig("out", num_generations=2, per_device_train_batch_size=2, report_to=[], **more)
    found = check(tiny_model("llama"), reward, args, rows, processing_class=tiny_tokenizer())
    return [finding for finding in found if finding.code.startswith("W") and finding.code != "W123"]


def test_check_gives_all_findings_and_errors_stay_errors() -> None:
    severities = {finding.code: finding.severity for finding in found_by_check(listing)}
    assert severities == {"W106": "error", "W119": "note"}
    [overruled] = found_by_check(listing, on_finding={"W106": "ignore", "W119": "ignore"})
    assert (overruled.code, overruled.severity) == ("W106", "warning")


def test_the_trainer_goes_on_where_the_error_is_overruled(make_trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": row["prompt"], "label": row["label"]} for row in ROWS]
    wish = {"on_finding": {"W106": "ignore"}}
    trainer = make_trainer(listing, rows=rows, max_steps=1, prove_first_batch=True, **wish)
    with caplog.at_level(logging.INFO, logger="podium"):
        trainer.train()
    assert trainer.state.global_step == 1
    found = [(each.code, each.severity) for each in trainer.health.found if each.code == "W106"]
    assert found == [("W106", "warning")]
    assert any("every answer listed" in message for message in caplog.messages)
    kept = json.loads((Path(trainer.args.output_dir) / "reward_test.json").read_text())
    assert kept["table"]["columns"] == ["listing"]


def test_an_error_ends_it_before_the_first_step_as_podium_train_does(make_trainer: Any) -> None:
    rows = [{"prompt": row["prompt"], "label": row["label"]} for row in ROWS]
    trainer = make_trainer(listing, rows=rows, max_steps=1, prove_first_batch=True)
    with pytest.raises(RewardError, match="all candidates") as raised:
        trainer.train()
    assert overrule("W106") in str(raised.value)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda completions, environments=None, **kw: [each.score for each in environments],
        lambda completions, **kw: [each.score for each in kw["environments"]],
        lambda completions, **kw: [getattr(each, "score", 0.0) for each in kw.get("environments") or completions],
    ],
    ids=["default", "subscript", "get"],
)
def test_a_function_that_looks_into_environments_is_left_to_the_run(read: Any) -> None:
    found = pretest(resolve_rewards([read]), [1.0], ROWS, environments=True).findings
    assert [(finding.code, finding.severity) for finding in found] == [("W122", "note")]
    assert found[0].severity == "note"


def builder(*, opened: str = "", special: bool = False) -> PromptBuilder:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace("assistant\n' }}{% endif %}", f"assistant\n{opened}' }}}}{{% endif %}}")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    return PromptBuilder(tokenizer=tokenizer)


def thought_first(completions: Any, **kwargs: Any) -> list[float]:
    return [float(bool(re.match(r"<think>.+</think>\s*\S", text, re.S))) for text in completions]


def thought(completions: Any, **kwargs: Any) -> list[float]:
    return [float(bool(re.search(r"</think>\s*\S", text, re.S))) for text in completions]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("reward", "ending", "severity"),
    [
        (library_reward("think_format"), " <think>\n", "error"),
        (thought_first, "<think>", "error"),
        (library_reward("answer_correct"), " <answer>", "error"),
        (library_reward("answer_format"), " <answer>", "error"),
        (library_reward("xml_format"), "\n<reasoning>\n", "error"),
        (thought, "<think>", None),
        (library_reward("numeric_match"), "<think>", None),
        (library_reward("think_format"), " Answer in <think> tags.", None),
    ],
)
def test_a_form_that_the_prompt_has_begun_is_named(reward: Any, ending: str, severity: str | None) -> None:
    rows = [{**row, "prompt": row["prompt"] + ending} for row in SUMS]
    found = pretest(resolve_rewards([reward]), [1.0], rows, reach=reach_of(builder(), rows)).findings
    assert [each.severity for each in found if each.code == "W125"] == [severity] * (severity is not None)


def test_a_template_or_a_message_may_begin_the_form() -> None:
    chat = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS]
    begun = [{**row, "prompt": [*row["prompt"], {"role": "assistant", "content": "<think>\nOkay,"}]} for row in chat]
    assert set(reach_of(builder(opened="<think>\n"), chat).openings) == {"<think>"}
    assert set(reach_of(builder(), begun).openings) == {"<think>"}
    assert reach_of(builder(), chat).openings == ()


def test_tags_that_are_special_tokens_do_not_reach_a_reward() -> None:
    reach = reach_of(builder(special=True), SUMS)
    test = pretest(resolve_rewards([library_reward("answer_correct")]), [1.0], SUMS, reach=reach)
    [found] = [finding for finding in test.findings if finding.code == "W125"]
    assert found.severity == "error"
    assert "`</answer>`, `<answer>` are special tokens" in found.what
    assert not pretest(resolve_rewards([library_reward("numeric_match")]), [1.0], SUMS, reach=reach).findings


def length_of(completions: Any, **kwargs: Any) -> list[int]:
    return [len(text) for text in completions]


def fails_at_times(completions: Any, **kwargs: Any) -> list[float]:
    return [1 / (len(text) - 2) for text in completions]


@pytest.mark.cases(3)
@pytest.mark.parametrize("answer", [0.5, "good", ["1", "0"], None, [1.0]], ids=str)
def test_an_answer_of_the_wrong_shape_is_refused_before_weights_load(answer: Any, monkeypatch: Any) -> None:
    def shapeless(completions: Any, **kwargs: Any) -> Any:
        return answer

    monkeypatch.setattr("podium.trainer.trainer.load_run", lambda prepared: pytest.fail("weights load"))
    args = GRPOConfig("out", per_device_train_batch_size=4, num_generations=4, max_completion_length=16)
    with pytest.raises(RewardError, match=r"`shapeless` .*returned") as refused:
        GRPOTrainer(tiny_model(), shapeless, args, SUMS, processing_class=tiny_tokenizer())
    assert refused.value.code in SHAPES
    assert not overrule(refused.value.code)


@pytest.mark.parametrize("reward", [length_of, fails_at_times])
def test_an_answer_of_the_right_shape_goes_on(reward: Any) -> None:
    refuse_shapes(resolve_rewards([reward]), SUMS, environments=False)
