"""What cannot work ends in one clear message before any weight is loaded.

The proof of "before": the model's folder looks whole, but its weights are of another shape, so that loading them fails
with something else (the first test).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium import GRPOTrainer
from podium.errors import ConfigError, DataError, ModelError, PodiumError
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights cannot be loaded."""
    folder = tmp_path_factory.mktemp("refused")
    save_tiny_model(folder / "broken")
    save_tiny_model(folder / "other", hidden_size=16)
    shutil.copy(folder / "other" / "model.safetensors", folder / "broken" / "model.safetensors")
    return str(folder / "broken")


def refused(make: Callable[[], Any], kind: type[PodiumError], *words: str) -> None:
    with pytest.raises(kind) as error:
        make()
    message = str(error.value)
    for word in words:
        assert word in message, message
    assert len(message) < 1200


def test_loading_comes_last(make_trainer: Callable, broken: str) -> None:
    refused(lambda: make_trainer(model=broken), ModelError, "in the files", "by config.json")


def test_an_argument_that_there_is_none_of(broken: str) -> None:
    with pytest.raises(TypeError, match="banana"):
        GRPOTrainer(broken, len, banana=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vllm_mode": "server"}, ["vllm_mode", "belongs to vLLM"]),
        ({"vllm_gpu_memory_utilization": 0.5}, ["vllm_gpu_memory_utilization"]),
        ({"vllm_importance_sampling_correction": False}, ["vllm_importance_sampling_correction"]),
        ({"use_vllm": True, "rollout_engine": "live"}, ["vllm", "live"]),
        ({"rollout_engine": "liv"}, ["rollout_engine", "liv", "Did you mean `live`?"]),
        ({"ds3_gather_for_generation": False}, ["ds3_gather_for_generation", "sharded"]),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
            ["liger_kernel_config", "fused_linear_cross_entropy"],
        ),
        ({"loss_type": "grpoo"}, ["loss_type", "grpoo", "Did you mean `grpo`?", "dr_grpo"]),
        ({"importance_sampling_level": "sequenc"}, ["importance_sampling_level", "Did you mean `sequence`?"]),
        ({"scale_rewards": "groups"}, ["scale_rewards", "group, batch, none"]),
        ({"multi_objective_aggregation": "sum"}, ["multi_objective_aggregation"]),
        ({"temperature": 0.0}, ["temperature", "nothing can be learnt"]),
        ({"top_p": 1.5}, ["top_p", "between"]),
        ({"epsilon": -0.1}, ["epsilon"]),
        ({"top_entropy_quantile": 2.0}, ["top_entropy_quantile"]),
        ({"max_completion_length": 0}, ["max_completion_length", "at least 1"]),
        ({"overlong_prompts": "cut"}, ["overlong_prompts", "error, drop, truncate"]),
        ({"sync_ref_model": True}, ["sync_ref_model", "beta"]),
        ({"per_device_train_batch_size": 6}, ["divisible", "num_generations", "4 or 8", "2 or 3 or 6"]),
        ({"num_generations": 1}, ["`num_generations` is 1", "at least 2"]),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, ["generation_batch_size", "steps_per_generation"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size"]),
        ({"log_completions_hub_repo": "a/b"}, ["log_completions"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings(make_trainer: Callable, broken: str, settings: dict[str, Any], words: list[str]) -> None:
    refused(lambda: make_trainer(model=broken, **settings), ConfigError, *words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, ["train_dataset", "required"]),
        ([], ["no rows"]),
        ([{"question": "1+1", "answer": "2"}] * 8, ["prompt", "question"]),
        ([{"prompt": "a"}] * 7 + [{"prompt": None}], ["row 7", "null"]),
        ([{"prompt": "a"}] * 3 + [{"prompt": ""}] + [{"prompt": "b"}] * 4, ["row 3", "empty"]),
        ([{"prompt": "a"}] * 3 + [{"prompt": "  "}] + [{"prompt": "b"}] * 4, ["row 3", "whitespace"]),
        ([{"prompt": 5}] * 8, ["row 0", "int"]),
        ([{"prompt": [{"role": "user", "content": None}]}] * 8, ["row 0", "content"]),
        ([{"prompt": [{"role": "user"}]}] * 8, ["row 0", "content"]),
        ([{"prompt": "a"}] * 7 + [{"prompt": "x" * 600}], ["row 7", "600 tokens", "512", "overlong_prompts"]),
        ([{"prompt": "a"}] * 3, ["3 prompts", "4"]),
        ([{"prompt": "a", "image": "x.png"}] * 8, ["image"]),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}] * 8, ["image"]),
    ],
    ids=[
        "none",
        "no rows",
        "no prompt column",
        "null",
        "empty",
        "blank",
        "number",
        "null content",
        "no content",
        "longer than the context",
        "fewer than a round",
        "image column",
        "image in a message",
    ],
)
def test_datasets(make_trainer: Callable, broken: str, rows: Any, words: list[str]) -> None:
    refused(lambda: make_trainer(model=broken, rows=rows), DataError, *words)


