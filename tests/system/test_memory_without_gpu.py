"""The estimate of `podium check` for a GPU against torch's memory tracker over fake tensors, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sizing import config_of
from benchmarks.tracked import LORA, Trained, as_if_cuda, track
from podium import GRPOConfig
from podium.planning.memory import MemoryEstimate, estimate_memory

PROMPT, COMPLETION = 300, 256
PACK = PROMPT + 8 * (COMPLETION - 1)  # one group, so that the largest pack is full
LAYERS = 2


def estimated(folder: Path, name: str, trained: Trained, *, checkpointing: bool) -> MemoryEstimate:
    config = config_of(name)
    config.num_hidden_layers = LAYERS
    with as_if_cuda():
        args = GRPOConfig(
            str(folder),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=COMPLETION,
            tokens_per_pack=PACK,
            gradient_checkpointing=checkpointing,
            use_cpu=True,
            report_to=[],
        )
        return estimate_memory(
            config,
            args,
            prompt_tokens=PROMPT,
            peft_config=None if trained == "full" else LORA,
            bits=4 if trained == "qlora" else 0,
            available_bytes=80 * 10**9,
        )


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:Expected a tensor")  # the tracker's, of inputs that need no gradient
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", ["0.5B", pytest.param("7B", marks=pytest.mark.slow)])
def test_the_estimate_is_what_is_allocated(name: str, trained: Trained, checkpointing: bool, tmp_path: Path) -> None:
    """Part by part, within 15 %."""
    config = config_of(name)
    config.num_hidden_layers = LAYERS
    found = track(
        config,
        trained=trained,
        tokens_per_pack=PACK,
        prompt_tokens=PROMPT,
        completion_tokens=COMPLETION,
        checkpointing=checkpointing,
        layers=None,
    )
    estimate = estimated(tmp_path, name, trained, checkpointing=checkpointing)
    assert estimate.weights_bytes == pytest.approx(found.weights, rel=0.15)
    assert estimate.gradients_bytes == pytest.approx(found.gradients, rel=0.15)
    assert estimate.optimizer_bytes == pytest.approx(found.optimizer, rel=0.15)
    assert estimate.activations_bytes + estimate.rounded_bytes == pytest.approx(found.activations, rel=0.15)


@pytest.mark.slow
def test_peaks_lie_on_a_line_through_two_depths() -> None:
    """So that a model of 80 layers need not be run at its full depth."""
    config = config_of("0.5B")
    config.num_hidden_layers = 8
    settings = {"trained": "full", "tokens_per_pack": PACK, "prompts": 2}
    assert track(config, **settings) == track(config, **settings, layers=None)
