"""One trainer on one workload in a process of its own; prints one JSON line.

python -m benchmarks.worker podium W1 --steps 3
python -m benchmarks.worker trl W1 --precision bfloat16 --steps 2
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback

from benchmarks.floor import floor, measure_rates, synchronize
from benchmarks.workloads import WORKLOADS, Workload
from podium.models.builtin import resolve_model

PHASES = ("generate", "reward", "compare", "train", "optimizer")


class Clock:
    """Seconds by phase and step. A phase inside another one is taken out of it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.now: collections.Counter[str] = collections.Counter()
        self.stack: list[list[Any]] = []
        self.mark = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent inside goes to `name`."""
        synchronize()
        start = time.perf_counter()
        self.stack.append([name, 0.0])
        try:
            yield
        finally:
            synchronize()
            spent = time.perf_counter() - start
            _, inner = self.stack.pop()
            self.now[name] += spent - inner
            if self.stack:
                self.stack[-1][1] += spent

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Count the calls of a method as a phase."""
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.steps.append({"step": now - self.mark, **{phase: self.now[phase] for phase in PHASES}})
        self.mark = now
        self.now.clear()


class StepEnds(TrainerCallback):
    """Tells the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Loading is not counted."""
        self.clock.mark = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """One optimizer step."""
        synchronize()
        self.clock.step()


class ForcedLengths(LogitsProcessor):
    """For `generate`: the end token exactly where the workload says, never before."""

    def __init__(self, workload: Workload, end: int, prompt_width: int) -> None:
        self.lengths = torch.tensor(workload.lengths())
        self.end = end
        self.width = prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = input_ids.shape[1] - self.width
        scores[:, self.end] = float("-inf")
        over = (self.lengths <= drawn + 1).to(scores.device)
        scores[over] = float("-inf")
        scores[over, self.end] = 0.0
        return scores


def prompts(tokenizer: Any, workload: Workload, count: int) -> list[dict[str, str]]:
    """Different prompts of exactly `prompt_tokens` tokens."""
    rows = []
    for i in range(count):
        ids = tokenizer(f"Question {i}: " + "what is the sum of these numbers and why, step by step? " * 60)[
            "input_ids"
        ]
        rows.append({"prompt": tokenizer.decode(ids[: workload.prompt_tokens])})
    return rows


