"""Sound runs that a sensible person could start, and everything that is said of them: nothing may stop one.

    python -m benchmarks.healthy                    # all of them
    python -m benchmarks.healthy --clock 10         # as on a machine on which everything takes ten times as long
    python -m benchmarks.healthy --only 17 42       # some, each with all that was said
    python -m benchmarks.healthy --table            # the tables alone, from the results of earlier calls

Each run is a few GRPO steps of a tiny random model, checked by `podium.check` and trained by `podium.GRPOTrainer` with
the proof on the first batch, in a process of its own. Families of models, rewards, losses, rates, optimizers, adapters,
precisions, group sizes, lengths and sampling settings are drawn so that every value occurs about equally often, in
combinations that differ. A random model can learn little in so few steps: warnings that say so are true, and the table
has a judgement for every code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.families import FAMILIES
from benchmarks.legitimate_rewards import REWARDS

RUNS = 420
STEPS = (4, 12)
"""Of most runs, and of every fourth: some detectors look at eight steps or more."""
LIMIT = 240.0
"""Seconds by the true clock after which a run counts as one that hangs."""
SHOWN = 160
"""Characters of a finding that are kept."""
RESULTS = Path(__file__).parent / "results"
CLOCK = "PODIUM_BENCHMARK_CLOCK"
"""The factor by which `benchmarks/clock/sitecustomize.py` stretches time, in this process and its children."""

LIVE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "smollm3")
"""Dense families with softmax attention: those of the runs with `async_rollouts`, and with DoRA."""

TARGETS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("llama4", "llama4_text", "jamba", "gemma3n_text"), ("q_proj", "v_proj")),
    **dict.fromkeys(("mamba", "mamba2", "falcon_h1", "nemotron_h"), ("in_proj",)),
}
"""Layers with adapters where not all linear ones can have them: PEFT cannot wrap Llama 4's router, whose output is a
pair, nor Mamba's `out_proj`; transformers takes what an adapter on Jamba's router computes for the router's output, and
passes by one on Gemma 3n's AltUp coefficients while training."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "loss": (
        *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo")),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
    ),
    "learning_rate": (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1),
    "optim": ("adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad", "adamw_torch"),
    "adapter": (
        None,
        None,
        {"r": 8},
        {"r": 4, "use_dora": True},
        {"r": 16, "use_rslora": True},
        {"r": 1, "lora_alpha": 64},
    ),
    "precision": ({}, {}, {"model_init_kwargs": {"dtype": "bfloat16"}}, {"product_precision": "bfloat16"}),
    "sampling": (
        {},
        {"temperature": 0.3},
        {"temperature": 1.5},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"rollout_engine": "transformers"},
    ),
    "batch": (
        {"num_generations": 2, "per_device_train_batch_size": 4},
        {"num_generations": 3, "per_device_train_batch_size": 6},
        {"num_generations": 4, "per_device_train_batch_size": 16},
        {"num_generations": 8, "per_device_train_batch_size": 16},
        {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"num_generations": 2, "per_device_train_batch_size": 2, "steps_per_generation": 2},
    ),
    "max_completion_length": (1, 4, 16, 48),
    "other": (
        {},
        {"beta": 0.04},
        {"num_iterations": 2},
        {"scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.01},
        {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"mask_truncated_completions": True},
        {"top_entropy_quantile": 0.2},
        {"epsilon_high": 0.28, "beta": 0.001},
        {"num_train_epochs": 1, "shuffle_dataset": False},
        {"gradient_checkpointing": True},
        {"async_rollouts": 1},
    ),
    "sharp": (False, False, False, True),
    "reward": tuple(REWARDS),
    "family": tuple(FAMILIES),
}
"""What a run is made of; `sharp` is a policy that is nearly deterministic."""

