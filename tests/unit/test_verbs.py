"""Verbs without a model: a mistake is one message and leaves no file behind, any terminal will do, what is printed."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from podium.cli import app
from podium.cli.chat import ENDS, HELP, talk
from podium.cli.compare import _whose_rewards
from podium.cli.doctor import _print
from podium.cli.targets import NamedModel
from podium.cli.train import _checked
from podium.console.terminal import print_wrapped
from podium.errors import Finding
from podium.records import StepMetrics
from podium.rewards import audit, library_reward
from podium.runs.doctor import HealthReport
from podium.runs.find_model import ModelSource
from podium.testing import save_tiny_model

Say = Callable[[str], None]

MISTAKES = {
    "report empty": "empty is not the folder of a run: it has none of metrics.jsonl",
    "report nowhere": "There is no folder nowhere.",
    "report afile": "There is no folder afile.",
    "report run nowhere": "There is no folder nowhere.",
    "report run run run": "shows one run, or two side by side; 3 were given",
    "report run -o empty": "empty cannot be written",
    "report run -o afile/x.html": "afile/x.html cannot be written",
    "report run -o /proc/x.html": "/proc/x.html cannot be written",
    "watch nowhere --once": "There is no folder nowhere.",
    "watch run --host 0.0.0.0": "Give a key of at least 16 characters",
    "merge model": "Missing option '--out'",
    "merge model --out afile": "afile is there already",
    "merge model --out model": "model is there already",
    "merge model --out afile/x": "afile/x cannot be made",
    "merge model --out /proc/x": "/proc/x cannot be made",
    "merge empty --out x": "The folder empty is empty",
    "merge run --out x": "The run run has saved no model",
    "push run --dry-run": "The run run has saved no model",
    "push model --dry-run --include ../*": "--include ../*: no such file in model",
    "serve model --engine x": "--engine is 'x'; it must be one of transformers, vllm",
    "chat empty": "The folder empty is empty",
    "chat model --max-tokens 0": "Invalid value for '--max-tokens'",
    "compare run nowhere": "`nowhere` is not a folder here",
    "init quickstart.yaml -y": "podium recipes quickstart > quickstart.yaml; or podium init quickstart -y",
    "explain M999": "no rule `M999`. `podium explain` lists them",
    "verison": "fix: podium version",
    "--verison": "fix: podium --version",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without a model, a model without a run, an empty folder and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "time": 1, "values": {"reward": 0.5}}\n')
    (tmp_path / "afile").write_text("x")
    save_tiny_model(tmp_path / "model")
    return tmp_path


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("line", "says"),
    [pytest.param(*item, marks=pytest.mark.defect("N", f"podium {item[0]}"), id=item[0]) for item in MISTAKES.items()],
)
def test_a_mistake_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, now: Say, line: str, says: str) -> None:
    monkeypatch.setattr("podium.runs.shipping.merge.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    before = sorted(place.rglob("*"))
    result = CliRunner().invoke(app, shlex.split(line))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert says in result.stderr
    assert sorted(place.rglob("*")) == before
    now(result.stderr)


@pytest.mark.parametrize("word", ["--version", "version", "-h", "merge -h"])
@pytest.mark.defect("H8", "podium --version, version, -h, merge -h")
def test_version_and_help(now: Say, word: str) -> None:
    result = CliRunner().invoke(app, word.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("podium 0." if "version" in word else "Usage: ")
    now(result.stdout.splitlines()[0])


STREAMS = ["latin-1", "ascii", "cp1252"]


@pytest.mark.parametrize(
    "line", ["explain M141", "recipes", "doctor run", "check run.yaml", "report run", "rewards list"]
)
@pytest.mark.defect("T11", "other verbs")
def test_verbs_on_a_terminal_that_is_not_utf_8(
    place: Path, monkeypatch: pytest.MonkeyPatch, now: Say, line: str
) -> None:
    """A stream that cannot hold what is written does not end the verb."""
    (place / "run.yaml").write_text("model: \u4e2d\ndataset: builtin:additions\n", encoding="utf-8")
    (place / "run/findings.jsonl").write_text(
        '{"code": "M141", "severity": "note", "what": "\u4e2d", "why": "", "fix": "", "step": 1}\n', encoding="utf-8"
    )
    for encoding in STREAMS:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as ended:
            app(shlex.split(line))
        monkeypatch.undo()
        monkeypatch.chdir(place)
        assert ended.value.code in (0, 1, 2)
        for stream in streams:
            stream.flush()
    now("ends as in UTF-8, with escapes for what the stream lacks")


def narrow(text: str, width: int) -> list[str]:
    file = io.StringIO()
    print_wrapped(Console(file=file, force_terminal=True, color_system=None, width=width), Text(text))
    return file.getvalue().splitlines()


@pytest.mark.defect("F12", "findings and the proof's table at 80 and 40 columns")
@pytest.mark.parametrize("width", [80, 40])
def test_long_lines_wrap_at_words(now: Say, width: int) -> None:
    finding = "  why: " + "every word of a finding stays whole and none is lost " * 4
    table = "  ok           trained tensors         " + "two hundred and seventy-two tensors of the model " * 2
    for text in (finding, table):
        lines = narrow(text, width)
        assert max(map(len, lines)) <= width
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())
        assert len(lines) > 1
    wrapped = narrow(table, 100)
    assert wrapped[1].index(wrapped[1].strip()[0]) == table.index("two"), "below its own column"
    now(wrapped[1].strip())


@pytest.mark.defect("F11", "two runs with different rewards")
def test_compare_says_whose_rewards_measured(tmp_path: Path, now: Say) -> None:
    targets = []
    for name, rewards in (("a", "[short]"), ("b", "[right, short]"), ("c", "[right, short]")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"dataset: x.csv\nrewards: {rewards}\n")
        (folder / "environment.json").write_text('{"reward_weights": {"right": 1.0}}')
        targets.append(NamedModel(given=name, source=ModelSource(base="m"), run=folder))
    said = _whose_rewards(targets[:2], targets[1])
    assert said.endswith("Both are measured with those of b.")
    assert _whose_rewards(targets[1:], targets[2]) == ""
    assert _whose_rewards(targets[:1], targets[0]) == ""
    now(said)


@pytest.mark.defect("G2", "what test-latest installs")
def test_the_newest_packages_are_tried_with_the_tasks(now: Say) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    target = makefile.split("\ntest-latest:")[1].split("\n\n")[0]
    assert '-e ".[tasks]"' in target
    now('test-latest installs ".[tasks]"')


@pytest.mark.defect("F13", "warnings of names that transformers has changed")
@pytest.mark.defect("G3", "gradient_checkpointing")
@pytest.mark.parametrize("name", ["gradient_checkpointing", "is_gradient_checkpointing"])
def test_the_older_name_of_checkpointing_is_not_warned_of(now: Say, name: str) -> None:
    program = (
        "import warnings, podium\n"
        f"warnings.warn('`{name}` is deprecated and will be removed in v6.', FutureWarning)\n"
        "warnings.warn('another', FutureWarning)\n"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "deprecated" not in made.stderr.replace(program, "")
    assert "another" in made.stderr
    now("no warning")


@pytest.mark.defect("G3", "checkpointing that memory asks for reaches newer transformers")
def test_checkpointing_has_both_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers 5.23 reads `activation_checkpointing`; without it a run would not recompute what it was to."""
    from podium import GRPOConfig
    from podium.trainer.assembly import _decide_checkpointing

    args = GRPOConfig(str(tmp_path), max_completion_length=5000)
    assert args.gradient_checkpointing is None
    monkeypatch.setattr(args, "activation_checkpointing", False, raising=False)
    _decide_checkpointing(args, 1024, "shared")
    assert args.gradient_checkpointing is True
    assert args.activation_checkpointing is True
    monkeypatch.setattr(GRPOConfig, "activation_checkpointing", True, raising=False)
    assert GRPOConfig(str(tmp_path)).gradient_checkpointing is True


