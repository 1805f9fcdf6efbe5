"""What Podium tells a user to do: commands that exist, findings that agree, changes that cure, a run that is done."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import shlex
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import podium
from podium.checks import check_recipe
from podium.cli import app
from podium.console.next_command import NEXT, next_line
from podium.errors import Finding
from podium.errors.texts import as_line
from podium.planning.columns import chosen_columns, unnamed_columns
from podium.recipe.changes import apply_changes
from podium.recipe.cure import patched
from podium.recipe.document import parse
from podium.records import StepMetrics
from podium.runs.doctor import examine
from podium.runs.monitors import DETECTORS, Issue, RunSettings, agreed, diagnose, flat
from podium.runs.monitors.signs import JudgedTexts, signs
from podium.testing import save_tiny_model
from tests.unit import test_check_settings as of_settings
from tests.unit.test_agent_monitors import CURES, FAILURES, played
from tests.unit.test_checks import CASES
from tests.unit.test_monitors import KNOWN, NUMBERS, ROUNDS, healthy, table

PACKAGE = Path(podium.__file__).parent

# ---- the commands to type ----


def assert_parses(line: str) -> None:
    """`next: podium VERB ...` or the command alone is one that the command line takes."""
    program, *words = shlex.split(line.removeprefix("next: "))
    assert program == "podium"
    group = typer.main.get_command(app)
    context = group.make_context("podium", words, resilient_parsing=True)
    while hasattr(group, "commands"):
        name, group, words = group.resolve_command(context, words)
        assert group is not None, line
        context = (
            group.make_context(name, words, parent=context)
            if not hasattr(group, "commands")
            else group.make_context(name, words, parent=context, resilient_parsing=True)
        )
    if not context.allow_extra_args:
        assert not context.args


@pytest.mark.parametrize("outcome", NEXT)
def test_the_next_command_is_one_that_exists(outcome: str) -> None:
    names = {name for _, name, _, _ in string.Formatter().parse(NEXT[outcome]) if name}
    given = {name: {"code": "M101"}.get(name, f"my {name}") for name in names - {"recipe"}}
    assert_parses(next_line(outcome, recipe="run.yaml", **given))


def test_a_command_that_does_not_exist_fails() -> None:
    for line in ("podium cur run.yaml", "podium merge runs/a --outt b", "podium doctor"):
        with pytest.raises(Exception, match=r"No such|Missing|^2$"):
            assert_parses(line)


def write_run(folder: Path, findings: list[dict[str, Any]], right: float | None = None, better: bool = True) -> str:
    """The folder of a run of two steps, with findings, and a comparison whose second accuracy is `right`."""
    folder.mkdir(parents=True)
    rows = [{"severity": "warning", "what": "w", "why": "", "fix": "", "changes": {}, "step": 1, **f} for f in findings]
    (folder / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [{"step": step, "time": 0, "values": {"reward": 0.5}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "config.yaml").write_text("dataset: a.csv\ntemperature: 1.5\noutput_dir: out\n")
    if right is not None:
        (folder / "evaluation").mkdir()
        verdict = "Better: accuracy rose." if better else "No difference shown."
        shown = {"metric": "accuracy", "verdict": verdict, "main": {"a": 0.1, "b": right}, "is_better": better}
        (folder / "evaluation" / "comparison.json").write_text(json.dumps(shown))
    return str(folder)


HOT = {"code": "M191", "changes": {"temperature": 1.0}, "fix": "temperature: 1.0"}


def said(*words: str) -> str:
    ran = CliRunner().invoke(app, list(words))
    assert ran.exit_code == 0, ran.output
    return ran.output


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("findings", "right", "better", "doctor", "report"),
    [
        ([HOT], 0.99, True, "chat", "chat"),
        ([HOT], 0.99, False, "cure", "doctor"),
        ([HOT], 0.5, True, "cure", "doctor"),
        ([{"code": "M191"}], 0.5, True, "explain", "doctor"),
        ([], 0.5, False, "compare", "sample"),
        ([], 0.99, True, "chat", "chat"),
        ([], 0.5, True, "compare", "compare"),
        ([], None, False, "compare", "compare"),
    ],
)
def test_what_comes_next_follows_from_the_run(
    findings: list[dict[str, Any]], right: float, better: bool, doctor: str, report: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", findings, right, better)
    for verb, wanted in (("doctor", doctor), ("report", report)):
        [line] = [line for line in said(verb, folder).splitlines() if line.startswith("next: ")]
        assert_parses(line)
        assert shlex.split(line)[2] == wanted, (verb, line)


@pytest.mark.parametrize(("right", "better"), [(0.99, False), (0.5, True), (None, False)])
def test_a_run_is_done_only_where_its_model_is_better_and_nearly_always_right(
    right: float | None, better: bool, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", [HOT], right, better)
    assert "no setting needs to change" not in said("doctor", folder)
    assert "The run is done" not in said("cure", folder, "--dry-run")
    if right:
        write_run(tmp_path / "by reward", [HOT], right, True)
        compared = tmp_path / "by reward" / "evaluation" / "comparison.json"
        compared.write_text(compared.read_text().replace('"accuracy",', '"reward",'))
        assert "no setting needs to change" not in said("doctor", str(tmp_path / "by reward"))


def test_a_solved_run_is_told_that_it_is_done(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [HOT], 0.99)
    assert "no setting needs to change" in said("doctor", folder)
    assert "The run is done: Better" in said("cure", folder)
    assert not list(tmp_path.glob("*.cured.yaml"))
    assert "temperature: 1.5 -> 1.0" in said("cure", folder, "--codes", "M191", "--dry-run")


def test_no_cure_is_proposed_where_it_would_change_nothing(tmp_path: Path) -> None:
    assert "podium cure" in said("doctor", write_run(tmp_path / "hot", [HOT]))
    same = write_run(tmp_path / "same", [{**HOT, "changes": {"temperature": 1.5}}])
    assert "podium cure" not in said("doctor", same)
    (tmp_path / "hot" / "config.yaml").unlink()
    assert "podium cure" not in said("doctor", str(tmp_path / "hot"))
    log = tmp_path / "trainer_state.json"
    steps = [{"step": step, "reward": 0.5, "kl": 0.01 * 3**step} for step in range(1, 12)]
    log.write_text(json.dumps({"log_history": steps}))
    found = examine(log).issues
    assert found
    assert "podium cure" not in said("doctor", str(log))


def test_a_folder_with_a_space_is_quoted_in_the_line_to_type(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a run", [HOT])
    assert f"patch: podium cure '{folder}'" in said("doctor", folder)


def test_a_cured_recipe_begins_a_new_run(tmp_path: Path) -> None:
    values = {"output_dir": "run", "resume_from_checkpoint": True, "temperature": 1.5}
    text = patched(values, values, {"temperature": 1.0}, folder=tmp_path, target=tmp_path / "run.cured.yaml")
    assert text == "output_dir: run-cured\ntemperature: 1.0\n"


# ---- findings that agree ----


def test_two_findings_do_not_want_two_values(tmp_path: Path) -> None:
    findings = [
        {"code": "M191", "changes": {"learning_rate": 1e-5, "beta": 0.1}, "fix": "f"},
        {"code": "M192", "severity": "error", "changes": {"learning_rate": 1e-6}, "fix": "learning_rate: 1e-06"},
        {"code": "M193", "changes": {"learning_rate": 3e-5}, "fix": "learning_rate: 3e-05"},
    ]
    found = [issue.finding for issue in examine(write_run(tmp_path / "run", findings)).issues]
    assert [each.code for each in found] == ["M192", "M191", "M193"]
    assert [dict(each.changes) for each in found] == [{"learning_rate": 1e-6}, {"beta": 0.1}, {}]
    assert [each.fix for each in found[1:]] == ["beta: 0.1; learning_rate: see M192", "learning_rate: see M192"]


def contradictions(findings: list[Finding]) -> list[str]:
    values: dict[str, Any] = {}
    return [
        as_line(key, value)
        for each in findings
        for key, value in flat(each.changes)
        if values.setdefault(key, value) != value
    ]


def test_findings_about_one_setting_are_one_entry_of_the_doctor(tmp_path: Path) -> None:
    findings = [
        {
            "code": "M191",
            "changes": {"learning_rate": 1e-5},
            "fix": "Set learning_rate: 1e-05. Read completions.",
            "what": "one",
        },
        {
            "code": "M192",
            "severity": "error",
            "changes": {"learning_rate": 1e-6},
            "fix": "learning_rate: 1e-06",
            "what": "two",
        },
    ]
    folder = write_run(tmp_path / "run", findings)
    shown = said("doctor", folder)
    assert re.findall(r"(?m)^\d+\. ", shown) == ["1. "]
    assert "with it M191 (warning, in step 1): one Set learning_rate: see M192. Read completions." in shown
    assert said("cure", folder, "--dry-run").count("learning_rate:") == 1
    report = tmp_path / "page.html"
    said("report", folder, "-o", str(report))
    assert "learning_rate: 1e-05" not in report.read_text()


def test_findings_that_agree_stay_as_they_are() -> None:
    found = [Finding(code=c, severity="note", what="", changes={"lora": {"r": 8}}, fix=c) for c in ("M101", "M102")]
    assert agreed(found) == found
    assert not contradictions(found)
    other = Finding(code="M103", severity="warning", what="", changes={"lora": {"r": 4}})
    assert contradictions([*found, other])
    assert not contradictions(agreed([*found, other]))


# ---- advice that was wrong, and is not given any more ----


def write_recipe(folder: Path, rows: list[dict[str, Any]], model: str, **keys: Any) -> Path:
    """A recipe with a reward for texts alone, on these rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(
        "def right(completions, answer):\n    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"
    )
    given = {"model": model, "dataset": "rows.jsonl", "rewards": ["mine.py:right"], "max_steps": 1, **keys}
    (folder / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()))
    return folder / "run.yaml"


