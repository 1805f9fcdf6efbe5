"""What the verbs say of fixed inputs: shipped recipes, the reward library, explained codes, recorded runs.

Each verb that has `--json` and loads no large model is called with it; of a recorded run also the text that `doctor`,
`watch --once` and `cure --dry-run` print, and the data of its page. Nothing is written into a run's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from podium.cli import app
from podium.errors import PodiumError
from podium.runs.report.page import run_data
from podium.runs.run import Run

FIXED = (
    *(("recipes",), ("explain",), ("explain", "C010"), ("explain", "learning_rate"), ("explain", "kl")),
    *(("explain", "no-such-name"), ("rewards", "list"), ("rewards", "show", "math_match")),
)
OF_RECIPES = (("rewards", "test", "quickstart"), ("environments", "test", "calculator"))
MOVING = ("seconds", "seconds_per_completion", "slowest")
"""Keys of JSON whose values another run of the same command changes."""


def verbs(runs: Path) -> dict[str, Any]:
    """The exit code of each command, and a digest of each part of what it says; `runs`: a folder of recorded runs."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for words in (*FIXED, *OF_RECIPES):
            found[" ".join(words)] = _called((*words, "--json"), runs)
        for run in _records(runs):
            name = str(run.relative_to(runs))
            found[f"doctor {name} --json"] = _called(("doctor", str(run), "--json"), runs)
            found[f"doctor {name}"] = _called(("doctor", str(run), "--fail-on", "error"), runs)
            if run.is_dir():
                found[f"watch {name}"] = _called(("watch", str(run), "--once"), runs)
                found[f"cure {name}"] = _called(("cure", str(run), "--dry-run"), runs)
                found[f"page of {name}"] = _page(run, runs)
    return found


def _records(runs: Path) -> list[Path]:
    """Folders of runs and of runs in stages, and records of other trainers."""
    folders = {path.parent for name in ("metrics.jsonl", "stages.json") for path in runs.rglob(name)}
    return [*sorted(folders), *sorted(runs.glob("*trainer_state*.json"))]


def _called(words: tuple[str, ...], runs: Path) -> dict[str, Any]:
    os.environ["COLUMNS"] = "120"
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said: dict[str, Any] = {"exit": result.exit_code}
    if result.exit_code == 2:
        return {**said, "error": _digest(result.stderr, runs)}
    try:
        parts = json.loads(result.stdout)
    except ValueError:
        return {**said, "text": _digest(result.stdout, runs)}
    return {**said, **{name: _digest(steady(part), runs) for name, part in parts.items()}}


def _page(run: Path, runs: Path) -> dict[str, Any]:
    try:
        data = run_data(Run.load(run))
    except PodiumError as error:
        return {"error": _digest(str(error), runs)}
    return {name: _digest(part, runs) for name, part in data.items()}


def steady(value: Any) -> Any:
    """Without the values that another run of the same command changes."""
    if isinstance(value, dict):
        return {key: steady(part) for key, part in value.items() if key not in MOVING}
    return [steady(part) for part in value] if isinstance(value, list) else value


def _digest(value: Any, runs: Path) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    root = str(Path(__file__).parent.parent)
    text = re.sub(r"(?<=\.py):\d+", "", text.replace(str(runs), "RUNS").replace(root, "ROOT"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
