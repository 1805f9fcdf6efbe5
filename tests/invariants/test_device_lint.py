"""What a decoded token and a pack ask of a GPU: launches, operations that wait for it, operands on another device.

A GPU computes while the host queues what comes next. That ends where the host needs a result (`.item()`, a boolean
index, a copy to the host), and where operations are many and small, queueing them takes longer than computing them.
Counted on a CPU that computes as a GPU does (`as_if_cuda`); operands on the wrong device are found with tensors that
have no data but say that they are on `cuda:0`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disabled
from torch.utils._pytree import tree_leaves

import podium
from podium.algorithm import losses
from podium.algorithm.losses import CORRECTIONS, OBJECTIVES, LossInputs, LossSettings, policy_loss
from podium.engines.base import first_requests
from podium.engines.live import graphs
from podium.engines.live.engine import DecodingSession
from podium.engines.live.schedule import Row, Schedule
from podium.engines.sampling import DrawnTokens, joined
from podium.models import devices, head, precision
from podium.models.attention import tree_attention
from podium.models.forward import token_logps, unwrap
from podium.models.head import ChunkedLogps, LogitScaling, WideHead, replaced_head
from podium.models.packing import pack, unscored
from podium.records import Prompt, SamplingSettings
from podium.testing import tiny_model
from podium.trainer.rounds import MicroBatch
from podium.trainer.step import Objective, Step

aten = torch.ops.aten
SOURCES = str(Path(podium.__file__).parent)

WAITS = {
    aten._local_scalar_dense,
    aten._unique,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
COPIES = {aten._to_copy, aten.copy_}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
NO_LAUNCH = {
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.scalar_tensor,  # how `where` takes a number; it stays on the host
}
WIDE = {aten.mm.dtype, aten.bmm.dtype}
"""Half precision multiplied into float32 by one kernel, which a CPU does not have."""


class Lint(TorchDispatchMode):
    """Counts launches, and notes where the host waits for a device or operands are on different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.waits: list[str] = []
        self.mixed: list[str] = []
        self.marks: list[int] = []

    def mark(self) -> None:
        """Remember how many launches there have been."""
        self.marks.append(self.launches)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.launches += launches(func)
        if waits(func, args, kwargs, tensors):
            self.waits.append(f"{func} at {source()}")
        elif func.overloadpacket not in COPIES and len({x.device for x in tensors if x.dim()}) > 1:
            self.mixed.append(f"{func} at {source()}")
        if func in WIDE and tensors[0].device.type == "cpu":
            return args[0].float() @ args[1].float()
        return func(*args, **kwargs)


def launches(func: Any) -> bool:
    """Whether an operation starts a kernel or a copy: it makes or writes a tensor, and not only another view of one."""
    if func.overloadpacket in NO_LAUNCH:
        return False
    made = [x for x in func._schema.returns if "Tensor" in str(x.type)]
    return any(x.alias_info is None or x.alias_info.is_write for x in made)


