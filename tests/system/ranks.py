"""The same runs on any number of processes.

    python ranks.py FOLDER [RUN ...]
    accelerate launch --multi_gpu --num_processes 2 ranks.py FOLDER
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 ranks.py FOLDER
    torchrun --nproc_per_node 2 ranks.py FOLDER RUN:fsdp

Each run (all, or those named) `NAME.safetensors` and `NAME.json` (the log) in the folder, written by the first process.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from benchmarks.families import tiny
from podium import GRPOConfig, GRPOTrainer, TextEnvironment
from podium.models import devices
from podium.testing import tiny_model, tiny_tokenizer
from tests.images.tiny import asked, picture, processor_of

# Rounds of four prompts are dealt to two processes as 0 and 3, 1 and 2.
ROWS: list[dict[str, Any]] = [{"prompt": "x" * (1 + 3 * i) + "=", "flat": i % 4 in (1, 2)} for i in range(12)]

CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]

SHOWN = [
    {"prompt": asked(row["prompt"], picture(i)), "teacher_prompt": None}
    if i in (1, 8, 9, 10)
    else {"prompt": asked(row["prompt"]), "teacher_prompt": CHATS[i - 1]["prompt"]}
    for i, row in enumerate(ROWS)
]
"""Of a round of four prompts one has an image, which is on one process alone, or none has, or three."""

BASE: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 12,
    "shuffle_dataset": False,
    # Adam would blow differences of 1e-9 in small gradients up to its whole step.
    "optim": "sgd",
    "learning_rate": 0.3,
    "max_steps": 5,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "product_precision": "float32",
    "ddp_timeout": 300,
}

RUNS: Mapping[str, Mapping[str, Any]] = {
    "full": {"generation": 16},
    "lora": {"generation": 16, "beta": 0.05},
    "adapter": {"generation": 16, "beta": 0.05},
    "uneven": {"generation": 12, "loss_type": "grpo"},
    "adam": {"generation": 16, "optim": "adamw_torch", "learning_rate": 1e-3},
    "one_prompt": {"generation": 4, "beta": 0.02, "entropy_coef": 0.02, "top_entropy_quantile": 0.5},
    "no_signal_on_one": {"generation": 16},
    "no_signal_at_all": {"generation": 16},
    "batch_scale": {"generation": 16, "scale_rewards": "batch", "loss_type": "dr_grpo"},
    "reuse": {
        "generation": 16,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "beta": 0.02,
        "max_steps": 6,
    },
    "packs": {"generation": 16, "tokens_per_pack": 60, "loss_type": "cispo"},
    "checkpointed": {"generation": 16, "tokens_per_pack": 100, "gradient_checkpointing": True},
    "entropy": {
        "generation": 16,
        "top_entropy_quantile": 0.4,
        "use_adaptive_entropy": True,
        "entropy_target": 6.0,
        "entropy_coef": 0.05,
    },
    "masked": {"generation": 8, "mask_truncated_completions": True, "max_completion_length": 80},
    "resampled": {"generation": 16, "dynamic_sampling": True},
    "stream": {"generation": 16},
    "evaluated": {"generation": 16, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2},
    "sync": {"generation": 16, "beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "ahead": {"generation": 16, "async_rollouts": 1, "dynamic_sampling": True, "beta": 0.02},
    "observed": {
        "generation": 16,
        "observation_coef": 0.2,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 60,
        "max_turns": 3,
        "generation_kwargs": {"eos_token_id": [2, *range(10, 60)]},
    },
    "long": {
        "generation": 16,
        "tokens_per_pack": 40,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "dynamic_sampling": True,
        "max_resamples": 2,
        "learning_rate": 0.01,
        "max_steps": 50,
    },
}
"""`generation` is the number of completions of a round over all processes."""

IMAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "images": (
        "qwen2_5_vl",
        {"beta": 0.02, "teacher_model": "policy", "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2},
    ),
    "images_lora": ("llava_next", {"beta": 0.05, "train_image_encoder": True}),
    "encoder": ("qwen3_vl", {"train_image_encoder": True, "tokens_per_pack": 100}),
    "encoder_rows": ("gemma3", {"train_image_encoder": True, "tokens_per_pack": 100, "gradient_checkpointing": True}),
    "encoder_adam": (
        "qwen3_vl",
        {
            "train_image_encoder": True,
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "steps_per_generation": 2,
            "num_iterations": 2,
        },
    ),
}
"""Families of models and settings of the runs on rows of which some have images."""

WHOLE = ("ahead",)
"""Runs that need whole weights on every process."""

RESUMED = ("reuse", "adam", "adapter", "sync", "evaluated")
"""Runs that are also stopped after their third step and resumed."""


def letters(completions: list[str], flat: list[bool], **_: Any) -> list[float]:
    """Rows marked flat give equal rewards to their whole group."""
    return [0.0 if same else sum(c.isalpha() for c in text) / 4 for text, same in zip(completions, flat, strict=True)]


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def answers(completions: list[Any], **_: Any) -> list[float]:
    return lengths([completion[0]["content"] for completion in completions])


def nothing(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


REWARDS = {
    "no_signal_on_one": letters,
    "resampled": letters,
    "ahead": letters,
    "long": letters,
    "no_signal_at_all": nothing,
    **dict.fromkeys(IMAGES, answers),
}


class Repeats(TextEnvironment):
    """Answers differ in length."""

    def reset(self, prompt: list[dict[str, str]], **row: Any) -> None:
        self.said = prompt[0]["content"]

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        return self.said[:9] + text[:2], len(text) % 3 / 2, False, {}


def trainer(name: str, folder: str, **overrides: Any) -> GRPOTrainer:
    family, of_images = IMAGES.get(name, (None, {}))
    settings = {**BASE, **RUNS.get(name, {"generation": 16}), **of_images, **overrides}
    slots = int(os.environ.get("WORLD_SIZE", "1")) * settings.get("steps_per_generation", 1)
    settings["per_device_train_batch_size"] = settings.pop("generation") // slots
    model: Any = tiny_model("llama") if family is None else tiny(family)
    rows = SHOWN if family is not None else CHATS if name == "observed" else ROWS
    if name == "adapter":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return GRPOTrainer(
        model=model,
        reward_funcs=None if name == "observed" else REWARDS.get(name, lengths),
        environment_factory=Repeats if name == "observed" else None,
        args=GRPOConfig(folder, **settings),
        train_dataset=IterableDataset.from_generator(lambda: iter(ROWS))
        if name == "stream"
        else Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]) if name in ("evaluated", "images") else None,
        processing_class=tiny_tokenizer() if family is None else processor_of(family),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if name in ("lora", "images_lora") else None,
    )


def whole_weights(trained: GRPOTrainer) -> dict[str, torch.Tensor]:
    """All weights, on every process."""
    if trained.processes.zero3:
        import deepspeed

        with deepspeed.zero.GatheredParameters([*trained.model.parameters()]):
            return {k: v.detach().clone() for k, v in trained.model.state_dict().items()}
    weights = trained.model.state_dict()
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in weights.items()}
    return {k: v.detach().contiguous().clone() for k, v in whole.items()}


def leave(folder: Path, name: str, trained: GRPOTrainer) -> None:
    """Weights and log of the first process; all processes must have the same weights."""
    division = trained.processes.division
    assert division == os.environ.get("EXPECTED_DIVISION", division)
    weights = whole_weights(trained)
    total = torch.stack([value.double().sum() for value in weights.values()])
    everyone = trained.accelerator.gather(total[None])
    assert torch.equal(everyone, total.expand_as(everyone)), f"{name}: processes ended with different weights"
    if trained.accelerator.is_main_process:
        save_file(weights, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(trained.state.log_history))


class Dies(TrainerCallback):
    """The last process gets a SIGKILL in the middle of a run, if the environment says so."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == int(os.environ.get("DIE_AT", "-1")) and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def plain(folder: Path, name: str) -> None:
    trained = trainer(name, str(folder / name))
    trained.train()
    leave(folder, name, trained)


