"""Sampling settings, several processes and servers: what a person may do wrong, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from podium import GRPOConfig
from podium.errors import ConfigError
from podium.models.forward import Forward
from podium.trainer.processes import prepare_to_load
from podium.trainer.proof.checks import BEFORE_ROLLOUTS
from podium.trainer.rounds import Plan
from podium.trainer.rules import filters_of

Now = Callable[[str], None]

# ---- generation_kwargs and the arguments of the same name ----


@pytest.mark.parametrize(
    ("kwargs", "argument", "value"),
    [
        pytest.param({"temperature": 0.7}, "temperature", 0.7, marks=pytest.mark.defect("C1", "temperature: 0.7")),
        pytest.param({"top_p": 0.9}, "top_p", 0.9, marks=pytest.mark.defect("C1", "top_p: 0.9")),
        pytest.param({"top_k": 20}, "top_k", 20, marks=pytest.mark.defect("C1", "top_k: 20")),
        pytest.param({"min_p": 0.1}, "min_p", 0.1, marks=pytest.mark.defect("C1", "min_p: 0.1")),
        pytest.param(
            {"repetition_penalty": 1.1},
            "repetition_penalty",
            1.1,
            marks=pytest.mark.defect("C1", "repetition_penalty: 1.1"),
        ),
        pytest.param(
            {"max_new_tokens": 9}, "max_completion_length", 9, marks=pytest.mark.defect("C1", "max_new_tokens: 9")
        ),
        pytest.param({"max_tokens": 9}, "max_completion_length", 9, marks=pytest.mark.defect("N", "max_tokens: 9")),
        pytest.param({"temperature": None}, "temperature", 1.0, marks=pytest.mark.defect("N", "temperature: null")),
    ],
    ids=str,
)
def test_generation_kwargs_are_the_arguments(
    kwargs: dict[str, Any], argument: str, value: Any, tmp_path: Path, now: Now
) -> None:
    args = GRPOConfig(str(tmp_path), generation_kwargs=kwargs)
    now(f"args.{argument} is {getattr(args, argument)}")
    assert getattr(args, argument) == value


@pytest.mark.defect("C1", "temperature: 0.7 in generation_kwargs, in training, reference and proof")
def test_there_is_one_temperature(make_trainer: Callable, now: Now) -> None:
    """The proof compares sampled with trained log-probabilities and would stop the run."""
    trainer = make_trainer(generation_kwargs={"temperature": 0.7}, beta=0.1, max_steps=1)
    trainer.train()
    plain = make_trainer(temperature=0.7, beta=0.1, max_steps=1)
    plain.train()
    loss, expected = (t.state.log_history[0] for t in (trainer, plain))
    now("the losses, entropies and KLs of temperature: 0.7")
    assert {k: v for k, v in loss.items() if not k.startswith(("time", "train", "perf"))}.keys() == {
        k for k in expected if not k.startswith(("time", "train", "perf"))
    }
    assert (loss["loss"], loss["entropy"], loss["kl"]) == (expected["loss"], expected["entropy"], expected["kl"])


@pytest.mark.defect("C1", "temperature: 0.9 beside generation_kwargs: {temperature: 0.7}")
def test_two_temperatures(tmp_path: Path, caplog: Any, now: Now) -> None:
    args = GRPOConfig(str(tmp_path), temperature=0.9, generation_kwargs={"temperature": 0.7})
    assert args.temperature == 0.7
    now(caplog.messages[-1])
    assert "generation_kwargs: temperature 0.7 counts, and not temperature: 0.9." in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        pytest.param({"temperature": 0}, "`temperature` is 0", marks=pytest.mark.defect("C1", "temperature: 0")),
        pytest.param({"top_p": 90}, "`top_p` is 90", marks=pytest.mark.defect("N", "generation_kwargs: top_p: 90")),
        pytest.param({"temperature": "0.7"}, "must be a number", marks=pytest.mark.defect("N", "temperature: '0.7'")),
        pytest.param({"top_k": 5.5}, "must be a whole number", marks=pytest.mark.defect("N", "top_k: 5.5")),
        pytest.param({"min_p": True}, "must be a number", marks=pytest.mark.defect("N", "min_p: true")),
        pytest.param({"max_new_tokens": 0}, "at least 1", marks=pytest.mark.defect("N", "max_new_tokens: 0")),
        pytest.param(
            {"num_return_sequences": 2}, "num_generations", marks=pytest.mark.defect("N", "num_return_sequences: 2")
        ),
        pytest.param({"n": 4}, "num_generations", marks=pytest.mark.defect("N", "generation_kwargs: n: 4")),
        pytest.param(
            {"return_dict_in_generate": True},
            "take `return_dict_in_generate` out",
            marks=pytest.mark.defect("N", "return_dict_in_generate"),
        ),
        pytest.param({"seed": 1}, "take `seed` out", marks=pytest.mark.defect("N", "generation_kwargs: seed: 1")),
        ({"do_sample": False}, "do_sample: False: all completions of a group are the same"),
        ({"num_beams": 4}, "asks for beam sample, which draws no samples of the policy"),
        ({"num_beams": 4, "num_beam_groups": 2}, "asks for group beam search"),
        ({"force_words_ids": [[5]]}, "asks for constrained beam search"),
        ({"dola_layers": "low"}, "asks for dola generation"),
        ({"prompt_lookup_num_tokens": 3}, "asks for assisted generation"),
        ({"stop": ["\n"]}, "Did you mean `stop_strings`"),
        ({"no_repeat_ngrams": 3}, "Did you mean `no_repeat_ngram_size`"),
        ({"logits_processor": []}, "`generate` does not read"),
        ({"stop_token_ids": [3]}, "eos_token_id, a list"),
    ],
    ids=str,
)
def test_generation_kwargs_that_cannot_work(kwargs: dict[str, Any], says: str, tmp_path: Path, now: Now) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig(str(tmp_path), generation_kwargs=kwargs)
    now(str(error.value))
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["temperature", "num_generations", "beta", "learning_rate", "seed"])
def test_none_is_no_number(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is None; it must be a number"):
        GRPOConfig(str(tmp_path), **{name: None})


def test_filters_that_are_none_are_off(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), top_p=None, top_k=None, min_p=None, repetition_penalty=None)
    assert not filters_of(args)
    assert (args.top_p, args.top_k, args.repetition_penalty) == (1.0, 0, 1.0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.defect("C1", "generation_config.json of the model folder: min_p, suppress_tokens")
def test_the_model_folder_does_not_filter(make_trainer: Callable, now: Now, adapter: bool) -> None:
    from peft import LoraConfig

    def sampled(**defaults: Any) -> list[Any]:
        given = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapter else {}
        trainer = make_trainer(rollout_engine="transformers", **given)
        model = trainer.model.get_base_model() if adapter else trainer.model
        for name, value in defaults.items():
            setattr(model.generation_config, name, value)
        groups = trainer.generate_completions([{"prompt": "1+1="}], num_generations=8)
        assert all(getattr(model.generation_config, name) == value for name, value in defaults.items())
        return [completion.token_ids for group in groups for completion in group.group.completions]

    assert sampled(min_p=0.9, suppress_tokens=list(range(4, 200))) == sampled()
    now("the completions without it")


# ---- several processes ----


def divided(**given: Any) -> Any:
    """Arguments of one of two processes."""
    nothing = {"fsdp_plugin_args": None, "deepspeed_plugin": None, "async_rollouts": 0, "use_vllm": False, "beta": 0.0}
    return SimpleNamespace(**{"world_size": 2, "ddp_timeout": 20, "product_precision": "auto", **nothing, **given})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_processes_train_on_about_as_many_tokens(ranks: int) -> None:
    """Of 32 groups a third has no signal; lengths of completions are spread by a factor of 20."""
    plan = Plan(prompts_per_round=32, num_generations=8, shares=1, iterations=1, accumulation=1, ranks=ranks, rank=0)
    chance = np.random.default_rng(0)
    most: dict[str, list[float]] = {"sampled": [], "dealt": []}
    for _ in range(50):
        groups = np.exp(chance.normal(size=(32, 8))).sum(axis=1)
        tokens = {(0, p): int(200 * groups[p]) for p in range(32) if chance.random() > 1 / 3}
        sampled = {p: r for r, prompts in enumerate(plan.assign_to_ranks([50] * 32)) for p in prompts}
        for name, ranks_of in (("sampled", {key: sampled[key[1]] for key in tokens}), ("dealt", plan.deal(tokens))):
            loads = [sum(n for key, n in tokens.items() if ranks_of[key] == r) for r in range(ranks)]
            most[name].append(max(loads) / np.mean(loads))
    before, after = (float(np.mean(most[name])) for name in ("sampled", "dealt"))
    assert before > 1.05
    assert after - 1 < (before - 1) / 2


@pytest.mark.defect("E4", "ddp_timeout: 20 on a CPU")
def test_a_process_that_hangs_is_not_waited_for_longer_than_ddp_timeout(now: Now) -> None:
    distributed = torch.distributed
    if distributed.is_initialized():  # by another test of this process
        distributed.destroy_process_group()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        prepare_to_load(divided(), adapter=False)
        backend = distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        now(f"the group waits {backend.options._timeout}")
        assert backend.options._timeout == timedelta(seconds=20)
    finally:
        distributed.destroy_process_group()


@pytest.mark.defect("E11", "product_precision: bfloat16 with --accelerate fsdp2")
def test_rounded_copies_that_are_left_out_are_said(caplog: Any, now: Now) -> None:
    prepare_to_load(divided(product_precision="bfloat16"), adapter=False)
    assert not caplog.messages, "with DDP they are there"
    prepare_to_load(divided(product_precision="bfloat16", fsdp_plugin_args={"fsdp_version": 2}), adapter=False)
    now(caplog.text)
    assert "product_precision: bfloat16 is left out" in caplog.text


@pytest.mark.defect("N", "ZeRO-3 with beta and all weights")
def test_a_reference_of_divided_weights(now: Now) -> None:
    args = divided(deepspeed_plugin=SimpleNamespace(zero_stage=3), beta=0.1)
    with pytest.raises(ConfigError) as error:
        prepare_to_load(args, adapter=False)
    now(str(error.value))
    assert "train an adapter, or set beta: 0" in str(error.value)
    prepare_to_load(args, adapter=True)


def test_forwards_are_counted_before_the_first_of_them(make_trainer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is gathered from all processes: one that gathers while another is in a forward hangs the run."""
    trainer = make_trainer(max_steps=1, beta=0.1, num_iterations=2)
    trainer.train()
    samples = [sample for batch in trainer.round.micro_batches for sample in batch.samples]
    happened: list[str] = []
    token_logps = Forward.token_logps
    monkeypatch.setattr(trainer.processes, "num_dummy_forwards", lambda count: happened.append("count") or 0)
    monkeypatch.setattr(
        Forward, "token_logps", lambda *args, **how: happened.append("forward") or token_logps(*args, **how)
    )
    trainer.step.logps(samples)
    trainer.step.forward_backward(trainer.round.micro_batches[0], trainer.run.objective)
    assert happened == ["count", "forward", "count", "forward"]


