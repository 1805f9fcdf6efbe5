"""The proof on the first batch stops no sound run: other families, high rates, groups of two, noise as a reward.

Settings are those with which people try a trainer first: rate 0.1, few completions of eight tokens, random rewards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from podium.testing import KINDS, tiny_model, tiny_tokenizer


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class Chance:
    """A reward that has nothing to do with the completion, as of a noisy judge."""

    __name__ = "chance"

    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(0)

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return torch.rand(len(completions), generator=self.numbers).tolist()


def experts() -> nn.Module:
    vocabulary = {"vocab_size": len(tiny_tokenizer()), "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, **vocabulary, **sizes, **layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def sure(kind: str, bias: float) -> nn.Module:
    """A model that answers with one token as good as certainly."""
    model = tiny_model(kind)
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    with torch.no_grad():
        head.bias[tiny_tokenizer()("<")["input_ids"][0]] = bias
    return model


@pytest.fixture
def checked(make_trainer: Callable) -> Callable[..., dict[str, str]]:
    """Trains a step with the proof; the results of its checks that are neither `ok` nor `not checked`, by code."""

    def run(model: Any, reward: Any = None, **settings: Any) -> dict[str, str]:
        group = settings.setdefault("num_generations", 3)
        given = {
            "per_device_train_batch_size": group,
            "optim": "adamw_torch",
            "learning_rate": 0.1,
            "max_steps": 1,
            **settings,
        }
        trainer = make_trainer(reward or Chance(), model=model, prove_first_batch=True, **given)
        trainer.train()
        assert trainer.state.global_step == trainer.args.max_steps
        text = (Path(trainer.args.output_dir) / "proof.json").read_text(encoding="utf-8")
        checks = json.loads(text)["checks"]
        assert {check["code"] for check in checks} >= {"P004", "P007", "P008", "P015"}
        return {check["code"]: check["result"] for check in checks if check["result"] not in ("ok", "not checked")}

    return run


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, "experts"])
def test_first_tests_of_other_trainers(checked: Callable, kind: str, group: int) -> None:
    model = experts() if kind == "experts" else tiny_model(kind)
    assert set(checked(model, num_generations=group).values()) <= {"note"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": name, "beta": 0.1, "entropy_coef": 0.1} for name in ("grpo", "bnpo", "dr_grpo", "cispo")),
        *({"loss_type": name} for name in ("sapo", "vespo", "gspo", "luspo")),
        *({"optim": name, "weight_decay": 0.1} for name in ("sgd", "adafactor", "rmsprop")),
        {"lr_scheduler_type": "linear", "warmup_steps": 3, "max_steps": 6},
        {"max_completion_length": 1},
        {"temperature": 0.3, "top_k": 5},
        {"learning_rate": 1e-6, "num_iterations": 2},
        {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")},
    ],
    ids=str,
)
def test_losses_optimizers_and_schedules(checked: Callable, settings: dict[str, Any]) -> None:
    assert set(checked(tiny_model("qwen3"), **settings).values()) <= {"note"}


@pytest.mark.slow
def test_a_reward_for_length(checked: Callable) -> None:
    assert set(checked(tiny_model(), length).values()) <= {"note"}


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "weights"])
@pytest.mark.parametrize("kind", ["gemma3", "llama", "gpt2"])
def test_half_precision(checked: Callable, kind: str, weights: torch.dtype) -> None:
    given = {"bf16": True, "learning_rate": 1e-6} if weights == torch.float32 else {}
    assert set(checked(tiny_model(kind).to(weights), **given).values()) <= {"note"}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("bias", [5.0, 8.0, 12.0, 200.0])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_nearly_deterministic_policy(checked: Callable, bias: float, adapter: bool) -> None:
    """Completions are alike, rewards are not: where there is no signal, it is not called a fault."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    more = {"beta": 0.1, "num_iterations": 2} if adapter else {"async_rollouts": 1}
    found = checked(sure("llama", bias), peft_config=lora, learning_rate=1e-5, **more)
    assert {code for code, result in found.items() if result != "note"} <= {"P011"}


@pytest.mark.parametrize("weights", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_logits_at_their_cap(checked: Callable, weights: torch.dtype) -> None:
    """Gemma 2 caps its logits; of those that `top_k` leaves all are at the cap, where nothing moves them."""
    model = tiny_model("gemma2")
    with torch.no_grad():
        model.get_input_embeddings().weight *= 20
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    found = checked(model.to(weights), peft_config=lora, learning_rate=1e-4, top_k=20)
    assert {code for code, result in found.items() if result != "note"} <= {"P011"}


@pytest.mark.slow
def test_an_optimizer_with_coupled_decay(checked: Callable) -> None:
    """Its decay cannot be told from its step: at most a warning."""
    model = tiny_model()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=10.0)
    assert set(checked(model, optimizers=(adam, None)).values()) <= {"note", "WARNING"}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["opt", "seed_oss"])
def test_dropout_that_is_no_layer(checked: Callable, kind: str) -> None:
    """Rates that a module keeps as a number and applies in its forward."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = {"vocab_size": len(tiny_tokenizer()), "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    config = AutoConfig.for_model(kind, **sizes, **layers, **vocabulary, dropout=0.3, residual_dropout=0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert set(checked(model).values()) <= {"note"}


def test_a_model_that_draws_random_numbers_in_training(checked: Callable) -> None:
    """Its gradients differ from one time to the next: that is said, and is no fault of the batch."""
    model = tiny_model()

    def noisy(module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + torch.randn_like(output)) if module.training else output

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(noisy)
    assert set(checked(model).values()) <= {"note"}
