"""What README.md and docs/ show as printed is printed: each block by the command above it, in a scene made here.

A line `...` of a page stands for any lines. Times, sizes of memory and places on this machine are not compared, nor,
where a model draws (`drawn`), the rows of tables and every number. Lines that say what is read just now (`PROGRESS`)
are left out. What no test can print is named with the reason in
`NOT_PRINTED`; formulas and diagrams are in `DRAWINGS`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.sizing import config_of
from podium.cli import app
from podium.console import terminal
from podium.planning import memory
from podium.testing import tiny_tokenizer
from tests.e2e.test_docs_blocks import BLOCKS, COMMAND, ROOT, Block, words_of, write_rows

Scene = Callable[[Path], None]
EXAMPLES = ROOT / "examples"


def printed(block: Block) -> bool:
    """Whether a block shows what was printed: beside commands, or alone."""
    lines = block.text.splitlines()
    typed = any(line.startswith("$ ") for line in lines)
    alone = not any(COMMAND.match(line) for line in lines)
    return block.language in ("", "text") and (alone or typed) and block.line > 0


def first(block: Block) -> str:
    """The name of a block: its page and how it begins."""
    return f"{block.page}: {block.text.strip().splitlines()[0].strip()}"


PRINTED = {first(block): block for block in BLOCKS if printed(block)}


def blocks_with(beginning: str) -> list[Block]:
    """Printed blocks whose name begins so."""
    return [block for name, block in PRINTED.items() if name.startswith(beginning)]


def typed(*lines: str) -> None:
    """Run commands whose output is not shown."""
    for line in lines:
        result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert result.exit_code in (0, 1), f"{line}\n{result.output}"


def examples(folder: Path) -> None:
    """A clone, as far as tables go."""
    shutil.copytree(EXAMPLES, folder / "examples")


def sums(folder: Path) -> None:
    """In the folder that `podium init sums` has made."""
    typed("podium init sums --yes --no-sample")
    os.chdir(folder / "sums")


def seven(folder: Path) -> None:
    """A recipe on the configuration of Qwen2.5-7B, with a tokenizer and without weights."""
    config_of("7B").save_pretrained(folder / "qwen2.5-7b")
    tiny_tokenizer().save_pretrained(folder / "qwen2.5-7b")
    recipe = {"model": "qwen2.5-7b", "dataset": "builtin:additions", "rewards": ["answer_format", "answer_correct"]}
    (folder / "run.yaml").write_text(yaml.safe_dump({**recipe, **BATCH, "max_completion_length": 1024}))


def multiples(folder: Path) -> None:
    """Twenty multiplications, and the two rewards of rewards.md."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} times 2?"}], "answer": str(2 * n)} for n in range(19, 99)
    ]
    write_rows(folder / "train.jsonl", rows)
    of_page = {
        block.text for block in BLOCKS if block.page == "rewards.md" and block.text.startswith("# my_rewards.py")
    }
    (folder / "my_rewards.py").write_text("".join(of_page).partition("\n")[2])
    (folder / "r.py").write_text(LENIENT)
    recipe = {
        "model": "builtin:smollm2-135m-instruct",
        "dataset": "train.jsonl",
        "rewards": ["r.py:lenient", "r.py:exact"],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**recipe, **BATCH}))


LENIENT = """def text_of(completion):
    return completion[0]["content"]


def lenient(completions, answer):
    return [1.0 if gold in text_of(text) else 0.0 for text, gold in zip(completions, answer)]


def exact(completions, answer):
    return [1.0 if gold == text_of(text) else 0.0 for text, gold in zip(completions, answer)]
"""
BATCH = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 64,
    "learning_rate": 1e-5,
    "max_steps": 20,
    "report_to": "none",
    "output_dir": "runs/mine",
}