def test_layers_divided_over_processes_are_refused() -> None:
    groups = SimpleNamespace(dp_replicate_size=1, dp_shard_size=1, tp_size=2)
    with pytest.raises(ConfigError, match="Set dp_replicate_size and dp_shard_size alone"):
        prepare_to_load(divided(parallelism_config=groups), adapter=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bit16_groups", marks=pytest.mark.defect("E2", "ZeRO-1 and 2: trained tensors")),
        pytest.param("fp16_groups", marks=pytest.mark.defect("E2", "ZeRO-3: trained tensors")),
    ],
)
def test_what_deepspeed_flattens_is_trained(name: str, make_trainer: Callable, now: Now) -> None:
    trainer = make_trainer()
    parameters = list(trainer.model.parameters())
    flat = [{"params": [torch.zeros(3)], "lr": 1e-3}]
    trainer.optimizer = SimpleNamespace(param_groups=flat, optimizer=SimpleNamespace(**{name: [parameters]}))
    [trained] = [row for row in BEFORE_ROLLOUTS if row.code == "P002"]
    check = trained.checked(trainer._subject)
    now(f"{check.name}: {check.detail}")
    assert check.passed
    assert not check.suspect
    trainer.optimizer = SimpleNamespace(param_groups=flat, optimizer=SimpleNamespace(**{name: [parameters[1:]]}))
    assert trained.checked(trainer._subject).suspect


@pytest.mark.defect("E2", "health/update_ratio and M138")
def test_a_step_inside_the_last_backward_is_measured(make_trainer: Callable, now: Now, monkeypatch: Any) -> None:
    """As DeepSpeed steps: the optimizer that the Trainer calls does nothing."""
    trainer = make_trainer(max_steps=2)
    backward = trainer.processes.backward.__func__

    def steps(processes: Any, loss: Any) -> None:
        backward(processes, loss)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(0.01)

    monkeypatch.setattr(type(trainer.processes), "backward", steps)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    trainer.train()
    ratio = trainer.state.log_history[0]["health/update_ratio"]
    now(f"health/update_ratio {ratio:.2g}")
    assert ratio > 1e-3
