"""Families of models that read images, each against its own forward of one row at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from benchmarks.families import tiny
from podium.algorithm.losses import LossInputs, LossSettings, policy_loss
from podium.engines.base import Rollout, RolloutEngine, continuation, play
from podium.engines.live.engine import LiveEngine
from podium.engines.transformers import TransformersEngine
from podium.models.forward import AttentionPath, Forward, Method, choose_method
from podium.models.images import ImageProcessor, joined
from podium.models.packing import pack, unscored
from podium.models.stored import outside
from podium.records import Completion, GivenImages, Group, Prompt, RolloutRequest, Sample, SamplingSettings
from tests.images.tiny import PROCESSORS, asked, picture, processor_of

PATHS: Mapping[str, AttentionPath] = {**dict.fromkeys(PROCESSORS, "shared"), "gemma3": "padded", "gemma4": "padded"}
"""Which path a family ends on: the tokens of an image see each other in Gemma 3 and 4, which no tree of tokens has."""


@dataclass(frozen=True)
class Family:
    """A tiny model, its processor, and how it computes."""

    name: str
    model: PreTrainedModel
    processor: ProcessorMixin
    method: Method

    @property
    def placeholder(self) -> int:
        return self.model.config.image_token_id

    def prompt(self, number: int, text: str, *images: Image.Image) -> Prompt:
        return prompt_of(self.processor, self.placeholder, number, text, images)

    def forward(self, path: AttentionPath, temperature: float = 1.0) -> Forward:
        head = self.method.head
        return Forward(path=path, head=head, temperature=temperature, precision=contextlib.nullcontext)


def prompt_of(
    processor: ProcessorMixin, placeholder: int, number: int, text: str, images: Sequence[Image.Image]
) -> Prompt:
    messages = asked(text, *images)
    ids, found = ImageProcessor(lambda: processor, placeholder)(messages, {"add_generation_prompt": True})
    return Prompt(
        id=number, row=number, token_ids=tuple(ids), text="", content=messages, images=(found,) if images else ()
    )


@functools.cache
def family_of(name: str) -> Family:
    model = tiny(name)
    processor = processor_of(name)
    example = prompt_of(processor, model.config.image_token_id, 0, "What is it?", [picture(9)])
    return Family(name, model, processor, choose_method(model, example))


FAST = ("gemma3", "idefics3", "llava_next", "qwen3_vl")
"""One of each kind: images that see themselves, tiles by row, tiles by image, grids with positions of their own."""


@pytest.fixture(params=[pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in PROCESSORS])
def family(request: pytest.FixtureRequest) -> Family:
    return family_of(request.param)


def prompts_of(family: Family) -> list[Prompt]:
    """One image; another one behind the same tokens; two of other sizes; none."""
    return [
        family.prompt(0, "hi?", picture(0)),
        family.prompt(1, "hi?", picture(1)),
        family.prompt(2, "two", picture(2, 16, 16), picture(3, 32, 64)),
        family.prompt(3, "text only"),
    ]


def samples_of(prompts: Sequence[Prompt], each: int = 3) -> list[Sample]:
    """Completions of unequal lengths."""
    random = np.random.default_rng(1)
    return [
        unscored(prompt.token_ids, random.integers(4, 250, 5 + i).tolist(), prompt.images)
        for prompt in prompts
        for i in range(each)
    ]


def own_logps(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [A] by one call of the model's own forward."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    given = joined([images.fields for images in sample.images]) if sample.images else {}
    for images in sample.images:
        for name, field_L in images.token_fields.items():
            field_1S = given.setdefault(name, torch.zeros_like(ids))
            field_1S[0, images.start : images.start + len(field_L)] = field_L
    logits_TV = model(input_ids=ids, **given, use_cache=False).logits[0].float() / temperature
    start = len(sample.prompt_ids)
    return logits_TV[start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]


def packed_logps(
    family: Family, samples: Sequence[Sample], path: AttentionPath, tokens_per_pack: int = 10_000
) -> Tensor:
    """Those of all samples, from a forward for every pack."""
    forward = family.forward(path)
    with forward.context(family.model):
        packs = pack(samples, tokens_per_pack=tokens_per_pack)
        return torch.cat([forward.token_logps(family.model, packed).logps_N for packed in packs])


@contextlib.contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """Within it, the rows of images in each call of `get_image_features`."""
    part = [module for module in model.modules() if hasattr(type(module), "get_image_features")][-1]
    own = part.get_image_features
    parameters = inspect.signature(own).parameters
    calls: list[int] = []

    @functools.wraps(own)
    def counting(*args: Any, **named: Any) -> Any:
        calls.append(rows_of({**dict(zip(parameters, args, strict=False)), **named}))
        return own(*args, **named)

    part.get_image_features = counting
    try:
        yield calls
    finally:
        del part.get_image_features


def rows_of(fields: Mapping[str, Any]) -> int:
    """Images, or for families without their sizes rows of pixels: tiles, or prompts."""
    names = ("image_grid_thw", "image_sizes", "pixel_values")
    return len(next(fields[name] for name in names if fields.get(name) is not None))


def each_once(prompts: Sequence[Prompt]) -> int:
    """Rows of all images of the prompts."""
    return sum(rows_of(prompt.images[0].fields) for prompt in prompts if prompt.images)


def test_path(family: Family) -> None:
    assert family.method.path == PATHS[family.name], family.method.not_shared


@pytest.mark.parametrize("tokens_per_pack", [150, 10_000])
@pytest.mark.parametrize("path", ["chosen", "padded"])
def test_log_probabilities_are_the_models_own(family: Family, path: str, tokens_per_pack: int) -> None:
    """Of rows with two images, with one and without, in one batch and cut into several."""
    taken = family.method.path if path == "chosen" else "padded"
    prompts = prompts_of(family)
    samples = samples_of(prompts)
    with torch.no_grad():
        expected = torch.cat([own_logps(family.model, sample) for sample in samples])
        with counted(family.model) as calls:
            got = packed_logps(family, samples, taken, tokens_per_pack)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    if tokens_per_pack == 10_000:
        assert calls == [each_once(prompts)]
    assert max(calls) <= each_once(prompts)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_gradients_are_those_of_a_plain_loop(family: Family, trained: bool) -> None:
    """Of the language model, and of the encoder where that is trained."""
    model = family.model
    encoder = outside(model)
    samples = samples_of(prompts_of(family))
    weight_N = torch.from_numpy(np.random.default_rng(2).normal(size=sum(len(x.token_ids) for x in samples))).float()
    for parameter in encoder.values():
        parameter.requires_grad_(trained)
    try:
        (torch.cat([own_logps(model, sample) for sample in samples]) @ weight_N).backward()
        expected = gradients(model)
        forward = family.forward(family.method.path)
        with forward.context(model):
            packs = pack(samples, tokens_per_pack=300)
            weights = weight_N.split([packed.num_tokens for packed in packs])
            for packed, weight in zip(packs, weights, strict=True):
                (forward.token_logps(model, packed).logps_N @ weight).backward()
        got = gradients(model)
    finally:
        for parameter in encoder.values():
            parameter.requires_grad_(True)
    assert got.keys() == expected.keys()
    assert any(name in encoder for name in got) == trained
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in got.items():
        near = 2e-5 * float(expected[name].abs().max()) + 5e-7 * largest
        torch.testing.assert_close(gradient, expected[name], atol=near, rtol=0, msg=name)


@pytest.mark.parametrize("path", ["chosen", "padded"])
def test_images_beside_text_are_encoded_and_change_nothing(family: Family, path: str) -> None:
    """The same modules run as behind images, in the same order; the encoder's gradients are there, and zero."""
    model = family.model
    plain = family.forward(family.method.path if path == "chosen" else "padded")
    shown, _, two, text = prompts_of(family)
    beside = replace(plain, beside_text=shown.images)
    behind, of_two, alone, of_text = (
        traced(model, forward, prompt)
        for prompt, forward in ((shown, plain), (two, plain), (text, plain), (text, beside))
    )
    assert of_text.modules == behind.modules == of_two.modules != alone.modules
    torch.testing.assert_close(of_text.logps_N, alone.logps_N, atol=1e-6, rtol=0)
    assert of_text.gradients.keys() == behind.gradients.keys() > alone.gradients.keys()
    for name, gradient in of_text.gradients.items():
        expected = alone.gradients.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, atol=1e-6 * float(expected.abs().max()), rtol=0, msg=name)