JUDGED: Mapping[str, str] = {
    "C021": "true: with that rate an adapter hardly moves",
    "C022": "true of the rate; a run of four steps survives it",
    "C023": "true: groups of two or three were asked for",
    "C024": "true: two to four prompts a step were asked for",
    "C025": "true: another form than the paper's",
    "C026": "true: the rate is 0",
    "C030": "true: max_steps decides",
    "C037": "true: one token was asked for",
    "C069": "true: sampling is from another distribution than the gradient is of",
    "D045": "a guess from the name nanochat; a random model was trained on no conversations",
    "D037": "true: the answers are longer than the limit",
    "M101": "true: a random model earns the same everywhere",
    "M102": "true of these completions",
    "M103": "true of these completions: a random model does not earn it",
    "M108": "true: few prompts a step",
    "M111": "true of the numbers; chance in so few steps",
    "M121": "true of the numbers; little was earned",
    "M122": "true: a nearly deterministic or one-token policy repeats itself",
    "M123": "true at this temperature; doubtful for a policy sharp by itself",
    "M124": "true of the numbers: the rate is high",
    "M133": "true: the rate is high",
    "M132": "true: the rate is high",
    "M134": "true of the numbers; gradients of a nearly deterministic policy vary",
    "M135": "true: dropout, which is on in training alone; bfloat16",
    "M136": "true: the rate is high",
    "M137": "true: the rate is next to nothing",
    "M138": "true: no gradient reached it, or half precision rounded it away",
    "M139": "true: the rate is that of all weights",
    "M141": "true: a random model does not end its text",
    "M144": "true: completions were empty",
    "M146": "true: no tag was written",
    "M152": "true: the reward is the length, on purpose",
    "M159": "true of the numbers; the model wrote so from the start",
    "M163": "true of the seconds: the step of a tiny model takes as long as its rewards",
    "M160": "true of the texts of a random model",
    "P008": "true: no gradient reaches it, in the plain model neither",
    "P011": "true: at this rate half precision rounds the step away",
    "P014": "true of the numbers: the weights are random; the tokenizer is right",
    "W105": "doubtful: the reward is about style",
    "W009": "true of the clock: the reward takes that long where everything takes ten times as long",
    "W106": "true: naming all of them earns as much, by design of this reward",
    "W107": "true: more than one answer is paid, by design of this reward",
    "W115": "true: near answers are paid, by design of this reward",
    "W122": "true: it was not tested",
    "W124": "doubtful: no form is asked for",
    "W108": "true: the first of two answers is what this reward reads",
}
"""Codes of warnings, and whether they were true where they were read; other codes fail the command."""


@dataclass(frozen=True, kw_only=True)
class Sound:
    """One run."""

    number: int
    family: str
    reward: str
    sharp: bool
    adapter: Mapping[str, Any] | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    number: int
    stopped: str = ""
    """The exception that ended it; empty: it was trained to its end."""
    steps: int = 0
    seconds: float = 0.0
    said: Sequence[tuple[str, str, str, str]] = field(default_factory=tuple)
    """(where, severity, code, what) of every finding: by `check`, `proof` or `run`."""


def plans(count: int = RUNS) -> list[Sound]:
    """The runs, the same on every call: each dimension is a deck of cards that is shuffled whenever it is used up."""
    decks = {name: _deck(name, values) for name, values in CHOICES.items()}
    return [_fitted(number, {name: next(deck) for name, deck in decks.items()}) for number in range(count)]


def _deck(name: str, values: Sequence[Any]) -> Iterator[Any]:
    chance = random.Random(name)
    while True:
        yield from chance.sample(values, len(values))


def _fitted(number: int, drawn: Mapping[str, Any]) -> Sound:
    """A run of what was drawn, without the few combinations that exclude each other by their nature."""
    settings = {
        "learning_rate": drawn["learning_rate"],
        "optim": drawn["optim"],
        "max_completion_length": drawn["max_completion_length"],
        "max_steps": STEPS[number % 4 == 0],
        "seed": number,
        **drawn["loss"],
        **drawn["precision"],
        **drawn["sampling"],
        **drawn["batch"],
        **drawn["other"],
    }
    if settings.get("async_rollouts"):  # the live engine's, which not every family has
        settings.pop("rollout_engine", None)
        drawn = {**drawn, "family": LIVE[number % len(LIVE)]}
    adapter = drawn["adapter"]
    if adapter is not None and adapter.get("use_dora") and drawn["family"] not in LIVE:  # PEFT has none for experts
        adapter = {"r": 8}
    return Sound(
        number=number,
        family=drawn["family"],
        reward=drawn["reward"],
        sharp=drawn["sharp"],
        adapter=adapter,
        settings=settings,
    )


# ---- one run ----