def load(shape: str, device: str) -> tuple[Any, Any]:
    """The built-in model, or a randomly initialised one of a known shape (`Qwen2.5-1.5B`) with its tokenizer."""
    folder = resolve_model("builtin:smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if shape == "builtin":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer
    config = AutoConfig.for_model(
        "qwen2", **SHAPES[shape], vocab_size=151_936, eos_token_id=2, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, tokenizer


SHAPES = {
    "Qwen2.5-0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "Qwen2.5-1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "Qwen2.5-7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


def reward_function(workload: Workload):
    """The workload's rewards, whatever was written."""

    def forced(completions: list, **kwargs: Any) -> list[float]:
        return [workload.reward(*divmod(i, workload.generations)) for i in range(len(completions))]

    return forced


def lora() -> Any:
    """r=16 on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def run_trl(workload: Workload, steps: int, precision: str, shape: str, device: str) -> tuple[Clock, Any]:
    """TRL's trainer with transformers' `generate`."""
    import trl

    model, tokenizer = load(shape, device)
    clock = Clock()
    # Recomputing activations costs time; TRL needs it for memory, so it keeps its default.
    args = trl.GRPOConfig(
        tempfile.mkdtemp(),
        **workload.config(),
        max_steps=workload.warm_up + steps,
        bf16=precision == "bfloat16",
        use_cpu=device == "cpu",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    if precision == "float32":
        args.bf16 = False
    trainer = trl.GRPOTrainer(
        model,
        reward_function(workload),
        args,
        Dataset.from_list(prompts(tokenizer, workload, 64)),
        processing_class=tokenizer,
        peft_config=lora() if workload.lora else None,
        callbacks=[StepEnds(clock)],
    )
    generate = trainer.model.generate
    trainer.model.generate = lambda *a, **k: generate(
        *a, **k, logits_processor=[ForcedLengths(workload, tokenizer.eos_token_id, k["input_ids"].shape[1])]
    )
    clock.wrap(trainer, "_generate_single_turn", "generate")
    clock.wrap(trainer, "_calculate_rewards", "reward")
    clock.wrap(trainer, "training_step", "train")
    original = trainer._get_per_token_logps_and_entropies

    def logps(*a: Any, **k: Any) -> Any:
        if torch.is_grad_enabled():
            return original(*a, **k)
        with clock.phase("compare"):
            return original(*a, **k)

    trainer._get_per_token_logps_and_entropies = logps
    time_optimizer(trainer, clock)
    trainer.train()
    return clock, trainer


def run_podium(workload: Workload, steps: int, precision: str, shape: str, device: str) -> tuple[Clock, Any]:
    """Podium's trainer with its default engine."""
    import dataclasses

    from podium import GRPOConfig, GRPOTrainer
    from podium.engines.base import RolloutEngine

    model, tokenizer = load(shape, device)
    clock = Clock()
    args = GRPOConfig(
        tempfile.mkdtemp(),
        **workload.config(),
        max_steps=workload.warm_up + steps,
        product_precision=precision,
        prove_first_batch=False,  # it takes exact lengths for a fault: forced tokens are not drawn
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        reward_function(workload),
        args,
        Dataset.from_list(prompts(tokenizer, workload, 64)),
        processing_class=tokenizer,
        peft_config=lora() if workload.lora else None,
        callbacks=[StepEnds(clock)],
    )
    engine = trainer.run.step.engine

    class Forced(RolloutEngine):
        """The engine with the workload's lengths."""

        tokenizer = engine.tokenizer

        @contextlib.contextmanager
        def session(self, settings: Any, expected: Any, *, keeps: bool = False) -> Any:
            with clock.phase("generate"):
                forced = dataclasses.replace(settings, lengths=workload.length)
                with engine.session(forced, expected, keeps=keeps) as session:
                    yield session

    trainer.step.engine = Forced()
    clock.wrap(trainer.step, "logps", "compare")
    clock.wrap(trainer, "training_step", "train")
    time_optimizer(trainer, clock)
    trainer.train()
    return clock, trainer


def time_optimizer(trainer: Any, clock: Clock) -> None:
    """The optimizer is made when training starts."""
    create = trainer.create_optimizer

    def created(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        clock.wrap(trainer.optimizer, "step", "optimizer")
        return optimizer

    trainer.create_optimizer = created


RUNNERS = {"trl": run_trl, "podium": run_podium}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=RUNNERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--model", default="builtin", choices=["builtin", *SHAPES])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = WORKLOADS[options.workload]
    rates = measure_rates(device)
    clock, trainer = RUNNERS[options.trainer](workload, options.steps, options.precision, options.model, device)
    counted = clock.steps[workload.warm_up :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else peak_resident_gib()
    result = {
        "trainer": options.trainer,
        "precision": options.precision,
        "workload": workload.name,
        "model": options.model,
        "seconds": {key: statistics.median(step[key] for step in counted) for key in ("step", *PHASES)},
        "all_steps": [step["step"] for step in counted],
        "tokens": sum(workload.lengths()),
        "completions": workload.completions,
        "useful": workload.useful(),
        "peak_memory_gib": peak,
        "weights": digest(trainer.model),
        "rates": {name: getattr(rates, name) for name in rates.__slots__},
        "floor": {
            phase: getattr(floor(workload, trainer.model, rates), phase)
            for phase in ("generate", "compare", "train", "optimizer", "total")
        },
    }
    print(json.dumps(result), file=sys.stdout, flush=True)


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of the trained parameters, in the order of their names."""
    found = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def peak_resident_gib() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
