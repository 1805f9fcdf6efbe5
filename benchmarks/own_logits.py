"""Sampled and trained log-probabilities, and gradients, against each model's own forward, on one and two processes.

    python -m benchmarks.own_logits                    # every family and composite class, about half an hour
    python -m benchmarks.own_logits falcon_h1 granite  # some
    python -m benchmarks.own_logits --processes 1      # without FSDP2

Each model is tiny, random, in float32, with scales, caps and biases that are not neutral, and takes one step of GRPO
without a proof, at a temperature other than 1, with each engine that it can have. The reference is
`log_softmax(model(ids).logits / temperature)` of an untouched copy, a completion at a time. A model may also be refused
before training; then the message stands in place of numbers. Exits with 1 where a number is beyond `NATS` or
`GRADIENTS`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.families import FAMILIES, tiny, tokenizer_of
from benchmarks.models import odd

NATS, GRADIENTS = 1e-5, 1e-4
"""Largest differences: of a log-probability, and of all gradients as a share of their length."""
TEMPERATURE, RATE = 0.7, 30.0
"""A large learning rate, so that the rounding of weights hides nothing of a gradient."""
SETTINGS: Mapping[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 8,
    "temperature": TEMPERATURE,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "max_steps": 1,
    "loss_type": "dapo",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "product_precision": "float32",
    "prove_first_batch": False,
    "disable_dropout": True,
    "router_aux_loss_coef": 0.0,
}
"""Nothing is in the loss but what is compared: neither dropout nor the balance of experts."""


class Seen(NamedTuple):
    """Token ids of a prompt and of its completion, with log-probabilities of the latter."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logps: Any
    advantage: float = 0.0


def measured(name: str, engine: str, folder: str) -> str:
    """One line: what differs from the model's own forward in one step with this engine."""
    import torch
    from datasets import Dataset

    from podium import GRPOConfig, GRPOTrainer
    from podium.errors import PodiumError

    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {**SETTINGS, "per_device_train_batch_size": 16 // world, "rollout_engine": engine}
    rows = Dataset.from_list([{"prompt": "x" * (1 + 3 * i) + "="} for i in range(4)])
    reference = tiny(name)
    try:
        run = GRPOTrainer(
            tiny(name),
            odd,
            args=GRPOConfig(folder, **settings),
            train_dataset=rows,
            processing_class=tokenizer_of(name),
        )
    except PodiumError as error:
        return f"refused: {' '.join(str(error).split())[:160]}"
    if run.run.step.engine.name != engine:
        return f"samples with {run.run.step.engine.name}"
    before = {n: p.detach().clone() for n, p in reference.named_parameters()}
    with watched(run) as (sampled, trained):
        run.train()
    after = {n: full(p) for n, p in run.model.named_parameters()}
    nats = [0.0, 0.0]
    for place, found in enumerate((sampled, trained)):
        assert found, "nothing was seen"
        for each in found:
            nats[place] = max(nats[place], float((own(reference, each).detach() - each.logps).abs().max()))
    total = torch.tensor(float(sum(len(each.completion) for each in sampled)))
    loss = sum((-each.advantage * own(reference, each).sum() for each in trained), torch.zeros(()))
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.named_parameters()}
    nats = [summed(torch.tensor(x), "max") for x in nats]
    total = summed(total, "sum")
    moved = {n: before[n] - after[n.removeprefix("module.")] for n in before}
    expected = {n: RATE * summed(g, "sum") / total for n, g in grads.items()}
    off = sum(float((moved[n] - g).square().sum()) for n, g in expected.items()) ** 0.5
    size = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    assert size, "the gradient is 0"
    verdict = "" if float(max(nats)) <= NATS and off / size <= GRADIENTS else "  OFF"
    return f"sampled {float(nats[0]):.0e}, trained {float(nats[1]):.0e} nats, gradients {off / size:.0e}{verdict}"


