"""The proof on the first batch: it finds planted faults and names them, is silent on healthy models, changes nothing.

Every fault here has happened, unnoticed, in a trainer that people use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import TrainerCallback

import podium.models.forward
import podium.models.head
import podium.models.packing
import podium.trainer.rollouts
import podium.trainer.samples
from podium import Run
from podium.errors import ProofError
from podium.records import Completion, Group, Prompt, Sample, ScoredGroup
from podium.testing import tiny_tokenizer
from podium.trainer.proof.checks import AFTER_STEP, BEFORE_ROLLOUTS, BEFORE_STEP, Check
from podium.trainer.proof.evidence import telling_prompts
from podium.trainer.proof.first_batch import Proof
from tests.conftest import digits

pytestmark = pytest.mark.usefixtures("both_devices")

HEALTHY = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2")
NUM_CHECKS = len(BEFORE_ROLLOUTS) + len(BEFORE_STEP) + len(AFTER_STEP)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)


@pytest.fixture
def make(make_trainer: Callable) -> Callable:
    """As `make_trainer`, with the proof, and one step."""
    return lambda *given, **settings: make_trainer(*given, **{"prove_first_batch": True, "max_steps": 1, **settings})


def proof_of(trainer: Any) -> dict[str, Any]:
    return json.loads((Path(trainer.args.output_dir) / "proof.json").read_text(encoding="utf-8"))


def failed(trainer: Any, *codes: str) -> str:
    """The message with which training stops; exactly these codes failed, and no weight has moved."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(ProofError) as stopped:
        trainer.train()
    found = [check["code"] for check in proof_of(trainer)["checks"] if check["passed"] is False]
    assert set(codes) <= set(found), str(stopped.value)
    assert stopped.value.findings[0].code == stopped.value.code == found[0]
    for one, other in zip(before, trainer.model.parameters(), strict=True):
        assert one.equal(other) or bool(one.isnan().any())
    assert trainer.state.global_step == 0
    return str(stopped.value)


def warned(trainer: Any, code: str) -> str:
    """The one warning of the proof of a run that goes on."""
    trainer.train()
    [check] = [check for check in proof_of(trainer)["checks"] if check["result"] == "WARNING"]
    assert check["code"] == code
    assert code in [finding.code for finding in trainer.health.found]
    return check["detail"]


# ---- healthy ----


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_is_said_of_healthy_models(make: Callable, kind: str, adapter: bool) -> None:
    calls = []

    def counting(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return digits(completions)

    trainer = make(counting, model=kind, peft_config=lora() if adapter else None, temperature=1.3, max_steps=2)
    trainer.train()
    assert calls == [16, 16, 16], "two rounds, the first scored a second time"
    proof = proof_of(trainer)
    assert proof["passed"]
    assert len(proof["checks"]) == NUM_CHECKS
    results = {check["name"]: check["result"] for check in proof["checks"]}
    for name in (
        "completions end with the turn",  # plain prompts have no turns
        "text is the model's own",  # a random model knows no text
        "training starts at its reference",
        "the reference stays where it is",
    ):
        assert results.pop(name) == "not checked", name
    assert set(results.values()) == {"ok"}, results


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "entropy_coef": 0.1, "loss_type": "grpo"},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
        {"loss_type": "vespo", "top_entropy_quantile": 0.5},
        {"loss_type": "gspo", "num_iterations": 2, "steps_per_generation": 2},
        {"rollout_engine": "transformers", "top_k": 20},
        {"gradient_checkpointing": True, "tokens_per_pack": 10},
        {"peft_config": lora(lora_dropout=0.3)},
        {"lr_scheduler_type": "linear", "warmup_steps": 1, "max_steps": 3},
    ],
    ids=str,
)
def test_nor_of_any_settings(make: Callable, settings: dict[str, Any]) -> None:
    trainer = make(**settings)
    trainer.train()
    assert proof_of(trainer)["passed"]
    assert len(proof_of(trainer)["checks"]) == NUM_CHECKS