def test_all_problems_of_a_dataset_at_once(make_trainer: Callable, broken: str) -> None:
    rows = [{"prompt": "fine"}, {"prompt": None}, {"prompt": "x" * 700}, {"prompt": ""}] * 3
    refused(
        lambda: make_trainer(model=broken, rows=rows),
        DataError,
        "row 1",
        "row 3",
        "row 9",
        "3 prompts are too long",
        "row 10",
    )


def test_an_evaluation_set_is_checked_too(make_trainer: Callable, broken: str) -> None:
    rows = {"good": [{"prompt": "a"}], "bad": [{"prompt": None}]}
    refused(lambda: make_trainer(model=broken, eval_rows=rows), DataError, "eval_dataset['bad']", "row 0", "null")


def test_a_completion_that_leaves_no_room_for_a_prompt(make_trainer: Callable, broken: str) -> None:
    refused(
        lambda: make_trainer(model=broken, max_completion_length=512),
        ConfigError,
        "max_completion_length",
        "512",
        "room",
    )


def test_a_conversation_without_a_template(make_trainer: Callable, broken: str, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}] * 8
    plain = tiny_tokenizer(chat_template=None)
    refused(lambda: make_trainer(model=broken, rows=rows, processing_class=plain), DataError, "chat template")


def test_a_router_coefficient_without_a_router(make_trainer: Callable) -> None:
    refused(lambda: make_trainer(router_aux_loss_coef=0.1), ConfigError, "router_aux_loss_coef", "no router")


def test_models_that_are_not_there(make_trainer: Callable, tmp_path: Path) -> None:
    refused(lambda: make_trainer(model=str(tmp_path / "nowhere")), ModelError, "nowhere")
    refused(lambda: make_trainer(model="builtin:smollm3"), ModelError, "builtin:smollm2-135m-instruct")
    (tmp_path / "empty").mkdir()
    refused(lambda: make_trainer(model=str(tmp_path / "empty")), ModelError, "empty")


def test_tokenizers_that_cannot_serve(make_trainer: Callable) -> None:
    model = tiny_model()
    model.config._name_or_path = ""
    refused(lambda: make_trainer(model=model, processing_class=None), ModelError, "processing_class")
    with pytest.raises(TypeError, match="processing_class"):
        make_trainer(processing_class="gpt2")


def test_something_that_is_no_processor(make_trainer: Callable, broken: str) -> None:
    class Processor:
        tokenizer = tiny_tokenizer()

    with pytest.raises(TypeError, match="must be a tokenizer, not a Processor"):
        make_trainer(model=broken, processing_class=Processor())


def test_a_dtype_that_does_not_exist(make_trainer: Callable, broken: str) -> None:
    refused(
        lambda: make_trainer(model=broken, model_init_kwargs={"dtype": "float23"}), ConfigError, "float23", "bfloat16"
    )


def test_quantization_given_twice(make_trainer: Callable, broken: str) -> None:
    refused(
        lambda: make_trainer(
            model=broken, quantization_config={"a": 1}, model_init_kwargs={"quantization_config": {"b": 2}}
        ),
        ConfigError,
        "twice",
    )


def test_nothing_is_written_for_a_refused_run(make_trainer: Callable, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_trainer(loss_type="nope")
    assert not (tmp_path / "run").exists()
