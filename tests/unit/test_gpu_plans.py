"""Plans of runs on GPUs that are not here: sizes worked out by hand, which layout is taken, and what is refused."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from benchmarks.sizing import EXPERTS, config_of
from benchmarks.tracked import LORA
from podium import GRPOConfig
from podium.cli.plan import command, layouts_of, print_plan
from podium.errors import ConfigError
from podium.models.devices import GPUS, gpu_named
from podium.planning.layouts import Candidate, Plan, plan_layouts
from podium.planning.memory import MemoryEstimate
from podium.trainer.planned import planned

SEVEN = 7_615_616_512
"""Parameters of Qwen2.5-7B."""
LINEAR = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
"""Those in the linear layers, without the head: attention's four and the three of the gated unit, 28 times."""
HEAD = 152064 * 3584
ADAPTER = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
"""Of rank 16: as many rows as each linear layer has inputs and outputs."""
THIRTY = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 128 * 3 * 2048 * 768 + 128 * 2048 + 2 * 2048)
THIRTY += 2 * 151936 * 2048 + 2048
"""Parameters of Qwen3-30B-A3B: attention, norms, 128 experts and their router in 48 layers; embedding, head, norm."""


def plan(name: str, trained: str, devices: int, gpu: str = "h100", **settings: Any) -> Plan:
    layouts = layouts_of(devices, gpu, None, None)
    given = {"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 1024, **settings}
    with planned(layouts["ddp"]):
        args = GRPOConfig("unused", report_to=[], **given)
    peft = None if trained == "full" else LORA
    bits = 4 if trained == "qlora" else 0
    return plan_layouts(config_of(name), args, layouts, prompt_tokens=300, peft_config=peft, bits=bits)


def of(found: Plan, layout: str) -> Candidate:
    return next(candidate for candidate in found.candidates if candidate.layout == layout)


def estimate_of(found: Plan, layout: str) -> MemoryEstimate:
    estimate = of(found, layout).estimate
    assert estimate is not None
    return estimate


def text_of(found: Plan) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_plan(console, found)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- by hand ----


def test_all_weights_in_float32() -> None:
    """Four bytes of weights, four of gradients, eight of AdamW; FSDP2 divides all sixteen."""
    found = plan("7B", "full", 16)
    divided, whole, zero = (estimate_of(found, name) for name in ("fsdp2", "ddp", "zero2"))
    assert divided.num_parameters == SEVEN
    assert (divided.weights_bytes, divided.gradients_bytes) == (4 * SEVEN // 16, 4 * SEVEN // 16)
    assert divided.optimizer_bytes == 8 * SEVEN // 16
    assert 2 * SEVEN < divided.sampling_bytes < 2 * SEVEN + 6e9, "the live engine has all weights, in bfloat16"
    assert (whole.weights_bytes, whole.gradients_bytes, whole.optimizer_bytes) == (4 * SEVEN, 4 * SEVEN, 8 * SEVEN)
    assert whole.rounded_bytes == 2 * (LINEAR + HEAD), "autocast's"
    assert whole.buckets_bytes == 4 * SEVEN, "beside the gradients that packs add up"
    assert whole.peak_bytes > 20 * SEVEN + 2 * (LINEAR + HEAD)
    # ZeRO-2: weights in bfloat16; 1/16 of gradients in bfloat16, of float32 weights, and of AdamW's states
    assert (zero.weights_bytes, zero.gradients_bytes) == (2 * SEVEN, 2 * SEVEN // 16)
    assert zero.optimizer_bytes == 12 * SEVEN // 16
    assert found.chosen == of(found, "hsdp")
    assert of(found, "fsdp2").host_bytes == 8 * 4 * SEVEN, "eight processes of a machine load it"
    assert "does not fit, 170." in of(found, "ddp").problem
    assert "The largest parts: optimizer 60.9 GB, weights 30.5 GB" in of(found, "ddp").problem


@pytest.mark.parametrize("trained", ["lora", "qlora"])
def test_adapters(trained: str) -> None:
    """A base in bfloat16, or its linear layers in 4 bits, a float32 scale for each 64; the adapter in float32."""
    found = plan("7B", trained, 8)
    whole = estimate_of(found, "ddp")
    base = 2 * SEVEN if trained == "lora" else (0.5 + 4 / 64) * LINEAR + 2 * (SEVEN - LINEAR)
    assert whole.num_trained == ADAPTER
    assert whole.weights_bytes == base + 4 * ADAPTER
    assert (whole.gradients_bytes, whole.optimizer_bytes) == (4 * ADAPTER, 8 * ADAPTER)
    assert whole.rounded_bytes == 0
    assert found.chosen == of(found, "ddp")
    if trained == "lora":
        assert estimate_of(found, "fsdp2").weights_bytes == 4 * ADAPTER + 2 * SEVEN // 8
    else:
        assert of(found, "fsdp2").estimate is None
        assert of(found, "fsdp2").problem == "weights in 4 bits have not been tried with FSDP2 or DeepSpeed"


def test_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B: all 128 experts of each layer are on a device while it samples; on 80 GB that is too much."""
    found = plan(EXPERTS, "full", 16)
    divided = estimate_of(found, "fsdp2")
    assert divided.num_parameters == THIRTY
    assert divided.weights_bytes + divided.gradients_bytes + divided.optimizer_bytes == 16 * THIRTY // 16
    assert divided.sampling_bytes > 2 * THIRTY
    assert found.chosen is None
    larger = plan(EXPERTS, "full", 16, "h200")
    assert larger.chosen == of(larger, "hsdp")


@pytest.mark.slow
def test_an_adapter_on_experts_keeps_a_changed_copy_of_each_layer() -> None:
    checkpointed, kept = (
        estimate_of(plan(EXPERTS, "lora", 16, gradient_checkpointing=value, tokens_per_pack=512), "fsdp2")
        for value in (True, False)
    )
    copies = 2 * 48 * 128 * 3 * 2048 * 768
    assert kept.activations_bytes > copies
    assert kept.activations_bytes - checkpointed.activations_bytes > copies * 47 // 48


# ---- what is taken ----


def test_what_does_not_fit_is_not_said_to_fit() -> None:
    """72B with all weights: gathered for sampling, they alone are larger than the device."""
    found = plan("72B", "full", 16)
    assert found.chosen is None
    assert "Larger than the device alone: sampling (cache, logits, copies of weights) 167" in of(found, "fsdp2").problem
    text = text_of(found)
    assert "None of them fits with 10 % left, calculated, not measured." in text
    assert not re.search(r"\w fits,", text)
    for candidate in (*found.candidates, *plan("3B", "full", 8).candidates, *plan("14B", "full", 16).candidates):
        assert candidate.estimate is not None
        assert candidate.fits == (candidate.estimate.peak_bytes <= 72e9) == (not candidate.problem)


def test_a_run_that_does_not_fit_as_it_is() -> None:
    """DDP takes less with smaller packs and recomputed activations; FSDP2, which needs neither, comes before that."""
    found = plan("3B", "full", 8)
    saving = of(found, "ddp")
    assert saving.fits
    assert saving.settings == {"gradient_checkpointing": True, "tokens_per_pack": 1024}
    assert saving.peak_without > 80e9
    assert found.chosen == of(found, "fsdp2")
    fixed = of(plan("3B", "full", 8, gradient_checkpointing=False, tokens_per_pack=4096), "ddp")
    assert (fixed.fits, fixed.settings) == (False, {}), "what a run sets stays"
    alone = plan("3B", "full", 1)
    assert alone.chosen is not None
    assert command(["run.yaml"], alone.chosen) == "run.yaml --tokens_per_pack 1024"
    assert "ddp *: with gradient_checkpointing: true, tokens_per_pack: 1024; without, 84" in text_of(found)


def test_a_layout_that_the_run_refuses() -> None:
    found = plan("0.5B", "full", 2, beta=0.1)
    assert of(found, "zero3").problem.startswith("beta needs a copy of the model")
    assert estimate_of(found, "fsdp2").reference_bytes == estimate_of(found, "fsdp2").weights_bytes


def test_weights_divided_inside_of_each_machine() -> None:
    """Of 16 processes on two machines each holds an eighth with HSDP, and a sixteenth with FSDP2."""
    found = plan("7B", "full", 16)
    inside, across = estimate_of(found, "hsdp"), estimate_of(found, "fsdp2")
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(inside, name) == pytest.approx(2 * getattr(across, name), rel=1e-6)
    assert "Of ddp, hsdp, fsdp2, these with *, zero1, zero2, zero3 it is the first" in text_of(found)
    assert "hsdp" not in layouts_of(8, "h100", None, None)
    assert "hsdp" not in layouts_of(2, "h100", 2, None)


def test_layouts_that_are_all_refused() -> None:
    launch = layouts_of(8, "h100", None, "fsdp2")["fsdp2"]
    text = text_of(Plan(candidates=(Candidate(layout="fsdp2", launch=launch, refused="not tried"),)))
    assert "fsdp2: not tried\nNone of them fits" in text


def test_a_server_samples_elsewhere() -> None:
    estimate = estimate_of(plan("7B", "full", 8, use_vllm=True, vllm_mode="server"), "fsdp2")
    assert estimate.sampling_bytes == 0


# ---- flags ----


def test_a_gpu_without_bfloat16() -> None:
    layouts = layouts_of(1, "T4", None, None)
    with planned(layouts["ddp"]):
        args = GRPOConfig("unused", report_to=[])
        assert (args.device.type, args.fp16, args.bf16) == ("cuda", True, False)
    assert GRPOConfig("unused", report_to=[]).device.type == "cpu"


@pytest.mark.parametrize(
    ("devices", "nodes", "expected"),
    [
        (16, None, "--processes 8 --nodes 2 --node-rank R --rendezvous HOST:PORT --accelerate fsdp2"),
        (12, None, "--processes 6 --nodes 2 --node-rank R --rendezvous HOST:PORT --accelerate fsdp2"),
        (16, 4, "--processes 4 --nodes 4 --node-rank R --rendezvous HOST:PORT --accelerate fsdp2"),
        (16, 1, "--processes 16 --accelerate fsdp2"),
        (8, None, "--processes 8 --accelerate fsdp2"),
    ],
)
def test_the_line_to_type(devices: int, nodes: int | None, expected: str) -> None:
    launch = layouts_of(devices, "80GB", nodes, None)["fsdp2"]
    assert command(["run.yaml"], Candidate(layout="fsdp2", launch=launch)) == f"run.yaml {expected}"


@pytest.mark.parametrize(
    ("devices", "gpu", "nodes", "accelerate", "message"),
    [
        (16, "h1000", None, None, r"--gpu h1000: this is no GPU of the table.*\n.*--gpu h100"),
        (16, "A100", None, None, r"\n.*--gpu a100-80"),
        (1, "0GB", None, None, "no size such as 80GB"),
        (16, None, None, None, "--gpu is not set"),
        (3, "h100", 2, None, r"3 cannot be divided by 2\.\n.*--devices 4"),
        (2, "h100", None, "fsdp3", "--accelerate fsdp3: there is no such file"),
    ],
)
def test_mistakes_in_flags(devices: int, gpu: str | None, nodes: int | None, accelerate: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts_of(devices, gpu, nodes, accelerate)


def test_sizes_are_those_that_are_sold() -> None:
    assert {name: GPUS[name].num_bytes / 1e9 for name in ("h200", "l4", "a100-40")} == {
        "h200": 141,
        "l4": 24,
        "a100-40": 40,
    }
    assert layouts_of(1, "RTX 4090", None, None)["ddp"].gpu == GPUS["rtx-4090"]
    assert layouts_of(1, "nvidia_h100", None, None)["ddp"].gpu == GPUS["h100"]
    assert [gpu_named(size).described for size in ("80GB", "24 GiB", "h100")] == [
        "GPUs of 80 GB",
        "GPUs of 25.8 GB",
        "h100 (80 GB)",
    ]