@pytest.mark.cases(1)
@pytest.mark.parametrize(("shares", "accumulation"), [(2, 4), (1, 2)])
def test_nor_of_a_step_of_several_rounds(make: Callable, shares: int, accumulation: int) -> None:
    trainer = make(
        per_device_train_batch_size=4,
        steps_per_generation=shares,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    [check] = [each for each in proof_of(trainer)["checks"] if each["name"] == "trained tokens are the sampled ones"]
    assert check["result"] == "ok"
    assert f"of {4 * accumulation} completions" in check["detail"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_run_is_the_same_with_and_without(make_trainer: Callable, adapter: bool) -> None:
    """Bit by bit; also with dropout and a reward that draws random numbers."""

    def noisy(completions: list[str], **_: Any) -> list[float]:
        return [float(torch.rand(())) + float(np.random.rand()) for _ in completions]

    runs = []
    for prove in (False, True):
        trainer = make_trainer(
            noisy, prove_first_batch=prove, peft_config=lora() if adapter else None, optim="adamw_torch"
        )
        for module in trainer.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        trainer.train()
        assert (Path(trainer.args.output_dir) / "proof.json").exists() is prove
        runs.append(trainer)
    for one, other in zip(*(trainer.model.parameters() for trainer in runs), strict=True):
        assert one.equal(other)
    without, with_ = ([entry for entry in trainer.state.log_history if "reward" in entry] for trainer in runs)
    for one, other in zip(without, with_, strict=True):
        timeless = [
            {
                k: v
                for k, v in entry.items()
                if not any(part in k for part in ("time", "bytes", "per_second", "finding/W111"))
            }
            for entry in (one, other)
        ]
        assert timeless[0] == timeless[1]


def test_after_a_resume_only_the_cheap_part_runs(make: Callable) -> None:
    make(save_strategy="steps", save_steps=1, max_steps=1).train()
    trainer = make(save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    proof = proof_of(trainer)
    assert proof["step"] == 1
    assert [check["code"] for check in proof["checks"]] == ["P001", "P002", "P003"]


# ---- planted faults ----


def test_adapter_not_applied_in_sampling(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(peft_config=lora())
    engine, generate = trainer.run.step.engine, trainer.run.step.engine.generate

    def without_adapter(*given: Any, **settings: Any) -> Any:
        with trainer.model.disable_adapter():
            return generate(*given, **settings)

    monkeypatch.setattr(engine, "generate", without_adapter)
    message = failed(trainer, "P006")
    assert "the adapter does not reach the sampler" in message


def test_temperature_ignored_in_training(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(temperature=1.5)
    monkeypatch.setattr(podium.models.head.LogitScaling, "at", lambda scaling, _temperature: scaling)
    message = failed(trainer, "P004", "P005", "P007")
    assert "these are log-probabilities at temperature 1, not 1.5" in message


def test_temperature_ignored_in_sampling(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(temperature=1.5)
    generate = trainer.run.step.engine.generate
    monkeypatch.setattr(
        trainer.run.step.engine,
        "generate",
        lambda prompts, settings, **more: generate(prompts, dataclasses.replace(settings, temperature=1.0), **more),
    )
    assert "these are log-probabilities at temperature 1, not 1.5" in failed(trainer, "P004")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_positions_shifted(make: Callable, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rotary models do not even change when all positions move together; absolute ones do."""
    inputs = podium.models.forward.FORWARDS["shared"]

    def shifted(packed: Any) -> Any:
        kwargs, *how = inputs(packed)
        return {**kwargs, "position_ids": kwargs["position_ids"] + 1}, *how

    trainer = make(model=kind)
    monkeypatch.setitem(podium.models.forward.FORWARDS, "shared", shifted)
    assert "token 0 of completion 0 stands at position 1" in failed(trainer, "P005")


@pytest.mark.slow
def test_positions_of_completions_shifted(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = podium.models.forward.FORWARDS["shared"]

    def shifted(packed: Any) -> Any:
        kwargs, *how = inputs(packed)
        positions = kwargs["position_ids"].clone()
        for span in packed.spans_R:
            positions[0, span.tokens[span.prompt_length :]] += 1
        return {**kwargs, "position_ids": positions}, *how

    trainer = make()
    monkeypatch.setitem(podium.models.forward.FORWARDS, "shared", shifted)
    assert re.search(r"token (\d+) of completion 0 stands at position (?!\1 )", failed(trainer, "P005", "P004"))


def test_one_end_id_missing(make: Callable) -> None:
    trainer = make()
    trainer.model.generation_config.eos_token_id = [2, 3]
    assert "<|endoftext|> (3) does not end a completion" in failed(trainer, "P003")


def test_the_turn_ends_and_the_completion_does_not(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model's tokenizer with a chat template: `<|im_end|>` is in the template, but is no end token."""
    from podium.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(12)]
    trainer = make(
        lambda completions, **_: [float(i) for i in range(len(completions))],
        rows=rows,
        processing_class=tokenizer,
        max_completion_length=16,
    )
    trainer.model.generation_config.eos_token_id = 3
    trainer.step.policy = dataclasses.replace(trainer.step.policy, end_ids=frozenset({3}))
    head = trainer.model.get_output_embeddings()
    head.bias = nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    with torch.no_grad():
        head.bias[2] = 4.0
    assert "go on after <|im_end|> (2)" in warned(trainer, "P003")


def test_a_frozen_layer_that_should_train(make: Callable) -> None:
    trainer = make()
    trainer.model.model.layers[1].mlp.requires_grad_(False)
    message = warned(trainer, "P002")
    assert "frozen: model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight" in message


def test_nothing_that_is_trained(make: Callable, tiny_llama: Callable) -> None:
    model = tiny_llama()
    other = torch.nn.Parameter(torch.ones(1))
    failed(make(model=model, optimizers=(torch.optim.SGD([other], lr=0.1), None)), "P002")


@pytest.mark.slow
def test_a_frozen_adapter(make: Callable) -> None:
    trainer = make(peft_config=lora())
    for name, parameter in trainer.model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(False)
    assert "layers.0.mlp.down_proj.lora_A.default.weight" in warned(trainer, "P002")


def test_a_layer_the_caller_froze_is_only_noted(make: Callable, tiny_llama: Callable) -> None:
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    trainer = make(model=model)
    trainer.train()
    [check] = [check for check in proof_of(trainer)["checks"] if check["code"] == "P002"]
    assert check["result"] == "note"
    assert "frozen by the caller: model.embed_tokens.weight" in check["detail"]


def test_a_tensor_the_optimizer_does_not_have(make: Callable, tiny_llama: Callable) -> None:
    model = tiny_llama()
    some = [p for name, p in model.named_parameters() if "norm" not in name]
    trainer = make(model=model, optimizers=(torch.optim.SGD(some, lr=0.1), None))
    assert "in no group of the optimizer: model.layers.0.input_layernorm.weight" in warned(trainer, "P002")


def test_gradient_scaled_twice_by_accumulation(make: Callable) -> None:
    """accelerate divides by its own number of steps, too, if it is told of them."""
    trainer = make(gradient_accumulation_steps=2, per_device_train_batch_size=8)
    trainer.accelerator.gradient_accumulation_steps = 2
    message = failed(trainer, "P007")
    assert "the gradient is 0.5 times the plain one" in message


@pytest.mark.slow
def test_loss_counted_by_micro_step(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in one micro-step, wrong in two: the classic mean of means."""
    import podium.trainer.proof.evidence as evidence

    counted = evidence.micro_batches

    def each_alone(shares: Any, **settings: Any) -> Any:
        return [batch for share in shares for batch in counted([share], **settings)]

    monkeypatch.setattr(evidence, "micro_batches", each_alone)
    assert "two micro-steps: the gradient is" in failed(make(), "P007")


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["weight", "head of attention"])
def test_a_nan_in_one_head(make: Callable, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    trainer = make()
    attention = trainer.model.model.layers[1].self_attn
    if where == "weight":
        with torch.no_grad():
            attention.v_proj.weight[8:16] = float("nan")
        message = failed(trainer, "P001")
        assert "model.layers.1.self_attn.v_proj.weight (256 numbers, rows 8 to 15)" in message
        return

    def broken(module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = args[0].clone()
        x[..., 8:16] = float("nan")
        return (x,)

    draw = trainer.rollouts.draw

    def and_then_break(*given: Any) -> Any:
        drawn = draw(*given)
        attention.o_proj.register_forward_pre_hook(broken)
        return drawn

    monkeypatch.setattr(trainer.rollouts, "draw", and_then_break)
    assert "not finite from model.layers.1.self_attn.o_proj on" in failed(trainer, "P005")


def test_a_gradient_that_is_not_finite(make: Callable) -> None:
    trainer = make()
    weight = trainer.model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda grad: grad * float("nan"))
    assert "not finite: model.layers.0.self_attn.q_proj.weight" in failed(trainer, "P008")


def test_a_layer_cut_off_from_the_loss(make: Callable) -> None:
    trainer = make()
    trainer.model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output.detach())
    assert "4 of 21 tensors get none from these rows, in the plain model either: model.layers.1.mlp.gate" in warned(
        trainer, "P008"
    )


@pytest.mark.slow
def test_a_layer_cut_off_in_training_alone(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model gives the layer a gradient, so that is a fact: the run stops."""
    trainer = make()
    mlp = trainer.model.model.layers[1].mlp
    token_logps = type(trainer.run.policy.forward).token_logps

    def without(self: Any, *given: Any, **settings: Any) -> Any:
        handle = mlp.register_forward_hook(lambda _module, _args, output: output.detach())
        try:
            return token_logps(self, *given, **settings)
        finally:
            handle.remove()

    monkeypatch.setattr(type(trainer.run.policy.forward), "token_logps", without)
    assert "none, though the plain model gives them one: model.layers.1.mlp.gate_proj.weight" in failed(trainer, "P008")


@pytest.mark.cases(1)
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_mask_inside_the_inputs_of_the_loss(make: Callable, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """All but one token of every completion are masked where training takes the inputs of its loss from."""
    import podium.trainer.step as training

    made = training.loss_inputs

    def masked(*given: Any, **settings: Any) -> Any:
        inputs = made(*given, **settings)
        rollouts = inputs.rollout_N
        edge = rollouts.new_ones(1, dtype=torch.bool)
        apart = rollouts[1:] != rollouts[:-1]
        keep = torch.cat([edge, apart] if which == "first" else [apart, edge])
        return dataclasses.replace(inputs, keep_N=keep)

    monkeypatch.setattr(training, "loss_inputs", masked)
    failed(make(), "P007")


def test_a_loss_with_the_wrong_sign(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    import podium.algorithm.losses as losses

    row = losses.OBJECTIVES["dapo"]
    turned = row._replace(surrogate=lambda *given: -row.surrogate(*given))
    monkeypatch.setitem(losses.OBJECTIVES, "dapo", turned)
    assert "are moved against their advantage" in failed(make(loss_type="dapo"), "P015")


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd", "adafactor"])
def test_a_callback_that_turns_gradients_round(make: Callable, optimizer: str) -> None:
    class Turning(TrainerCallback):
        def on_pre_optimizer_step(self, *given: Any, **kwargs: Any) -> None:
            for parameter in kwargs["model"].parameters():
                parameter.grad.neg_()

    trainer = make(callbacks=[Turning()], optim=optimizer, learning_rate=1e-3)
    with pytest.raises(ProofError) as stopped:
        trainer.train()
    assert stopped.value.code == "P015"


def test_completions_that_are_alike_are_all_counted(make: Callable) -> None:
    trainer = make(max_completion_length=1, temperature=0.3)
    trainer.train()
    [check] = [each for each in proof_of(trainer)["checks"] if each["code"] == "P009"]
    first = Run.load(trainer.args.output_dir).rollouts.query("step == 1")
    assert len(first) == 16
    assert first.groupby("prompt")["completion"].nunique().sum() < 16, "nothing is alike, and nothing shown"
    assert check["detail"].endswith(" of 16 completions are trained on")


@pytest.mark.slow
def test_tokens_from_text_tokenized_again(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    samples_of = podium.trainer.samples.samples_of

    def from_text(scored: ScoredGroup, *given: Any) -> list[Sample]:
        changed = []
        for sample, completion in zip(samples_of(scored, *given), scored.group.completions, strict=True):
            ids = tuple(trainer.run.policy.tokenizer(completion.text)["input_ids"] or (3,))
            changed.append(
                dataclasses.replace(
                    sample,
                    token_ids=ids,
                    actions=np.ones(len(ids), bool),
                    advantages_A=np.resize(sample.advantages_A, len(ids)),
                    sampled_logps_A=np.resize(sample.sampled_logps_A, len(ids)),
                )
            )
        return changed

    monkeypatch.setattr(podium.trainer.samples, "samples_of", from_text)
    message = failed(trainer, "P009")
    assert "of a trained completion is" in message
    assert "was sampled" in message


def test_an_engine_that_tokenizes_text_again(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end tokens are lost with the text."""
    trainer = make(max_completion_length=64, seed=1)
    generate = trainer.run.step.engine.generate

    def from_text(*given: Any, **settings: Any) -> Any:
        groups = generate(*given, **settings)
        again = [
            tuple(
                dataclasses.replace(c, token_ids=tuple(trainer.run.policy.tokenizer(c.text)["input_ids"] or (5,)))
                for c in group.completions
            )
            for group in groups
        ]
        return [
            dataclasses.replace(
                group,
                completions=tuple(
                    dataclasses.replace(c, logps=tuple(np.resize(c.logps, len(c.token_ids)).tolist())) for c in cs
                ),
            )
            for group, cs in zip(groups, again, strict=True)
        ]

    monkeypatch.setattr(trainer.run.step.engine, "generate", from_text)
    failed(trainer, "P009", "P004")


def test_the_better_completion_gets_the_lower_advantage(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    advantages = podium.trainer.rollouts.gathered_advantages

    def upside_down(*given: Any) -> Any:
        table, result = advantages(*given)
        return table, dataclasses.replace(result, advantages_PG=-result.advantages_PG)

    monkeypatch.setattr(podium.trainer.rollouts, "gathered_advantages", upside_down)
    assert "the better completion has the lower advantage" in failed(trainer, "P010")


# ---- after the step ----


def test_weights_too_coarse_to_move(make: Callable, tiny_llama: Callable) -> None:
    """The next steps may be larger: a warning."""
    trainer = make(model=tiny_llama().to(torch.bfloat16), learning_rate=1e-9)
    assert "0 of 21 tensors changed" in warned(trainer, "P011")


def test_a_stale_copy_of_the_weights(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads a copy that was made before the step; sampler and training agree on it."""
    trainer = make()
    model, proof = trainer.model, trainer.proof
    before_step = proof.before_step

    def and_then_freeze(*given: Any) -> None:
        before_step(*given)
        copy = {name: p.detach().clone() for name, p in model.named_parameters()}
        logps = trainer.run.policy.forward.token_logps

        @contextlib.contextmanager
        def old_weights() -> Any:
            now = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(copy[name])
            yield
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(now[name])

        def stale(*given: Any, **settings: Any) -> Any:
            if torch.is_grad_enabled():
                return logps(*given, **settings)
            with old_weights():
                return logps(*given, **settings)

        forward = type(trainer.run.policy.forward)
        monkeypatch.setattr(forward, "token_logps", lambda _self, *given, **settings: stale(*given, **settings))

    monkeypatch.setattr(proof, "before_step", and_then_freeze)
    with pytest.raises(ProofError, match="the same log-probabilities with other weights"):
        trainer.train()


# ---- what may not be called proved ----


def result_of(trainer: Any, name: str) -> dict[str, Any]:
    [check] = [check for check in proof_of(trainer)["checks"] if check["name"] == name]
    return check


def certain(trainer: Any, beginning: str = "<") -> None:
    """Every completion begins with the same token, as good as certainly."""
    head = trainer.model.get_output_embeddings()
    bias = torch.zeros(head.out_features, device=head.weight.device)
    bias[trainer.run.policy.tokenizer(beginning)["input_ids"][0]] = 200.0
    head.bias = nn.Parameter(bias, requires_grad=False)


@pytest.mark.slow
@pytest.mark.defect("B1", "every token all but certain")
def test_certain_tokens_are_not_checked(make: Callable, now: Callable) -> None:
    """Their gradients are of the size of rounding: neither a failure nor a proof."""
    trainer = make(rows=[{"prompt": "12"}, {"prompt": "34"}] * 4)
    certain(trainer)
    trainer.train()
    for name in ("cutting the batch changes nothing", "every trained tensor gets a gradient"):
        assert result_of(trainer, name)["result"] == "not checked"
    now(result_of(trainer, "cutting the batch changes nothing")["detail"])


@pytest.mark.defect("B1", "completions that begin with certain tokens")
def test_certain_beginnings_are_passed_by(now: Callable) -> None:
    """The sample is taken in front of the least likely token that was sampled: there is a gradient to compare."""

    def scored(prompt: int, *logps: tuple[float, ...]) -> Any:
        completions = [
            Completion(token_ids=tuple(range(10, 10 + len(x))), logps=x, finish="stop", text="", policy_step=0)
            for x in logps
        ]
        group = Group(
            prompt=Prompt(id=prompt, row=prompt, token_ids=(prompt,) * 20, text="", content=""),
            completions=tuple(completions),
        )
        return ScoredGroup(group=group, names_K=("a",), rewards_GK=np.zeros((len(completions), 1)))

    groups = [scored(1, (0.0, -1e-7, -1e-6)), scored(2, (-1e-6, -1e-6, -2.5), (0.0,)), scored(3, (-1e-6, -0.7))]
    prompts = telling_prompts(groups)
    assert [prompt.token_ids for prompt in prompts] == [(2,) * 14 + (10, 11), (3,) * 15 + (10,)]
    now("the sample starts in front of the least likely token that was sampled")


@pytest.mark.defect("B10", "optimizer with maximize=True")
def test_a_step_against_the_advantages(make: Callable, tiny_llama: Callable, now: Callable) -> None:
    model = tiny_llama()
    trainer = make(model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), None))
    with pytest.raises(ProofError) as stopped:
        trainer.train()
    assert stopped.value.code == "P015"
    now(str(stopped.value).splitlines()[1].strip())


@pytest.mark.slow
@pytest.mark.defect("B10", "half of the groups at learning rate 0")
def test_a_group_of_the_optimizer_at_rest(make: Callable, tiny_llama: Callable, now: Callable) -> None:
    model = tiny_llama()
    names = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in names.items() if "layers.0" in n], "lr": 0.0},
        {"params": [p for n, p in names.items() if "layers.0" not in n], "lr": 0.1},
    ]
    trainer = make(model=model, optimizers=(torch.optim.SGD(groups), None))
    trainer.train()
    check = result_of(trainer, "trained tensors")
    assert check["result"] == "note"
    assert "learning rate 0: model.layers.0." in check["detail"]
    now(check["detail"])


@pytest.mark.defect("B10", "the reference is the policy")
def test_a_reference_that_is_the_policy(make: Callable, now: Callable) -> None:
    trainer = make(beta=0.1)
    trainer.run.objective.reference.copy = trainer.model
    with pytest.raises(ProofError) as stopped:
        trainer.train()
    assert "P016 the reference stays where it is" in str(stopped.value)
    now(str(stopped.value).splitlines()[1].strip())


@pytest.mark.slow
@pytest.mark.defect("B10", "KL 0.63 at step 1")
def test_a_reference_that_is_another_model(make: Callable, tiny_llama: Callable, now: Callable) -> None:
    trainer = make(beta=0.1)
    with torch.no_grad():
        for p in trainer.run.objective.reference.copy.parameters():
            p.mul_(1.1)
    trainer.train()
    check = result_of(trainer, "training starts at its reference")
    assert check["result"] == "WARNING"
    assert [finding.code for finding in trainer.health.found if finding.code.startswith("P")] == ["P016"]
    now(check["detail"])


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_reference_as_it_should_be(make: Callable, adapter: bool) -> None:
    trainer = make(beta=0.1, peft_config=lora() if adapter else None)
    trainer.train()
    names = ("training starts at its reference", "the reference stays where it is")
    assert [result_of(trainer, name)["result"] for name in names] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.defect("B10", "a stale lm_head alone")
def test_a_stale_head(make: Callable, monkeypatch: pytest.MonkeyPatch, now: Callable) -> None:
    """The sampler has every weight as it is but the head's."""
    trainer = make()
    model, sample = trainer.model, trainer.step.sample
    head = model.get_output_embeddings().weight
    old = head.detach().clone()

    def with_the_old_head(*given: Any, **settings: Any) -> Any:
        now_it_is = head.detach().clone()
        with torch.no_grad():
            head.copy_(old)
        try:
            return sample(*given, **settings)
        finally:
            with torch.no_grad():
                head.copy_(now_it_is)

    monkeypatch.setattr(trainer.step, "sample", with_the_old_head)
    message = failed(trainer, "P004")
    now(message.splitlines()[1].strip())


def test_the_line_counts_what_passed_alone() -> None:
    made = {"ok": {}, "note": {"note": True}, "WARNING": {"suspect": True}}
    checks = [Check(name=word, code="P001", passed=True, detail="", **more) for word, more in made.items()]
    checks += [Check(name="a", code="P002", passed=None, detail="")]
    checks += [Check(name="b", code="P003", passed=False, detail="", overruled=yes) for yes in (True, False)]
    said = Proof(checks=tuple(checks), step=0, processes=1, seconds=1.0).summary().splitlines()[0]
    assert "2 checks passed, 1 failed, 1 overruled, 1 warning, 1 not checked" in said


def test_nothing_to_train_on_proves_nothing(make: Callable) -> None:
    """All rewards equal: no group is trained on, the weights stay, and the checks after a step wait for one."""
    trainer = make(lambda completions, **_: [1.0] * len(completions))
    trainer.train()
    done = {check["name"]: check["result"] for check in proof_of(trainer)["checks"]}
    assert "the step goes down its loss" not in done
    assert done["rollout and training log-probabilities"] == "not checked"
    assert done["rewards"] == "note"


# ---- whether the text is the model's own ----


@pytest.fixture
def fluent(make: Callable) -> Any:
    """A trainer whose model has learnt its prompts by heart."""
    rows = [{"prompt": f"the {noun} is on the {place}"} for noun in ("cat", "dog") for place in ("mat", "hill", "roof")]

    def made(**given: Any) -> Any:
        trainer = make(rows=rows * 2, **given)
        own = trainer.run.policy.tokenizer if "processing_class" not in given else tiny_tokenizer()
        ids = torch.tensor([own(row["prompt"] + " " * 9)["input_ids"][:24] for row in rows]).to(trainer.args.device)
        model, adam = trainer.model, torch.optim.Adam(trainer.model.parameters(), lr=3e-3)
        for _ in range(60):
            adam.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            adam.step()
        adam.zero_grad()
        return trainer

    return made


@pytest.mark.cases(1)
@pytest.mark.defect("B13", "vocabulary permuted")
@pytest.mark.parametrize("foreign", [True, False], ids=["another's", "its own"])
def test_the_tokenizer_of_another_model(fluent: Callable, foreign: bool, now: Callable) -> None:
    trainer = fluent(**({"processing_class": permuted(tiny_tokenizer())} if foreign else {}))
    trainer.train()
    check = result_of(trainer, "text is the model's own")
    assert check["result"] == ("WARNING" if foreign else "ok"), check
    assert ("the tokenizer is another model's" in check["detail"]) is foreign
    now(check["detail"])


def permuted(tokenizer: Any) -> Any:
    """Bytes shifted against one another; special tokens stay."""
    from tokenizers import Tokenizer

    made = json.loads(tokenizer.backend_tokenizer.to_str())
    names = [
        name for name, i in sorted(made["model"]["vocab"].items(), key=lambda x: x[1]) if not name.startswith("<|")
    ]
    ids = [made["model"]["vocab"][name] for name in names]
    made["model"]["vocab"].update(zip(names, ids[97:] + ids[:97], strict=True))
    other = tiny_tokenizer()
    other._tokenizer = Tokenizer.from_str(json.dumps(made))
    return other


@pytest.mark.slow
@pytest.mark.defect("B13", "a chat template without the assistant's turn")
def test_completions_that_open_the_turn_themselves(make: Callable, now: Callable) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.partition("{% if add_generation_prompt %}")[0]
    trainer = make(
        lambda completions, **_: [float(len(each[0]["content"])) for each in completions],
        rows=[{"prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(8)],
        processing_class=tokenizer,
    )
    head = trainer.model.get_output_embeddings()
    head.bias = nn.Parameter(torch.zeros(head.out_features, device=head.weight.device), requires_grad=False)
    with torch.no_grad():
        head.bias[tokenizer.convert_tokens_to_ids("<|im_start|>")] = 12.0
    trainer.train()
    check = result_of(trainer, "text is the model's own")
    assert check["result"] == "WARNING"
    assert "16 of 16 completions begin with <|im_start|>" in check["detail"]
    now(check["detail"])


# ---- the direction of a step, where it is hard to tell ----


@pytest.mark.defect("N", "maximize=True under a warmup from 0")
def test_the_direction_is_looked_at_when_the_weights_first_move(
    make: Callable, tiny_llama: Callable, now: Callable
) -> None:
    model = tiny_llama()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: min(step / 2, 1.0))
    trainer = make(model=model, optimizers=(sgd, warmup), max_steps=4)
    with pytest.raises(ProofError) as stopped:
        trainer.train()
    assert stopped.value.code == "P015"
    assert trainer.state.global_step == 2, "the first step has learning rate 0"
    now(str(stopped.value).splitlines()[1].strip())


@pytest.mark.cases(1)
@pytest.mark.defect("N", "a step of 1e-9")
@pytest.mark.parametrize(("rate", "result"), [(1e-9, "ok"), (1e-30, "not checked")])
def test_a_step_too_small_to_tell_is_not_called_right(make: Callable, now: Callable, rate: float, result: str) -> None:
    """The direction shows in the weights long before it shows in what they compute."""
    trainer = make(learning_rate=rate)
    trainer.train()
    check = result_of(trainer, "the step goes down its loss")
    assert check["result"] == result
    now(check["detail"])


@pytest.mark.slow
@pytest.mark.defect("N", "weights in bfloat16")
@pytest.mark.cases(1)
@pytest.mark.parametrize("maximize", [True, False], ids=["up", "down"])
def test_the_direction_of_coarse_weights(make: Callable, tiny_llama: Callable, now: Callable, maximize: bool) -> None:
    model = tiny_llama().to(torch.bfloat16)
    trainer = make(model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=0.01, maximize=maximize), None))
    with pytest.raises(ProofError, match="P015") if maximize else contextlib.nullcontext():
        trainer.train()
    now(result_of(trainer, "the step goes down its loss")["detail"])


@pytest.mark.defect("N", "sync_ref_model moves the reference on purpose")
def test_a_reference_that_follows_on_purpose(make: Callable, now: Callable) -> None:
    trainer = make(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    trainer.train()
    check = result_of(trainer, "the reference stays where it is")
    assert (check["result"], check["detail"]) == ("not checked", "sync_ref_model moves it")
    now(check["detail"])