def mistakes(folder: Path) -> None:
    """The recipe and the rows of health.md, with one mistake of each kind."""
    rows: list[dict[str, object]] = [
        {"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(100, 500)
    ]
    rows += rows[30:50]
    rows[17] = {**rows[17], "prompt": None}
    rows[120] = {**rows[120], "answer": None}
    write_rows(folder / "train.jsonl", rows)
    (folder / "r.py").write_text(
        "def correct(completions, answer):\n"
        "    return [float(text[0]['content'].strip() == gold) for text, gold in zip(completions, answer)]\n"
    )
    (folder / "run.yaml").write_text(
        "model: builtin:smollm2-135m-instruct\ndataset: train.jsonl\nrewards: [r.py:correct]\nlora: {r: 16}\n"
        "per_device_train_batch_size: 8\nlearning_rate: 1e-6\nnum_generation: 8\nmax_completion_length: 64\n"
        "max_steps: 20\nreport_to: none\noutput_dir: runs/mine\n"
    )


def guesses(folder: Path) -> None:
    """The game of agents.md in which a wrong guess costs, with the oracle of the page."""
    text = (ROOT / "docs" / "agents.md").read_text()
    [oracle] = re.findall(r"```python\n(def halves.*?)```", text, re.DOTALL)
    (folder / "game.py").write_text(GAME + oracle)
    write_rows(folder / "rows.jsonl", [{"prompt": "Guess my number from 1 to 7.", "number": n} for n in (3, 5, 1, 7)])


GAME = """import podium


class Guess(podium.TextEnvironment):
    max_turns = 3

    def reset(self, number, **row):
        self.number = int(number)

    def step(self, text):
        guess = int(text) if text.strip().isdigit() else 0
        if guess == self.number:
            return None, 1.0, True, {}
        return ("higher" if guess < self.number else "lower"), -0.2 if text.strip() else 0.0, False, {}


"""


def empty(folder: Path) -> None:
    """Nothing: the command makes what it needs."""


def checkout(folder: Path) -> None:
    """Where this file is."""
    os.chdir(ROOT)


def adapter(folder: Path) -> None:
    """A run with an adapter, of one step in place of the eight of the page."""
    line = "podium train quickstart --max_steps 1 --learning_rate 1e-3 --no-eval --output_dir runs/adapter"
    typed(f"{line} --per_device_train_batch_size 16 --lora '{{\"r\":16}}'")


class Shown(NamedTuple):
    """How a block is printed again."""

    scene: Scene
    command: str = ""
    """Of a block that does not begin with one."""
    drawn: bool = False
    """Whether a model draws."""
    slow: bool = False


SHOWN: Mapping[str, Shown] = {
    "scale.md: $ podium check run.yaml --devices 16 --gpu h100": Shown(seven),
    "start.md: $ podium init examples/reviews.csv": Shown(examples, drawn=True, slow=True),
    "start.md: $ podium init sums --yes": Shown(empty, drawn=True, slow=True),
    "start.md: $ podium rewards test run.yaml": Shown(sums),
    "start.md: $ podium check run.yaml": Shown(sums),
    "start.md: $ podium sample run.yaml -n 1": Shown(sums, drawn=True, slow=True),
    "data.md: note[C040] assumed": Shown(examples, "podium check --dataset examples/questions.csv"),
    "health.md: $ podium check run.yaml": Shown(mistakes),
    "rewards.md: completion    ": Shown(multiples, "podium rewards test my_rewards.py:correct --data train.jsonl"),
    "rewards.md: $ podium check run.yaml": Shown(multiples),
    "scale.md: note[C029]": Shown(sums, "podium check run.yaml --processes 2 --accelerate fsdp2"),
    "scale.md: $ podium init run.yaml --cluster slurm --nodes 2": Shown(sums),
    "agents.md: $ podium environments test": Shown(guesses),
    "RESULTS.md: reported": Shown(checkout, "python -m benchmarks.graders --speed", slow=True),
    "shipping.md: $ podium merge runs/adapter --out merged": Shown(adapter, drawn=True, slow=True),
    "shipping.md: $ podium push runs/adapter --repo me/adder --dry-run": Shown(adapter, drawn=True, slow=True),
    "evaluation.md: $ podium eval builtin:smollm2-135m-instruct --recipe quickstart -k 4": Shown(
        empty, drawn=True, slow=True
    ),
}

TRAINED = "the training takes minutes; "
NOT_PRINTED: Mapping[str, str] = {
    "start.md: $ podium train --dataset examples/questions.csv": TRAINED
    + "tests/e2e/test_csv_to_chat.py types the same commands, and fewer rows",
    "agents.md: $ podium sample guess -n 1": "episodes have other turns on other processors; the form: "
    "tests/unit/test_agent_recipes.py",
    "evaluation.md: $ podium compare runs/s2": TRAINED + "the form: tests/e2e/test_evaluation.py",
    "evaluation.md: No regression shown": "two random models; the sentence: tests/unit/test_detectors.py",
    "evaluation.md: Reward without a model": TRAINED + "the sentences: tests/e2e/test_evaluation.py",
    "evaluation.md: Not the models alone": "two evaluations of "
    "random models; the sentence: tests/unit/test_evaluation_statistics.py",
    "health.md: warning: M141": TRAINED + "the sentence: tests/unit/test_monitors.py",
    "health.md: $ podium cure runs/rate": TRAINED + "tests/unit/test_changes.py has the form",
    "health.md: or go on against it": "of a kernel that computes something else; rewards.md shows the line of W106",
    "health.md: M131 The gradient": "of an overflow; tests/invariants/test_non_finite.py",
    "scale.md: error: runs/x/checkpoint-3": "two processes with FSDP2; tests/system/test_processes.py",
    "guide.md: $ podium tinker builtin:smollm2-135m-instruct": "is a server: tests/tinker has the command",
    "shipping.md: $ podium serve runs/adapter": "becomes a server; tests/e2e/test_serve.py has the command",
}

DRAWINGS = (
    "algorithm.md: R_i = sum_k w_k r_ik",
    "algorithm.md: z_ik = ",
    "algorithm.md: A_it = ",
    "algorithm.md: cov_t = ",
    "algorithm.md: L = L_policy + observation_coef",
    "algorithm.md: w_it = min",
    "algorithm.md: rho_it = ",
    "algorithm.md: log pi(token) = ",
    "algorithm.md: r  = pi_ref / pi",
    "algorithm.md: completions of a generation round",
    "architecture.md: dataset row",
    "architecture.md: errors/",
    "health.md: runs/x/",
    "recipes.md: runs/x/",
)

MEASURED = (
    (r"rounded copies of weights [\d.]+ GB,\s+", ""),  # where a processor multiplies in bfloat16
    (r"(?m)^(?:note: Matrix products in |[^\n]*: [\d,]+/[\d,]+ prompts, )[^\n]*\n", ""),
    (r"\d[\d.,]*(?=\s+(?:GB|MB|kB|bytes|ms|GFLOP/s|s)\b)", "N"),
    (r"\b\d+:\d\d\b", "N:NN"),
    (r"(?m)^( +step +\d+) +[\d.]+ +[\d.]+", r"\1 N N"),
    (r"(?m)^( +[a-z ]+ (?:none|[\d.]+) +\d+) +[\d.]+ +(?=returned|failed)", r"\1 N "),
    (r"[\w/.-]*/src/podium/([\w/]+\.py):\d+", r"src/podium/\1:N"),
    (r"src/podium/([\w/]+\.py):\d+", r"src/podium/\1:N"),
    (r'File "[^"]*/(\w+\.py)"', r'File "\1"'),
)
PROGRESS = re.compile(r"(?m)^(?:Reading|Loading|Checking) .* \.\.\.\n")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def normal(text: str, *, drawn: bool) -> str:
    """The text without what differs from one machine to the next, and without its wrapping."""
    for pattern, name in MEASURED:
        text = re.sub(pattern, name, text)
    if drawn:
        text = NUMBER.sub("N", re.sub(r"(?m)(^ *─+ *\n)(?:(?: [^\n]*)?\n)+", r"\1", text))
    return re.sub(r"─+", "─", " ".join(text.split()))


def shows(page: str, said: str, *, drawn: bool) -> bool:
    """Whether a page has what was said; a line `...` of it, and an end `, ...`, stand for any words."""
    parts = [normal(part, drawn=drawn) for part in re.split(r"(?m)^ *\.\.\. *$|(?<=, )\.\.\.$", page)]
    text, place = normal(said, drawn=drawn), 0
    for part in parts[:-1]:
        found = text.find(part, place)
        if found < 0 or (place == 0 and found > 0 and part is parts[0]):
            return False
        place = found + len(part)
    return text.endswith(parts[-1]) and len(text) - len(parts[-1]) >= place and (len(parts) > 1 or text == parts[0])


def steps(block: Block, command: str) -> list[tuple[str, str]]:
    """Commands of a block, each with what it shows."""
    if command:  # some of what it prints
        return [(command, "...\n" + "\n...\n".join(block.text.splitlines()) + "\n...")]
    parts = re.split(r"(?m)^\$ (.+)\n", block.text.replace("\\\n", " "))[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def run(line: str) -> str:
    """What a line prints, errors included."""
    words = words_of(line)
    if words[0] == "cd":
        os.chdir(words[1])
        return ""
    if words[0] == "python":
        return subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=120).stdout
    result = CliRunner().invoke(app, words[1:], input="")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return PROGRESS.sub("", result.output)


@pytest.mark.cases(1)
@pytest.mark.defect("OTpages", "printed blocks are printed again")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * shown.slow, id=name) for name, shown in SHOWN.items()]
)
def test_a_page_shows_what_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, [block] = SHOWN[name], blocks_with(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for each in (terminal.console, terminal.errors):  # made at their import, with the width of then
        monkeypatch.setattr(each, "_width", 120)
    monkeypatch.setattr(memory, "available_memory", lambda _: 12 * 10**9)  # severity and fix of an estimate follow it
    shown.scene(tmp_path)
    for line, expected in steps(block, shown.command):
        said = run(line)
        assert shows(expected, said, drawn=shown.drawn), f"{block}: {line} prints\n{said}"


@pytest.mark.defect("OTpages", "no printed block without a test or a reason")
def test_every_printed_block_is_printed_again_or_says_why_not() -> None:
    told = [*SHOWN, *NOT_PRINTED, *DRAWINGS]
    assert not [name for name in told if len(blocks_with(name)) != 1]
    found = sorted(str(block) for name in told for block in blocks_with(name))
    assert found == sorted(map(str, PRINTED.values())), "print it again in SHOWN, or say why not in NOT_PRINTED"
    named = [path for reason in NOT_PRINTED.values() for path in re.findall(r"tests/[\w/]+\.py", reason)]
    assert all((ROOT / path).exists() for path in named)
