"""Checkpoints with an encoder of images, trained on text: every tensor is kept, and only the language model changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.families import FAMILIES
from podium import GRPOConfig, GRPOTrainer
from podium.errors import DataError
from podium.models.loading import LoadSettings, load_policy
from podium.models.stored import as_stored, load, misfits, outside, stored_shapes
from podium.runs.find_model import find_model
from podium.runs.shipping.merge import export_model
from podium.testing import save_tiny_model

ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} + 1?"}]} for i in range(4)]
LORA = LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian")
OTHERS = ("gemma4", "idefics3", "llava", "mistral3", "qwen2_5_vl", "smolvlm")
PROCESSOR = "preprocessor_config.json"


def odd(completions: list[Any], **_: Any) -> list[float]:
    """Differs between any two texts."""
    return [sum(map(ord, c[0]["content"])) % 101 / 101 for c in completions]


def trainer(model: Any, out: Path, *, lora: Any = None, rows: Any = ROWS, **settings: Any) -> GRPOTrainer:
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    settings |= {"learning_rate": 1e-2 if lora else 1e-3, "report_to": "none", "disable_tqdm": True}
    args = GRPOConfig(str(out), **settings)
    return GRPOTrainer(model=model, reward_funcs=odd, args=args, train_dataset=rows, peft_config=lora)


def checkpoint(kind: str, folder: Path) -> dict[str, Tensor]:
    """The tensors of a new tiny checkpoint."""
    FAMILIES[kind](folder)
    return load_file(folder / "model.safetensors")


def vision(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "projector", "connector", "image", "merger"))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the byte."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def reloaded(folder: Path, kind: str) -> PreTrainedModel:
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.model_type == kind
    return model


KINDS = ("gemma3", "qwen3_5", "qwen3_vl", *OTHERS)


def fast(*names: str) -> list[Any]:
    """All kinds; those that are not named are slow."""
    return [pytest.param(kind, marks=[] if kind in names else pytest.mark.slow) for kind in KINDS]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", fast("gemma3", "qwen3_5"))
def test_all_weights_trained(kind: str, tmp_path: Path) -> None:
    """With the first batch proved, and the checkpoint of step 1 trained on to the same end."""
    before = checkpoint(kind, tmp_path / "base")
    (tmp_path / "base" / PROCESSOR).write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    run = trainer(str(tmp_path / "base"), tmp_path / "run", max_steps=2, save_steps=1, prove_first_batch=True)
    run.train()
    run.save_model()
    after = load_file(tmp_path / "run/model.safetensors")
    assert set(after) == set(before) == set(load_file(tmp_path / "run/checkpoint-1/model.safetensors"))
    changed = {name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))}
    assert changed
    assert not any(map(vision, changed))
    assert all(same(before[name], after[name]) for name in before if vision(name))
    assert {after[name].dtype for name in changed} == {torch.float32}
    reloaded(tmp_path / "run", kind)
    assert (tmp_path / "run" / PROCESSOR).read_bytes() == (tmp_path / "base" / PROCESSOR).read_bytes()
    again = trainer(str(tmp_path / "base"), tmp_path / "run", max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    expected = run.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.model.state_dict().items())


@pytest.mark.parametrize("kind", fast("qwen3_vl"))
def test_adapter_trained_and_merged(kind: str, tmp_path: Path) -> None:
    before = checkpoint(kind, tmp_path / "base")
    run = trainer(str(tmp_path / "base"), tmp_path / "run", lora=LORA, max_steps=2, prove_first_batch=True)
    run.train()
    run.save_model()
    adapted = list(load_file(tmp_path / "run/adapter_model.safetensors"))
    assert adapted
    assert not any(map(vision, adapted))
    made = export_model(find_model(str(tmp_path / "run")), tmp_path / "merged")
    assert made.proof.origin.known
    after = load_file(tmp_path / "merged/model.safetensors")
    assert set(after) == set(before)
    changed = {name for name in before if not same(before[name], after[name])}
    assert changed
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapted}
    assert {name.split(".")[-2] for name in changed} <= layers
    assert not any(map(vision, changed))
    assert {x.dtype for x in after.values()} == {torch.bfloat16}
    reloaded(tmp_path / "merged", kind)


def test_tensors_keep_their_own_types(tmp_path: Path) -> None:
    """A file with tensors of several types, in a merge and in a full save."""
    before = checkpoint("gemma3", tmp_path / "base")
    mixed = {name: x.float() + 1e-4 if "post_layernorm" in name else x for name, x in before.items()}
    save_file(mixed, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        settings = LoadSettings(init_kwargs={"dtype": dtype})
        model = load_policy(str(tmp_path / "base"), settings)
        model.save_pretrained(tmp_path / dtype, state_dict=as_stored(model))
        after = load_file(tmp_path / dtype / "model.safetensors")
        kept = [name for name in mixed if vision(name) and same(mixed[name], after[name])]
        assert len(kept) == len(outside(model)) - (2 if dtype == "bfloat16" else 0)  # which cannot hold them


@pytest.mark.parametrize(
    "ignored",
    [{"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"num_beams": 1, "length_penalty": 2.0}],
    ids=str,
)
def test_a_generation_config_that_transformers_refuses_to_save(ignored: dict[str, Any], tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path / "model")) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ignored}))
    loaded = load(str(tmp_path / "model"))
    loaded.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == 2
    assert not {"temperature", "top_p", "length_penalty"} & saved.keys()


def test_a_model_that_was_loaded_already(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everything in it is trainable, and its processor is given in place of a tokenizer."""
    before = checkpoint("qwen3_vl", tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger="podium"):
        run = trainer(model, tmp_path / "run", max_steps=1, weight_decay=0.5)
    assert sum("outside the language model" in record.message for record in caplog.records) == 1
    run.train()
    run.save_model()
    after = load_file(tmp_path / "run/model.safetensors")
    assert all(same(before[name], after[name]) for name in before if vision(name))


