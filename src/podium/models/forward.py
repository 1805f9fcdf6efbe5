"""Model + pack -> log-probability and entropy of every trained token.

Knows token ids and weights; knows no rewards and no losses. Logits are computed in `models.head`.

Shape letters: T tokens in the pack, N trained tokens, M given tokens that are to be predicted, P positions that predict
them, V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from podium.models.attention import Attends, TreeAttention, attention_implementation, tree_attention
from podium.models.devices import put
from podium.models.head import Head, OwnLogits, head_logps, learn_head, logps_of_logits, replaced_head
from podium.models.images import encoded_once, rotary_positions, token_fields
from podium.models.modes import evaluation_mode, in_float32
from podium.models.packing import Pack, Places, pack, unscored
from podium.records import GivenImages, Prompt

AttentionPath = Literal["shared", "padded"]
"""`shared`: each prompt once, attention over the tree. `padded`: one padded row per rollout, any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogps:
    """Log-probabilities and entropies of the trained tokens of a pack."""

    logps_N: Tensor
    """Under `logits / temperature`, in nats, normalized over the candidates of each token."""
    entropy_N: Tensor
    """Entropy of the whole next-token distribution, in nats."""
    router_loss: Tensor | None = None
    """The model's load-balancing loss, for mixtures of experts asked for it."""
    observed_logps_M: Tensor | None = None
    """Of the given tokens that are to be predicted; None: there are none."""


def token_logps(
    model: nn.Module,
    pack: Pack,
    *,
    temperature: float,
    head: Head,
    path: AttentionPath = "shared",
    router: bool = False,
    beside_text: tuple[GivenImages, ...] = (),
) -> TokenLogps:
    """Log-probabilities and entropies [N] of a pack's trained tokens, log-probabilities [M] of its observed ones;
    differentiable if gradients are enabled.

    `model` may be wrapped (DDP, PEFT); `head` and `path` are what `choose_method` found of it. The caller enters
    `tree_attention` around forward *and* backward for the shared path. `router` asks a mixture of experts for its
    load-balancing loss. `beside_text`: see `Forward`.
    """
    inputs, predict, places = FORWARDS[path](pack)
    if router:
        inputs["output_router_logits"] = True
    targets = torch.cat([pack.target_N, pack.observed_M]) if pack.num_observed else pack.target_N
    places = places.with_candidates(pack.candidates_N)
    if beside_text and pack.feature_T is None:
        pack = replace(pack, images=beside_text, feature_T=np.full(len(pack.input_ids_T), -1))
    with _with_images(model, pack, path) as described:
        inputs |= described
        if isinstance(head, OwnLogits):
            outputs = model(use_cache=False, **inputs)
            logps_N, entropy_N = logps_of_logits(predict(outputs.logits), places, targets, temperature)
        else:
            scaling = head.at(temperature)
            outputs, (logps_N, entropy_N) = _without_logits(
                model,
                inputs,
                lambda embedding, hidden: head_logps(embedding, predict(hidden), places, targets, scaling),
            )
    observed_logps_M = None
    if pack.num_observed:
        n = pack.num_tokens
        logps_N, observed_logps_M, entropy_N = logps_N[:n], logps_N[n:], entropy_N[:n]
    # A layer without experts may have none: transformers gives the number 0 then.
    router_loss = torch.as_tensor(outputs.aux_loss) if router else None
    return TokenLogps(logps_N=logps_N, entropy_N=entropy_N, router_loss=router_loss, observed_logps_M=observed_logps_M)


def _without_logits(
    model: nn.Module, inputs: dict[str, Any], computed: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Any, list[Tensor]]:
    """The outputs of a forward in which the output embedding computes two tensors [N] in place of logits; and these."""
    head_outputs: list[Tensor] = []
    unwrapped = unwrap(model)

    def head(module: nn.Module, hidden_1ND: Tensor) -> Tensor:
        head_outputs.extend(computed(module, hidden_1ND))
        # What the model does to these "logits" does not matter. That they lead to the head's weight does: data-parallel
        # wrappers look from a forward's outputs for the parameters that will get no gradient.
        return torch.stack(head_outputs, dim=-1)[None] if zero3 else head_outputs[0][None, :, None].clone()

    def hooked(_module: nn.Module, _inputs: Any, output_1N2: Tensor) -> None:
        """ZeRO-3's own hooks, which came first, gather the weight for the backward of what they returned."""
        head_outputs[:] = output_1N2[0].unbind(-1)

    embeddings: Any = unwrapped.get_output_embeddings()
    zero3 = hasattr(embeddings.weight, "ds_id")
    with replaced_head(unwrapped, head):
        hook = embeddings.register_forward_hook(hooked) if zero3 else None
        outputs = model(use_cache=False, **inputs)
        if hook is not None:
            hook.remove()
    return outputs, head_outputs


