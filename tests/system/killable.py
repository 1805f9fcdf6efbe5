"""Training runs in processes of their own that may be killed at any moment.

As a script it is a server: it imports everything once and forks for every run, so that a kill costs no import. One JSON
line in starts a run:

    {"run": "base", "folder": "/tmp/x", "resume": true, "die_at": null}

and lines come out: `pid N`, `step N` after each optimizer step, `call N` when a tool is called the Nth time, `saves N`
(file operations in checkpoints), `ended STATUS`. A run in stages says `begun N` when a stage begins to train, too. A
finished run leaves `final.safetensors` and `history.json` in its folder. `die_at` kills the run from within, at that
file operation inside a checkpoint.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import TrainerCallback

from podium import GRPOConfig, GRPOTrainer, Run, Stages
from podium.agents.chat import ChatFormat, set_tool_template
from podium.runs.checkpoint import PREFIX, STAGING
from podium.tester import pretest
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

LINES = os.dup(1)
"""Where the lines go; what the Trainer prints goes to stderr."""

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 5) for b in range(4)]

SETTINGS: Mapping[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_completion_length": 8,
    "num_train_epochs": 3,
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_steps": 1,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "seed": 11,
}

ADAPTER = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=0.2)

RUNS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "reuse": {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
    },
    "lora": {"beta": 0.05, "eval_strategy": "steps", "eval_steps": 4, "num_generations_eval": 2},
    "adapter": {"beta": 0.05},
    "sync": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "entropy": {
        "use_adaptive_entropy": True,
        "entropy_target": 6.0,
        "entropy_coef": 0.1,
        "dynamic_sampling": True,
        "top_entropy_quantile": 0.5,
    },
    "stream": {"max_steps": 8, "steps_per_generation": 2, "per_device_train_batch_size": 8},
    "generate": {"rollout_engine": "transformers", "num_train_epochs": 2},
    "ahead": {
        "async_rollouts": 2,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "dynamic_sampling": True,
    },
    "tools": {
        "max_steps": 6,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 8,
        "max_completion_length": 240,
        "generation_kwargs": {"eos_token_id": [2, *range(4, 260, 6)]},
    },
}
"""Settings that differ from the base run, by name. `lora` has dropout and a reward with a random part; `ahead` one that
also says something of every completion, and of all; `tools` a tool that takes random times."""


def digits(completions: list[str], **_: Any) -> list[float]:
    """Small numbers, equal within some groups."""
    return [sum(c.isdigit() for c in text) + 0.1 * (len(text) % 3) for text in completions]


def noisy(completions: list[str], **_: Any) -> list[float]:
    """Draws from Python's and torch's global generators, as some rewards do."""
    return [len(text) + random.random() + float(torch.rand(())) for text in completions]


def talkative(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    """Rewards in few steps, so that some groups have no spread."""
    log_extra("length", [len(text) for text in completions])
    log_metric("random", random.random())
    return [float(len(text) // 4) + (random.random() > 0.8) for text in completions]


CALLS = itertools.count(1)


def look_up(key: int) -> str:
    """Look up the value of a key.

    Args:
        key: The key.
    """
    say(f"call {next(CALLS)}")
    time.sleep(0.02 * random.SystemRandom().random())
    return str(key * 7 % 100)


def parsed(chat: ChatFormat, token_ids: Sequence[int], **_: Any) -> dict[str, Any]:
    """The message of a turn that a model without training has drawn: three of four are calls."""
    message: dict[str, Any] = {"role": "assistant", "content": chat.tokenizer.decode(token_ids)}
    if sum(token_ids) % 4:
        call = {"name": "look_up", "arguments": {"key": token_ids[0]}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def of_answers(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """How many tool messages there are, and something of the text."""
    counts = [sum(message["role"] == "tool" for message in messages) for messages in completions]
    return [n + 0.1 * (len(messages[-1]["content"]) % 7) for n, messages in zip(counts, completions, strict=True)]


class Report(TrainerCallback):
    """Says when a step is done, before its checkpoint is written."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(f"step {state.global_step}")


def say(line: str) -> None:
    os.write(LINES, f"{line}\n".encode())


def acting(folder: str) -> GRPOTrainer:
    """The run with a tool."""
    tokenizer = tiny_tokenizer()
    set_tool_template(tokenizer)
    ChatFormat.parse = parsed  # type: ignore[method-assign, assignment]  # in this process alone
    return GRPOTrainer(
        model=tiny_model("llama", max_position_embeddings=2048),
        reward_funcs=of_answers,
        args=GRPOConfig(folder, **{**SETTINGS, **RUNS["tools"]}),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]),
        processing_class=tokenizer,
        tools=[look_up],
        callbacks=[Report()],
    )


def trainer(name: str, folder: str) -> GRPOTrainer:
    """A run of the table, with everything made anew."""
    if name == "tools":
        return acting(folder)
    model: Any = tiny_model("llama")
    if name == "adapter":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    rows = IterableDataset.from_generator(lambda: iter(ROWS)) if name == "stream" else Dataset.from_list(ROWS)
    return GRPOTrainer(
        model=model,
        reward_funcs={"lora": [digits, noisy], "ahead": talkative}.get(name, digits),
        args=GRPOConfig(folder, **{**SETTINGS, **RUNS[name]}),
        train_dataset=rows,
        eval_dataset=Dataset.from_list(ROWS[:3]) if name == "lora" else None,
        processing_class=tiny_tokenizer(),
        peft_config=ADAPTER if name == "lora" else None,
        callbacks=[Report()],
    )