@pytest.mark.slow
@pytest.mark.defect("OT20", "a cure that brings an error is taken back, and the error's fix is named")
def test_a_cure_brings_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: Any) -> None:
    save_tiny_model(tmp_path / "tiny-instruct")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    keys = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 16, "temperature": 2.5}
    write_recipe(tmp_path, rows, "./tiny-instruct", **keys)
    monkeypatch.chdir(tmp_path)
    out = said("cure", "run.yaml")
    assert "Taken back, as it brings an error: chat: true   (D045)" in out
    assert "W012" in out
    assert "1 error" not in out
    cured = (tmp_path / "run.cured.yaml").read_text()
    assert "chat" not in cured
    assert "temperature: 1.0" in cured
    now(out[out.index("Taken back") :].splitlines()[0])


@pytest.mark.cases(1)
@pytest.mark.defect("OT21", "D001 proposes a template with every column of the question")
@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"word": "candle", "letter": "a", "answer": "1"}, '--prompt "{word} {letter}"; in a recipe: prompt:'),
        ({"text": "Ann lives in Rome.", "name": "Ann", "city": "Rome"}, '--prompt "{text}"; in a recipe: prompt:'),
        ({"question": "1+1", "gold": "2"}, '--prompt "{question}" --answer "{gold}"'),
    ],
)
def test_no_column_of_the_question_is_dropped(
    row: dict[str, str], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: Any
) -> None:
    write_recipe(tmp_path, [row] * 40, "builtin:smollm2-135m-instruct")
    monkeypatch.chdir(tmp_path)
    [found] = [each for each in check_recipe("run.yaml") if each.code == "D001"]
    assert found.fix.startswith(fix)
    assert found.changes["prompt"] in fix, "so that the cure writes it"
    now(found.fix)