def test_names_of_layers_leave_out_the_encoder(tmp_path: Path) -> None:
    """`q_proj` is a layer of Gemma 3's encoder as well; what the caller leaves out stays left out."""
    checkpoint("gemma3", tmp_path / "base")
    for excluded in (["layers.1.self_attn.q_proj"], r".*layers\.1.*", None):
        config = LoraConfig(r=2, target_modules=["q_proj"], exclude_modules=excluded)
        policy = load_policy(str(tmp_path / "base"), LoadSettings(init_kwargs={}, peft_config=config))
        layers = {name.partition(".lora_")[0] for name, p in policy.named_parameters() if p.requires_grad}
        assert len(layers) == (2 if excluded is None else 1)
        assert all("language_model" in name for name in layers)


def test_what_is_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers ignores such tensors without a word."""
    before = checkpoint("qwen3_5", tmp_path / "base")
    more = {**before, "mtp.fc.weight": torch.ones(4, 4)}
    save_file(more, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(tmp_path / "base")
    [found] = misfits("it", config, stored_shapes(tmp_path / "base"))
    assert found.code == "M022"
    assert found.severity == "note"
    assert "mtp.fc.weight" in found.what
    with caplog.at_level(logging.WARNING, logger="podium"):
        load_policy(str(tmp_path / "base"), LoadSettings(init_kwargs={}))
    assert [record.message for record in caplog.records if "M022" in record.message]


def test_nothing_is_said_of_a_whole_checkpoint(tmp_path: Path) -> None:
    for kind in ("gemma3", "qwen3_5", "gpt2", "llama"):
        checkpoint(kind, tmp_path / kind)
        config = AutoConfig.from_pretrained(tmp_path / kind)
        assert not list(misfits(kind, config, stored_shapes(tmp_path / kind)))


def test_rows_with_images_are_refused_without_a_processor(tmp_path: Path) -> None:
    checkpoint("qwen3_vl", tmp_path / "base")
    rows = [{**row, "image": Image.new("RGB", (8, 8))} for row in ROWS]
    with pytest.raises(DataError, match=r"row 0: the row has images, and .* \[D036\]"):
        trainer(str(tmp_path / "base"), tmp_path / "run", rows=rows)
