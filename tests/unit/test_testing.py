"""The tiny models and tokenizer that other tests stand on."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.testing import KINDS, save_tiny_model, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_the_same_every_time_and_leave_the_seed_alone(kind):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = tiny_model(kind), tiny_model(kind), tiny_model(kind, seed=1)
    assert torch.rand(1) == expected
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    assert not all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    assert one.config.vocab_size == len(tiny_tokenizer())


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_windows_and_caps_are_felt(kind):
    ids = torch.tensor([tiny_tokenizer()("a text that is longer than the window")["input_ids"]])
    for change in ({"sliding_window": 1000}, {"final_logit_softcapping": None}):
        with torch.no_grad():
            difference = (tiny_model(kind)(ids).logits - tiny_model(kind, **change)(ids).logits).abs().max()
        assert difference > 0.01, change


def test_every_text_survives_the_tokenizer():
    tokenizer = tiny_tokenizer()
    text = "2+2=4\n<answer>\u00e9</answer>  \u4e2d"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tiny_tokenizer(pad_is_eos=True).pad_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_a_saved_model_can_be_loaded_by_its_folder(tmp_path):
    name = save_tiny_model(tmp_path / "model", "qwen3", seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(name)
    assert all(map(torch.equal, loaded.state_dict().values(), tiny_model("qwen3", seed=3).state_dict().values()))
    assert AutoTokenizer.from_pretrained(name)("ab<|im_end|>")["input_ids"][-1] == loaded.config.eos_token_id