@pytest.mark.defect("OT21", "init: both columns beside one that is called `answer` are asked")
def test_all_columns_beside_an_answer_are_asked(now: Any) -> None:
    rows = [{"word": "candle", "letter": "a", "answer": "1"}] * 9
    made = chosen_columns(["word", "letter", "answer"], rows)
    assert made.keys == {"prompt": "{word} {letter}"}
    assert not made.unused
    now(str(made.keys))


@pytest.mark.defect("OT22", "a table of words without a header: the first row is taken for names, and it is said")
def test_words_for_names(now: Any) -> None:
    rows = [{"dog": word, "dogs": f"{word}s"} for word in ("cat", "pen", "hat", "bird")]
    made = chosen_columns(["dog", "dogs"], rows)
    assert made.other == '--prompt "{dogs}" --answer "{dog}"', "the names are said, as nothing but their order decides"
    assert not unnamed_columns(["dog", "dogs"], rows)
    now(f"not {made.other}")


def letters(right: str, texts: list[str], answers: list[str]) -> JudgedTexts:
    """A prompt for each text; what is `right` is paid."""
    return JudgedTexts(
        texts=texts, questions=[str(n) for n in range(len(texts))], answers=answers, paid=[a == right for a in answers]
    )


@pytest.mark.defect("OT23", "M159 counts rows once each, however often they were drawn")
def test_rows_of_one_text_are_counted_once(now: Any) -> None:
    answers = ["future", "past", "present"] * 8
    sample = letters("future", ["future"] * 24, answers)
    often = replace(
        sample,
        texts=["future"] * 48,
        questions=[*sample.questions, *["0"] * 24],
        answers=[*answers, *["future"] * 24],
        paid=[*sample.paid, *[True] * 24],
    )
    [one] = [sign for sign in signs(sample) if sign.kind == "constant"]
    [two] = [sign for sign in signs(often) if sign.kind == "constant"]
    assert "the commonest answer is that of 33 % of their 24 rows" in one.what
    assert one.what == two.what
    assert one.is_answer
    now(one.what)


