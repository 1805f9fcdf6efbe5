"""Every code block of README.md, SKILL.md, benchmarks/RESULTS.md and docs/ is executed, or says why not.

The only way out is a comment before the block: `<!-- not run: needs a GPU -->`. Otherwise

- yaml is a recipe: a whole one goes through `podium check`, a part is laid over a small recipe and read;
- python runs, the blocks of a page one after the other; pycon is run by tests/unit/test_docs.py;
- json, jsonl and csv are parsed;
- in blocks of commands each `podium ...` line is parsed by the real command line, and run where that is quick and the
  scene has what it names; of other programs the file, target or extra that a line names must exist;
- blocks in no language, or in `text`, that hold no command are printed output, formulas or diagrams.

Models of the hub are replaced by a tiny one, and data, reward files and runs are made on the spot (`scene`).
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_group
from typer.testing import CliRunner

from podium.checks import check_recipe
from podium.cli import app
from podium.cli.words import models_and_flags, recipe_and_flags
from podium.recipe import load
from podium.recipe.schema import key_types
from podium.testing import save_tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SKILL.md",
    ROOT / "benchmarks" / "RESULTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+?) -->\n+)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
LAUNCHERS = ("accelerate", "torchrun")
PROGRAMS = ("podium", "make", "pip", "python", "bash", *LAUNCHERS)
COMMAND = re.compile(rf"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) ")
INDENTED = re.compile(rf"^ {{4}}(?=(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) )((?:[^\n]*\\\n)*[^\n]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text[: match.start("language")].count("\n") + 1
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        yield Block(page.name, line, match["language"], body, match["why"])
    for match in INDENTED.finditer(FENCE.sub("", text)):
        yield Block(page.name, 0, "", match[1] + "\n", None)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def chosen(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and block.why_not is None]


def test_every_block_is_in_a_language_that_is_looked_at() -> None:
    known = {"", "text", "pycon", "python", "yaml", "json", "jsonl", "csv", "bash", "sh", "console"}
    unknown = [
        f"{block}: {block.language}" for block in BLOCKS if block.why_not is None and block.language not in known
    ]
    assert not unknown, "give them a language of the list, or `<!-- not run: why -->`"


def test_whoever_is_left_out_says_why() -> None:
    for page in PAGES:
        said = page.read_text(encoding="utf-8").count("<!-- not run")
        assert said == sum(block.why_not is not None for block in BLOCKS if block.page == page.name), page.name


# ---- what blocks may name ----

ROWS = [
    {
        "prompt": f"{a}+{b}=",
        "answer": str(a + b),
        "solution": str(a + b),
        "ground_truth": str(a + b),
        "data_source": "sums",
        "tests": json.dumps([{"stdin": "", "stdout": str(a + b)}]),
    }
    for a in range(1, 9)
    for b in range(1, 9)
]
HELD_OUT = [{**row, "prompt": f"1+{row['prompt']}"} for row in ROWS[:8]]

REWARD = """
def {name}(completions, **columns):
    return [len(str(completion)) % 7 / 7 for completion in completions]
"""
TOOL = """
def {name}(a: int, b: int) -> int:
    \"\"\"Compute.

    Args:
        a: A number.
        b: A number.
    \"\"\"
    return a * b
"""
COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""
CORRECT = """
def correct(completions, answer):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text.strip() == gold) for text, gold in zip(texts, answer)]
"""

RUN = {
    "model": "model",
    "dataset": "train.jsonl",
    "eval_dataset": "test.jsonl",
    "rewards": ["my_rewards.py:brevity", "answer_correct"],
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 4,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "eval_samples": 1,
    "eval_rows": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "prove_first_batch": False,
    "output_dir": "runs/mine",
}
RUNS = ("runs/quickstart", "runs/mine", "runs/a", "runs/b", "runs/x")
STATE = "outputs/checkpoint-100/trainer_state.json"
SCENE = {
    "run.yaml",
    "train.jsonl",
    "x.jsonl",
    "train.parquet",
    "test.jsonl",
    "my_rewards.py",
    "my.py",
    STATE,
    *RUNS,
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reward(folder: Path, file: str, name: str) -> None:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    own = (TOOL if path.name == "tools.py" else REWARD).format(name=name)
    text = {"compute_score": COMPUTE_SCORE, "correct": CORRECT}.get(name, own)
    with path.open("a") as opened:
        opened.write(text)


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it: a model, data, rewards, a recipe, runs, another trainer's logs."""
    folder = tmp_path_factory.mktemp("scene")
    for name in ("model", "merged"):
        save_tiny_model(folder / name, max_position_embeddings=8192)
    for name in ("train.jsonl", "x.jsonl", "train.parquet"):
        write_rows(folder / name, ROWS)
    write_rows(folder / "test.jsonl", HELD_OUT)
    for name in ("brevity", "correct"):
        write_reward(folder, "my_rewards.py", name)
    write_reward(folder, "my.py", "fn")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["train", "run.yaml", "--output_dir", RUNS[0]], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    for copy in RUNS[1:]:
        shutil.copytree(folder / RUNS[0], folder / copy)
    logs = [{"step": i, "reward": 0.5, "kl": 0.01} for i in range(1, 6)]
    (folder / STATE).parent.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps({"log_history": logs}))
    assert all((folder / name).exists() for name in SCENE)
    return folder


