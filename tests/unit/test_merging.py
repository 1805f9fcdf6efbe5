"""A merge is given back only where the merged model answers as the adapter does, and named by what is known of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from podium.errors import ModelError, ProofError
from podium.models.adapters import FILE, base_hash, put_on, record
from podium.models.merging import MergeProof, expect, merge, prove
from podium.models.stored import load
from podium.testing import KINDS, tiny_model, tiny_tokenizer


def adapted(kind: str = "llama", size: float = 0.1, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model with an adapter that has been trained: its second matrices are not zero."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=True)
    model: Any = get_peft_model(tiny_model(kind).to(dtype), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def merged_and_proved(model: PeftModel) -> tuple[Any, MergeProof]:
    expected = expect(model, tiny_tokenizer())
    merged = merge(model)
    return merged, prove(merged, expected, merged.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_that_holds(kind: str) -> None:
    merged, proof = merged_and_proved(adapted(kind))
    assert proof.difference < 1e-4 < proof.effect
    assert not any("lora" in name for name, _ in merged.named_parameters())


TIED: dict[str, PeftConfig] = {
    "embedding": LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    "head": LoraConfig(r=4, target_modules=r"(.*\.)?(q_proj|lm_head)"),
    "both": LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True),
    "a copy": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "tokens": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[40, 50]),
    "only tokens": TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[40, 50]),
}


@pytest.mark.parametrize("kind", TIED)
def test_an_adapter_on_one_side_of_a_tied_weight(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama", tie_word_embeddings=True), TIED[kind])
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.data += 0.1 * torch.randn_like(parameter)
    expected = expect(model, tiny_tokenizer())
    merged = merge(model)
    assert prove(merged, expected, torch.float32).passed
    merged.save_pretrained(tmp_path)
    assert prove(AutoModelForCausalLM.from_pretrained(tmp_path), expected, torch.float32).passed


def test_an_adapter_that_changes_nothing_yet() -> None:
    merged, proof = merged_and_proved(adapted(size=0.0))
    assert proof.effect == 0
    assert merged.config.model_type == "llama"


@pytest.mark.parametrize("fault", ["base", "twice", "one layer", "nan"])
def test_a_broken_merge_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A merge that forgot the adapter, added it twice, missed a layer or overflowed."""
    model = adapted()
    tuner = type(model.base_model)
    original = tuner.merge_and_unload

    def broken(self: Any, *given: Any, **settings: Any) -> Any:
        if fault == "base":
            return self.unload()
        layers = [module for _, module in self.model.named_modules() if hasattr(module, "lora_B")]
        with torch.no_grad():
            for layer in layers[-1:] if fault == "one layer" else layers:
                factor = {"twice": 2.0, "one layer": 0.0, "nan": float("nan")}[fault]
                layer.lora_B["default"].weight.mul_(factor)
        return original(self, *given, **settings)

    monkeypatch.setattr(tuner, "merge_and_unload", broken)
    with pytest.raises(ProofError, match="The merge is refused") as refused:
        merged_and_proved(model)
    assert refused.value.code == "P013"
    assert "podium explain P013" in refused.value.fix


def test_half_precision_that_drops_the_adapter_is_refused() -> None:
    """The adapter's change is smaller than what bfloat16 can add to the weights: close, but no closer than the base."""
    model = adapted(size=1e-4)
    expected = expect(model, tiny_tokenizer())
    rounded = merge(model).to(torch.bfloat16).float()
    with pytest.raises(ProofError, match=r"Rounding has lost what was trained.*--dtype float32"):
        prove(rounded, expected, torch.bfloat16)


def test_nothing_to_merge() -> None:
    with pytest.raises(ModelError, match="no adapter"):
        merge(tiny_model("llama"))  # type: ignore[arg-type]


Tensors = dict[str, Tensor]