def logits_of(
    model: nn.Module,
    ids_T: Tensor,
    positions: Tensor,
    attends: Attends,
    keep: Tensor | Literal[0] = 0,
    fields: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Logits [len(keep), V] of a model that samples, in the precision of their product; keep = 0: of all tokens.

    `positions`: [1, T], or [axes, 1, T]; `fields`: what `encoded_once` yields.
    """
    inputs = {"input_ids": ids_T[None], "position_ids": positions, "attention_mask": None, "podium": attends}
    return model(**inputs, **fields, use_cache=False, logits_to_keep=keep).logits[0]


Precision = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes the context in which a model computes as it does in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Settings by which a run computes log-probabilities."""

    path: AttentionPath
    head: Head
    temperature: float
    precision: Precision
    beside_text: tuple[GivenImages, ...] = ()
    """Images that a pack of text encodes as well, though no token has their features: their gradients are zero. For
    processes that call the encoder together, some with images and some without. Empty: text calls no encoder."""

    @contextlib.contextmanager
    def context(self, model: nn.Module) -> Iterator[None]:
        """Around forward and backward of `model`: tree attention, where it can, in the run's precision."""
        with tree_attention(model) if self.path == "shared" else contextlib.nullcontext(), self.precision():
            yield

    def token_logps(self, model: nn.Module, packed: Pack, *, router: bool = False) -> TokenLogps:
        """See `token_logps`; inside `context`."""
        return token_logps(
            model,
            packed,
            temperature=self.temperature,
            head=self.head,
            path=self.path,
            router=router,
            beside_text=self.beside_text,
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers or PEFT model inside data-parallel wrappers."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def base_model(model: nn.Module) -> Any:
    """The transformers model inside wrappers and adapters."""
    inner: Any = unwrap(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def is_quantized(model: Any) -> bool:
    """Whether weights are loaded in 4 or 8 bits by bitsandbytes."""
    return any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))


Inputs = tuple[dict[str, Any], Callable[[Tensor], Tensor], Places]
"""A forward's arguments, what picks the rows that predict the trained tokens, of the hidden states [P, D] before the
head or of the logits [P, V] behind it, and which of them predicts which token."""


def _shared_inputs(pack: Pack) -> Inputs:
    inputs = {
        "input_ids": pack.input_ids_T[None],
        "position_ids": pack.position_ids_T[None],
        "attention_mask": None,
        "logits_to_keep": pack.predict_P,
        "podium": TreeAttention(pack.layout, pack.input_ids_T.device),
    }
    return inputs, lambda hidden_1PD: hidden_1PD[0], pack.places


def _padded_inputs(pack: Pack) -> Inputs:
    """One row per rollout, padded on the right; `position_ids` count from its first token."""
    device = pack.input_ids_T.device
    index_RS, real_RS = _padded(pack)
    drawn = [span.predicting for span in pack.spans_R]
    observed = [span.observing for span in pack.spans_R]
    column_X = put(np.concatenate(drawn + observed), device)
    row_X = put(np.repeat([*range(len(drawn))] * 2, [*map(len, drawn + observed)]), device)
    inputs = {
        "input_ids": pack.input_ids_T[index_RS.to(device)],
        "position_ids": (real_RS.cumsum(1) - 1).to(device),
        "attention_mask": real_RS.long().to(device),
    }
    return inputs, lambda hidden_RSD: hidden_RSD[row_X, column_X], Places.of(np.arange(len(column_X)), device)


def _padded(pack: Pack) -> tuple[Tensor, Tensor]:
    """Positions in T of every rollout's inputs [R, S], and which of them are no padding."""
    lengths = [len(span.tokens) for span in pack.spans_R]
    index_RS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for r, span in enumerate(pack.spans_R):
        index_RS[r, : lengths[r]] = torch.from_numpy(span.tokens)
    return index_RS, torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


@contextlib.contextmanager
def _with_images(model: nn.Module, pack: Pack, path: AttentionPath) -> Iterator[dict[str, Tensor]]:
    """The arguments of a forward that describe its images; none for text. Within it each image is encoded once."""
    if pack.feature_T is None:
        yield {}
        return
    device = pack.input_ids_T.device
    described: dict[str, Tensor] = {}
    if path == "shared":
        index_BS = torch.arange(len(pack.feature_T))[None]
        features_X = pack.feature_T[pack.feature_T >= 0]
        rows: Iterable[GivenImages] = pack.images
    else:
        index_BS, real_BS = _padded(pack)
        feature_BS = np.where(real_BS, pack.feature_T[index_BS], -1)
        features_X = feature_BS[feature_BS >= 0]
        rows = itertools.chain.from_iterable(pack.images_R) if any(pack.images_R) else pack.images
        described = {name: x.to(device) for name, x in token_fields(pack.images_R, index_BS.shape[1]).items()}
    positions_CT = None
    if any(pack.images_R):
        paths = [span.tokens for span in pack.spans_R]
        positions_CT = rotary_positions(model, pack.input_ids_T.cpu().numpy(), paths, pack.images_R)
    if positions_CT is not None:
        described["position_ids"] = positions_CT[:, index_BS].to(device)
    with encoded_once(model, pack.images, features_X, rows) as fields:
        yield {**described, **fields}


FORWARDS: dict[AttentionPath, Callable[[Pack], Inputs]] = {"shared": _shared_inputs, "padded": _padded_inputs}


# ---- what a model can do ----


class Method(NamedTuple):
    """How a model computes log-probabilities, as trials of it have shown."""

    path: AttentionPath
    head: Head
    not_shared: str = ""
    """Why the shared path was not taken."""


def choose_method(model: nn.Module, example: Prompt | None = None) -> Method:
    """The fastest path that gives this model's own numbers, and how its logits follow from its hidden states.

    Decided by trying: its own logits, and two completions of one prompt, packed, against the same two as separate plain
    forwards. `example`: a prompt with images, with which this is tried, too.
    """
    head = learn_head(unwrap(model))
    base = base_model(model)
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return Method("padded", head, "its forward does not take `logits_to_keep`")
    for prompt, what in ((None, ""), (example, " behind images")):
        if what and prompt is None:
            continue
        try:
            difference, tolerance = probe(unwrap(model), head, prompt)
        except Exception as error:  # noqa: BLE001  any failure means the same: this model needs the padded path
            why = f"a trial of the shared-prefix forward{what} failed ({type(error).__name__}: {error})"
            return Method("padded", head, why)
        if not difference <= tolerance:
            why = f"a trial of the shared-prefix forward{what} differed by {difference:.2g} nats"
            return Method("padded", head, why)
    return Method("shared", head)


def probe(model: nn.Module, head: Head, example: Prompt | None = None) -> tuple[float, float]:
    """Largest difference in log-probability between the shared and the padded path on made-up tokens, and its limit.

    The limit is a share of what a layer would do that looked at the other completion, too, or 1e-3 if that is less.
    `example`: a prompt with images, behind which the tokens stand; None: made-up tokens, too.
    """
    device = next(model.parameters()).device
    tokens = np.random.default_rng(0).integers(0, model.get_input_embeddings().weight.shape[0], 24).tolist()
    prompt = tokens[:12] if example is None else [*example.token_ids]
    images = () if example is None else example.images
    if images:
        tokens = [0 if token == images[0].placeholder else token for token in tokens]
    one = tokens[12:20]
    two = tokens[20:]

    def probed(prompt: list[int], completions: list[list[int]], path: AttentionPath) -> Tensor:
        samples = [unscored(prompt, ids, images) for ids in completions]
        [packed] = pack(samples, tokens_per_pack=len(prompt) + sum(map(len, completions)), device=device)
        return token_logps(model, packed, temperature=1.0, head=head, path=path).logps_N

    with torch.no_grad(), evaluation_mode(model), in_float32(model):
        with tree_attention(model):
            shared = probed(prompt, [one, two], "shared")
        with attention_implementation(model, "eager"):  # which leaves nothing out, soft-capping included
            padded = probed(prompt, [one, two], "padded")
            leaking = probed(prompt + one, [two], "padded")
    effect = float((padded[len(one) :] - leaking).abs().max())
    return float((shared - padded).abs().max()), min(1e-3, 0.1 * effect + 2e-6)
