"""Seconds of a whole training step with random weights of real shapes: Podium's and TRL's, the same arguments.

python -m benchmarks.gpu.step --out DIR

Every completion has full length, and every group rewards that differ. Both trainers have their own defaults for all
that is not given (TRL computes activations again in the backward, Podium where they would not fit).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.harness import Measure, Options, Script, free_memory, main, peak_bytes, random_model, synchronize
from benchmarks.gpu.memory import rewards

CASES: Mapping[str, tuple[str, bool, int, int]] = {
    "135M, all weights, 16 tokens": ("135M", False, 16, 12),
    "0.5B, all weights, 256 tokens": ("0.5B", False, 256, 3),
    "0.5B, all weights, 1024 tokens": ("0.5B", False, 1024, 3),
    "1.5B, LoRA on bfloat16, 256 tokens": ("1.5B", True, 256, 3),
}
"""Shapes, whether an adapter is trained, tokens of a completion, steps."""
TRAINERS = ("podium", "trl")
PROMPTS, GENERATIONS, PROMPT_TOKENS = 8, 8, 300


def groups(options: Options) -> dict[str, Sequence[str]]:
    """Both trainers on each shape."""
    return dict.fromkeys(list(CASES)[:1] if options.tiny else CASES, TRAINERS)


def prepare(group: str, options: Options) -> Measure:
    """A new model for each trainer."""

    def measure(trainer: str) -> dict[str, Any]:
        free_memory()
        clock = Clock(options.device)
        made = make_trainer(trainer, *CASES[group], options, clock)
        made.train()
        entries = [entry for entry in made.state.log_history if "reward" in entry]
        lengths = [entry["completions/mean_length"] for entry in entries]
        *_, tokens, steps = CASES[group]
        whole = options.tiny or min(lengths) > tokens - 1
        held = [entry["health/device_bytes"] / 2**30 for entry in entries if "health/device_bytes" in entry]
        return {
            "ok": made.state.global_step == steps and whole,
            "seconds_a_step": statistics.median(clock.seconds[1:]),
            "first_step": clock.seconds[0],
            "generate": middle(entries, "time/generate_seconds"),
            "train": middle(entries, "time/train_seconds"),
            "held_gib": [round(each, 3) for each in held],
            "peak_gib": peak_bytes(options.device) / 2**30,
        }

    return measure


def middle(entries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median over the steps after the first, where the trainer says it."""
    said = [float(entry[name]) for entry in entries[1:] if name in entry]
    return statistics.median(said) if said else None


class Clock:
    """Seconds of each step."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, list[float]()
        self._before = 0.0

    @property
    def callback(self) -> Any:
        """To be given to a trainer."""
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                clock._before = clock._now()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                before, clock._before = clock._before, clock._now()
                clock.seconds.append(clock._before - before)

        return Callback()

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def make_trainer(name: str, shape: str, lora: bool, tokens: int, steps: int, options: Options, clock: Clock) -> Any:  # noqa: FBT001
    """Either trainer with the same arguments."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    import podium
    from podium.testing import tiny_tokenizer

    model = random_model(shape, torch.bfloat16 if lora else torch.float32, options)
    prompt, tokens = (16, 8) if options.tiny else (PROMPT_TOKENS, tokens)
    package = {"podium": podium, "trl": trl}[name]
    args = package.GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=GENERATIONS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        max_completion_length=tokens,
        generation_kwargs={"eos_token_id": model.config.vocab_size - 1},  # random weights hardly ever draw it
        max_steps=steps,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
        bf16=options.device != "cpu",
        **({"prove_first_batch": False} if name == "podium" else {}),
    )
    rows = Dataset.from_list([{"prompt": f"{i:04}".ljust(prompt, "x")} for i in range(64)])  # a token each letter
    return package.GRPOTrainer(
        model,
        rewards,
        args,
        rows,
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if lora
        else None,
        callbacks=[clock.callback],
    )


if __name__ == "__main__":
    sys.exit(main(Script(name="step", groups=groups, prepare=prepare, limit=240)))
