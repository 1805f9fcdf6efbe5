"""Two processes on one device over gloo, DDP and FSDP2, against one process: two steps of a tiny model.

    python -m benchmarks.gpu.two_ranks --out DIR

They train twice: on what they sample, with the proof on the first batch; and on given tokens, whose weights are
compared, as rounding makes some sampled tokens differ. NCCL takes one process a GPU, so this shows that the code runs
and adds up, and nothing of its speed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import Measure, Options, Script, main, run_process, take_gpu_branches

PRECISIONS = ("float32", "bfloat16")
TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Of the distance that training goes; without one process's share it would be 0.7. FSDP2 rounds in other places than
autocast does."""
LAUNCH_SECONDS = 200
COMPLETIONS, GENERATIONS = 16, 4
"""Of a step, over all processes, and of a prompt."""


def groups(_options: Options) -> dict[str, Sequence[str]]:
    """Ways to divide the work, each in both precisions."""
    return {"ddp": PRECISIONS, "fsdp2": PRECISIONS}


def prepare(group: str, options: Options) -> Measure:
    """Runs two processes in both precisions; a case compares one of them with one process."""
    import torch

    folder = Path(tempfile.mkdtemp())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = ["-m", "benchmarks.gpu.two_ranks", "rank", str(folder), group, options.device]
    error = run_process([sys.executable, *launcher, *script], limit=LAUNCH_SECONDS)

    def measure(case: str) -> dict[str, Any]:
        file = folder / f"{case}.pt"
        if not file.is_file():
            raise RuntimeError(f"the two processes left no weights; {error}")
        before, alone = train("one", case, options.device, fixed=True)
        together = torch.load(file)
        off = float((together - alone).norm() / (alone - before).norm())
        return {"ok": off <= TOLERANCE[case], "relative_difference": off}

    return measure


def rank(folder: str, division: str, device: str) -> None:
    """One of two processes; the first leaves the weights."""
    import torch

    os.environ["LOCAL_RANK"] = "0"  # both on the first device
    if device == "cpu":
        take_gpu_branches()
    for precision in PRECISIONS:
        train(division, precision, device)
        _, after = train(division, precision, device, fixed=True)
        if int(os.environ["RANK"]) == 0:
            torch.save(after, Path(folder, f"{precision}.pt"))
    torch.distributed.destroy_process_group()


def train(division: str, precision: str, device: str, *, fixed: bool = False) -> tuple[Any, Any]:
    """Two steps, on given tokens if `fixed`; all weights before and after, in one vector on the host."""
    from datasets import Dataset

    from podium import GRPOConfig, GRPOTrainer
    from podium.testing import tiny_model, tiny_tokenizer

    model = tiny_model("llama")
    before = flat(model)
    args = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=GENERATIONS,
        per_device_train_batch_size=COMPLETIONS // int(os.environ.get("WORLD_SIZE", "1")),
        max_completion_length=6,
        shuffle_dataset=False,
        optim="sgd",
        learning_rate=0.3,
        max_steps=2,
        prove_first_batch=not fixed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        bf16=precision == "bfloat16",
        fsdp=division == "fsdp2",
        ddp_backend=None if division == "one" else "gloo",
        ddp_timeout=60,
    )
    rows = Dataset.from_list([{"prompt": "x" * (1 + 3 * i) + "="} for i in range(8)])
    trainer = GRPOTrainer(model, places, args, rows, processing_class=tiny_tokenizer())
    if fixed:
        trainer.step.engine = Fixed(trainer.run.step.engine)
    trainer.train()
    if trainer.processes.division != division:
        raise RuntimeError(f"asked for {division}, and got {trainer.processes.division}")
    return before, flat(trainer.model)


def flat(model: Any) -> Any:
    """All weights, in one vector on the host; those that are divided are gathered."""
    import torch
    from torch.distributed.tensor import DTensor

    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten().cpu() for p in whole])


class Fixed:
    """An engine that samples, and then gives other tokens, which depend on the row alone."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        """Everything but `generate` is the engine's."""
        return getattr(self.engine, name)

    def generate(self, prompts: Sequence[Any], settings: Any, **kwargs: Any) -> list[Any]:
        """One group per prompt; the losses of an on-policy step do not look at the engine's log-probabilities."""
        import numpy as np

        from benchmarks.gpu.samples import tokens

        groups = []
        for group in self.engine.generate(prompts, settings, **kwargs):
            generator = np.random.default_rng(group.prompt.row)
            drawn = [tokens(generator, settings.max_tokens) for _ in group.completions]
            logps = (0.0,) * settings.max_tokens
            completions = [
                dataclasses.replace(old, token_ids=ids, logps=logps, finish="length")
                for old, ids in zip(group.completions, drawn, strict=True)
            ]
            groups.append(dataclasses.replace(group, completions=tuple(completions)))
        return groups


def places(completions: list[str], **_: Any) -> list[float]:
    """By the place in its group."""
    return [float(i % GENERATIONS) for i in range(len(completions))]


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
    else:
        sys.exit(main(Script(name="two_ranks", groups=groups, prepare=prepare, limit=LAUNCH_SECONDS + 60)))