@pytest.fixture
def place(scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the scene, to work in."""
    folder = tmp_path / "place"
    shutil.copytree(scene, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("JUDGE_KEY", "a key")
    return folder


# ---- yaml ----

OTHER_NAMES = {"model_name_or_path": "model", "dataset_name": "dataset", "reward_funcs": "rewards"}
WHOLE = {"model", "dataset", "rewards"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", chosen("yaml"), ids=str)
def test_yaml_is_a_recipe_or_a_part_of_one(block: Block, place: Path) -> None:
    text = re.sub(r"\b(Qwen|meta-llama|google|HuggingFaceTB)/[\w.-]+", "model", block.text)
    given = yaml.safe_load(text)
    if "reasoning-gym" in text:
        pytest.importorskip("reasoning_gym")
    assert isinstance(given, dict), str(block)
    make_what_it_names(text, given, place)
    keys = {OTHER_NAMES.get(key, key) for key in given}
    if keys >= WHOLE:
        (place / "block.yaml").write_text(text)
        wrong = [finding for finding in check_recipe("block.yaml", {}) if finding.severity == "error"]
        assert not wrong, "\n".join(map(str, wrong))
    else:
        base = {key: value for key, value in RUN.items() if key in WHOLE - keys}
        (place / "block.yaml").write_text(yaml.safe_dump(base) + text)
        load("block.yaml").arguments()


def make_what_it_names(text: str, given: dict[str, Any], folder: Path) -> None:
    """Files with rewards and with data that a block names and the scene lacks."""
    for file, name in re.findall(r"([\w/-]+\.py):(\w+)", text):
        if not (folder / file).exists() or f"def {name}(" not in (folder / file).read_text():
            write_reward(folder, file, name)
    for module, name in re.findall(r"\b(\w+(?:\.\w+)+):([a-z]\w*)", text):
        if not module.endswith(".py"):
            write_reward(folder, f"{module.replace('.', '/')}.py", name)
    for key in ("dataset", "eval_dataset"):
        path = Path(str(given.get(key, "")))
        if path.suffix in (".jsonl", ".csv", ".parquet") and not path.is_absolute() and not (folder / path).exists():
            write_rows(folder / path, HELD_OUT if key == "eval_dataset" else ROWS)


# ---- python, data ----

SMALLER = {
    "Qwen/Qwen2.5-0.5B-Instruct": "model",
    "max_steps=100": "max_steps=2, max_completion_length=4",
    '"runs/trl", max_steps': '"runs/trl", use_cpu=True, bf16=False, max_steps',  # of TRL, which asks for a GPU
}


LONG = {"recipes.md"}
"""Pages whose python trains through whole stages."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in LONG else [])
        for page in sorted({block.page for block in chosen("python")})
    ],
)
def test_python_runs(page: str, place: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in chosen("python"):
        if block.page == page:
            text = block.text
            for large, small in SMALLER.items():
                text = text.replace(large, small)
            exec(compile(text, str(block), "exec"), names)


@pytest.mark.parametrize("block", chosen("json", "jsonl", "csv"), ids=str)
def test_data_is_parsed(block: Block) -> None:
    if block.language == "csv":
        lengths = {len(row) for row in csv.reader(io.StringIO(block.text), strict=True)}
        assert len(lengths) == 1
    for text in block.text.splitlines() if block.language == "jsonl" else [block.text] * (block.language == "json"):
        json.loads(text)


# ---- commands ----


def commands(block: Block) -> Iterator[str]:
    """Lines to type; of a block with `$ ` only those that begin with it, the others are what was printed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    shell = block.language in ("bash", "sh", "console")
    for line in lines:
        if prompted and line.startswith("$ "):
            yield line.removeprefix("$ ")
        elif not prompted and (COMMAND.match(line) or (shell and line.strip() and line.lstrip()[0] != "#")):
            yield line.strip()


def words_of(line: str) -> list[str]:
    """Of a launcher's line what it launches, where that is Podium itself."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a remark without `#`: the words will not be taken, and that names the line
        words = line.split()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words[words.index("podium") :] if words[0] in LAUNCHERS and "podium" in words else words


LINES = {
    re.sub(r"\s+# .*", "", part.strip()): block.page
    for block in reversed(chosen("", "text", "bash", "sh", "console"))
    for line in commands(block)
    for part in line.split("&&")
}
"""What is typed, without comments, and a page that says so."""
PODIUM = [line for line in LINES if words_of(line)[0] == "podium"]
OTHERS = [line for line in LINES if line not in PODIUM and not line.startswith("cd ")]


COMMAND_LINE = get_group(app)
"""Made here: commands keep the help option of their first context, and these contexts have no parent."""


def parsed(words: list[str]) -> tuple[str, Any]:
    """The verb, and what the command line made of the words. Raises what it raises."""
    command, rest = COMMAND_LINE, words[1:]
    name = []
    while isinstance(command, TyperGroup):
        name.append(rest[0])
        command, rest = command.commands[rest[0]], rest[1:]
    return " ".join(name), command.make_context(" ".join(name), list(rest))


@pytest.mark.parametrize("line", PODIUM)
def test_the_command_line_takes_it(line: str) -> None:
    verb, context = parsed(words_of(line))
    if context.args:
        if verb in ("eval", "compare"):
            _, flags = models_and_flags(context.args, verb, most=2)
        else:
            _, flags = recipe_and_flags(context.args, verb)
        assert set(flags) <= set(key_types()), f"{LINES[line]}: {line}"


QUICK = {
    "chat",
    "check",
    "compare",
    "doctor",
    "eval",
    "explain",
    "recipes",
    "report",
    "rewards list",
    "rewards show",
    "rewards test",
    "sample",
}
"""Verbs that are run where the scene has what a line names; besides `train` with two steps and `watch --once`."""
NEEDS = {"chat", "check", "compare", "doctor", "eval", "report", "sample", "train", "watch"}
"""Of these, the ones that need a run, a log or a recipe of the scene; the built-in model takes too long."""
WRITTEN = ("-o", "--output", "--html")
PLACEHOLDERS = {"CODE", "NAME", "RECIPE", "RUN"}


def is_quick(line: str) -> bool:
    """Whether a line takes seconds in the scene."""
    words = words_of(line)
    try:
        verb, _ = parsed(words)
    except Exception:  # noqa: BLE001 - test_the_command_line_takes_it says of which line, and why
        return False
    named = [
        word.partition(":")[0]
        for before, word in itertools.pairwise(words[1:])
        if before not in WRITTEN and re.search(r"/|\.(ya?ml|jsonl|csv|json|py\b)", word)
    ]
    short = bool(re.search(r"--max_steps [12]\b", line)) if verb == "train" else "--once" in words or verb != "watch"
    return (
        verb in QUICK | NEEDS
        and short
        and set(named) <= SCENE
        and (bool(named) or verb not in NEEDS)
        and not PLACEHOLDERS & set(words)
    )


QUICK_LINES = [line for line in PODIUM if is_quick(line)]
PROCESSES = {"rewards test", "train"}
"""Verbs that start processes, each of which imports torch: seconds alone, half a minute on a busy machine."""


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if parsed(words_of(line))[0] in PROCESSES else [])
        for line in QUICK_LINES
    ],
)
def test_quick_ones_run(line: str, place: Path) -> None:
    result = CliRunner().invoke(app, words_of(line)[1:], input="", catch_exceptions=False)
    assert result.exit_code in (0, 1), f"{LINES[line]}: {line}\n{result.output}"
    if "--json" in line:
        assert isinstance(json.loads(result.stdout), dict)