STAGES: Mapping[str, list[Mapping[str, Any]]] = {
    "stages": [
        {"name": "warm", "type": "sft", "max_steps": 3, "per_device_train_batch_size": 4, "max_length": 64},
        {"name": "gate", "rewards": [digits], "max_steps": 5, "until": "rewards/digits/mean >= 0 for 2 steps"},
        {"name": "far", "rewards": [digits], "max_steps": 2, "beta": 0.1, "schedule": "continue"},
        {"name": "near", "rewards": [digits], "max_steps": 3, "beta": 0.1, "reference": "last_stage"},
    ],
    "moving stages": [
        {"name": "a", "rewards": [digits], "max_steps": 3, "sync_ref_model": True},
        {"name": "b", "rewards": [digits], "max_steps": 2, "optimizer": "reset"},
        {"name": "c", "rewards": [digits], "max_steps": 2, "filter": "answer != '3'"},
    ],
    "adapter stages": [
        {"name": "a", "rewards": [{"function": digits, "adaptive": True}, noisy], "max_steps": 3},
        {"name": "b", "rewards": [{"function": digits, "adaptive": True}], "max_steps": 2, "schedule": "continue"},
        {"name": "c", "rewards": [digits, noisy], "max_steps": 3, "reference": "last_stage"},
    ],
}
"""Runs in stages, by name. Checkpoints inside a stage come at every second step, those at borders by themselves."""

OVER_STAGES: Mapping[str, Mapping[str, Any]] = {
    "stages": {},
    "moving stages": {"beta": 0.1, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "adapter stages": {"beta": 0.05, "lora": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.2}},
}


class ReportStages(Report):
    """Steps are numbered through."""

    def __init__(self) -> None:
        self.steps = self.begun = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1
        say(f"begun {self.begun}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        say(f"step {self.steps}")


def run_stages(name: str, folder: str, resume: bool | str) -> None:
    """Likewise, through all stages."""
    start = Path(folder) / "start"
    if not start.is_dir():
        save_tiny_model(start)
    base = {key: x for key, x in SETTINGS.items() if key not in ("num_train_epochs", "save_steps", "report_to")}
    stages = Stages(
        STAGES[name],
        model=str(start),
        train_dataset=Dataset.from_list(ROWS),
        output_dir=folder,
        save_steps=2,
        report_to="none",
        callbacks=[ReportStages()],
        **{**base, **OVER_STAGES[name]},
    )
    trained = stages.train(resume_from_checkpoint=resume or None)
    if trained is not None:
        save_file({k: v.contiguous().clone() for k, v in trained.model.state_dict().items()}, final_of(folder))
    history = [
        {"step": each.step, **{k: str(v) for k, v in each.values.items() if not is_time(k)}}
        for each in Run.load(folder).history
    ]
    (Path(folder) / "history.json").write_text(json.dumps(history))


def final_of(folder: str) -> Path:
    return Path(folder) / "final.safetensors"


def run(name: str, folder: str, resume: bool | str) -> None:
    """Train to the end and write down what came out."""
    if name in STAGES:
        run_stages(name, folder, resume)
        return
    trained = trainer(name, folder)
    trained.train(resume_from_checkpoint=resume or None)
    weights = {k: v.contiguous().clone() for k, v in trained.model.state_dict().items()}
    if trained.run.objective.reference is not None and trained.run.objective.reference.copy is not None:
        weights |= {f"reference.{k}": v.clone() for k, v in trained.run.objective.reference.copy.state_dict().items()}
    save_file(weights, final_of(folder))
    history = [{k: v for k, v in entry.items() if not is_time(k)} for entry in trained.state.log_history]
    (Path(folder) / "history.json").write_text(json.dumps(history))


def is_time(name: str) -> bool:
    """Names of logged numbers that differ from run to run."""
    return any(part in name for part in ("time", "runtime", "second", "resident", "finding/", "flos", "train_loss"))


class Watch:
    """Counts what happens to files inside checkpoints; kills the process at a given count."""

    EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"})

    def __init__(self, die_at: int | None) -> None:
        self.die_at = die_at
        self.count = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in self.EVENTS or not isinstance(args[0], (str, os.PathLike)):
            return
        path = os.fspath(args[0])
        if STAGING not in path and PREFIX not in path:
            return
        self.count += 1
        if self.count == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def child(order: Mapping[str, Any]) -> None:
    watch = Watch(order["die_at"])
    sys.addaudithook(watch)
    tqdm.set_lock(threading.RLock())  # its own is shared with all forks: one that is killed with it would stop the rest
    status = 1
    try:
        run(order["run"], order["folder"], order["resume"])
        say(f"saves {watch.count}")
        status = 0
    except BaseException:  # noqa: BLE001  the process ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def warm_up() -> None:
    """One step here, so that no fork imports, measures and tests again what a first step needs: a second a run."""
    pretest._tested = tested_once(pretest._tested)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        trained = trainer("base", folder)
        trained.args.max_steps = 1
        trained.train()


def tested_once(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test of the rewards of a run, once: they are known by their names here."""
    known: dict[tuple[str, ...], Any] = {}

    def tested(rewards: Sequence[Any], *others: Any) -> Any:
        names = tuple(reward.name for reward in rewards)
        if names not in known:
            known[names] = test(rewards, *others)
        return known[names]

    return tested


def serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(order)
        say(f"pid {pid}")
        say(f"ended {os.waitpid(pid, 0)[1]}")


if __name__ == "__main__":
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warm_up()
    gc.collect()
    gc.freeze()  # a run ends with a collection; over everything imported it takes 0.2 s
    serve()