@dataclass(frozen=True)
class Traced:
    """A forward and its backward, of the sum of log-probabilities."""

    logps_N: Tensor
    gradients: Mapping[str, Tensor]
    modules: Sequence[str]
    """Those with parameters of their own, in the order in which they first ran."""


def traced(model: PreTrainedModel, forward: Forward, prompt: Prompt) -> Traced:
    ran: list[str] = []
    owners = {name: module for name, module in model.named_modules() if [*module.parameters(recurse=False)]}
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name, module in owners.items()
    ]
    [packed] = pack(samples_of([prompt]), tokens_per_pack=10_000)
    with forward.context(model):
        logps_N = forward.token_logps(model, packed).logps_N
        logps_N.sum().backward()
    for hook in hooks:
        hook.remove()
    return Traced(logps_N.detach(), gradients(model), [*dict.fromkeys(ran)])


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Those that are there, which are taken away."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


SETTINGS = SamplingSettings(num_completions=4, max_tokens=8, temperature=0.7, seed=3)


def sampled(family: Family, prompts: Sequence[Prompt]) -> list[Group]:
    """Groups of completions by the engine that a run on this model has."""
    ends = frozenset([family.processor.tokenizer.eos_token_id])
    settings = replace(SETTINGS, never=(family.placeholder,), end_ids=ends)
    return engine_of(family).generate(prompts, settings)