def constant_run(first: Callable[[int], str], later: Callable[[int], str]) -> Finding:
    """The M159 of a run that is paid for its rows' answers and writes these texts in its first round and later."""
    label = ["a", "b", "c"]
    tables = {
        step: [
            table(
                step,
                lambda p, g, text: float(text == label[p % 3]),
                text=lambda s, p, g: (first if s == 1 else later)(g),
                answer=lambda p, g, t: label[p % 3],
            )
        ]
        for step in range(1, 13)
    }
    history = [StepMetrics(step=step, values=healthy(step)) for step in tables]
    [found] = [each.finding for each in diagnose(history, tables, SETTINGS) if each.finding.code == "M159"]
    return found


SETTINGS = RunSettings(learning_rate=3e-5, accuracy="score")


@pytest.mark.defect("OT23", "M159 of a model that wrote so before training blames no reward and no step")
def test_one_text_before_training(now: Any) -> None:
    found = constant_run(lambda g: "b", lambda g: "b")
    assert "before any training" in found.why
    assert dict(found.changes) == {"examples": 2}
    assert "checkpoint" not in found.fix
    assert "reward depend" not in found.fix
    now(f"{found.why} {found.fix}")
    learnt = constant_run(lambda g: "abc"[g % 3], lambda g: "b")
    assert "right for some rows" in learnt.why
    assert dict(learnt.changes) == {"learning_rate": 1e-5}
    assert "reward depend" not in learnt.fix
    paid = constant_run(lambda g: "abc"[g % 3], lambda g: "a b c or so")
    assert "reward depend" in paid.fix


# ---- every proposal of the source is applied ----

CODE = re.compile(r"[A-Z]\d{3}")
WHERE = {
    "W123": ("unit/test_reward_calls.py", "the reward that counts as accuracy, by its name"),
    "C064": ("e2e/test_balance.py", "rows that are a stream are drawn in order"),
    "M027": ("unit/test_shipped_templates.py", "a date that is fixed is not reported again"),
    "M138": ("unit/test_monitors.py", "float32 where half precision may have rounded a step away"),
    "K004": ("defects/test_settings.py", "the value with which the checkpoint was made"),
    "P003": ("invariants/test_proof.py", "the end token that is proposed"),
    "P005": ("invariants/test_proof.py", "transformers samples where the live engine cannot"),
    "P011": ("invariants/test_proof_of_sound_runs.py", "float32 holds a step that bfloat16 loses"),
    "P018": ("invariants/test_proof_turns.py", "transformers samples where the live engine cannot"),
}
"""Proposals whose faults are planted elsewhere, in an engine, a model, a template or a checkpoint: where."""


def proposing() -> set[str]:
    """The codes of all functions of the package that handle changes of settings."""
    detectors = {row.find.__name__: code for code, row in DETECTORS.items()}
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            inside = list(ast.walk(function))
            names = {each.id for each in inside if isinstance(each, ast.Name)}
            if "changes" not in names | {each.arg for each in inside if isinstance(each, ast.keyword)}:
                continue
            if path.parent.name == "monitors":
                found |= {detectors[function.name]} if function.name in detectors else set()
            else:
                texts = (each.value for each in inside if isinstance(each, ast.Constant))
                found |= {text for text in texts if isinstance(text, str) and CODE.fullmatch(text)}
    return found