def waits(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether the host waits until the device has come this far."""
    if func.overloadpacket in COPIES:
        return waits_for_copy(func, args, kwargs, tensors)
    if func.overloadpacket in INDEXING:
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return func.overloadpacket in WAITS


def waits_for_copy(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether a copy is one between devices, in either direction, other than `put`'s."""
    if func is aten.copy_.default:
        target, start = tensors[0].device, tensors[1].device
    else:
        start = tensors[0].device
        target = torch.device(kwargs.get("device") or start)
    return start.type != target.type and not source().endswith("in put")


def source() -> str:
    """The line of Podium that is being executed."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    if frame is None:
        return "no line of Podium"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


# ---- models and devices ----

KINDS = ("llama", "qwen3", "gemma3", "gpt2")
TRAINED = ("full", "lora")
GPU = "cuda:0"


def made(kind: str, trained: str, layers: int = 2) -> nn.Module:
    """A tiny model in evaluation mode, as dropout is not what is counted."""
    layers_of = {
        "gpt2": {"n_layer": layers},
        "gemma3": {"num_hidden_layers": layers, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)},
    }
    model = tiny_model(kind, **layers_of.get(kind, {"num_hidden_layers": layers}))
    if trained == "full":
        return model
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).eval()


C10 = str(Path(torch.__file__).parent / "lib" / "libc10.so")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors may say that they are on a GPU, and autocast believes it; they have no data.

    Without gradients: autograd asks for streams, which only a build of torch for GPUs has.
    """
    guards = (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(C10), "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = before or guards[14]  # indexing asks for CUDA's guard, and gets that of `meta` where there is none
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    precision._returns_float32.cache_clear()
    losses._largest_exponent(torch.float32)  # a constant, computed on the host the first time
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield
    guards[1] = before
    precision._returns_float32.cache_clear()


def moved(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on the GPU, tied ones still tied."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, x in store.items():
                if x is not None:
                    there = known.setdefault(id(x), torch.empty(x.shape, dtype=x.dtype, device=GPU))
                    store[name] = nn.Parameter(there, x.requires_grad) if isinstance(x, nn.Parameter) else there
    return model


@pytest.fixture
def like_gpu(as_if_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes as a GPU does, products of half precision into float32 included."""
    losses._largest_exponent(torch.float32)  # a constant, computed on the host the first time
    monkeypatch.setattr(precision, "_returns_float32", lambda *_: True)
    monkeypatch.setattr(head, "add_product", lambda total, a, b: total.addmm_(a.float(), b.float()))


# ---- the two regions ----

TEXT, END = 5, 2


class LintedSession(DecodingSession):
    """A batch whose tokens the test makes up; what was drawn stays on the device."""

    def _record(self, rows: list[Row], drawn: Sequence[DrawnTokens]) -> None:
        """The one wait is left out. A completion of each of the first two prompts ends early, and makes room."""
        mine = {id(row) for row in rows}
        for _ in drawn:
            running = [row for row in self.schedule.rows if id(row) in mine]
            drawing = [(row, member) for row in running for member in row.completions]
            ends = [x.prompt_id < 2 and x.completion == 0 and len(row.token_ids) == 5 for row, x in drawing]
            moves = self.schedule.append(running, [END if x else TEXT for x in ends], [0.0] * len(ends))
            self.cache.move(moves.rows, moves.slots)


def decode(model: nn.Module, device: str) -> Lint:
    """Completions of three prompts, two of which are there at first; the last step has rows of all kinds."""
    prompts = [Prompt(id=i, row=i, token_ids=(TEXT,) * (4 + i), text="", content="") for i in range(3)]
    settings = SamplingSettings(num_completions=2, max_tokens=12, end_ids=frozenset([END]))
    schedule = Schedule(settings, 4, shared=False)
    kind = torch.device(device).type
    with (
        Lint() as lint,
        torch.no_grad(),
        torch.autocast(kind, dtype=torch.bfloat16),
        tree_attention(model),
        replaced_head(unwrap(model), WideHead()),
        patch.object(graphs, "addresses", lambda _: []),
    ):
        engine: Any = SimpleNamespace(model=model, go_on=lambda: None, graphs=graphs.Graphs())
        session = LintedSession(engine, schedule, torch.device(device), settings.max_tokens)
        for request in first_requests(prompts, settings):
            session.submit(request)

        def marked(parts: Sequence[DrawnTokens]) -> DrawnTokens:
            drawn = joined(parts)
            lint.mark()
            return drawn

        with (
            patch("podium.engines.live.engine.joined", marked),
            patch.object(graphs.Graphs, "capture", lambda _, step, __: (step, step())),
        ):
            while session.is_busy:
                session.step()
    return lint


def train(model: nn.Module, device: str, backward: Callable[[Tensor], None] = torch.Tensor.backward) -> Lint:
    """Two packs; what the first one makes for both (casts of weights, gradients) is there for the second.

    Marks of each: before it, after its forward, after its loss, after its backward.
    """
    rng = np.random.default_rng(0)
    samples = []
    for advantage in (1.0, -1.0, 2.0, -2.0):
        sample = unscored((TEXT,) * 6, rng.integers(4, 200, 12).tolist())
        advantages_A = np.full(12, advantage, np.float32)
        samples.append(replace(sample, advantage=advantage, advantages_A=advantages_A))
    batch = MicroBatch(
        samples=tuple(samples), num_rollouts=4, num_tokens=48, step_tokens=48, micro_steps=1, is_last=True
    )
    scaling = LogitScaling(cap=getattr(model.config.get_text_config(), "final_logit_softcapping", None))
    with Lint() as lint:

        def logps(model: nn.Module, packed: Any, router: bool) -> Any:
            out = token_logps(model, packed, temperature=0.9, head=scaling, router=router)
            lint.mark()
            return out

        def run_backward(loss: Tensor) -> None:
            lint.mark()
            backward(loss)

        step: Any = Step.__new__(Step)
        step.args = SimpleNamespace(async_rollouts=0, use_vllm=False)
        step.policy = SimpleNamespace(model=model, forward=SimpleNamespace(token_logps=logps))
        step.prepared = model
        step._examination = None
        step.engine = SimpleNamespace(processed_logps=False)
        step.processes = SimpleNamespace(backward=run_backward)
        objective = Objective(loss=LossSettings())
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16), tree_attention(model):
            for packed in (pack(samples, tokens_per_pack=100, device=device)[0] for _ in range(2)):
                lint.mark()
                step._backward(packed, batch, objective, None, None, 0.01)
                lint.mark()
    return lint


def kept_for_backward(monkeypatch: pytest.MonkeyPatch, trained: str) -> Callable[[Tensor], None]:
    """A backward of the head, the only one of Podium's own on a GPU, for a forward without gradients."""
    kept: list[Any] = []

    def apply(*inputs: Any) -> tuple[Tensor, Tensor]:
        ctx = SimpleNamespace(needs_input_grad=(True, trained == "full", False, False, False, False, False, False))
        ctx.set_materialize_grads = lambda _: None
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        kept.append((ctx, outputs := ChunkedLogps.forward(ctx, *inputs)))
        return outputs

    def backward(_: Tensor) -> None:
        ctx, outputs = kept.pop()
        ChunkedLogps.backward(ctx, *map(torch.ones_like, outputs))

    monkeypatch.setattr(ChunkedLogps, "apply", apply)
    return backward


CASES = [
    pytest.param(kind, trained, marks=[pytest.mark.slow] if trained == "lora" and kind != "llama" else [])
    for kind in KINDS
    for trained in TRAINED
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "trained"), CASES)
def test_nothing_waits_for_a_gpu_or_mixes_devices(
    kind: str, trained: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disabled():
        model = made(kind, trained)
    moved(model)
    for lint in (decode(model, GPU), train(model, GPU, kept_for_backward(monkeypatch, trained))):
        assert (lint.waits, lint.mixed) == ([], [])


# ---- limits ----


class Counts(NamedTuple):
    """Launches: of a decode step and of a pack, a layer's and the rest's, and of one more chunk of the head."""

    step_layer: float
    step_rest: float
    forward_layer: float
    forward_rest: float
    loss: float
    backward_layer: float
    backward_rest: float
    forward_chunk: float
    backward_chunk: float


GENERAL_STEP = 10
"""A decode step whose rows have prompts and completions of different lengths, and slots of different sizes."""


def launched_pack(model: nn.Module) -> np.ndarray:
    """Launches of the second pack's forward, loss and backward; nothing may wait: a step's one look comes after all."""
    lint = train(model, "cpu")
    assert lint.waits == []
    return np.diff(lint.marks[4:])


def launched(model: nn.Module) -> np.ndarray:
    """Launches of a decode step and of a pack; the look at several tokens (`DecodingSession._record`) is left out."""
    lint = decode(model, "cpu")
    assert lint.waits == []
    return np.array([np.diff(lint.marks)[GENERAL_STEP], *launched_pack(model)])


def counted(kind: str, trained: str, patch: pytest.MonkeyPatch) -> Counts:
    """Measured from models of two and of four layers, and from two and three chunks of the head."""
    two, four = (launched(made(kind, trained, layers)) for layers in (2, 4))
    layer = (four - two) / 2
    chunks = []
    for rows in (24, 16):
        row_bytes = 4 * tiny_model(kind).config.vocab_size
        patch.setitem(devices.KINDS, "cpu", replace(devices.KINDS["cuda"], logits_bytes=rows * row_bytes))
        chunks.append(launched_pack(made(kind, trained)))
    (step, forward, loss, backward), (rest, *rests) = layer.tolist(), (two - 2 * layer).tolist()
    assert loss == 0
    more = (chunks[1] - chunks[0]).tolist()
    return Counts(step, rest, forward, rests[0], rests[1], backward, rests[2], more[0], more[2])


# As measured. Half of gemma3's layers have a sliding window, and the rest of its forward makes a mask for each kind.
LIMITS: dict[tuple[str, str], Counts] = {
    ("llama", "full"): Counts(61, 65, 49, 53, 83, 112, 74, 24, 31),
    ("llama", "lora"): Counts(104, 65, 92, 53, 83, 163, 35, 24, 27),
    ("qwen3", "full"): Counts(77, 65, 65, 53, 83, 144, 74, 24, 31),
    ("qwen3", "lora"): Counts(120, 65, 108, 53, 83, 189, 35, 24, 27),
    ("gemma3", "full"): Counts(99, 90, 87, 85, 83, 180, 80, 26, 38),
    ("gemma3", "lora"): Counts(142, 90, 130, 85, 83, 219, 40, 26, 34),
    ("gpt2", "full"): Counts(37, 55, 23, 43, 83, 67, 64, 24, 31),
    ("gpt2", "lora"): Counts(67, 55, 53, 43, 83, 85, 47, 24, 27),
}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "trained"), CASES)
def test_launches_do_not_grow(kind: str, trained: str, like_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step whose operations the host starts one by one, as it does where a step cannot be captured."""
    monkeypatch.setitem(devices.KINDS, "cpu", replace(devices.KINDS["cpu"], graphs=False))
    found = counted(kind, trained, monkeypatch)
    print(f"{kind}, {trained}: 0 waits a decoded token, 0 a pack, {found}")  # noqa: T201  seen with `pytest -s`
    assert {name: x for name, x in found._asdict().items() if x > getattr(LIMITS[kind, trained], name)} == {}


@pytest.mark.cases(18)
@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_no_loss_waits(loss_type: str, correction: str | None, like_gpu: None) -> None:
    rollout_N = torch.arange(12) // 3
    logps_N, old_logps_N, sampled_logps_N, entropy_N = torch.linspace(-4, -1, 48).view(4, 12)
    inputs = LossInputs(
        logps_N=logps_N,
        entropy_N=entropy_N,
        advantages_R=torch.tensor([1.0, -1.0, 2.0, -2.0]),
        rollout_N=rollout_N,
        num_rollouts=4,
        num_tokens=12,
        old_logps_N=old_logps_N,
        ref_logps_N=old_logps_N,
        sampled_logps_N=sampled_logps_N,
    )
    settings = LossSettings(
        loss_type=loss_type,
        beta=0.1,
        off_policy_mask_threshold=0.5,
        correction=None if correction is None else CORRECTIONS[correction],
    )
    with Lint() as lint:
        policy_loss(inputs, settings, entropy_coef=0.1)
    assert lint.waits == []


# ---- the lint itself ----


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool(x.any()),
    "boolean index": lambda x: x[x > 0],
    "boolean target": lambda x: x.__setitem__(x > 0, x[:1]),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_the_lint_finds_what_waits(planted: Callable[[Tensor], Any]) -> None:
    with Lint() as lint:
        planted(torch.linspace(-1, 1, 8))
    assert lint.waits


@pytest.mark.parametrize("planted", ["copy to the host", "copy from the host", "operand", "index"])
def test_the_lint_finds_what_is_on_the_host(planted: str, gpu: None) -> None:
    there, here = torch.zeros(8, device=GPU), torch.arange(8)
    done: dict[str, Callable[[], Any]] = {
        "copy to the host": there.cpu,
        "copy from the host": lambda: here.to(GPU),
        "operand": lambda: there + here,
        "index": lambda: there[here],
    }
    with Lint() as lint, contextlib.suppress(RuntimeError):
        done[planted]()
    assert lint.waits + lint.mixed


def test_the_lint_counts_kernels_and_no_views() -> None:
    with Lint() as lint:
        x = torch.zeros(4, 4)
        x.view(16)[2:].detach().t().add_(1)
    assert lint.launches == 2
