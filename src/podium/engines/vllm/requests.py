"""Prompts as requests to vLLM, its answers as completions. Plain records: no network, no tensors.

A prompt with images goes as the images and the tokens before each got one for each feature (`short_ids`): vLLM prepares
them by the model's own processor, and answers with the tokens that it made of them, which have to be the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podium.engines.base import Sampled
from podium.engines.sampling import row_key
from podium.errors import EngineError
from podium.records import GivenImages, RolloutRequest, SamplingSettings, data_url

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
"""The route that takes images with tokens, and whose answers have the tokens that filters left."""
PROCESSED = "processed_logprobs"
"""vLLM's `logprobs_mode` for those of the distribution that is drawn from."""
NEVER = -100.0
"""Added to the logits of tokens that are not drawn, as much as vLLM takes. Their probability times e^-100 is none in
effect, and yet what vLLM says of it tells what it would have been."""


def sampling_of(request: RolloutRequest, settings: SamplingSettings) -> dict[str, Any]:
    """vLLM's names for how a request's completions are drawn.

    vLLM gives completion g of a request the seed of the request plus g, so all random numbers follow from the run's
    seed, the round and the prompt. End tokens are the trainer's, whatever the server's model says.
    """
    later = filter(None, [request.position, request.turn])
    key = row_key(settings.seed, settings.round, request.prompt_id, request.completion, *later)
    sampling = {
        "n": request.num_completions,
        "max_tokens": request.max_tokens,
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "top_p": 1.0 if settings.greedy else settings.top_p,
        "top_k": 0 if settings.greedy else settings.top_k,
        "min_p": 0.0 if settings.greedy else settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "seed": int(key) >> 2,  # signed there, and g is added
        "stop_token_ids": sorted(settings.end_ids),
        "ignore_eos": True,
        "logprobs": 0,
        **settings.extra,
    }
    if settings.never:
        told = [*settings.never, settings.never[0]]  # one more: vLLM counts the drawn token among those that it tells
        sampling |= {"logprob_token_ids": told, "logprobs": len(told)}
        sampling["logit_bias"] = {**sampling.get("logit_bias", {}), **dict.fromkeys(settings.never, NEVER)}
    return sampling


def short_ids(request: RolloutRequest) -> list[int]:
    """The request's tokens with those for images as they were before each image got one for each feature."""
    ids = [*request.token_ids]
    for images in sorted(request.images, key=lambda images: images.start, reverse=True):
        ids[images.start : images.start + images.num_tokens] = images.short_ids
    return ids


def image_parts(images: GivenImages) -> list[dict[str, str]]:
    """Images as vLLM's `content_parts`, without loss."""
    return [{"type": "image_url", "url": data_url(picture)} for picture in images.pictures]


class Call(NamedTuple):
    """A request as it is posted."""

    route: str
    body: dict[str, Any]


def call_of(
    model: str,
    request: RolloutRequest,
    settings: SamplingSettings,
    *,
    masks: bool = False,
    needs_top_k: bool = False,
    parts: Sequence[Mapping[str, str]] = (),
) -> Call:
    """Return the request to a server for a request's completions.

    Args:
        model: the name to ask for.
        request: what to continue.
        settings: how.
        masks: whether the tokens that filters leave are asked for, too.
        needs_top_k: whether the server refuses requests without `top_k`: a greedy one draws from the first token.
        parts: the request's images, by `image_parts`.
    """
    sampling = {**sampling_of(request, settings), "skip_special_tokens": False}
    if settings.greedy and needs_top_k:
        sampling |= {"temperature": 1.0, "top_k": 1}
    if not (masks or settings.never):
        body = {"model": model, "prompt": list(request.token_ids), "return_token_ids": True, **sampling}
        return Call(COMPLETIONS, body)
    params = {**sampling, "output_kind": 2}  # the last output alone, which has all tokens of all completions
    body = {"model": model, "token_ids": short_ids(request), "sampling_params": params}
    if parts:
        body |= {"content_parts": [*parts], "return_token_ids": True}
    return Call(GENERATE, body)


