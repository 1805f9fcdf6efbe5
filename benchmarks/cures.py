"""Planted mistakes of beginners: whether each is named in time, and whether the cure that its finding states helps.

    python -m benchmarks.cures                                  # all mistakes and healthy runs, three seeds
    python -m benchmarks.cures "learning rate 1e-7" --seeds 1   # some of them
    python -m benchmarks.cures --table                          # the tables alone, from the JSON

Each run (`benchmarks.mistakes`) is checked, trained for 8 or 12 steps in a process of its own on one thread, and
measured on the same held-out rows with the task's own accuracy. A mistake is named if an error or a warning with one of
its codes comes before training, in the proof on the first batch, or in the first five steps. Then a program applies the
cure: the `changes` of the findings, of those of the check alone where it names the mistake; where there are none and
the fix describes a change of the reward file or the rows, the files as they should have been. The cure helps if the
mean over the seeds is higher by 0.05 and no seed is lower. A run that an error stops has the accuracy of the model as
it is. Runs are kept by a digest of their files: a finished run is not repeated, and mistakes share the runs of their
cures.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.mistakes import MISTAKES, TASKS, Job, Mistake, healthy, is_right, merged, recipe_of

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "cures.json"
RUNS = Path("runs/cures")
NAMED_WITHIN = 5
"""Optimizer steps."""
GAIN = 0.05
"""Mean over the seeds by which a cure must be better; held-out accuracy of one seed is a mean of 80 completions."""

Result = Mapping[str, Any]


# ---- one run, in a process of its own ----


def work(folder: Path) -> dict[str, Any]:
    """Check, train, measure; everything that a later step needs."""
    os.chdir(folder)
    job = json.loads(Path("job.json").read_text())
    started = time.process_time()
    result: dict[str, Any] = {"findings": [], "stopped": "", "crashed": "", "accuracy": None}
    from podium.checks import examine

    checked = examine("run.yaml")
    result["findings"] = [record(finding, "check") for finding in checked.findings]
    if checked.recipe is not None:
        _train(checked.recipe, job, result)
    elif job["trains"]:
        result["stopped"] = "check"
    return {**result, "seconds": round(time.process_time() - started, 1)}


def record(finding: Any, when: str) -> dict[str, Any]:
    """A finding, and when it came: `check`, `first batch`, or `step 3`."""
    values = dataclasses.asdict(finding)
    return {**{key: values[key] for key in ("code", "severity", "what", "fix", "changes")}, "when": when}


def _train(recipe: Any, job: Mapping[str, Any], result: dict[str, Any]) -> None:
    from podium.errors import PodiumError

    trainer = None
    try:
        trainer = recipe.trainer()
        if job["trains"]:
            trainer.train()
    except PodiumError as error:
        result["stopped"] = f"{error.code or type(error).__name__}: {error.what}".splitlines()[0]
        own = error.findings or ([_as_finding(error)] if error.code else [])
        result["findings"] += [record(finding, "first batch") for finding in own]
    result["findings"] += _recorded(Path("out"))
    if trainer is not None:
        result["accuracy"] = _accuracy(trainer, recipe, job["task"])
        history = trainer.health.folder.folder / "metrics.jsonl"
        lines = [json.loads(line)["values"] for line in history.read_text().splitlines()] if history.is_file() else []
        result["rewards"] = [round(values["reward"], 3) for values in lines if values.get("reward") is not None]
        flat = [values["frac_reward_zero_std"] for values in lines if values.get("frac_reward_zero_std") is not None]
        result["signal"] = round(1 - statistics.mean(flat), 3) if flat else 0.0


def _as_finding(error: Any) -> Any:
    from podium.errors import Finding

    return Finding(code=error.code, severity="error", what=error.what, fix=error.fix)


def _recorded(folder: Path) -> list[dict[str, Any]]:
    """What the proof and the detectors have found."""
    from podium.runs.run import Run

    if not folder.is_dir():
        return []
    run, words = Run(folder=folder), {"FAILED": "error", "WARNING": "warning"}
    found = [
        {
            **{"code": each["code"], "severity": words[each["result"]], "what": each["detail"]},
            **{"fix": each.get("fix", ""), "changes": each.get("changes", {}), "when": "first batch"},
        }
        for each in run.proof.get("checks", ())
        if each["result"] in words
    ]
    for row in run.findings.to_dict("records"):
        step = row["step"] if row["step"] == row["step"] else None
        keys = ("code", "severity", "what", "fix", "changes")
        found.append({**{key: row[key] for key in keys}, "when": f"step {int(step)}" if step else "first batch"})
    return found


def _accuracy(trainer: Any, recipe: Any, task: str) -> float:
    """Of the model on the held-out rows, asked as the recipe asks, with room for an answer."""
    from podium import GRPOConfig, GRPOTrainer
    from podium.data.rows import load_data

    plain = dataclasses.replace(recipe.data, dataset="test.csv", eval_dataset=None, held_out=None, filter=())
    rows = list(load_data(plain)[0])
    truths = [row["answer"] for row in TASKS[task].split()[2]]
    room = max(recipe_of(task, 1)["max_completion_length"], recipe.config.get("max_completion_length") or 0)
    judge = GRPOTrainer(
        model=trainer.model,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=GRPOConfig(
            "judge",
            per_device_train_batch_size=64,
            num_generations=2,
            max_completion_length=room,
            loss_type="dapo",
            seed=7,
            report_to="none",
            prove_first_batch=False,
        ),
        train_dataset=rows,
        processing_class=trainer.processing_class,
    )
    groups = judge.generate_completions(rows, 2, temperature=1.0)
    right = [
        is_right(each.text, truth)
        for group, truth in zip(groups, truths, strict=True)
        for each in group.group.completions
    ]
    return round(statistics.mean(right), 4)


# ---- all runs ----


def folder_of(job: Job) -> Path:
    """Named by the digest of all that the run depends on."""
    content = json.dumps([job.task, dict(job.recipe), job.rewards, list(job.rows), job.trains], sort_keys=True)
    return RUNS / hashlib.sha256(content.encode()).hexdigest()[:16]


def run_all(jobs: Iterable[Job], workers: int) -> None:
    """Run what has no result yet, each in a process of its own."""
    missing = {folder_of(job): job for job in jobs if not (folder_of(job) / "result.json").is_file()}
    with ThreadPoolExecutor(workers) as pool:
        for number, seconds in enumerate(pool.map(_run, missing.items()), start=1):
            print(f"{number} of {len(missing)} runs, {seconds:.0f} s", flush=True)


def _run(each: tuple[Path, Job]) -> float:
    folder, job = each
    job.write(folder)
    (folder / "job.json").write_text(json.dumps({"task": job.task, "trains": job.trains}))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    command = [sys.executable, "-m", "benchmarks.cures", "--work", str(folder.absolute())]
    started = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    if done.returncode:  # a traceback is a result too: a mistake that Podium has no message for
        crashed = {"findings": [], "stopped": "", "crashed": (folder / "log.txt").read_text()[-1500:], "accuracy": None}
        (folder / "result.json").write_text(json.dumps(crashed, indent=1) + "\n")
    return time.perf_counter() - started


def result_of(job: Job) -> Result:
    """The result of a run; a run that never had a trainer has the accuracy of the model as it is."""
    folder = folder_of(job)
    text = (folder / "result.json").read_text().replace(f"{folder.absolute()}/", "")  # findings name the run's files
    result: dict[str, Any] = json.loads(text)
    if result["accuracy"] is None:
        result["accuracy"] = json.loads((folder_of(untrained(job.task)) / "result.json").read_text())["accuracy"]
    return result


def untrained(task: str) -> Job:
    """The model as it is, asked as the healthy recipe asks."""
    return dataclasses.replace(healthy(task, 1), trains=False)


# ---- named, cured, better ----


def in_time(result: Result) -> list[Mapping[str, Any]]:
    """Errors and warnings that come before training or in its first steps, in their order."""
    early = {"check", "first batch", *(f"step {step}" for step in range(1, NAMED_WITHIN + 1))}
    return [each for each in result["findings"] if each["severity"] != "note" and each["when"] in early]


def named(mistake: Mistake, result: Result) -> Mapping[str, Any] | None:
    """The first finding that names it; None: it was missed."""
    return next((each for each in in_time(result) if each["code"] in mistake.codes), None)


def with_changes(recipe: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """The recipe with the changes of all findings, the gravest first, and these as a line of YAML."""
    from podium.errors import Finding
    from podium.errors.texts import as_yaml
    from podium.recipe.changes import apply_changes
    from podium.recipe.cure import prescribe
    from podium.recipe.document import parse
    from podium.runs.monitors import rank

    keys = ("code", "severity", "what", "fix", "changes")
    findings = [Finding(**{key: each[key] for key in keys}) for each in found]
    changes = prescribe(sorted(findings, key=rank)).changes
    return dict(parse(apply_changes(recipe, changes), name="run.yaml").values), as_yaml(changes)


def cured(mistake: Mistake, seed: int, result: Result) -> tuple[Job | None, str]:
    """The run with the cure that the findings state, and the cure in words. None: they state none that applies."""
    job, found = mistake.job(seed), in_time(result)
    if any(each["code"] in mistake.codes and each["when"] == "check" for each in found):
        found = [each for each in found if each["when"] == "check"]  # cured before any training
    own = [each for each in found if each["code"] in mistake.codes]
    if any(each["changes"] for each in own):
        recipe, changes = with_changes(job.recipe, found)
        return dataclasses.replace(job, recipe=recipe), changes
    if mistake.repair is None:
        return None, ""
    described = next((each for each in own if any(word in each["fix"] for word in mistake.repair.words)), None)
    if described is None:
        return None, ""
    words, settings = f"by hand: {described['fix']}", mistake.repair.settings
    repaired = healthy(mistake.task, seed)
    return (dataclasses.replace(job, recipe=merged(job.recipe, settings)) if settings else repaired), words


def judged(name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """One mistake over the seeds."""
    mistake, by_seed = MISTAKES[name], {}
    for seed in seeds:
        before = result_of(mistake.job(seed))
        cure, words = cured(mistake, seed, before)
        first = named(mistake, before)
        by_seed[seed] = {
            "named": first and {key: first[key] for key in ("code", "when", "what", "fix")},
            "others": sorted({each["code"] for each in in_time(before)} - set(mistake.codes)),
            "stopped": before["stopped"],
            "crashed": before["crashed"],
            "cure": words,
            "before": before["accuracy"],
            "after": None if cure is None else result_of(cure)["accuracy"],
            "signal": [before.get("signal"), None if cure is None else result_of(cure).get("signal")],
        }
    return {"mistake": name, "kind": mistake.kind, "task": mistake.task, "seeds": by_seed, **verdict(by_seed.values())}


def verdict(runs: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Named with every seed; better by `GAIN` on average and with no seed worse."""
    runs = list(runs)
    after = [run["after"] for run in runs]
    better = (
        None not in after
        and statistics.mean(after) - statistics.mean(run["before"] for run in runs) >= GAIN
        and all(run["after"] >= run["before"] for run in runs)
    )
    return {"named": all(run["named"] for run in runs), "better": better}


