"""Failures of data, rewards, tokenizer and template, planted into real runs: whether the first finding names the cause.

    python -m benchmarks.planted                      # all runs, then the table (an hour and a half on two cores)
    python -m benchmarks.planted "chance reward, 1"   # some of them
    python -m benchmarks.planted --replay             # the table alone, from the folders of earlier runs

Every run is GRPO on the built-in model, with 8 prompts x 8 completions a step. The first finding is the first error or
warning that a user sees, in the order in which they appear: `podium.check`, the proof on the first batch, `podium
doctor`. Healthy runs are of four kinds of task, with three seeds each; of them all findings are listed that any planted
failure is named by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.health import text, usual

RESULTS = Path(__file__).parent / "results" / "planted.json"
MODEL = "builtin:smollm2-135m-instruct"
STEPS, HEALTHY_STEPS = 14, 8

Row = dict[str, Any]


# ---- tasks ----


def next_numbers() -> list[Row]:
    """A number in, the next one out: what the model can do about half of the time, and soon nearly always."""
    system = "Say which number comes next. Answer with the number alone."
    return [{"prompt": asked(system, ("17", "18"), ("41", "42"), str(n)), "answer": str(n + 1)} for n in range(10, 130)]


def chain_sums() -> list[Row]:
    """reasoning-gym's, asked as the recipe does."""
    from podium.rewards import gym_rows

    rows = gym_rows("chain_sum", size=300, seed=1, min_terms=2, max_terms=3, min_digits=1, max_digits=1)
    system, task = (
        "Answer inside tags like this: <answer>7</answer>.",
        "State the final answer to the following arithmetic problem: ",
    )
    example = (f"{task}3 + 4 =", "<answer>7</answer>")
    return [{"prompt": asked(system, example, row["prompt"]), "answer": row["answer"]} for row in rows]


WORDS = (
    "horse dog cat cow pig goat lion tiger bear rabbit duck eagle owl frog shark oak rose tulip fern pine maple orchid "
    "hammer saw drill axe shovel rake ruler needle broom table lamp door window car boat train plane road river hill "
    "cloud star planet apple banana carrot potato cake song book letter word number school teacher doctor farmer king "
    "queen friend game ball shirt hat shoe ring coin bottle cup plate spoon garden flower tree bird bee spider snake"
)


def plurals() -> list[Row]:
    """One word in, one word out."""
    system = "Give the plural of a word. Answer with one word."
    return [
        {"prompt": asked(system, ("pencil", "pencils"), ("chair", "chairs"), word), "answer": f"{word}s"}
        for word in WORDS.split()
    ]


def sentences() -> list[Row]:
    """Nothing that is right or wrong: a form is asked for."""
    return [
        {"prompt": [{"role": "user", "content": f"Describe a {word} in one short sentence."}]} for word in WORDS.split()
    ]


def asked(system: str, *turns: tuple[str, str] | str) -> list[Row]:
    """A conversation of worked examples, and last the question."""
    said = [("system", system)]
    for turn in turns:
        said += [("user", turn)] if isinstance(turn, str) else [("user", turn[0]), ("assistant", turn[1])]
    return [{"role": role, "content": content} for role, content in said]


# ---- rewards ----