def read(
    answer: Mapping[str, Any], request: RolloutRequest, settings: SamplingSettings, *, needs_top_k: bool = False
) -> list[Sampled]:
    """The completions in an answer of either route, in order.

    Args:
        answer: to the request.
        request: what was asked for.
        settings: how.
        needs_top_k: as in `call_of`; greedy tokens, drawn from one, then have no log-probabilities.

    Raises:
        EngineError: it is not what was asked for.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        sampled = [(list(c["token_ids"]), _logps(c["logprobs"], settings), c.get("sampling_mask")) for c in choices]
        if request.images:
            check_prompt(answer["prompt_token_ids"], request)
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"vLLM's answer lacks token ids or log-probabilities ({error!r}).", error=error) from None
    if len(sampled) != request.num_completions:
        raise EngineError(
            f"vLLM answered {len(sampled)} completions where {request.num_completions} were asked for.",
            sampled_count=len(sampled),
            num_completions=request.num_completions,
        )
    if settings.greedy and needs_top_k:
        sampled = [(ids, [None] * len(logps), masks) for ids, logps, masks in sampled]
    return [checked(ids, logps, request, settings, masks) for ids, logps, masks in sampled]


def _logps(answered: Mapping[str, Any], settings: SamplingSettings) -> list[float | None]:
    """Return the log-probabilities of the drawn tokens, as either route writes them."""
    if "content" not in answered:
        return list(answered["token_logprobs"])
    return [
        over_all(token["logprob"], {x["token_id"]: x["logprob"] for x in token.get("top_logprobs") or ()}, settings)
        for token in answered["content"]
    ]


def over_all(logp: float, told: Mapping[int, float], settings: SamplingSettings) -> float:
    """The log-probability of a drawn token over all tokens, those that are never drawn among them, as training has it.

    Args:
        logp: over those that could be drawn.
        told: the log-probabilities that vLLM gave at this place, by token.
        settings: of sampling. What filters leave is not all tokens, whatever is never drawn.
    """
    if settings.filtered:
        return logp
    taken = NEVER if settings.greedy else NEVER / settings.temperature
    return logp - float(np.logaddexp.reduce([0.0, *(told[token] - taken for token in settings.never)]))


def check_prompt(made: Sequence[int], request: RolloutRequest) -> None:
    """Raise `EngineError` where vLLM made other tokens of a prompt with images than the processor here."""
    ours = request.token_ids
    if tuple(made) == ours:
        return
    same = next((i for i, (a, b) in enumerate(zip(made, ours, strict=False)) if a != b), min(len(made), len(ours)))
    raise EngineError(
        f"vLLM makes other tokens of a prompt with images than the processor here: {len(made)}, and here {len(ours)}, "
        f"of which the first {same} are the same.",
        fix="Give both the same files of the processor, and the same versions of transformers.",
        made=len(made),
        ours=len(ours),
        same=same,
    )


def checked(
    ids: list[int],
    logps: Sequence[float | None],
    request: RolloutRequest,
    settings: SamplingSettings,
    masks: Sequence[Sequence[int]] | None = None,
) -> Sampled:
    """A completion that can be one. Raises `EngineError`; a log-probability that vLLM could not give becomes NaN.

    Args:
        ids: the drawn tokens.
        logps: their log-probabilities.
        request: what was asked for.
        settings: how.
        masks: for each drawn token the ids that filters had left.
    """
    if not ids or len(ids) != len(logps):
        raise EngineError(
            f"vLLM answered {len(ids)} token ids with {len(logps)} log-probabilities.",
            ids_count=len(ids),
            logps_count=len(logps),
        )
    most = request.max_tokens
    if ids[-1] not in settings.end_ids and len(ids) < most and not settings.stop_texts:
        raise EngineError(
            f"vLLM ended a completion after {len(ids)} of {most} tokens with token {ids[-1]}, which is no end token.",
            ids_count=len(ids),
            most=most,
            ids=ids[-1],
        )
    if drawn := [token for token in ids if token in settings.never]:
        what = f"vLLM drew token {drawn[0]}, which stands for images and is not to be drawn."
        raise EngineError(what, drawn=drawn[0])
    if masks is not None and (len(masks) != len(ids) or any(i not in mask for i, mask in zip(ids, masks, strict=True))):
        raise EngineError("vLLM answered a token that is not among those that it says it could draw.")
    candidates = None if masks is None else [np.sort(np.array(mask, np.int32)) for mask in masks]
    return Sampled(ids, [math.nan if x is None else x for x in logps], candidates)
