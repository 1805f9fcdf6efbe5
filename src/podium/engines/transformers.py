"""The reference engine and the fallback: transformers' own `generate`, one row per completion.

Slower than `live` by the prompt that every row computes again and the rows that wait for the longest; it takes any
model and any of `generation_kwargs`. Its random numbers come from torch's global generator, seeded for every round.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from podium.engines.base import RolloutEngine, Sampled
from podium.engines.sampling import row_key
from podium.models.candidates import of_bits, packed_bits
from podium.models.forward import Forward, base_model
from podium.models.images import ImageOrder, encoded_once, token_fields
from podium.models.modes import evaluation_mode, replaced
from podium.models.packing import pack, unscored
from podium.records import GivenImages, RolloutRequest, SamplingSettings


class StopTexts(StoppingCriteria):
    """Ends rows at texts, and remembers where: `generate` fills them up with pad tokens, which nobody drew."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._found = StopStringCriteria(tokenizer, list(texts))
        self.lengths: dict[int, int] = {}
        """Tokens of each row that ended so, with its prompt and what is to the left of it."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        found_R = self._found(input_ids, scores)
        for row in found_R.nonzero().flatten().tolist():
            self.lengths.setdefault(row, input_ids.shape[1])
        return found_R


class Recorder(LogitsProcessor):
    """The last of the processors: keeps which tokens the others have left, as bits [R, B] of each step."""

    def __init__(self) -> None:
        self.bits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.bits.append(packed_bits(scores > -torch.inf))
        return scores


class TransformersEngine(RolloutEngine):
    """`model.generate`; log-probabilities of what it drew come from one more forward, as training computes them."""

    name = "transformers"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        forward: Forward,
        tokens_per_pack: int,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.forward = forward
        self.precision = forward.precision
        self.tokens_per_pack = tokens_per_pack

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        """One turn; see `engines.base.RolloutEngine`."""
        if not requests:
            return []
        if any(request.settings not in (None, settings) for request in requests):
            return [group for request in requests for group in self._with_its_own(request, settings)]
        with evaluation_mode(self.model), torch.no_grad():
            with self.precision():
                rows = self._generate(requests, settings)
            logps = self._score(rows, settings)
        sampled = [
            Sampled(row.token_ids, of_row, list(row.candidates) if row.candidates else None)
            for row, of_row in zip(rows, logps, strict=True)
        ]
        left = iter(sampled)
        return [list(islice(left, request.num_completions)) for request in requests]

    def _with_its_own(self, request: RolloutRequest, settings: SamplingSettings) -> list[list[Sampled]]:
        return self.sample([replace(request, settings=None)], request.settings or settings)

    def _generate(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[_Row]:
        device = next(self.model.parameters()).device
        most = max(request.max_tokens for request in requests)
        width = max(len(request.token_ids) for request in requests)
        requests_R = [request for request in requests for _ in range(request.num_completions)]
        rows = [request.token_ids for request in requests_R]
        ids = torch.tensor(
            [[self.tokenizer.pad_token_id] * (width - len(row)) + list(row) for row in rows], device=device
        )
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            key = row_key(settings.seed, settings.round, requests[0].prompt_id, -1 - requests[0].position)
            torch.manual_seed(int(key & np.uint64(2**63 - 1)))
            # Else the folder's generation_config.json fills in what the settings leave open: min_p, suppressed tokens.
            with replaced([(base_model(self.model), "generation_config", GenerationConfig())]):
                given = {"input_ids": ids, "attention_mask": mask, "generation_config": self._config(settings, most)}
                stops = [StopTexts(self.tokenizer, settings.stop_texts)] if settings.stop_texts else []
                given |= {"tokenizer": self.tokenizer, "stopping_criteria": StoppingCriteriaList(stops)}
                recorder = Recorder()
                if settings.keeps_candidates:
                    given["logits_processor"] = LogitsProcessorList([*_filters(settings), recorder])
                with self._images(requests_R, width) as described:
                    output = self.model.generate(**given, **described)
        left = [request.max_tokens for request in requests for _ in range(request.num_completions)]
        for row, length in (item for stop in stops for item in stop.lengths.items()):
            left[row] = min(left[row], length - width)
        drawn = [row[:most] for row, most in zip(output[:, width:].tolist(), left, strict=True)]
        lengths = [next((i for i, x in enumerate(row, 1) if x in settings.end_ids), len(row)) for row in drawn]
        bits_SRB = [bits.cpu().numpy() for bits in recorder.bits]
        return [
            _Row(
                prompt,
                token_ids[:length],
                tuple(of_bits(bits_RB[r]) for bits_RB in bits_SRB[:length]) or None,
                requests_R[r].images,
            )
            for r, (prompt, token_ids, length) in enumerate(zip(rows, drawn, lengths, strict=True))
        ]

    @contextlib.contextmanager
    def _images(self, requests: Sequence[RolloutRequest], width: int) -> Iterator[dict[str, Tensor]]:
        """The arguments of `generate` that describe the images of left-padded rows; each image is encoded once."""
        order = ImageOrder()
        rows = [order.told_apart(request.token_ids, request.images) for request in requests]
        images = [request.images for request in requests]
        flat_images = itertools.chain.from_iterable(images)
        device = next(self.model.parameters()).device
        fields_BS = token_fields(images, width, [width - len(row) for row in rows])
        flat = np.concatenate(rows)
        with encoded_once(self.model, order.images, -1 - flat[flat < 0], flat_images) as fields:
            yield {**fields, **{name: x_BS.to(device) for name, x_BS in fields_BS.items()}}

    def _config(self, settings: SamplingSettings, max_tokens: int) -> GenerationConfig:
        filters = {
            "temperature": settings.temperature if not settings.greedy else None,
            "top_p": settings.top_p if not settings.greedy else None,
            "top_k": settings.top_k if not settings.greedy else None,
            "min_p": settings.min_p or None,
        }
        if settings.keeps_candidates:  # `_filters` applies them
            filters = {"top_k": 0}
        return GenerationConfig(
            **{
                "max_new_tokens": max_tokens,
                "do_sample": not settings.greedy,
                **filters,
                "repetition_penalty": settings.repetition_penalty,
                "eos_token_id": sorted(settings.end_ids) or None,
                "pad_token_id": self.tokenizer.pad_token_id,
                "disable_compile": True,
                "suppress_tokens": [*settings.never] or None,
                **{name: value for name, value in settings.extra.items() if name != "stop_strings"},
            }
        )

    def _score(self, rows: Sequence[_Row], settings: SamplingSettings) -> list[list[float]]:
        samples = [
            replace(unscored(row.prompt_ids, row.token_ids, row.images), candidates=row.candidates) for row in rows
        ]
        device = next(self.model.parameters()).device
        temperature = 1.0 if settings.greedy else settings.temperature
        forward = replace(self.forward, temperature=temperature, precision=self.precision)
        flat: list[list[float]] = []
        for packed in pack(samples, tokens_per_pack=self.tokens_per_pack, device=device):
            with forward.context(self.model):
                logps_N = forward.token_logps(self.model, packed).logps_N
            flat += [x.tolist() for x in packed.split(logps_N)]
        return flat


class _Row(NamedTuple):
    """A row of `generate`."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    candidates: tuple[np.ndarray, ...] | None
    images: tuple[GivenImages, ...]


def _filters(settings: SamplingSettings) -> list[LogitsProcessor]:
    """The processors that `generate` makes of these settings, in its order."""
    filters: list[LogitsProcessor] = []
    if settings.never:
        filters.append(SuppressTokensLogitsProcessor([*settings.never]))
    if settings.temperature != 1:
        filters.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k > 0:
        filters.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        filters.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0:
        filters.append(MinPLogitsWarper(settings.min_p))
    return filters
