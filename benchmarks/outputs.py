"""Everything that Podium says on fixed inputs, as JSON, for comparing two commits.

python -m benchmarks.outputs check OUT.json             findings of `podium check`: mistakes, sound runs, recipes
python -m benchmarks.outputs doctor OUT.json RUNS       findings of `podium doctor` on every run folder below RUNS
python -m benchmarks.outputs init OUT.json              what `podium init -y` writes for everyday tables and examples
python -m benchmarks.outputs rows OUT.json              rows in their order, and findings, of datasets of every kind
python -m benchmarks.outputs tests OUT.json             findings of `podium rewards|environments|agents test`
python -m benchmarks.outputs verbs OUT.json RUNS        what verbs say of recorded runs, of codes and of the library
python -m benchmarks.outputs --compare BEFORE.json AFTER.json

No model is loaded but a tokenizer. An output is a mapping from the name of a case to what was said; paths of temporary
folders are replaced by `FOLDER`. The comparison prints every case that differs, and exits with 1 where one does.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Said = dict[str, Any]
"""What was said on each case, in JSON's types."""
SHOWN = 20
"""Lines of a difference that are printed."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder that is the working directory within."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder).resolve()
        finally:
            os.chdir(before)


def neutral(value: Any, folder: Path) -> Any:
    """A value in JSON's types without the path of a temporary folder."""
    return json.loads(json.dumps(value, default=str).replace(str(folder), "FOLDER"))


def command(*words: str) -> Said:
    """Exit code and printed text of `podium WORDS`, run in this process."""
    from typer.testing import CliRunner

    from podium.cli import app

    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "120", "NO_COLOR": "1"})
    crash = result.exception if not isinstance(result.exception, SystemExit) else None
    return {"exit": result.exit_code, "printed": result.output, "crash": repr(crash) if crash else ""}


# ---- podium check ----


def check(_: Path | None) -> Said:
    """Findings on the planted mistakes of beginners, sound runs, and the shipped recipes."""
    return {**_mistakes(), **_sound_runs(), **_recipes()}


def _findings(found: Any, folder: Path) -> list[Any]:
    parts = ("code", "severity", "what", "why", "fix", "changes", "facts", "where")
    return [neutral({part: getattr(finding, part, None) for part in parts}, folder) for finding in found]


def _mistakes() -> Said:
    from benchmarks.mistakes import MISTAKES, TASKS, healthy
    from podium.checks import examine

    jobs = {f"mistake: {name}": mistake.job(1) for name, mistake in MISTAKES.items()}
    jobs |= {f"healthy: {name}": healthy(name, 1) for name in TASKS}
    said: Said = {}
    for name, job in jobs.items():
        with scratch() as folder:
            job.write(folder)
            said[name] = _findings(examine("run.yaml").findings, folder)
    return said


def _sound_runs() -> Said:
    from datasets import Dataset

    from benchmarks.healthy import models, plans
    from benchmarks.legitimate_rewards import REWARDS
    from podium import GRPOConfig
    from podium import check as checked

    said: Said = {}
    runs = [run for run in plans() if run.number % 7 == 0 and not run.adapter]
    with scratch() as folder:
        paths = models(runs, folder)
        for run in runs:
            legitimate = REWARDS[run.reward]
            found = checked(
                str(paths[run.family, run.sharp]),
                legitimate.make(),
                GRPOConfig("out", report_to="none", **run.settings),
                Dataset.from_list(legitimate.rows()),
            )
            said[f"sound run {run.number}"] = _findings(found, folder)
    return said


def _recipes() -> Said:
    from podium.recipe import shipped_recipes

    said: Said = {}
    with scratch() as folder:
        for name in shipped_recipes():
            said[f"recipe: {name}"] = neutral(command("check", name, "--json"), folder)
    return said


# ---- podium doctor ----