def exact(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """The answer, and nothing else."""
    return [float(text(each).strip(" .\n").lower() == gold) for each, gold in zip(completions, answer, strict=True)]


def one_sentence(completions: Sequence[Any], **_: Any) -> list[float]:
    """Ends with the first full stop, and is short."""
    texts = [text(each).strip() for each in completions]
    return [
        0.5 * (each.endswith(".") and each.count(".") == 1) + 0.5 * (4 <= len(each.split()) <= 14) for each in texts
    ]


def close() -> list[Any]:
    """The form, nearness, and right or wrong: as the recipe `chain-sum` pays."""
    from podium.rewards import library_reward

    tagged = {"extract": "tag:answer"}
    return [*usual()[:1], library_reward("numeric_closeness", **tagged), usual()[1]]


def by_chance(completions: Sequence[Any], **_: Any) -> list[float]:
    """A coin."""
    return [float(random.random() < 0.5) for _ in completions]


def on_topic(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Meant: stay with the question. Paid: the share of its words that stand in the completion."""
    questions = [set((p if isinstance(p, str) else p[-1]["content"]).lower().split()) for p in prompts]
    return [
        len(words & set(text(each).lower().split())) / len(words)
        for words, each in zip(questions, completions, strict=True)
    ]


# ---- what is wrong ----


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    """Answers against prompts: as a join by the wrong key leaves them."""
    answers = [row["answer"] for row in rows]
    random.Random(seed).shuffle(answers)
    return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def mislabelled(rows: list[Row], seed: int) -> list[Row]:
    """30 % have the answer of another row."""
    chance = random.Random(seed)
    answers = sorted({row["answer"] for row in rows})
    return [
        {**row, "answer": chance.choice([x for x in answers if x != row["answer"]])} if chance.random() < 0.3 else row
        for row in rows
    ]


def permuted(tokenizer: Any, seed: int) -> Any:
    """The ids of another vocabulary of the same size; special tokens stay."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["content"] for token in made["added_tokens"]}
    vocabulary = made["model"]["vocab"]
    names = [name for name in vocabulary if name not in special]
    ids = [vocabulary[name] for name in names]
    random.Random(seed).shuffle(ids)
    vocabulary.update(zip(names, ids, strict=True))
    backend = Tokenizer.from_str(json.dumps(made))
    other = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
    other.chat_template = tokenizer.chat_template
    return other


def without_the_turn(tokenizer: Any, seed: int) -> Any:
    """The chat template's last clause is gone."""
    template = tokenizer.chat_template
    start = template.index("{% if add_generation_prompt %}")
    tokenizer.chat_template = template[:start]
    return tokenizer


# ---- runs ----


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run."""

    first: tuple[str, ...] = ()
    """Codes one of which has to come first; none: a healthy run."""
    rows: Callable[[], list[Row]] = next_numbers
    rewards: Callable[[], list[Any]] = lambda: [exact]
    spoilt: Callable[[list[Row], int], list[Row]] | None = None
    tokenizer: Callable[[Any, int], Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    seed: int = 1


PLANTED: Mapping[str, Planned] = {
    "answers shuffled": Planned(first=("M155",), spoilt=shuffled),
    "30 % wrong answers": Planned(first=("M156",), spoilt=mislabelled),
    "chance reward": Planned(first=("P010", "W111", "M157"), rewards=lambda: [by_chance], steps=8),
    "copying pays": Planned(
        first=("M158",),
        rows=sentences,
        rewards=lambda: [on_topic],
        settings={"max_completion_length": 24},
        steps=8,
    ),
    "another tokenizer": Planned(first=("P014",), tokenizer=permuted, steps=2),
    "no assistant's turn": Planned(first=("M025",), tokenizer=without_the_turn, steps=2),
}
HEALTHY: Mapping[str, Planned] = {
    "next numbers": Planned(),
    "plurals": Planned(rows=plurals),
    "chain sums": Planned(rows=chain_sums, rewards=close, settings={"max_completion_length": 16}),
    "one sentence": Planned(rows=sentences, rewards=lambda: [one_sentence], settings={"max_completion_length": 32}),
}
RUNS: Mapping[str, Planned] = {
    **{f"{name}, {seed}": dataclasses.replace(run, seed=seed) for name, run in PLANTED.items() for seed in (1, 2)},
    **{
        f"healthy {name}, {seed}": dataclasses.replace(run, seed=seed)
        for name, run in HEALTHY.items()
        for seed in (1, 2, 3)
    },
}


def arguments(planned: Planned, folder: Path, *, proof: bool) -> dict[str, Any]:
    """Of `podium.check` and of the trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from podium import GRPOConfig
    from podium.models.builtin import resolve_model

    settings = {
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 8,
        "temperature": 1.0,
        "loss_type": "dapo",
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "max_steps": planned.steps or (STEPS if planned.first else HEALTHY_STEPS),
        "seed": planned.seed,
        "prove_first_batch": proof,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **planned.settings,
    }
    rows = planned.rows()
    own = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    return {
        "model": MODEL,
        "reward_funcs": planned.rewards(),
        "args": GRPOConfig(str(folder), **settings),
        "train_dataset": Dataset.from_list(planned.spoilt(rows, planned.seed) if planned.spoilt else rows),
        "processing_class": planned.tokenizer(own, planned.seed) if planned.tokenizer else None,
    }


def run(name: str, folder: Path, *, proof: bool) -> None:
    """Check, train; what `check` said is kept in the folder."""
    from podium import GRPOTrainer, check
    from podium.errors import PodiumError

    given = arguments(RUNS[name], folder, proof=proof)
    said = [dataclasses.asdict(finding) for finding in check(**given)]
    try:
        GRPOTrainer(**given).train()
    except PodiumError as error:
        print(f"{name}: training ended with {type(error).__name__}: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(json.dumps(said, indent=1, default=str) + "\n")


# ---- the table ----


def seen(folder: Path) -> list[dict[str, Any]]:
    """All errors and warnings in the order in which a user sees them."""
    from podium.runs.doctor import examine

    said = [(each["severity"], each["code"], each["what"]) for each in json.loads((folder / "check.json").read_text())]
    if (folder / "proof.json").is_file():
        words = {"FAILED": "error", "WARNING": "warning"}
        checks = json.loads((folder / "proof.json").read_text())["checks"]
        said += [(words[c["result"]], c["code"], c["detail"]) for c in checks if c["result"] in words]
    if (folder / "metrics.jsonl").is_file():
        found = [issue.finding for issue in examine(folder).issues]
        said += [(finding.severity, finding.code, finding.what) for finding in found]
    return [{"code": code, "what": what} for severity, code, what in said if severity in ("error", "warning")]


def results(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """What was said of each run, and whether it is right."""
    from podium import Run
    from podium.runs.monitors import ends

    names = {code for planned in PLANTED.values() for code in planned.first}
    found = []
    for name, folder in folders.items():
        planned, said = RUNS[name], seen(folder)
        codes = [each["code"] for each in said]
        false = [] if planned.first else sorted(names & set(codes))
        right = bool(codes) and codes[0] in planned.first if planned.first else not false
        reward = ends([each.values["reward"] for each in Run.load(folder).history])[:2]
        reward = [round(x, 2) for x in reward]
        found.append({"run": name, "right": right, "false": false, "reward": reward, "said": said})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """What `benchmarks/RESULTS.md` shows of the results."""
    planted, healthy = ([each for each in found if bool(RUNS[each["run"]].first) is x] for x in (True, False))
    lines = [
        f"{len(planted)} planted failures: {sum(each['right'] for each in planted)} named first. "
        f"{len(healthy)} healthy runs: {sum(bool(each['false']) for each in healthy)} with one of these findings.",
        "",
        "| run | reward, first and last steps | first error or warning | others |",
        "|---|---|---|---|",
    ]
    for each in found:
        codes = list(dict.fromkeys(said["code"] for said in each["said"]))
        what = each["said"][0]["what"].partition("; ")[0].partition(" (match")[0] if codes else ""
        first = f"{codes[0]}: {what}".replace("|", "\\|") if codes else "nothing"
        lines.append(
            f"| {each['run']} | {each['reward'][0]} to {each['reward'][1]} | {first} | {' '.join(codes[1:])} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs, table, JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--no-proof", action="store_true", help="record steps alone, to set limits on")
    parser.add_argument("--folder", type=Path, default=Path("runs/planted"))
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    folders = {
        name: given.folder / name.replace(" ", "-").replace(",", "").replace("'", "") for name in given.names or RUNS
    }
    if not given.replay:
        for name, folder in folders.items():
            print(f"--- {name}", flush=True)
            run(name, folder, proof=not given.no_proof)
    found = results({name: folder for name, folder in folders.items() if (folder / "check.json").is_file()})
    print(table(found))
    if len(found) == len(RUNS) and not given.no_proof:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