@contextmanager
def watched(run: Any) -> Iterator[tuple[list[Seen], list[Seen]]]:
    """Completions as they were sampled, and as they were trained on, on this process."""
    import torch

    from podium.models.forward import Forward

    sampled: list[Seen] = []
    trained: list[Seen] = []
    engine, generate, token_logps = run.run.step.engine, run.run.step.engine.generate, Forward.token_logps

    def watch_sampling(*given: Any, **named: Any) -> Any:
        groups = generate(*given, **named)
        sampled.extend(
            Seen(group.prompt.token_ids, each.token_ids, torch.tensor(each.logps))
            for group in groups
            for each in group.completions
            if each.token_ids
        )
        return groups

    def watch_training(self: Any, model: Any, packed: Any, **named: Any) -> Any:
        out = token_logps(self, model, packed, **named)
        if torch.is_grad_enabled() and packed.num_tokens > 1:
            lengths = torch.bincount(packed.rollout_N, minlength=packed.num_rollouts).tolist()
            parts = out.logps_N.detach().split(lengths), packed.target_N.split(lengths)
            for span, logps, targets, advantage in zip(packed.spans_R, *parts, packed.advantages_R, strict=True):
                if len(targets):
                    prompt = packed.input_ids_T[torch.from_numpy(span.tokens[: span.prompt_length])]
                    trained.append(Seen(tuple(prompt.tolist()), tuple(targets.tolist()), logps, float(advantage)))
        return out

    engine.generate = watch_sampling
    Forward.token_logps = watch_training  # type: ignore[method-assign]
    try:
        yield sampled, trained
    finally:
        Forward.token_logps = token_logps  # type: ignore[method-assign]


def own(model: Any, seen: Seen) -> Any:
    """Log-probabilities of a completion by the model's own forward, float32."""
    import torch

    from podium.models.attention import attention_implementation

    with attention_implementation(model, "eager"):  # others leave out a cap of attention
        logits_SV = model(input_ids=torch.tensor([seen.prompt + seen.completion]), use_cache=False).logits[0]
    logp_TV = (logits_SV[len(seen.prompt) - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(seen.completion)[:, None])[:, 0]


def full(parameter: Any) -> Any:
    """A parameter, put together where it is sharded."""
    found = parameter.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()


def summed(x: Any, how: str) -> Any:
    """The sum, or the largest, over the processes."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(x, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return x


def rank(names: Sequence[str]) -> None:
    """Measure in this process, which may be one of several; the first prints."""
    import logging

    from podium.models.forward import choose_method

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    first = os.environ.get("RANK", "0") == "0"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            engines = ["live", "transformers"] if choose_method(tiny(name)).path == "shared" else ["transformers"]
            for engine in engines:
                try:
                    line = measured(name, engine, f"{folder}/{name}-{engine}")
                except Exception as error:  # noqa: BLE001  each is a line of the table
                    line = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}  OFF"
                if first:
                    print(f"{name} | {engine} | {os.environ.get('WORLD_SIZE', '1')} | {line}", flush=True)


def launched(processes: int) -> list[str]:
    """The command that starts so many processes; several share the weights by FSDP2."""
    from podium.cli.launch import CONFIGS

    if processes == 1:
        return [sys.executable]
    flags = ["--config_file", str(CONFIGS / "fsdp2.yaml"), f"--num_processes={processes}", "--main_process_port=0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *flags]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names or list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"no such family: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if args.rank:
        rank(names)
        return
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    lines: list[str] = []
    for processes in args.processes:
        command = [*launched(processes), *(["-m"] if processes == 1 else ["--module"]), "benchmarks.own_logits"]
        with subprocess.Popen([*command, "--rank", *names], stdout=subprocess.PIPE, text=True, env=environment) as run:
            assert run.stdout is not None
            for line in run.stdout:
                if " | " in line:
                    lines.append(line)
                    print(line, end="", flush=True)
    off = [line for line in lines if line.endswith("OFF\n")]
    missing = {
        name for name in names for n in args.processes if not any(f"{name} | " in x and f"| {n} |" in x for x in lines)
    }
    print(
        f"{len(lines) - len(off)} as the model's own forward or refused, {len(off)} off, not reached: {sorted(missing)}"
    )
    sys.exit(1 if off or missing else 0)


if __name__ == "__main__":
    main()