def doctor(runs: Path | None) -> Said:
    """The diagnosis of every run folder below a folder."""
    if runs is None:
        sys.exit("doctor: which folder of runs? python -m benchmarks.outputs doctor OUT.json RUNS")
    said: Said = {}
    for path in sorted(runs.rglob("metrics.jsonl")):
        run = path.parent
        diagnosis = command("doctor", str(run), "--json")
        if diagnosis["exit"] == 0:
            diagnosis["printed"] = json.loads(diagnosis["printed"])
        said[str(run.relative_to(runs))] = neutral(diagnosis, runs.resolve())
    return said


# ---- podium init ----


TASKS = ("number", "exact", "json", "code", "format", "tool", "game")
MACHINES = ("cpu", "small-gpu", "large-gpu")


def init(_: Path | None) -> Said:
    """The files that are written for each everyday table and for each example, and what is printed."""
    from benchmarks.tables import TABLES, write

    said: Said = {}
    for table in TABLES:
        words = ["--task", table.task] if table.task else []
        for flags in ([], ["--reward-file"]):
            with scratch() as folder:
                path = write(table, folder)
                said[" ".join([table.name, *flags])] = _started(folder, str(path), *words, *flags)
    for task in TASKS:
        for machine in MACHINES:
            with scratch() as folder:
                words = ["--task", task, "--machine", machine]
                said[" ".join(words)] = _started(folder, "example", *words)
    return said


def _started(folder: Path, *words: str) -> Said:
    """What `podium init WORDS` printed, and the files that it wrote; no model is sampled."""
    printed = command("init", *words, "-y", "--no-sample")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder]
    written = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return dict(neutral({**printed, "written": written}, folder))


# ---- rows ----


def rows(_: Path | None) -> Said:
    """Digests of the rows of each dataset, and findings of checks of rows."""
    from benchmarks import outputs_rows

    return outputs_rows.rows()


# ---- verbs ----


def verbs(runs: Path | None) -> Said:
    """Exit codes and digests of what the verbs print that load no model, and of the pages of recorded runs."""
    from benchmarks import outputs_verbs

    if runs is None:
        sys.exit("give a folder with recorded runs")
    return outputs_verbs.verbs(runs)


# ---- tests of rewards, environments and programs ----


def tests(_: Path | None) -> Said:
    """Reports on planted and on sound rewards, environments and programs, as JSON."""
    from benchmarks import outputs_tests

    return outputs_tests.tests()


# ---- rewards of the library ----


def rewards_scores(_: Path | None) -> Said:
    """Digests of what every reward of the library gives the texts of the lists of answers."""
    from benchmarks import outputs_scores

    return outputs_scores.scores()


KINDS: Mapping[str, Callable[[Path | None], Said]] = {
    "check": check,
    "doctor": doctor,
    "init": init,
    "rows": rows,
    "verbs": verbs,
    "tests": tests,
    "rewards_scores": rewards_scores,
}


def differing(before: Said, after: Said) -> Iterator[str]:
    """Lines for every case that is not the same."""
    for name in sorted({*before, *after}):
        old, new = (json.dumps(said.get(name), indent=1, ensure_ascii=False).splitlines() for said in (before, after))
        if old != new:
            yield f"== {name}"
            lines = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=1))[2:]
            yield from lines[:SHOWN]
            if len(lines) > SHOWN:
                yield f"... {len(lines) - SHOWN} more lines"


def main() -> int:
    """Write the outputs of a kind, or compare two; 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=sorted(KINDS))
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("runs", nargs="?", type=Path, help="a folder of recorded runs")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    asked = parser.parse_args()
    if asked.compare:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in asked.compare)
        lines = list(differing(before, after))
        num_differing = sum(line.startswith("== ") for line in lines)
        print("\n".join([*lines, f"{num_differing} of {len({*before, *after})} cases differ"]))
        return int(bool(lines))
    if asked.kind is None or asked.out is None:
        parser.error("a kind and a file to write")
    out = asked.out.resolve()
    said = KINDS[asked.kind](asked.runs.resolve() if asked.runs else None)
    out.write_text(json.dumps(said, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(said)} cases of {asked.kind}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