@functools.cache
def of_histories() -> dict[str, Finding]:
    """By code, the finding of each detector that proposes a change, in the history in which it must fire."""
    found: dict[str, Finding] = {}
    for code in {**NUMBERS, **ROUNDS, **FAILURES}:
        for issue in issues_of(code, RunSettings(**{**KNOWN, **own_settings(code)})):
            if issue.finding.code == code:
                found[code] = issue.finding
    return found


def own_settings(code: str) -> dict[str, Any]:
    given = CURES[code][0] if code in CURES else (NUMBERS | ROUNDS).get(code, (None, {}))[1]
    return {key: value for key, value in given.items() if key != "steps"}


def issues_of(code: str, settings: RunSettings) -> list[Issue]:
    """The findings in the history of a code's failure, under these settings."""
    if code in FAILURES:
        play, given = FAILURES[code]
        fields = {key: getattr(settings, key) for key in ("learning_rate", "present", *own_settings(code))}
        return played(play, **given, **fields)
    numbers, rounds = NUMBERS.get(code), ROUNDS.get(code)
    steps = range(1, (numbers or rounds or (None, {}))[1].get("steps", 12) + 1)
    history = [StepMetrics(step=s, values={**healthy(s), **(numbers[0](s) if numbers else {})}) for s in steps]
    tables = {s: [made] for s in steps if rounds and (made := rounds[0](s)) is not None}
    return diagnose(history, tables, settings)


@pytest.mark.slow
@pytest.mark.defect("OT24", "every place of the source that proposes a change, by code")
def test_every_proposal_is_applied_by_a_test(now: Any) -> None:
    codes = proposing()
    assert len(codes) > 50
    in_checks = {case.code for case in CASES} | of_settings.CODES  # which apply what they find
    histories = {code for code, finding in of_histories().items() if finding.changes}
    histories |= {"M159"} if constant_run(lambda g: "b", lambda g: "b").changes else set()
    missing = codes - in_checks - histories - set(WHERE) - NOT_PROPOSED
    assert not missing
    for code, (file, _) in WHERE.items():
        assert f'"{code}"' in (Path(__file__).parents[1] / file).read_text()
    now(f"{len(codes)} codes")


NOT_PROPOSED = {"D025"}
"""Codes that such a function looks at, and whose own findings carry no change."""


@pytest.mark.slow
@pytest.mark.defect("OT24", "the change of a detector is a setting that its run did not have, and ends the proposal")
@pytest.mark.parametrize("code", sorted({**NUMBERS, **ROUNDS, **FAILURES}))
def test_the_changes_of_a_detector_are_not_proposed_again(code: str) -> None:
    finding = of_histories()[code]
    changes = dict(flat(finding.changes))
    before = {"dataset": "a.csv", "learning_rate": 2e-5}
    after = parse(apply_changes(before, finding.changes), name="cured").values
    known = RunSettings(**{**KNOWN, **own_settings(code)})
    fields = {key: value for key, value in changes.items() if hasattr(known, key)}
    settings = replace(known, **fields, present={**after, **changes})
    for again in (each.finding for each in issues_of(code, settings) if each.finding.code == code):
        for key, value in flat(again.changes):
            old, new = before.get(key, KNOWN.get(key)), changes.get(key)
            if isinstance(new, float | int) and isinstance(old, float | int) and not isinstance(new, bool):
                assert (value - new) * (new - old) > 0, f"{key}: {old} -> {new} -> {value} turns round"
            else:
                assert (key, value) not in changes.items(), f"{key}: {value} is proposed to who has it"


@pytest.mark.defect("OT24", "of all findings that can meet in a run, no two ask for two values of a setting")
@pytest.mark.slow
def test_no_two_detectors_contradict_each_other(now: Any) -> None:
    found = [finding for finding in of_histories().values() if finding.changes]
    pairs = [*itertools.combinations(found, 2)]
    against = [pair for pair in pairs if contradictions([*pair])]
    assert against, "without one, this shows nothing"
    for one, other in against:
        told = agreed([one, other])
        assert not contradictions(told)
        lost = next(each for each in told if each not in (one, other))
        winner = next(each for each in told if each is not lost)
        assert f"see {winner.code}" in lost.fix
    assert not contradictions(agreed(found))
    now(f"{len(against)} of {len(pairs)} pairs")
