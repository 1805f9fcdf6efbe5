"""`vllm_mode: colocate` on the CPU: runs where vLLM and Podium share an environment. About five minutes on one core.

vLLM's engine lives in the process that trains, so one engine serves all tests here.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from podium import GRPOConfig, GRPOTrainer
from podium.data.tasks import additions
from podium.engines.live.engine import LiveEngine
from podium.errors import ConfigError
from podium.models.builtin import resolve_model
from podium.records import SamplingSettings
from podium.rewards import answer_correct, answer_format
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey
from podium.trainer.settings import vllm_settings

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.timeout(1800),
]
MODEL = "builtin:smollm2-135m-instruct"


def arguments(folder: Path, **settings: Any) -> GRPOConfig:
    given = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 256,
        "vllm_gpu_memory_utilization": 0.4,
        "product_precision": "float32",
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 16,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        **settings,
    }
    return GRPOConfig(str(folder), **given)


@pytest.fixture(scope="module")
def llm() -> Any:
    from podium.engines.vllm.colocate import build

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return build(vllm_settings(arguments(Path("unused"))), resolve_model(MODEL), 256)


@pytest.fixture
def make(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("podium.engines.vllm.connect.build", lambda *_: llm)

    def made(*, lora: bool = False, **settings: Any) -> GRPOTrainer:
        peft_config = LoraConfig(r=8, target_modules="all-linear") if lora else None
        rewards = [answer_format, answer_correct]
        return GRPOTrainer(MODEL, rewards, arguments(tmp_path, **settings), additions()[0], peft_config=peft_config)

    return made


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_what_is_sampled_is_the_policy_of_each_step(make: Any, *, lora: bool) -> None:
    trainer = make(lora=lora, learning_rate=1e-3 if lora else 5e-5)
    settings = SamplingSettings(num_completions=1, max_tokens=12, greedy=True, end_ids=trainer.run.policy.end_ids)
    prompts = round_prompts(trainer.run, RoundKey(0, 0), range(4))
    seen = []

    def look() -> None:
        theirs = trainer.step.sample(prompts, settings, taken=trainer.state.global_step)
        own = LiveEngine(trainer.model, trainer.run.policy.tokenizer, precision=trainer.run.policy.forward.precision)
        mine = own.generate(prompts, settings)
        for a, b in zip(theirs, mine, strict=True):
            assert a.completions[0].token_ids == b.completions[0].token_ids
            assert np.allclose(a.completions[0].logps, b.completions[0].logps, atol=1e-3)
        seen.append([group.completions[0].token_ids for group in theirs])

    look()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.run.step.engine._sent = None
    trainer.rollouts.sync(trainer.state.global_step)
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    trainer.train()
    look()
    assert seen[0] != seen[1]
    assert not trainer.proof.proof.failures
    logged = [row.get("sampling/sampling_logp_difference/max") for row in trainer.state.log_history]
    gaps = [gap for gap in logged if gap is not None]  # a step may have nothing to train on
    assert gaps
    assert max(gaps) < 1e-3


def test_weights_that_somebody_else_changed(make: Any, llm: Any) -> None:
    trainer = make()
    prompts = round_prompts(trainer.run, RoundKey(0, 0), range(2))
    settings = SamplingSettings(num_completions=2, max_tokens=4, end_ids=trainer.run.policy.end_ids)
    trainer.rollouts.sync(trainer.state.global_step)
    llm.update_weight_version("somebody's")
    with pytest.raises(RuntimeError, match="somebody's"):
        trainer.run.step.engine.generate(prompts, settings)


def test_completions_that_do_not_fit(make: Any) -> None:
    with pytest.raises(ConfigError, match="vllm_max_model_length is 256"):
        make(max_completion_length=256)