def resumed(folder: Path, name: str) -> None:
    """A run that saves, and one that goes on from its third step; the second's model, as it is saved for users."""
    saved = trainer(name, str(folder / f"{name}-saved"), save_strategy="steps", save_steps=1)
    saved.train()
    leave(folder, f"{name}-saved", saved)
    again = trainer(name, str(folder / f"{name}-resumed"))
    again.train(resume_from_checkpoint=str(folder / f"{name}-saved" / "checkpoint-3"))
    leave(folder, f"{name}-resumed", again)
    again.save_model(str(folder / f"{name}-model"))


def killed(folder: Path) -> None:
    """`adam`, saving every step; goes on where it stopped before."""
    output = folder / "killed"
    again = trainer("adam", str(output), save_strategy="steps", save_steps=1)
    again.add_callback(Dies())
    again.train(resume_from_checkpoint=any(output.glob("checkpoint-*")))
    leave(folder, "killed", again)


def continued(folder: Path) -> None:
    """A run that goes on from the checkpoint of another one."""
    again = trainer(os.environ["CONTINUED"], str(folder / "continued"))
    again.train(resume_from_checkpoint=os.environ["CONTINUED_FROM"])
    leave(folder, "continued", again)


def not_finite(folder: Path) -> None:
    """The last process computes NaN in steps 2, 4, 5 and 6."""
    spoilt = trainer("adam", str(folder / "not_finite"), max_steps=9)

    def spoil(module: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        state, last = spoilt.state, spoilt.args.process_index == spoilt.args.world_size - 1
        return output * float("nan") if last and module.training and state.global_step in (1, 3, 4, 5) else output

    layers = [module for name, module in spoilt.model.named_modules() if name.endswith("layers.0.mlp")]
    for layer in layers:
        layer.register_forward_hook(spoil)
    spoilt.train()
    assert spoilt.health.decision == "stop"
    leave(folder, "not_finite", spoilt)


def sampled(folder: Path) -> None:
    sampler = trainer("full", str(folder / "sampled"))
    answer = sampler.generate_completions(ROWS[:3], num_generations=2)
    if sampler.accelerator.is_main_process:
        ids = [[list(c.token_ids) for c in scored.group.completions] for scored in answer]
        (folder / "sampled.json").write_text(json.dumps(ids))


OTHERS: Mapping[str, Callable[[Path], None]] = {
    **{f"{name}-resumed": functools.partial(resumed, name=name) for name in (*RESUMED, "encoder_adam")},
    "continued": continued,
    "killed": killed,
    "not_finite": not_finite,
    "sampled": sampled,
}


def main(folder: Path, names: Sequence[str]) -> None:
    if names and names[0].endswith(":fsdp"):
        BASE["fsdp"], names = True, [name.removesuffix(":fsdp") for name in names]
    for name in names or [
        name for name in (*RUNS, *IMAGES, *OTHERS) if name not in ("continued", "killed", "long", "not_finite")
    ]:
        if name in OTHERS:
            OTHERS[name](folder)
        else:
            plain(folder, name)


if __name__ == "__main__":
    if os.environ.get("AS_IF_CUDA"):  # the GPU's branches on a CPU: see tests/conftest.py
        devices.KINDS["cpu"], BASE["max_steps"] = devices.KINDS["cuda"], 1
    torch.set_num_threads(1)
    gc.freeze()  # every run ends with a collection; over everything imported it takes 0.2 s
    main(Path(sys.argv[1]), sys.argv[2:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