class Echo:
    """A model that answers with what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, turns: list[dict[str, str]]) -> None:
        self.asked.append(turns[-1]["content"])


@pytest.mark.defect("OTchat", "podium chat: how to leave")
@pytest.mark.parametrize("word", [*ENDS, "", "/help"])
def test_the_words_that_end_a_talk_are_no_questions(
    now: Say, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    lines = iter(["hello", word, "still there"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, ""))
    speaker = Echo()
    talk(speaker, [])
    said = capsys.readouterr().out
    assert speaker.asked == ["hello"] + ["still there"] * (word == "/help")
    assert all(sign in HELP for sign in ("/exit", "Ctrl-D", "/new"))
    assert (HELP in said) == (word == "/help")
    now(f"{word!r}: {'shows the words' if word == '/help' else 'ends'}")


@pytest.mark.defect("OTfirst", "the first lines of podium train")
@pytest.mark.parametrize("severity", ["warning", "note"])
def test_training_shows_the_table_of_rewards_with_a_finding_about_them(
    now: Say, monkeypatch: pytest.MonkeyPatch, severity: str
) -> None:
    finding = Finding(severity=severity, code="W117", what="odd")
    table = SimpleNamespace(as_text=lambda: ["mean score of 8 rows"])
    checked = SimpleNamespace(findings=[finding], recipe="recipe", tables=[table])
    monkeypatch.setattr("podium.checks.examine", lambda *_, **__: checked)
    told = io.StringIO()
    monkeypatch.setitem(_checked.__globals__, "errors", Console(file=told))
    assert _checked("run.yaml", {}) == ("recipe", [finding])
    assert ("mean score" in told.getvalue()) == (severity == "warning")
    now("a table where there is a finding")


@pytest.mark.defect("OTdoctor", "a run without findings whose verdict is no better")
def test_the_doctor_shows_the_verdict_beside_nothing_found(
    now: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tuple(StepMetrics(step=step, values={"reward": 0.5}) for step in range(1, 41))
    verdict = "No better than a baseline: accuracy rose from 0.095 (before) to 0.215 (after)"
    report = HealthReport(
        source=str(tmp_path / "x.csv"), history=history, issues=(), has_completions=True, verdict=verdict
    )
    _print(report)
    said = " ".join(capsys.readouterr().out.split())
    assert "detectors found nothing" in said
    assert said.endswith(f"Held out: {verdict}")
    now(said[-120:])


@pytest.mark.defect("OTpages", "W122: the column that is named is the answer's")
def test_a_reward_of_style_is_told_the_column_of_answers(now: Say) -> None:
    rows = [{"prompt": f"{n} + 1 =", "question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    [finding] = [each for each in audit(library_reward("think_format"), rows) if each.code == "W122"]
    assert finding.fix.endswith("--answer-column answer")
    now(finding.fix)