def alarms(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Healthy runs, with every error and warning of theirs."""
    return [
        {
            **{"task": task, "seed": seed, "before": result_of(untrained(task))["accuracy"]},
            "after": result["accuracy"],
            "found": [
                {key: each[key] for key in ("code", "when", "what")}
                for each in result["findings"]
                if each["severity"] != "note"
            ],
        }
        for task in TASKS
        for seed in seeds
        for result in [result_of(healthy(task, seed))]
    ]


# ---- tables ----


def table(mistakes: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """The tables of `benchmarks/RESULTS.md`."""
    num_named, num_better = (sum(each[key] for each in mistakes) for key in ("named", "better"))
    lines = [
        f"{len(mistakes)} mistakes: {num_named} named before training or within {NAMED_WITHIN} steps; "
        f"{num_better} cures are better than the mistake. "
        f"{len(runs)} healthy runs: {sum(bool(each['found']) for each in runs)} with a warning.",
        "",
        "| mistake | named by | when | cure | without | with |",
        "|---|---|---|---|---|---|",
    ]
    for each in mistakes:
        by_seed = list(each["seeds"].values())
        first = next((run["named"] for run in by_seed if run["named"]), None)
        cure = next((run["cure"] for run in by_seed if run["cure"]), "none")
        cure = cure if cure.startswith(("by hand", "none")) else f"`{cure}`"
        code, when = (first["code"], first["when"]) if first else ("nothing", "")
        with_cure = " / ".join("-" if run["after"] is None else f"{run['after']:.2f}" for run in by_seed)
        without = " / ".join(f"{run['before']:.2f}" for run in by_seed)
        cells = [each["mistake"], code, when, _short(cure), without, with_cure + (" better" if each["better"] else "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    lines += ["", "| healthy run | seed | accuracy before | after | errors and warnings |", "|---|---|---|---|---|"]
    for run in runs:
        found = ", ".join(f"{each['code']} ({each['when']})" for each in run["found"]) or "none"
        lines.append(f"| {run['task']} | {run['seed']} | {run['before']:.2f} | {run['after']:.2f} | {found} |")
    return "\n".join(lines)


def keep(mistakes: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> None:
    """Put results into the JSON, in place of those of the same mistakes."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"mistakes": [], "healthy": []}
    by_name = {each["mistake"]: each for each in [*kept["mistakes"], *mistakes]}
    ordered = [by_name[name] for name in MISTAKES if name in by_name]
    RESULTS.write_text(json.dumps({"mistakes": ordered, "healthy": list(runs) or kept["healthy"]}, indent=1) + "\n")


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit].rsplit(' ', 1)[0]} ..."