def engine_of(family: Family) -> RolloutEngine:
    """The one that a run on this model has."""
    tokenizer = family.processor.tokenizer
    if family.method.path == "shared":
        return LiveEngine(family.model, tokenizer)
    forward = family.forward(family.method.path, SETTINGS.temperature)
    return TransformersEngine(family.model, tokenizer, forward=forward, tokens_per_pack=10_000)


def recorded(family: Family, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all completions as they were recorded, and by the model's own forward."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    samples = [unscored(prompt.token_ids, completion.token_ids, prompt.images) for prompt, completion in pairs]
    with torch.no_grad():
        own = torch.cat([own_logps(family.model, sample, SETTINGS.temperature) for sample in samples])
    return torch.tensor([logp for _, completion in pairs for logp in completion.logps]), own


def test_engines_record_the_models_own_log_probabilities(family: Family) -> None:
    """And encode each image once for all completions: `generate` once more where it scores what it drew."""
    prompts = prompts_of(family)
    with counted(family.model) as calls:
        groups = sampled(family, prompts)
    assert sum(calls) == each_once(prompts) * (1 if family.method.path == "shared" else 2)
    torch.testing.assert_close(*recorded(family, groups), atol=1e-5, rtol=0)


def test_placeholders_are_never_drawn(family: Family) -> None:
    """Though they are most likely; log-probabilities are over all tokens all the same."""

    def likely(_module: Any, _inputs: Any, logits: Tensor) -> Tensor:
        return logits + 9.0 * (torch.arange(logits.shape[-1]) == family.placeholder)

    handle = family.model.get_output_embeddings().register_forward_hook(likely)
    try:
        groups = sampled(replace(family, method=learnt(family)), prompts_of(family))
        got, own = recorded(family, groups)
    finally:
        handle.remove()
    assert not any(family.placeholder in x.token_ids for group in groups for x in group.completions)
    torch.testing.assert_close(got, own, atol=1e-5, rtol=0)
    assert own.mean() < -4


def learnt(family: Family) -> Method:
    """How the model computes with what was put on its head."""
    return choose_method(family.model, family.prompt(0, "What is it?", picture(9)))


def test_images_of_equal_prompts_are_told_apart(family: Family) -> None:
    """Prompts of the same tokens share those before their images; swapped images change what rows get, and the loss."""
    first, second, _, text = prompts_of(family)
    assert first.token_ids == second.token_ids
    assert first.images
    tokens = [40, 41, 42]
    rows = [unscored(prompt.token_ids, tokens, prompt.images) for prompt in (first, second, text)]
    swapped = [replace(rows[0], images=second.images), replace(rows[1], images=first.images), rows[2]]
    [packed] = pack(rows[:2], tokens_per_pack=10_000)
    before_images = int(first.images[0].placeholders[0])
    assert len(packed.input_ids_T) == 2 * (len(first.token_ids) + len(tokens) - 1) - before_images
    path = family.method.path
    with torch.no_grad():
        one, other = packed_logps(family, rows, path), packed_logps(family, swapped, path)
    n = len(tokens)
    assert (one[:n] - one[n : 2 * n]).abs().max() > 1e-3
    torch.testing.assert_close(other, torch.cat([one[n : 2 * n], one[:n], one[2 * n :]]), atol=1e-5, rtol=0)
    assert abs(loss_of(one, one) - loss_of(other, one)) > 1e-4
    with counted(family.model) as calls:
        groups = sampled(family, [first, second])
    assert sum(calls) == each_once([first, second]) * (1 if path == "shared" else 2)
    assert groups[0].completions[0].logps != groups[1].completions[0].logps


def given_later(family: Family, start: int, number: int) -> tuple[tuple[int, ...], tuple[GivenImages, ...]]:
    """Tokens with an image as a tool may give them, from a place in a sequence on."""
    given = family.prompt(0, "and this?", picture(number, 32, 32))
    return given.token_ids, tuple(replace(images, start=start) for images in given.images)


def test_log_probabilities_behind_images_that_are_given_later(family: Family) -> None:
    """Behind an image, behind none, and the same one in two completions of a prompt, which is encoded once."""
    samples = []
    prompts = [family.prompt(0, "hi?", picture(0)), family.prompt(1, "text only")]
    for prompt, number, first in ((prompts[0], 5, 40), (prompts[0], 5, 41), (prompts[0], 6, 42), (prompts[1], 6, 43)):
        added, images = given_later(family, len(prompt.token_ids) + 2, number)
        tokens = (first, first + 1, *added, 44, first)
        samples.append(unscored(prompt.token_ids, tokens, prompt.images + images))
    with torch.no_grad(), counted(family.model) as calls:
        got = packed_logps(family, samples, family.method.path)
        encoded = list(calls)
        expected = torch.cat([own_logps(family.model, sample) for sample in samples])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert sum(encoded) == sum(rows_of(x.fields) for x in {*samples[0].images, *samples[2].images})


def two_turns(family: Family, prompt: Prompt, request: RolloutRequest, number: int) -> Rollout:
    """A completion that is given an image after its first turn."""
    first = yield [replace(request, max_tokens=3)]
    added, images = given_later(family, len(prompt.token_ids) + len(first.token_ids), number)
    token_ids = (*first.token_ids, *added)
    second = yield [replace(continuation(request, token_ids, images), max_tokens=3)]
    logps = (*first.logps, *second.logps)
    return Completion(
        token_ids=(*token_ids, *second.token_ids),
        logps=logps,
        finish="length",
        text="",
        policy_step=0,
        images=images,
        drawn=(True,) * len(first.token_ids) + (False,) * len(added) + (True,) * len(second.token_ids),
    )


def test_engines_go_on_behind_images_that_are_given_later(family: Family) -> None:
    """Two completions are given one image, a third another one; a fourth has no image in its prompt."""
    prompts = [family.prompt(0, "hi?", picture(0)), family.prompt(1, "text only")]
    rollouts = []
    requests = []
    for prompt, completion, number in ((prompts[0], 0, 5), (prompts[0], 1, 5), (prompts[0], 2, 6), (prompts[1], 0, 6)):
        request = RolloutRequest(
            token_ids=prompt.token_ids,
            prompt_id=prompt.id,
            completion=completion,
            max_tokens=1_000,
            images=prompt.images,
        )
        requests.append(request)
        rollouts.append(two_turns(family, prompt, request, number))
    with counted(family.model) as calls:
        completions = play(engine_of(family), SETTINGS, rollouts, requests, threads=2)
    for request, completion in zip(requests, completions, strict=True):
        sample = unscored(request.token_ids, completion.token_ids, request.images + completion.images)
        with torch.no_grad():
            own = own_logps(family.model, sample, SETTINGS.temperature)[torch.tensor(completion.drawn)]
        torch.testing.assert_close(torch.tensor(completion.logps), own, atol=1e-5, rtol=0)
    if family.method.path == "shared":
        assert sum(calls) == sum(
            rows_of(x.fields) for x in {x for c in completions for x in c.images} | {*prompts[0].images}
        )


def loss_of(logps_N: Tensor, old_logps_N: Tensor) -> float:
    """The clipped loss of three rows of equal length."""
    rows = torch.arange(3)
    inputs = LossInputs(
        logps_N=logps_N,
        entropy_N=torch.zeros_like(logps_N),
        advantages_R=torch.tensor([1.0, -1.0, 0.5]),
        rollout_N=rows.repeat_interleave(len(logps_N) // 3),
        num_rollouts=3,
        num_tokens=len(logps_N),
        old_logps_N=old_logps_N,
    )
    return float(policy_loss(inputs, LossSettings()).loss)
