"""What a GPU runs by default, run on a CPU: the branches of CUDA's row of `devices.KINDS` (see `as_if_cuda`).

Half precision by autocast with and without a scaler, accelerate's preparation, attention over buckets with masks, rows
looked at every eighth token. Every training here goes through the proof on the first batch, which compares sampling,
packed and plain forwards, and gradients.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.cli.train import run as train
from podium.engines.live import engine as live
from podium.engines.live.cache import Decode
from podium.engines.live.engine import LiveEngine
from podium.errors import ProofError
from podium.models.builtin import resolve_model
from podium.models.head import LogitScaling, head_logps
from podium.models.packing import Places
from podium.records import Prompt, SamplingSettings
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer import config

pytestmark = pytest.mark.usefixtures("as_if_cuda")

PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16 autocast": {},
    "float16 autocast": {"fp16": True},
    "bfloat16 weights": {"weights": torch.bfloat16, "bf16": False},
}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True},
    "lora on half": {"lora": True, "weights": torch.bfloat16},
}
KINDS = ("llama", "qwen3", "gemma3", "gpt2")
SETTINGS: dict[str, dict[str, Any]] = {
    "beta": {"beta": 0.05},
    "checkpointing": {"gradient_checkpointing": True},
    "iterations": {"num_iterations": 2},
    "quantile": {"top_entropy_quantile": 0.5},
    "penalty": {"repetition_penalty": 1.2},
    "top_p": {"top_p": 0.9},
    "async": {"async_rollouts": 1},
}


def merged(precision: str, trained: str) -> dict[str, Any]:
    """Settings of both; a frozen base in half precision has autocast's own."""
    half = {"weights": torch.float16} if (precision, trained) == ("float16 autocast", "lora on half") else {}
    return {**PRECISIONS[precision], **TRAINED[trained], **half}


EVERY = [(p, t, kind, "") for p in PRECISIONS for t in TRAINED for kind in KINDS] + [
    (p, t, "llama", setting) for p in PRECISIONS for t in ("full", "lora") for setting in SETTINGS
]
CASES = [pytest.param(*case, marks=[pytest.mark.slow] if number % 3 else []) for number, case in enumerate(EVERY)]
"""A third runs each time, every kind of model, precision and setting among them; the rest is slow."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("precision", "trained", "kind", "setting"), CASES, ids=lambda x: x or "plain")
def test_three_steps_pass_the_proof(precision: str, trained: str, kind: str, setting: str, make_trainer: Any) -> None:
    given = {"learning_rate": 1e-3, **merged(precision, trained), **SETTINGS.get(setting, {})}
    model = tiny_model(kind).to(given.pop("weights", torch.float32))
    if given.pop("lora", False):
        given["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = make_trainer(model=model, max_steps=3, prove_first_batch=True, **given)
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_run_goes_on_bit_equal_from_a_checkpoint(make_trainer: Any, tmp_path: Any) -> None:
    """Rows are looked at every eighth token and lanes grow by doubling; the random numbers of a token stay its own."""
    settings = {"max_steps": 2, "max_completion_length": 20, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(**settings)
    whole.train()
    expected = {name: value.clone() for name, value in whole.model.state_dict().items()}
    again = make_trainer(**settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


def test_greedy_tokens_are_those_of_generate() -> None:
    """In float32, so that only the way of sampling differs: eight tokens a look, every completion a row of its own."""
    model = tiny_model("llama")
    prompts = [Prompt(id=i, row=i, token_ids=ids, text="", content="") for i, ids in enumerate([(5, 6, 7), (9,) * 9])]
    settings = SamplingSettings(num_completions=2, max_tokens=21, end_ids=frozenset([1]), greedy=True)
    for group in LiveEngine(model, tiny_tokenizer()).generate(prompts, settings):
        ids = torch.tensor([group.prompt.token_ids])
        said = model.generate(ids, max_new_tokens=21, do_sample=False, eos_token_id=1, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        for completion in group.completions:
            assert list(completion.token_ids) == said.tolist()[: len(completion.token_ids)]
            assert len(completion.token_ids) == 21 or completion.token_ids[-1] == 1


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7}, {"repetition_penalty": 1.3}, {"top_p": 0.8}, {"lengths": lambda p, g: 5 + (p + g) % 9}],
    ids=["plain", "cold", "penalty", "top_p", "lengths"],
)
def test_looking_every_eighth_token_draws_what_looking_at_each_does(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    prompts = [Prompt(id=i, row=i, token_ids=(5 + i, 6, 7), text="", content="") for i in range(5)]
    settings = SamplingSettings(num_completions=3, max_tokens=30, end_ids=frozenset(range(1, 12)), **how)
    seldom = LiveEngine(model, tiny_tokenizer(), max_rows=7).generate(prompts, settings)
    monkeypatch.setattr(live, "STEPS_PER_LOOK", 1)
    often = LiveEngine(model, tiny_tokenizer(), max_rows=7).generate(prompts, settings)
    assert len({len(c.token_ids) for group in often for c in group.completions}) > 3, "rows end at different tokens"
    for one, other in zip(seldom, often, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logps, theirs.logps, atol=1e-4)


# ---- cards without units for bfloat16 ----


@pytest.mark.cases(1)
@pytest.mark.parametrize(("asked", "half"), [(None, True), (True, True), (False, False)])
def test_without_bfloat16_units_float16_is_used_and_said(
    asked: bool | None, half: bool, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a T4 or V100, where torch says that it has bfloat16, and emulates it."""
    monkeypatch.setattr(config, "has_bfloat16", lambda: False)
    trainer = make_trainer(max_steps=1, prove_first_batch=True, bf16=asked)
    assert (trainer.args.fp16, trainer.args.bf16) == (half, False)
    assert ("no bfloat16 units" in caplog.text) == half
    assert ("in place of bf16: true" in caplog.text) == (asked is True)
    trainer.train()


