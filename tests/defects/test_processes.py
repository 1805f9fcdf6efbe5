"""Sampling settings, several processes and servers: what a person may do wrong, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium import GRPOConfig
from podium.errors import ConfigError

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
        pytest.param({"temperature": 0}, "temperature is 0", marks=pytest.mark.defect("C1", "temperature: 0")),
        pytest.param({"top_p": 90}, "top_p is 90", marks=pytest.mark.defect("N", "generation_kwargs: top_p: 90")),
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
    ],
    ids=str,
)
def test_generation_kwargs_that_cannot_work(kwargs: dict[str, Any], says: str, tmp_path: Path, now: Now) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig(str(tmp_path), generation_kwargs=kwargs)
    now(str(error.value))
    assert says in str(error.value)


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
