"""The first optimizer steps of a real `trl.GRPOTrainer` and of Podium's, from the same rollouts, move weights alike.

Both trainers run whole: TRL's samples through its `rollout_func`, Podium's through an engine, and both hand back the
same fixed completions. Plain gradient descent makes the movement proportional to the gradient.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl.trainer import grpo_trainer as trl_module

from benchmarks import families
from benchmarks.families import write_family
from podium import GRPOConfig, GRPOTrainer
from podium.algorithm.losses import OBJECTIVES
from podium.engines.base import RolloutEngine, Sampled
from podium.records import RolloutRequest, SamplingSettings
from podium.testing import save_tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

PROMPTS = ("2+2=", "the capital of France is", "name a colour: ")
MAX_LENGTH = 8
EOS = tiny_tokenizer().eos_token_id
COMPLETIONS = (
    ("4", "5, no", "fouuuuur", ""),  # the third is cut off at MAX_LENGTH; the last is the end token alone
    ("Paris", "Lyon", "Paris", "Nice"),
    ("red", "a pear", "xxxxxxxx", "blue"),
)
REWARDS = ((1.0, 0.2, -0.7, 0.4), (0.5, 0.5, 0.5, 0.5), (1.0, 0.0, 0.1, 0.7))
"""The second group has nothing to teach: Podium leaves it out where that changes nothing, TRL never does."""


def ids_of(text: str) -> list[int]:
    ids = tiny_tokenizer()(text)["input_ids"]
    return ids if len(ids) == MAX_LENGTH else [*ids, EOS]


SAMPLED = {prompt: [ids_of(text) for text in texts] for prompt, texts in zip(PROMPTS, COMPLETIONS, strict=True)}
REWARD_OF = {
    (prompt, tuple(ids)): reward
    for prompt, rewards in zip(PROMPTS, REWARDS, strict=True)
    for ids, reward in zip(SAMPLED[prompt], rewards, strict=True)
}


def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [REWARD_OF[prompt, tuple(ids)] for prompt, ids in zip(prompts, completion_ids, strict=True)]


class FixedEngine(RolloutEngine):
    """An engine that always says the same."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        texts = [self.tokenizer.decode(request.token_ids) for request in requests]
        return [[(ids, [-1.0] * len(ids)) for ids in SAMPLED[text]] for text in texts]


