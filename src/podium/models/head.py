"""Hidden states -> logits -> log-probabilities: a model's output embedding, and what its class does behind it.

What a class does there, a scale or a soft cap, is learnt by trying, never read from names: one name of a config divides
in one class and multiplies in the next, and some classes ignore it. Logits are then computed a chunk of rows at a time
and recomputed in the backward, so no [tokens, vocabulary] tensor is kept. A model that does something else computes
its logits by itself.

Shape letters: N trained tokens, P positions that predict them, T tokens of a trial, V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from podium.models.attention import without_autocast
from podium.models.candidates import Candidates, log_totals
from podium.models.devices import kind_of
from podium.models.modes import evaluation_mode, in_float32, replaced
from podium.models.packing import Places
from podium.models.precision import accumulated, add_product, product_weight, wide_product


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """Logits z of a model whose output embedding gives x: z = scale * x, or z = scale * cap * tanh(x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def at(self, temperature: float) -> LogitScaling:
        """The same, divided by the temperature."""
        return LogitScaling(self.scale / temperature, self.cap)

    def forward(self, logits: Tensor) -> Tensor:
        """Scaled logits, in the memory of these."""
        if self.cap is None:
            return logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap * self.scale)

    def backward(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """d loss / d x from d loss / d z: d tanh = 1 - tanh^2."""
        if self.cap is None:
            return grad if self.scale == 1.0 else grad.mul_(self.scale)
        return grad.mul_(1 - (scaled / (self.cap * self.scale)) ** 2).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class OwnLogits:
    """Logits are those of the model's own forward, all of a pack at once."""

    why: str
    """What the model does that is neither a scale nor a soft cap."""


Head = LogitScaling | OwnLogits
"""How a model's logits are computed."""


def replaced_head(
    model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Within this context the model's output embedding computes `forward(head, hidden)` in place of the logits."""
    head = model.get_output_embeddings()
    return replaced([(head, "forward", functools.partial(forward, head))])


class WideHead:
    """The output embedding with float32 logits, as training computes them, for as long as its weight stays the same."""

    def __init__(self) -> None:
        self._factor_VD: Tensor | None = None

    def __call__(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        if self._factor_VD is None:
            self._factor_VD = product_weight(head, hidden)
        with without_autocast(hidden.device.type):
            flat = hidden.flatten(0, -2).to(self._factor_VD.dtype)
            logits = wide_product(flat, self._factor_VD.T).unflatten(0, hidden.shape[:-1])
            bias = getattr(head, "bias", None)
            return logits if bias is None else logits + bias


def head_logps(
    head: nn.Module, hidden_PD: Tensor, places: Places, target_N: Tensor, scaling: LogitScaling
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] of the targets, never holding more than a chunk of logits.

    `scaling` is that of the model, at the temperature. Log-probabilities are normalized over `places.candidates`;
    entropies are those of the whole distribution.
    """
    weight_VD = head.weight
    chunk = max(16, kind_of(hidden_PD.device).logits_bytes // (4 * weight_VD.shape[0]))
    factor_VD = product_weight(head, hidden_PD).detach()
    if hasattr(weight_VD, "ds_id"):  # of ZeRO-3, which gives a weight away after the forward
        factor_VD = factor_VD.clone()
    bias_V = getattr(head, "bias", None)
    logps_N, entropy_P = ChunkedLogps.apply(hidden_PD, weight_VD, factor_VD, bias_V, places, target_N, scaling, chunk)
    return logps_N, entropy_P[places.row_N]


def logps_of_logits(logits_PV: Tensor, places: Places, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] of the targets under a model's own logits, as `head_logps`."""
    logp_PV = (logits_PV.float() / temperature).log_softmax(-1)
    p_PV = logp_PV.exp()
    entropy_P = -torch.where(p_PV > 0, p_PV * logp_PV, 0.0).sum(-1)
    logps_N = logp_PV[places.row_N, target_N]
    if (candidates := places.candidates) is not None:
        total_N = log_totals(logp_PV[candidates.row_X, candidates.ids_X], candidates.token_X, len(target_N))
        logps_N = logps_N - torch.where(total_N == -torch.inf, 0.0, total_N)
    return logps_N, entropy_P[places.row_N]


class ChunkedLogps(torch.autograd.Function):
    """log softmax(z)[target] [N] and entropy of softmax(z) [P], z computed a chunk of rows at a time, twice if several.

    Token n is target n of row `places.row_N`. Backward of the entropy: dH/dz_j = -p_j (log p_j + H). With candidates C
    of a token its log-probability is z[target] - log sum_{j in C} exp z_j.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        factor_VD: Tensor,
        bias_V: Tensor | None,
        places: Places,
        target_N: Tensor,
        scaling: LogitScaling,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        rows = len(hidden_PD)
        needed = any(ctx.needs_input_grad)
        top_P, log_total_P, entropy_P = (hidden_PD.new_empty(rows, dtype=torch.float32) for _ in range(3))
        logps_N = hidden_PD.new_empty(len(target_N), dtype=torch.float32)
        only = None
        candidates = places.candidates
        total_N = None if candidates is None else torch.full_like(logps_N, -torch.inf)
        with without_autocast(hidden_PD.device.type):
            for part, tokens, at in _row_chunks(rows, chunk, places):
                z = _logits(hidden_PD[part], factor_VD, bias_V, scaling)
                top_P[part], log_total_P[part], expected = _shifted(z)
                logps_N[tokens] = z[at, target_N[tokens]] - log_total_P[part][at]
                entropy_P[part] = log_total_P[part] - expected
                if candidates is not None:
                    ids_X, at_X, token_X = _candidates_of(candidates, places, part)
                    total_N = torch.maximum(total_N, log_totals(z[at_X, ids_X], token_X, len(target_N)))
                    of_all_N = log_total_P[part][at]
                    of_own_N = total_N[tokens]
                    logps_N[tokens] += torch.where(of_own_N == -torch.inf, 0.0, of_all_N - of_own_N)
                only = z if needed and rows <= chunk else None
        ctx.save_for_backward(hidden_PD, weight_VD, bias_V, target_N, top_P, log_total_P, entropy_P, total_N, only)
        ctx.places = places
        ctx.scaling = scaling
        ctx.chunk = chunk
        ctx.factor_VD = factor_VD
        ctx.set_materialize_grads(False)
        return logps_N, entropy_P

    @staticmethod
    def backward(ctx: Any, grad_logps_N: Tensor | None, grad_entropy_P: Tensor | None) -> tuple[Any, ...]:
        hidden_PD, weight_VD, bias_V, target_N, top_P, log_total_P, entropy_P, total_N, only = ctx.saved_tensors
        candidates = ctx.places.candidates
        factor_VD = ctx.factor_VD
        needs_hidden, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        grad_hidden = torch.empty_like(hidden_PD) if needs_hidden else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None

        def add_chunks(total_VD: Tensor | None) -> None:
            for part, tokens, at in _row_chunks(len(hidden_PD), ctx.chunk, ctx.places):
                top_1 = top_P[part, None]
                z = _logits(hidden_PD[part], factor_VD, bias_V, ctx.scaling).sub_(top_1) if only is None else only
                of_targets = None if grad_logps_N is None else (at, target_N[tokens], grad_logps_N[tokens])
                of_candidates = None
                if candidates is not None and grad_logps_N is not None:
                    ids_X, at_X, token_X = _candidates_of(candidates, ctx.places, part)
                    p_X = (z[at_X, ids_X] - total_N[token_X]).exp()
                    of_candidates = (at_X, ids_X, -grad_logps_N[token_X] * p_X, total_N[tokens] > -torch.inf)
                of_entropy = None if grad_entropy_P is None else (entropy_P[part, None], grad_entropy_P[part, None])
                lse = top_1, log_total_P[part, None]
                grad = _grad_logits(z, lse, ctx.scaling, of_targets, of_entropy, of_candidates)
                if grad_bias is not None:
                    grad_bias.add_(grad.sum(0))
                grad = grad.to(factor_VD.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (grad @ factor_VD).to(hidden_PD.dtype)
                if total_VD is not None:
                    add_product(total_VD, grad.T, hidden_PD[part].to(factor_VD.dtype))

        def add(grad_VD: Tensor) -> Tensor:
            if grad_VD.dtype == torch.float32:
                add_chunks(grad_VD)
                return grad_VD
            add_chunks(total_VD := torch.zeros_like(grad_VD, dtype=torch.float32))  # rounded once, not every chunk
            return grad_VD.add_(total_VD)

        grad_weight = None
        with without_autocast(hidden_PD.device.type):
            if needs_weight:
                grad_weight = accumulated(weight_VD, add)
            else:
                add_chunks(None)
        return grad_hidden, grad_weight, None, grad_bias, None, None, None, None


def _candidates_of(candidates: Candidates, places: Places, part: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, rows within a chunk of rows, and tokens of the candidates of the tokens that the chunk predicts."""
    ids_X, row_X, token_X = candidates.between(places.first_P[part.start], places.first_P[part.stop])
    return ids_X, row_X - part.start, token_X


def _row_chunks(rows: int, chunk: int, places: Places) -> Iterator[tuple[slice, Tensor | slice, Tensor]]:
    """Rows at a time, with the tokens that belong to them, and these tokens' places among them."""
    for start in range(0, rows, chunk):
        part = slice(start, min(rows, start + chunk))
        first = places.first_P[start]
        end = places.first_P[part.stop]
        tokens = slice(None) if rows <= chunk else places.order_N[first:end]
        yield part, tokens, places.row_N[tokens] - start


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scaling: LogitScaling) -> Tensor:
    hidden = hidden.to(weight.dtype)
    logits = wide_product(hidden, weight.T) if kind_of(hidden.device).autocast else (hidden @ weight.T).float()
    return scaling.forward(logits if bias is None else logits.add_(bias))


def _shifted(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every row's largest logit, which is taken from z in place, then log sum_j exp z_j and sum_j p_j z_j of the rest.

    Apart, since their sum rounds: a log-sum-exp of 1000 by 3e-5, and so every p. One more block of memory; a logit of
    minus infinity counts nothing.
    """
    top = z.amax(-1, keepdim=True)
    mass = z.sub_(top).exp()
    total = mass.sum(-1)
    if kind_of(z.device).immediate:
        mean = torch.bmm(mass[:, None], z[:, :, None])[:, 0, 0] / total
        if bool(mean.isfinite().all()):
            return top[:, 0], total.log(), mean
    return top[:, 0], total.log(), torch.where(mass > 0, mass.mul_(z), 0.0).sum(-1) / total


def _grad_logits(
    z: Tensor,
    lse: tuple[Tensor, Tensor],
    scaling: LogitScaling,
    of_targets: tuple[Tensor, Tensor, Tensor] | None,
    of_entropy: tuple[Tensor, Tensor] | None,
    of_candidates: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """d loss / d logits, in the memory of z where nothing else needs z.

    `lse`: largest logits, which were taken from z, and log-sum-exps of z. `of_targets`: rows, targets and upstream
    gradients of the log-probabilities; `of_entropy`: entropy and upstream gradient of every row; `of_candidates`: rows,
    ids and gradients of candidates, and which targets have some.
    """
    top, log_total = lse
    adjusted = z + top if scaling.cap is not None else z
    logp = z.sub_(log_total)
    if of_entropy is not None:
        entropy, upstream = of_entropy
        p = logp.exp()
        entropy_grad = torch.where(p > 0, p * (logp + entropy), 0.0).mul_(upstream)
    grad = logp.exp_()
    if of_targets is not None:
        rows, targets, upstream = of_targets
        over_all = upstream if of_candidates is None else torch.where(of_candidates[3], 0.0, upstream)
        total = torch.zeros_like(top[:, 0]).index_add_(0, rows, over_all)
        grad.mul_(-total[:, None]).index_put_((rows, targets), upstream, accumulate=True)
    else:
        grad.zero_()
    if of_candidates is not None:
        grad.index_put_(of_candidates[:2], of_candidates[2], accumulate=True)
    if of_entropy is not None:
        grad.sub_(entropy_grad)
    return scaling.backward(grad, adjusted)


# ---- what a model does to its logits ----

MAGNITUDES = (1e-9, 1e-3, 1.0, 10.0, 100.0, 1e6)
"""Sizes of the made-up logits from which a scale (the smallest) and a cap (the largest) are learnt."""
TRIAL_TEMPERATURE = 0.7
"""Other than 1, at which a temperature that is lost, or applied twice, would not show."""


@torch.no_grad()
def learn_head(model: nn.Module) -> Head:
    """How a model's logits follow from its hidden states, found out on its own forward.

    Three facts are tried, in float32: that the output embedding is a product with its weight, what the forward returns
    where made-up logits are put in the embedding's place, and that log-probabilities computed so are those of the
    model's own logits, at a temperature other than 1. A model of which one of them does not hold, or of which the trial
    fails, computes its logits by itself.

    Args:
        model: one that takes `input_ids` and returns `logits`, without data-parallel wrappers.
    """
    embedding = model.get_output_embeddings()
    if not isinstance(getattr(embedding, "weight", None), Tensor):
        return OwnLogits("its logits do not come from an output embedding with a weight")
    trained = {id(p) for p in embedding.parameters() if p.requires_grad}
    if trained - {id(embedding.weight), id(getattr(embedding, "bias", None))}:
        return OwnLogits("its output embedding trains more than its weight and bias")
    try:
        with evaluation_mode(model), in_float32(model):
            return _tried(model, embedding)
    except Exception as error:  # noqa: BLE001  any failure means the same: nothing is known of this model
        return OwnLogits(f"a trial of its forward failed ({type(error).__name__}: {error})")


def _tried(model: nn.Module, embedding: nn.Module) -> Head:
    ids = torch.arange(len(MAGNITUDES), device=embedding.weight.device)[None] % len(model.get_input_embeddings().weight)
    seen: list[tuple[Tensor, Tensor]] = []
    hook = embedding.register_forward_hook(lambda _module, inputs, output: seen.append((inputs[0], output)))
    try:
        own_TV = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        hook.remove()
    if len(seen) != 1:
        return OwnLogits(f"its output embedding is called {len(seen)} times in a forward")
    [(hidden_1TD, output_1TV)] = seen
    if not _is_product(embedding, hidden_1TD, output_1TV):
        return OwnLogits("its output embedding is not a product with its weight")
    head = _learnt_scaling(model, ids, output_1TV)
    if isinstance(head, LogitScaling) and not (off := _off(model, ids, own_TV, head)) <= 1e-4:
        return OwnLogits(f"log-probabilities computed from its hidden states are off by {off:.2g} nats")
    return head


def _is_product(embedding: nn.Module, hidden: Tensor, output: Tensor) -> bool:
    """Whether the output is `hidden @ weight.T + bias`, but for rounding."""
    weight_VD = embedding.weight.float()
    bias_V = getattr(embedding, "bias", None)
    if weight_VD.dim() != 2 or hidden.shape[-1] != weight_VD.shape[1] or output.shape[-1] != weight_VD.shape[0]:
        return False
    product = hidden.float() @ weight_VD.T
    size = hidden.float().abs() @ weight_VD.abs().T
    if bias_V is not None:
        product = product + bias_V
        size = size + bias_V.abs()
    output = output.float()
    return bool(((output == product) | ((output - product).abs() <= 1e-4 * size)).all())


def _learnt_scaling(model: nn.Module, ids: Tensor, output_1TV: Tensor) -> Head:
    """The scale and cap that turn the output embedding's values into the logits of the forward."""
    size_T1 = torch.tensor(MAGNITUDES, device=output_1TV.device)[:, None]
    # In float64, so that nothing is rounded on the way; float32's numbers, which a class that casts leaves as they are.
    x_TV = (size_T1 * torch.linspace(-1, 1, output_1TV.shape[-1], device=output_1TV.device)).double()
    with replaced_head(model, lambda _embedding, _hidden: x_TV[None].clone()):
        z_TV = model(input_ids=ids, use_cache=False).logits[0].double()
    if z_TV.shape != x_TV.shape:
        return OwnLogits(f"it returns {z_TV.shape[-1]} logits where its output embedding has {x_TV.shape[-1]}")
    scale = _rounded((z_TV[0] / x_TV[0])[x_TV[0] != 0].median())
    if torch.allclose(z_TV, scale * x_TV, rtol=1e-5, atol=0):
        return LogitScaling(scale)
    cap = _rounded(z_TV[-1].abs().max() / abs(scale)) if scale else 0.0
    if cap and torch.allclose(z_TV, scale * cap * torch.tanh(x_TV / cap), rtol=1e-5, atol=0):
        return LogitScaling(scale, cap)
    return OwnLogits("its logits are neither a multiple nor a soft cap of what its output embedding gives")


def _rounded(x: Tensor) -> float:
    """A number without the last digits of float64, which the forward's own products and quotients have rounded."""
    return float(f"{float(x):.14g}")


def _off(model: nn.Module, ids: Tensor, own_TV: Tensor, scaling: LogitScaling) -> float:
    """Largest difference of log-probabilities from those of the model's own logits, as a share where they are large."""
    logp_TV = (own_TV.float() / TRIAL_TEMPERATURE).log_softmax(-1)
    places = Places.of(np.arange(len(own_TV)), own_TV.device)
    found = [0.0]

    def compared(embedding: nn.Module, hidden_1TD: Tensor) -> Tensor:
        """Inside the embedding's own call, where its weight is in float32."""
        for target_T in (logp_TV.argmax(-1), logp_TV.argmin(-1), ids[0]):
            logps_T, _ = head_logps(embedding, hidden_1TD[0], places, target_T, scaling.at(TRIAL_TEMPERATURE))
            expected_T = logp_TV.gather(-1, target_T[:, None])[:, 0]
            off_T = (logps_T - expected_T).abs() / (1 + 0.1 * expected_T.abs())
            found.append(float(torch.where(logps_T == expected_T, 0.0, off_T).max()))
        return own_TV[None]

    with replaced_head(model, compared):
        model(input_ids=ids, use_cache=False)
    return max(found)