def test_every_quick_verb_is_run_somewhere() -> None:
    assert {parsed(words_of(line))[0] for line in QUICK_LINES} == QUICK | NEEDS


SKILL_LINES = [
    line for block in BLOCKS if block.page == "SKILL.md" and block.why_not is None for line in commands(block)
]


@pytest.mark.slow
@pytest.mark.defect("OTskill", "SKILL.md: every command, typed in the order of the page")
@pytest.mark.timeout(900)
def test_the_skill_as_a_program_drives_it(place: Path, now: Callable[[str], None]) -> None:
    """Exit codes are 0, or 1 with an error among the findings; `--json` is one object on stdout and nothing else."""
    for line in SKILL_LINES:
        result = CliRunner().invoke(app, words_of(line)[1:], input="")
        assert result.exception is None or isinstance(result.exception, SystemExit), f"{line}: {result.exception!r}"
        assert result.exit_code in (0, 1), f"{line}\n{result.output}"
        said = json.loads(result.stdout) if "--json" in line else {}
        wrong = [each for each in said.get("findings", ()) if each["severity"] == "error"]
        assert all({"code", "severity", "what", "why", "fix", "changes"} <= set(each) for each in wrong)
        assert result.exit_code == 0 or wrong or said["errors"], f"{line}\n{result.output}"
    assert {parsed(words_of(line))[0] for line in SKILL_LINES} >= {
        "init",
        "train",
        "merge",
        "push",
        "environments test",
    }
    now(f"{len(SKILL_LINES)} commands")


@pytest.mark.parametrize("line", OTHERS)
def test_what_other_programs_are_given_is_there(line: str) -> None:
    program, *rest = words_of(line)
    files = [word for word in rest if word.endswith((".py", ".sh"))]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if re.fullmatch(r"[a-z-]+", word)} <= set(targets)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"(?:podium|\.)\[([\w,]+)\]", line)
        assert {extra for some in named for extra in some.split(",")} <= set(extras)
    elif program == "python" and rest[0] == "-m":
        module = ROOT / rest[1].replace(".", "/")
        found = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        assert found or rest[1] in ("podium", "pytest")
    else:
        assert program in ("python", "bash", *LAUNCHERS), f"{LINES[line]}: {line}: mark it `<!-- not run: why -->`"
        assert files
        written = ("script.py", "test_rewards.py")
        assert all((ROOT / file).exists() or file in written for file in files), "the reader's, and what init writes"
