"""NaN and infinity put into one number of a run, at many places: each is said with where it began, none is applied."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

import podium
from podium.algorithm import losses
from podium.errors import RewardError
from podium.models.packing import pack, unscored
from podium.records import Sample
from podium.runs.doctor import examine
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer.examination import Examination, first_bad

NAN, INF = math.nan, math.inf


class At(TrainerCallback):
    """Does something once, at the beginning of a step."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self.act()


class Snapshots(TrainerCallback):
    """Weights and optimizer at the end of every step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.moments: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in kwargs["model"].parameters()]))
        state_of = kwargs["optimizer"].state_dict()["state"].values()
        numbers = [torch.as_tensor(x).flatten().float() for each in state_of for x in each.values() if x is not None]
        self.moments.append(torch.cat([torch.zeros(1), *numbers]).clone())


def spoil_weight(trainer: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        trainer.model.model.layers[0].mlp.down_proj.weight.data[3, 5] = value

    trainer.add_callback(At(2, act))


def spoil_embedding(trainer: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `+`, which every prompt has."""
    [plus] = trainer.processing_class("+")["input_ids"]

    def act() -> None:
        trainer.model.get_input_embeddings().weight.data[plus, 0] = value

    trainer.add_callback(At(2, act))


def spoil_sample(change: Callable[[Sample, float], Sample]) -> Callable[[Any, float, pytest.MonkeyPatch], None]:
    """Something of the first sample that is trained on in step 2."""

    def spoil(trainer: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
        original = trainer.get_batch_samples

        def spoilt(*args: Any) -> Any:
            batches, count = original(*args)
            if trainer.state.global_step == 1:
                first, *others = batches[0].samples
                batches[0] = dataclasses.replace(batches[0], samples=(change(first, value), *others))
            return batches, count

        monkeypatch.setattr(trainer, "get_batch_samples", spoilt)

    return spoil


def advantage(sample: Sample, value: float) -> Sample:
    """That of the whole sample, and so of its tokens."""
    return dataclasses.replace(sample, advantage=value, advantages_A=np.full_like(sample.advantages_A, value))


def first_of(name: str) -> Callable[[Sample, float], Sample]:
    """The first number of an array."""

    def change(sample: Sample, value: float) -> Sample:
        values_A = getattr(sample, name).copy()
        values_A[0] = value
        return dataclasses.replace(sample, **{name: values_A})

    return change


def spoil_gradient(trainer: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda grad: grad * value if trainer.state.global_step == 1 else grad)


def spoil_loss(trainer: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    row = losses.OBJECTIVES["dapo"]

    def surrogate(ratio_N: Any, x: Any, s: Any) -> Any:
        return row.surrogate(ratio_N, x, s) * (value if trainer.state.global_step == 1 else 1.0)

    monkeypatch.setattr(losses, "OBJECTIVES", {**losses.OBJECTIVES, "dapo": row._replace(surrogate=surrogate)})


def spoil_output(name: str) -> Callable[[Any, float, pytest.MonkeyPatch], None]:
    """One number of a module's output, in training alone."""

    def spoil(trainer: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if trainer.state.global_step != 1 or not module.training:
                return output
            first, *rest = output if isinstance(output, tuple) else (output,)
            at = torch.zeros_like(first)
            at[0, 4, 0] = value  # behind a prompt of four tokens
            return (first + at, *rest) if rest else first + at

        trainer.model.get_submodule(name).register_forward_hook(hook)

    return spoil


PLACES: dict[str, tuple[Callable[..., None], str, dict[str, Any]]] = {
    "a weight": (spoil_weight, "the weight `model.layers.0.mlp.down_proj.weight`, row 3", {}),
    "an embedding": (spoil_embedding, "the weight `model.embed_tokens.weight`, row", {}),
    "advantages": (spoil_sample(advantage), "`advantages` of the loss, completion 1 of the step", {}),
    "a token's advantage": (
        spoil_sample(first_of("advantages_A")),
        "`token_advantages` of the loss, token 1 (",
        {},
    ),
    "the reference": (spoil_sample(first_of("ref_logps_A")), "`ref_logps` of the loss, token 1 (", {"beta": 0.1}),
    "a gradient": (spoil_gradient, "the gradient of the weight `model.layers.1.mlp.up_proj.weight`, row 0", {}),
    "a loss": (spoil_loss, "the loss", {}),
    "attention": (spoil_output("model.layers.0.self_attn"), "the output of `model.layers.0.self_attn`, token 1 (", {}),
    "a norm": (spoil_output("model.norm"), "the output of `model.norm`, token 1 (", {}),
}
"""How a number is spoilt in step 2, the words of the finding, settings."""


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("value", [NAN, INF], ids=["NaN", "infinity"])
@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_is_not_finite_is_said_and_never_applied(
    place: str, value: float, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, words, settings = PLACES[place]
    seen = Snapshots()
    trainer = make_trainer(max_steps=3, optim="adamw_torch", learning_rate=1e-3, callbacks=[seen], **settings)
    spoil(trainer, value, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="podium.trainer.health"):
        trainer.train()
    first = next(finding for finding in trainer.health.found if finding.code == "M131")
    assert first.step == 2
    assert words in first.what
    assert any(words in record.getMessage() for record in caplog.records)
    before, after, last = seen.weights
    if "weight" in words and "gradient" not in words:  # the spoilt number alone
        assert int((before.isfinite() & ~after.isfinite()).sum()) == 1
        assert trainer.health.found[-1].step == 3, "the next step is left out, too"
    else:
        assert torch.equal(before, after)
        assert last.isfinite().all()
        assert not torch.equal(after, last), "the next step is applied"
    assert torch.equal(seen.moments[0], seen.moments[1])


def test_a_reward_that_is_infinite_ends_the_run(make_trainer: Callable) -> None:
    """NaN is None: of that completion the function says nothing."""
    with pytest.raises(RewardError, match="inf"):
        make_trainer(lambda completions, **_: [INF for _ in completions]).train()


def test_an_old_log_probability_that_is_not_finite_is_said(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio's bounds cut NaN off: the gradient is finite, and the loss is not."""
    seen = Snapshots()
    trainer = make_trainer(max_steps=3, num_iterations=2, callbacks=[seen])
    spoil_sample(first_of("old_logps_A"))(trainer, NAN, monkeypatch)
    trainer.train()
    [finding] = [finding for finding in trainer.health.found if finding.code == "M131"]
    assert "loss of step 2 is not finite" in finding.what
    assert "`old_logps` of the loss, token 1 (" in finding.what
    assert torch.equal(seen.weights[0], seen.weights[1])
    assert not torch.equal(seen.weights[1], seen.weights[2])


@pytest.mark.cases(1)
@pytest.mark.parametrize("value", [INF, -INF])
def test_an_old_log_probability_that_is_infinite_is_said(
    value: float, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio is 0, or bounded."""
    trainer = make_trainer(max_steps=3, num_iterations=2)
    spoil_sample(first_of("old_logps_A"))(trainer, value, monkeypatch)
    trainer.train()
    assert [finding.step for finding in trainer.health.found if finding.code == "M131"] == [2]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_samplers_log_probability_that_is_not_finite_is_said(
    make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no loss; the comparison with training's is spoilt."""
    trainer = make_trainer(max_steps=3)
    spoil_sample(first_of("sampled_logps_A"))(trainer, NAN, monkeypatch)
    trainer.train()
    [finding] = [finding for finding in trainer.health.found if finding.code == "M131"]
    assert finding.step == 2
    assert "health/logp_gap_mean" in finding.what


def test_an_optimizer_that_is_not_finite_is_said_when_it_has_stepped(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=6, optim="adamw_torch")

    def act() -> None:
        for state in trainer.optimizer.state.values():
            state["exp_avg"].fill_(NAN)

    trainer.add_callback(At(2, act))
    trainer.train()
    found = [finding for finding in trainer.health.found if finding.code == "M131"]
    assert [(finding.step, finding.severity) for finding in found] == [(2, "error")]
    assert trainer.state.global_step == 2, "nothing can be learnt by such weights"


# ---- what follows ----


def always_nan(trainer: Any) -> None:
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    weight.register_hook(lambda grad: grad * NAN)


@pytest.mark.cases(1)
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.0}, {"record": False}, {"async_rollouts": 1}], ids=str)
def test_a_run_without_a_step_ends_and_says_how_to_go_on(
    settings: dict[str, Any], make_trainer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(max_steps=9, gradient_accumulation_steps=2, per_device_train_batch_size=8, **settings)
    always_nan(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with caplog.at_level(logging.WARNING, logger="podium.trainer.health"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.health.decision == "stop"
    assert all(torch.equal(x, y) for x, y in zip(before, trainer.model.parameters(), strict=True))
    if trainer.args.record:
        assert examine(trainer.args.output_dir).issues[0].finding.code == "M131"
    [ended] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "on_finding: {M131: ignore}" in ended.getMessage()


def test_a_run_without_a_step_can_be_made_to_go_on(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=4, on_finding={"M131": "ignore"})
    always_nan(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.health.decision is None
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_what_does_not_repeat_is_said_so(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=3)
    spoilt: list[int] = []

    def once(grad: Any) -> Any:
        if trainer.state.global_step == 1 and not spoilt:
            spoilt.append(1)
            return grad * NAN
        return grad

    next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(once)
    trainer.train()
    [finding] = [finding for finding in trainer.health.found if finding.code == "M131"]
    assert "Computed once more it was finite" in finding.what
    assert len(podium.Run.load(trainer.args.output_dir).metrics) == 3


def test_a_norm_beyond_float32_is_told_from_numbers_that_are_not_finite(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=3)
    large = next(p for p in trainer.model.parameters() if p.requires_grad)
    large.register_hook(lambda grad: grad * 1e30 if trainer.state.global_step == 1 else grad)
    trainer.train()
    [finding] = [finding for finding in trainer.health.found if finding.code == "M131"]
    assert "whose square is beyond float32: all its numbers are finite, and largest in `" in finding.what


@pytest.mark.cases(1)
@pytest.mark.parametrize("forbids", [torch.finfo(torch.float32).min, -1e20, -1e9, -1e4])
def test_a_bias_that_forbids_tokens_is_trained_on(forbids: float, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    size = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model("phi", num_attention_heads=4, initializer_range=0.2, **size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.lm_head.bias.data[100:150] = forbids
    args = podium.GRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=2
    )
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    trainer = podium.GRPOTrainer(
        model, lambda completions, **_: [sum(map(ord, text)) % 7 for text in completions], args, rows,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert 1e-6 < trainer.health.latest["health/update_ratio"] < 1


def test_a_token_is_named_by_its_place_in_prompt_or_completion() -> None:
    prompt, *completions = (tiny_tokenizer()(text)["input_ids"] for text in ("ab", "cde", "cxy"))
    [packed] = pack([unscored(prompt, ids) for ids in completions], tokens_per_pack=100)
    examination = Examination(tiny_model("llama"), tiny_tokenizer().decode)
    positions, tokens = len(packed.input_ids_T), packed.num_tokens
    for shape, at, words in (
        ((1, positions, 4), 4, "token 2 ('b') of prompt of completion 1 of"),
        ((1, positions, 4), 4 * (positions - 1), "token 2 ('x') of completion 2 of"),
        ((tokens,), tokens - 1, "token 3 ('y') of completion 2 of"),
        ((2, 4, 8), 8 * 4 + 8 * 2, "token 1 ('c') of completion 2 of"),
    ):
        assert words in examination._token(packed, torch.Size(shape), at)
    assert first_bad(torch.tensor([0.0, INF, NAN])) == 1