def sharpened(source: Path, folder: Path) -> None:
    """The same checkpoint with a head so large that most tokens are all but certain."""
    from shutil import copytree

    import torch
    from safetensors.torch import load_file, save_file

    copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    heads = [name for name in tensors if name.endswith(("lm_head.weight", "embed_out.weight"))]
    tied = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight", "embeddings.weight"))]
    with torch.no_grad():
        for name in heads or tied:
            tensors[name] = tensors[name] * 20
    save_file(tensors, path, metadata={"format": "pt"})


def execute(run: Sound, model: Path, folder: Path) -> Outcome:
    """Check and train, in this process."""
    from datasets import Dataset
    from peft import LoraConfig

    from podium import GRPOConfig, GRPOTrainer, check

    started, said = time.perf_counter(), list[tuple[str, str, str, str]]()
    legitimate = REWARDS[run.reward]
    trainer: Any = None
    targets = TARGETS.get(run.family, "all-linear")
    try:
        given = {
            "model": str(model),
            "reward_funcs": legitimate.make(),
            "args": GRPOConfig(
                str(folder), save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1, **run.settings
            ),
            "train_dataset": Dataset.from_list(legitimate.rows()),
            "peft_config": LoraConfig(target_modules=targets if isinstance(targets, str) else [*targets], **run.adapter)
            if run.adapter
            else None,
        }
        said += [("check", f.severity, f.code, shown(f.what)) for f in check(**given)]
        trainer = GRPOTrainer(**given)
        trainer.train()
        stopped = f"a finding ended it: {trainer.health.decision}" if trainer.health.decision else ""
    except Exception as error:  # noqa: BLE001  whatever ends a run is its outcome
        stopped = f"{type(error).__name__}: {error}"
    if trainer is not None:
        said += [("run", f.severity, f.code, shown(f.what)) for f in trainer.health.found]
    steps = trainer.state.global_step if trainer is not None else 0
    seconds = round(time.perf_counter() - started, 2)
    return Outcome(number=run.number, stopped=stopped, steps=steps, seconds=seconds, said=tuple(dict.fromkeys(said)))


def shown(what: str) -> str:
    """A finding as it is kept: short, without the path of this checkout."""
    return what.replace(f"{Path(__file__).parents[1]}/", "")[:SHOWN]