def noisy(amount: float) -> Callable[[Tensors], Tensors]:
    def moved(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        return {
            name: x + amount * x.std() * torch.randn(x.shape, generator=generator) if x.ndim == 2 else x
            for name, x in tensors.items()
        }

    return moved


def one_number(tensors: Tensors) -> Tensors:
    name = sorted(tensors)[-2]
    first = torch.zeros_like(tensors[name])
    first.view(-1)[0] = 1e-3
    return {**tensors, name: tensors[name] + first}


def times(amount: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: x * (amount if "lora_B" in name else 1) for name, x in tensors.items()}


def swapped(tensors: Tensors) -> Tensors:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {re.sub(r"layers\.[01]\.", lambda found: other[found[0]], name): x for name, x in tensors.items()}


def randomized(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(x.shape, generator=generator) * 0.1 for name, x in tensors.items()}


BASES: dict[str, Callable[[Tensors], Tensors]] = {
    "one number": one_number,
    **{f"{percent} % noise": noisy(percent / 100) for percent in (0.1, 1, 3, 6, 10)},
    "scaled": lambda tensors: {name: x * 1.001 for name, x in tensors.items()},
}
"""What may have become of a base since an adapter was trained on it."""

ADAPTERS: dict[str, tuple[Callable[[Tensors], Tensors], str | None]] = {
    "renamed": (lambda tensors: {name.replace("self_attn", "attn"): x for name, x in tensors.items()}, "M033"),
    "all renamed": (lambda tensors: {f"x.{name}": x for name, x in tensors.items()}, "M033"),
    "a layer missing": (lambda tensors: {name: x for name, x in tensors.items() if "layers.1." not in name}, "M033"),
    "zeroed": (times(0.0), "M034"),
    "negated": (times(-1.0), None),
    "swapped": (swapped, None),
    "random": (randomized, None),
}
"""What may have become of an adapter since it was saved, and the refusal of it where nothing is recorded."""


def rewritten(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file({name: x.contiguous() for name, x in change(load_file(path)).items()}, path, metadata={"format": "pt"})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """`base`, and `adapter` with a record of both, as training writes it."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    policy: Any = adapted()
    policy.save_pretrained(tmp_path / "adapter")
    record(tmp_path / "adapter", base_hash(policy))
    return tmp_path


def words(place: Path, dtype: torch.dtype = torch.float32, ignore: tuple[str, ...] = ()) -> str:
    """What is said of a merge of `adapter` into `base`."""
    policy, origin = put_on(load(str(place / "base"), dtype=dtype), place / "adapter", ignore)
    expected = expect(policy, tiny_tokenizer())
    merged = merge(policy)
    return str(prove(merged, expected, dtype, origin=origin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_that_was_trained_on_is_called_so(place: Path, dtype: torch.dtype) -> None:
    policy, origin = put_on(load(str(place / "base"), dtype=dtype), place / "adapter")
    assert origin.known
    assert str(origin) == "trained model"
    assert isinstance(policy, PeftModel)


def test_a_base_loaded_in_bfloat16_is_known_in_float32(place: Path) -> None:
    policy = PeftModel.from_pretrained(load(str(place / "base"), dtype=torch.bfloat16), str(place / "adapter"))
    record(place / "adapter", base_hash(policy))
    assert "trained model differ" in words(place)


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", BASES)
def test_a_base_that_was_not_trained_on(place: Path, how: str) -> None:
    rewritten(place / "base/model.safetensors", BASES[how])
    with pytest.raises(ModelError, match="is not the base") as refused:
        words(place)
    assert refused.value.code == "M031"
    assert "--ignore M031" in refused.value.fix
    said = words(place, ignore=("M031",))
    assert "trained model" not in said
    assert "another base than trained on: overruled" in said.replace("(", "").replace(")", "")
    (place / "adapter" / FILE).unlink()
    said = words(place)
    assert "trained model" not in said
    assert "is not recorded" in said


@pytest.mark.cases(2)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("how", ADAPTERS)
def test_an_adapter_that_was_not_trained(place: Path, how: str, recorded: bool) -> None:
    change, code = ADAPTERS[how]
    rewritten(place / "adapter/adapter_model.safetensors", change)
    if recorded:
        code = "M032"
    else:
        (place / "adapter" / FILE).unlink()
    if code is None:
        assert "trained model" not in words(place)
    else:
        with pytest.raises(ModelError) as refused:
            words(place)
        assert refused.value.code == code


@pytest.mark.cases(1)
@pytest.mark.parametrize("recorded", [True, False])
def test_an_adapter_with_another_scale(place: Path, recorded: bool) -> None:
    path = place / "adapter/adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "lora_alpha": 4 * settings["lora_alpha"]}))
    if recorded:
        with pytest.raises(ModelError, match="lora_alpha 8 -> 32") as refused:
            words(place)
        assert refused.value.code == "M032"
    else:
        (place / "adapter" / FILE).unlink()
        assert "trained model" not in words(place)


def test_a_base_in_other_bits_is_not_known(place: Path) -> None:
    """Weights in 4 bits have no hash; those that have one are compared."""
    path = place / "adapter" / FILE
    contents = json.loads(path.read_text())
    path.write_text(json.dumps({**contents, "base": {**contents["base"], "is_whole": False}}))
    said = words(place)
    assert "trained model" not in said
    assert "is not recorded" in said
    rewritten(place / "base/model.safetensors", one_number)
    with pytest.raises(ModelError) as refused:
        words(place)
    assert refused.value.code == "M031"


def test_a_base_in_a_type_that_cannot_be_compared(place: Path) -> None:
    """What was float16 is no rounding of bfloat16."""
    policy = PeftModel.from_pretrained(load(str(place / "base"), dtype=torch.float16), str(place / "adapter"))
    record(place / "adapter", base_hash(policy))
    _, origin = put_on(load(str(place / "base"), dtype=torch.bfloat16), place / "adapter")
    assert origin.is_base is None
    assert not origin.known
    assert "trained model" in words(place)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "contents",
    [
        {"base": {"x": ["float32", "1", "2"]}, "adapter": {"y": "3"}, "settings": {}},
        {"format": 3},
        {"format": 2, "base": {}},
        [],
        None,
    ],
    ids=["of every tensor", "a later one", "incomplete", "a list", "no JSON"],
)
def test_a_record_of_another_release_is_a_warning(place: Path, caplog: Any, contents: Any) -> None:
    (place / "adapter" / FILE).write_text("{" if contents is None else json.dumps(contents))
    said = words(place)
    assert "adapter on this base" in said
    assert "is not recorded" in said
    assert [record.levelname for record in caplog.records if "cannot be compared" in record.message] == ["WARNING"]


@pytest.mark.defect("AD21", "an adapter that has learnt nothing, as training saved it: said, not refused")
def test_an_adapter_that_learnt_nothing_is_put_on_its_base(place: Path, caplog: Any, now: Any) -> None:
    rewritten(place / "adapter/adapter_model.safetensors", times(0.0))
    policy = PeftModel.from_pretrained(load(str(place / "base")), str(place / "adapter"))
    record(place / "adapter", base_hash(policy))
    _, origin = put_on(load(str(place / "base")), place / "adapter")
    assert origin.known
    assert "M034, as training saved it" in caplog.text
    now(caplog.messages[-1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("code", ["M031", "M033", "P013"])
@pytest.mark.defect("AD21", "a refused adapter names a command that has the flag `--base`")
def test_a_refusal_names_flags_that_its_command_has(code: str, place: Path, now: Any) -> None:
    weights = place / "adapter/adapter_model.safetensors"
    if code == "M031":
        rewritten(place / "base/model.safetensors", one_number)
    elif code == "M033":
        rewritten(weights, ADAPTERS["renamed"][0])
        (place / "adapter" / FILE).unlink()
    else:
        rewritten(weights, lambda tensors: {name: torch.cat([x, x]) for name, x in tensors.items()})
    with pytest.raises(ModelError) as refused:
        put_on(load(str(place / "base")), place / "adapter")
    assert refused.value.code == code
    assert f"podium merge {place / 'adapter'} --out DIR --base OWNER/NAME" in refused.value.fix
    now(refused.value.fix)
