"""The estimate of `podium check` for a GPU against torch's memory tracker over fake tensors, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PretrainedConfig

from benchmarks.sizing import EXPERTS, config_of
from benchmarks.tracked import LORA, Trained, as_if_cuda, track
from podium import GRPOConfig
from podium.planning.memory import MemoryEstimate, estimate_memory
from podium.trainer.planned import Launch, planned

PROMPT, COMPLETION = 300, 256
PACK = PROMPT + 8 * (COMPLETION - 1)  # one group, so that the largest pack is full
LAYERS = 2


def shallow(name: str) -> PretrainedConfig:
    config = config_of(name)
    config.num_hidden_layers = LAYERS
    return config


def estimated(
    folder: Path, name: str, trained: Trained, *, checkpointing: bool = False, launch: Launch | None = None
) -> MemoryEstimate:
    with as_if_cuda(), planned(launch):
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
            shallow(name),
            args,
            prompt_tokens=PROMPT,
            peft_config=None if trained == "full" else LORA,
            bits=4 if trained == "qlora" else 0,
            available_bytes=80 * 10**9,
        )


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:Expected a tensor")  # the tracker's, of inputs that need no gradient
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        *(("0.5B", trained) for trained in ("full", "lora", "qlora")),
        *(pytest.param("7B", trained, marks=pytest.mark.slow) for trained in ("full", "lora", "qlora")),
        pytest.param(EXPERTS, "lora", marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_what_is_allocated(name: str, trained: Trained, checkpointing: bool, tmp_path: Path) -> None:
    """Part by part, within 15 %."""
    found = track(
        shallow(name),
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


@pytest.mark.filterwarnings("ignore:Expected a tensor")
@pytest.mark.parametrize("trained", ["full", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["0.5B", pytest.param("7B", marks=pytest.mark.slow)])
def test_divided_weights_take_what_is_estimated_or_less(name: str, trained: Trained, tmp_path: Path) -> None:
    """The tracker counts layers that are gathered as weights, the estimate as activations; not all that can be are."""
    found = track(
        shallow(name),
        trained=trained,
        tokens_per_pack=PACK,
        prompt_tokens=PROMPT,
        completion_tokens=COMPLETION,
        division="fsdp2",
        ranks=8,
        layers=None,
    )
    estimate = estimated(tmp_path, name, trained, launch=Launch(processes=8, fsdp=2))
    states = estimate.weights_bytes + estimate.gradients_bytes + estimate.optimizer_bytes
    assert 1.0 <= (states + estimate.activations_bytes) / found.total < 1.2


@pytest.mark.slow
def test_peaks_lie_on_a_line_through_two_depths() -> None:
    """So that a model of 80 layers need not be run at its full depth."""
    config = config_of("0.5B")
    config.num_hidden_layers = 8
    settings = {"trained": "full", "tokens_per_pack": PACK, "prompts": 2}
    assert track(config, **settings) == track(config, **settings, layers=None)