def _child(run: Sound, model: Path, answer: Connection, *, quiet: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if quiet:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        answer.send(execute(run, model, Path(folder) / "run"))
    answer.close()
    os._exit(0)


# ---- all runs ----


def models(runs: Sequence[Sound], folder: Path) -> dict[tuple[str, bool], Path]:
    """A checkpoint of every family that occurs."""
    made: dict[tuple[str, bool], Path] = {}
    for family, sharp in sorted({(run.family, run.sharp) for run in runs}):
        plain = folder / family
        if not plain.exists():
            FAMILIES[family](plain)
        made[family, sharp] = plain
        if sharp:
            made[family, sharp] = folder / f"{family}-sharp"
            sharpened(plain, made[family, sharp])
    return made


def outcomes(runs: Sequence[Sound], *, jobs: int, quiet: bool) -> list[Outcome]:
    """Every run in a process of its own, `jobs` at once."""
    import podium.grpo_trainer  # noqa: F401  imported once, before the processes fork

    context, done = multiprocessing.get_context("fork"), list[Outcome]()
    with tempfile.TemporaryDirectory() as folder:
        made = models(runs, Path(folder))
        waiting, running = list(reversed(runs)), dict[Any, tuple[Sound, Any, float]]()
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                args = (run, made[run.family, run.sharp], theirs)
                process = context.Process(target=_child, args=args, kwargs={"quiet": quiet})
                process.start()
                theirs.close()
                running[mine] = run, process, time.time()
            for answer in wait(list(running), timeout=1.0):
                run, process, _ = running.pop(answer)
                done.append(_received(run, answer, process))
                _progress(done[-1], run, len(done), len(runs))
            for answer, (run, process, since) in list(running.items()):
                if time.time() - since > LIMIT * float(os.environ.get(CLOCK, "1")):
                    process.kill()
                    del running[answer]
                    done.append(Outcome(number=run.number, stopped=f"took more than {LIMIT:g} s"))
                    _progress(done[-1], run, len(done), len(runs))
    return sorted(done, key=lambda each: each.number)


def _received(run: Sound, answer: Connection, process: Any) -> Outcome:
    try:
        outcome: Outcome = answer.recv()
    except EOFError:
        process.join()
        return Outcome(number=run.number, stopped=f"its process ended with code {process.exitcode}")
    process.join()
    return outcome


def _progress(outcome: Outcome, run: Sound, count: int, total: int) -> None:
    errors = [code for _, severity, code, _ in outcome.said if severity == "error"]
    if outcome.stopped or errors:
        print(f"{run.number}: {run.family}, {run.reward}: {outcome.stopped[:300]} {errors}", flush=True)
    if count % 20 == 0:
        print(f"{count} of {total}", file=sys.stderr, flush=True)


# ---- tables ----


def results_file(clock: float) -> Path:
    """Where the results of a clock are."""
    return RESULTS / ("healthy.json" if clock == 1 else f"healthy-clock-{clock:g}.json")


def read(path: Path) -> list[Outcome]:
    """The results of an earlier call."""
    return [Outcome(**each) for each in json.loads(path.read_text(encoding="utf-8"))]


def is_bad(outcome: Outcome) -> bool:
    """Whether a run was stopped, or had a finding of severity error."""
    return bool(outcome.stopped) or any(severity == "error" for _, severity, *_ in outcome.said)


def summary(done: Sequence[Outcome], clock: float) -> str:
    """One line."""
    errors = sum(is_bad(each) and not each.stopped for each in done)
    warned = sum(any(severity == "warning" for _, severity, *_ in each.said) for each in done)
    when = "" if clock == 1 else f", everything taking {clock:g} times as long"
    return (
        f"{len(done)} sound runs{when}: {sum(bool(each.stopped) for each in done)} stopped, {errors} with an error, "
        f"{warned} with a warning."
    )


def table(done: Sequence[Outcome]) -> str:
    """Codes of warnings, the runs that had them, an example and its judgement."""
    found = {(each.number, code): what for each in done for _, severity, code, what in each.said if severity != "note"}
    counts = Counter(code for _, code in found)
    lines = ["| code | runs | as in | judgement |", "|---|---|---|---|"]
    for code, count in counts.most_common():
        example = next(what for (_, each), what in found.items() if each == code).splitlines()[0]
        cell = example[:SHOWN].replace("|", "\\|")
        lines.append(f"| {code} | {count} | {cell} | {JUDGED.get(code, 'not read yet')} |")
    return "\n".join(lines)


def main() -> None:
    """Run, write the results, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of runs")
    parser.add_argument("--again", action="store_true", help="only the runs that were stopped or had an error")
    parser.add_argument("--every", type=int, default=1, help="one in so many")
    parser.add_argument("--clock", type=float, default=1.0, help="stretch time by this factor")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--table", action="store_true", help="no run: the tables from the results")
    asked = parser.parse_args()
    if asked.clock != 1 and CLOCK not in os.environ:
        path = os.pathsep.join([str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH", "")])
        os.environ.update({CLOCK: f"{asked.clock:g}", "PYTHONPATH": path})
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.healthy", *sys.argv[1:]])
    path = results_file(asked.clock)
    if asked.table:
        done = read(path)
    else:
        runs, kept = plans(), list[Outcome]()
        if asked.again:
            kept = [each for each in read(path) if not is_bad(each)]
        runs = [runs[number] for number in asked.only] if asked.only else runs[:: asked.every]
        runs = [run for run in runs if run.number not in {each.number for each in kept}]
        done = sorted(kept + outcomes(runs, jobs=asked.jobs, quiet=not asked.only), key=lambda each: each.number)
        if not asked.only and asked.every == 1:
            path.write_text(json.dumps([asdict(each) for each in done], indent=0) + "\n", encoding="utf-8")
    if asked.only:
        for each in done:
            print(plans()[each.number], each.stopped, *("  " + " ".join(said) for said in each.said), sep="\n")
    print(summary(done, asked.clock), table(done), sep="\n\n")
    unread = {code for each in done for _, severity, code, _ in each.said if severity != "note"} - {*JUDGED}
    bad = any(map(is_bad, done))
    if unread and not asked.only:
        print(f"Not judged: {', '.join(sorted(unread))}")
    sys.exit(bool(bad or (unread and not asked.only)))


if __name__ == "__main__":
    main()
