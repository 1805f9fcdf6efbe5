"""An adapter of a base in 4 bits, sent alone to a real server on the CPU. A minute on one core; needs bitsandbytes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from podium.engines.vllm.weights import AdapterFolder
from podium.models.forward import base_model, is_quantized
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from tests.vllm.served import SIZES, Compared, losses, made
from tests.vllm.serving import WITH_ADAPTERS, Vllm, needs_vllm, serving

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, *needs_vllm]


def save_rounded(model: str, config: BitsAndBytesConfig, folder: Path) -> str:
    """Write a model whose float32 weights are the values that 4 bits stand for."""
    from bitsandbytes.functional import dequantize_4bit

    rounded = tiny_model("llama", **SIZES)
    for name, layer in AutoModelForCausalLM.from_pretrained(model, quantization_config=config).named_modules():
        if hasattr(state := getattr(layer, "weight", None), "quant_state"):
            rounded.get_submodule(name).weight.data = dequantize_4bit(state.data, state.quant_state).float()
    rounded.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_an_adapter_of_a_base_in_4_bits(tmp_path: Path) -> None:
    """The server has the values of the 4 bits; its greedy texts are the trainer's after each step."""
    pytest.importorskip("bitsandbytes")
    model = save_tiny_model(tmp_path / "tiny", **SIZES)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    rounded = save_rounded(model, config, tmp_path / "rounded")
    with serving(Vllm(tmp_path / "log.txt", *WITH_ADAPTERS, model=rounded)) as server:
        run = made(tmp_path / "run", server.url, 4, model=model, quantization_config=config)
        assert is_quantized(base_model(run.model))
        compared = Compared(run)
        run.add_callback(compared)
        run.train()
        [member] = run.run.step.engine.members
        assert type(member.transfer) is AdapterFolder
        assert member.server.weight_version() == "default"
    gaps = [row["sampling/sampling_logp_difference/max"] for row in losses(run)]
    logger.info("greedy log-probabilities apart by %s, sampled by %s", compared.apart, gaps)
    assert len({str(texts) for texts in compared.theirs}) > 1
    assert max(compared.apart) < 1e-4
    assert max(gaps) < 1e-4