@pytest.mark.slow
def test_a_scale_of_the_loss_that_overflows_at_first_stops_nothing(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes down in the proof, as it would by skipped steps."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**40))
    trainer = make_trainer(max_steps=2, prove_first_batch=True, fp16=True)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() < 2.0**40
    assert any(not torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))


# ---- what autocast must not round ----


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "as it was"])
def test_entropies_and_log_probabilities_of_the_built_in_model_are_summed_in_float32(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 0.01 nats of exact sums over the same rounded factors; inside autocast they were off by 0.1 and more."""
    if fault:
        monkeypatch.setattr("podium.models.head.without_autocast", lambda device: contextlib.nullcontext())
    folder = resolve_model("builtin:smollm2-135m-instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "What is 12 plus 7? The sum is 19. Paris is the capital of France, and Rome that of Italy."
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        hidden_PD, target_N = model.model(ids).last_hidden_state[0, :-1], ids[0, 1:]
        z_PV = hidden_PD.bfloat16().double() @ model.lm_head.weight.bfloat16().double().T
        with torch.autocast("cpu", dtype=torch.bfloat16):
            places = Places.of(np.arange(len(target_N)), "cpu")
            logps_N, entropy_N = head_logps(model.lm_head, hidden_PD, places, target_N, LogitScaling())
    exact_PV = z_PV.log_softmax(-1)
    of_logps = (logps_N - exact_PV.gather(1, target_N[:, None])[:, 0]).abs().max()
    of_entropies = (entropy_N + (exact_PV.exp() * exact_PV).sum(-1)).abs().max()
    assert (float(max(of_logps, of_entropies)) > 0.05) if fault else (float(max(of_logps, of_entropies)) < 0.01)


# ---- the faults that no test had seen ----


def test_attention_that_asks_for_its_type_where_autocast_is_off_is_found(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Decode.attend

    def late(self: Decode, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return original(self, query, *rest)

    monkeypatch.setattr(Decode, "attend", late)
    with pytest.raises(RuntimeError, match=r"scalar type|same dtype"):
        make_trainer(prove_first_batch=True).train()


def test_accelerates_wrapper_around_forward_is_found(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.trainer.trainer.without_autocast_wrapper", lambda accelerator: None)
    with pytest.raises(ProofError):
        make_trainer(prove_first_batch=True).train()


def test_accelerate_leaves_forward_alone(make_trainer: Any) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    assert "forward" not in vars(trainer.accelerator.unwrap_model(trainer.model))
    assert trainer.accelerator.native_amp


@pytest.mark.slow
@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 45 steps of the recipe on the real model, with the proof on, in bfloat16 by autocast."""
    monkeypatch.chdir(tmp_path)
    train("quickstart", {}, evaluate=True)
    folder = tmp_path / "runs" / "quickstart" / "evaluation"
    looks = [json.loads((folder / f"{when}.json").read_text()) for when in ("before", "after")]
    before, after = (look["accuracy"]["value"] for look in looks)
    assert before < 0.05
    assert after >= 0.65