def fixed_rollouts(prompts: list[str], _trainer: trl.GRPOTrainer) -> dict[str, Any]:
    """The same for TRL, which repeats every prompt once per completion."""
    seen = {prompt: iter(SAMPLED[prompt]) for prompt in prompts}
    return {
        "prompt_ids": [tiny_tokenizer()(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [next(seen[prompt]) for prompt in prompts],
        "logprobs": None,
    }


def settings_of(folder: str, *, accumulation: int, steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 12 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "num_generations": 4,
        "max_completion_length": MAX_LENGTH,
        "max_steps": steps,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **changes,
    }


def label(changes: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in changes.items())


def lora() -> LoraConfig:
    """With a random B, so that the policy differs from its reference from the start."""
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.0)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def run_trl(model: str, peft: LoraConfig | None, settings: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=trl.GRPOConfig(**settings),
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
        peft_config=peft,
        rollout_func=fixed_rollouts,
    )
    before = weights(trainer)
    trainer.train()
    return trainer, before


def run_podium(
    model: str, peft: LoraConfig | None, settings: dict[str, Any], start: dict[str, Tensor]
) -> tuple[GRPOTrainer, dict[str, Tensor]]:
    if peft is not None:  # TRL's reference is the base also of an adapter that is random from the start, see `lora`
        peft = dataclasses.replace(peft, init_lora_weights=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=GRPOConfig(**settings, prove_first_batch=False),  # the engine says the same whatever it is asked
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
        peft_config=peft,
    )
    trainer.step.engine = FixedEngine()
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert parameters.keys() == {name for name in start if not any(part in name for part in ENCODER)}
    with torch.no_grad():
        for name, parameter in parameters.items():  # a new adapter is random in both
            parameter.copy_(start[name])
    trainer.train()
    return trainer, start


ENCODER = ("vision", "visual", "projector", "merger")
"""Parts of the names of an encoder of images: TRL leaves it trainable and gives it no gradient, Podium freezes it."""


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": list(PROMPTS)})


def movement(trainer: Any, names: Sequence[str], before: dict[str, Tensor]) -> Tensor:
    after = weights(trainer)
    return torch.cat([(after[name] - before[name]).flatten() for name in names])


def assert_alike(
    model: str,
    peft: LoraConfig | None,
    settings: dict[str, Any],
    podium_settings: dict[str, Any] | None = None,
    *,
    within: float = 3e-5,
) -> tuple[Any, Any]:
    theirs, start = run_trl(model, peft, settings)
    ours, _ = run_podium(model, peft, podium_settings or settings, start)
    assert all(torch.equal(weights(theirs)[name], x) for name, x in start.items() if name not in weights(ours))
    expected, got = (movement(trainer, [*weights(ours)], start) for trainer in (theirs, ours))
    assert expected.norm() > 1e-3, "nothing moved, so nothing is compared"
    assert (got - expected).norm() / expected.norm() < within
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        names = [name for name in SAME_IN_THE_LOG if name in other]
        flat = "frac_reward_zero_std"
        if settings.get("scale_rewards") == "batch" and flat in names:  # TRL asks whether the batch has any spread
            names.remove(flat)
            assert mine[flat] >= other[flat]
        assert_same_numbers(mine, other, names)
    return ours, theirs


def assert_same_numbers(mine: dict[str, float], other: dict[str, float], names: list[str]) -> None:
    expected = {name: other[name] for name in names}
    assert {name: mine.get(name) for name in names} == pytest.approx(expected, rel=1e-3, abs=1e-5)


SAME_IN_THE_LOG = (
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "reward",
    "reward_std",
    "rewards/score/mean",
    "rewards/score/std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/clipped_ratio",
    "completions/max_terminated_length",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", initializer_range=0.1)


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """Accelerate collects garbage at every start of training, most of a second over all the modules loaded here."""
    gc.freeze()
    yield
    gc.unfreeze()


LOSSES = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.mark.cases(3)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_two_steps_on_one_round_move_weights_as_trl(model: str, tmp_path, loss_type: str, accumulation: int) -> None:
    """`num_iterations=2`: at the second step ratios are no longer 1. TRL shuffles completions between micro-batches;
    these losses do not mind."""
    settings = settings_of(
        str(tmp_path), accumulation=accumulation, steps=2, loss_type=loss_type, num_iterations=2, epsilon=0.02
    )
    assert_alike(model, None, settings)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1, "num_iterations": 2},
        {"beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": False, "loss_type": "grpo"},
        {"scale_rewards": "batch", "loss_type": "grpo"},
        {"scale_rewards": "none", "loss_type": "dr_grpo"},
        {"mask_truncated_completions": True},
        {"mask_truncated_completions": True, "loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
        {"num_iterations": 2, "loss_type": "grpo", **SEQUENCE},
        {"num_iterations": 2, "loss_type": "luspo", **SEQUENCE},
        {"temperature": 0.7, "num_iterations": 2},
        {"delta": 1.5, "num_iterations": 2, "learning_rate": 0.5},
        {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "learning_rate": 0.5},
        {"max_grad_norm": 0.01, "learning_rate": 1.0},
        {"weight_decay": 0.1},
        {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-3},
    ],
    ids=label,
)
def test_settings_move_weights_as_trl(model: str, tmp_path, changes: dict[str, Any]) -> None:
    assert_alike(model, None, settings_of(str(tmp_path), accumulation=1, steps=2, **changes))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "bnpo"},
        {"top_entropy_quantile": 0.3, "loss_type": "grpo"},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    ],
    ids=label,
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_depends_on_the_micro_batch_moves_weights_as_trl(
    model: str, tmp_path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], accumulation: int
) -> None:
    """With TRL's shuffling switched off, both cut the round into the same micro-batches."""
    monkeypatch.setattr(trl_module, "shuffle_sequence_dict", lambda batch: batch)
    settings = settings_of(str(tmp_path), accumulation=accumulation, steps=2, num_iterations=2, **changes)
    assert_alike(model, None, settings)


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [{"entropy_coef": 0.05}, {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 100.0}],
    ids=label,
)
def test_entropy_bonus_moves_weights_as_trl(model: str, tmp_path, changes: dict[str, Any], accumulation: int) -> None:
    """Podium's bonus is the mean over the step; TRL's is one over each micro-batch, so TRL has but one here."""
    settings = settings_of(str(tmp_path), accumulation=1, steps=2, num_iterations=2, **changes)
    ours = {**settings, "per_device_train_batch_size": 12 // accumulation, "gradient_accumulation_steps": accumulation}
    assert_alike(model, None, settings, ours)


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_a_round_over_several_steps_moves_weights_as_trl(
    model: str, tmp_path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """Two optimizer steps share a round, twice over; the cut goes through the second group."""
    monkeypatch.setattr(trl_module, "shuffle_sequence_dict", lambda batch: batch)
    changes = {"per_device_train_batch_size": 6, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}
    settings = settings_of(str(tmp_path), accumulation=1, steps=4, loss_type=loss_type, **changes)
    assert_alike(model, None, settings)


@pytest.mark.cases(1)
@pytest.mark.versions
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_lora_moves_weights_as_trl(model: str, tmp_path, beta: float, accumulation: int) -> None:
    """The reference is the model without its adapter, so its KL is not 0 from the first step on."""
    settings = settings_of(str(tmp_path), accumulation=accumulation, steps=1, beta=beta)
    ours, theirs = assert_alike(model, lora(), settings)
    if beta and accumulation == 1:  # over several micro-batches TRL averages means, Podium tokens
        assert ours.state.log_history[0]["kl"] == pytest.approx(theirs.state.log_history[0]["kl"], rel=1e-3)
        assert ours.state.log_history[0]["kl"] > 1e-3


OTHERS = ("lfm2", "kimi_linear", "gpt_oss", "deepseek_v3")


@pytest.mark.cases(1)
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_families_move_weights_as_trl(name: str, tmp_path: Path, peft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of checkpoints with an encoder of images, of hybrids, of sinks and latent attention.

    Scales are neutral: TRL reads them from names of the config, whatever the model's class does.
    """
    monkeypatch.setattr(families, "SCALES", {})
    write_family(name, tmp_path / "model", dtype=torch.float32)
    layers = r".*\.(q_proj|kv_b_proj|down_proj|in_proj_qkv)"
    adapter = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
    settings = settings_of(str(tmp_path / "run"), accumulation=1, steps=3)
    assert_alike(str(tmp_path / "model"), adapter if peft else None, settings, within=1e-4)


@pytest.mark.versions
def test_metrics_of_a_step_are_trls(model: str, tmp_path) -> None:
    """With a KL nothing is left out, and one micro-batch is the whole step: every number of the log is the same."""
    settings = settings_of(str(tmp_path), accumulation=1, steps=2, beta=0.1, num_iterations=2, epsilon=0.001)
    ours, theirs = assert_alike(model, lora(), settings)
    names = ["loss", "entropy", "kl", *OBJECTIVES["dapo"].metrics]
    for step in range(2):
        assert_same_numbers(ours.state.log_history[step], theirs.state.log_history[step], names)
    assert ours.state.log_history[1]["clip_ratio/region_mean"] > 0