def main() -> None:
    """Runs, then the JSON and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mistakes, or `healthy`; default: all")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables of the JSON and run nothing")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        result = work(given.work)
        (given.work / "result.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
        return
    if given.table:
        kept = json.loads(RESULTS.read_text())
        print(table(kept["mistakes"], kept["healthy"]))
        return
    seeds = [int(seed) for seed in given.seeds.split(",")]
    if unknown := [name for name in given.names if name not in {*MISTAKES, "healthy"}]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are healthy, {', '.join(MISTAKES)}")
    names = [name for name in MISTAKES if name in given.names or not given.names]
    is_healthy = not given.names or "healthy" in given.names
    tasks = TASKS if is_healthy else dict.fromkeys(MISTAKES[name].task for name in names)
    first = [untrained(task) for task in tasks]
    first += [healthy(task, seed) for seed in seeds for task in TASKS if is_healthy]
    first += [MISTAKES[name].job(seed) for seed in seeds for name in names]
    run_all(first, given.jobs)
    pairs = [(MISTAKES[name], seed) for seed in seeds for name in names]
    cures = [cured(mistake, seed, result_of(mistake.job(seed)))[0] for mistake, seed in pairs]
    run_all([job for job in cures if job is not None], given.jobs)
    found, runs = [judged(name, seeds) for name in names], alarms(seeds) if is_healthy else []
    print(table(found, runs))
    keep(found, runs)


if __name__ == "__main__":
    main()
