"""Model + pack -> log-probability and entropy of every trained token.

The head is computed in chunks and recomputed in the backward, so no [tokens, vocabulary] tensor is ever kept. Knows
token ids and weights; knows no rewards and no losses.

Shape letters: T tokens in the pack, N trained tokens, M given tokens that are to be predicted, P positions that predict
them, V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from podium.models.attention import TreeAttention, attention_implementation, tree_attention, without_autocast
from podium.models.devices import kind_of, put
from podium.models.modes import evaluation_mode, replaced
from podium.models.packing import Pack, Places, pack
from podium.models.precision import accumulated, add_product, product_weight, wide_product
from podium.records import TrainingGroup

AttentionPath = Literal["shared", "padded"]
"""`shared`: each prompt once, attention over the tree. `padded`: one padded row per rollout, any model."""

PRODUCT_ROWS = 8192
"""Rows of the head's weight whose gradient is computed, and added, at once: what stays in a processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogps:
    """Log-probabilities and entropies of the trained tokens of a pack."""

    logps_N: Tensor
    """Under `logits / temperature`, in nats."""
    entropy_N: Tensor
    """Entropy of the whole next-token distribution, in nats."""
    router_loss: Tensor | None = None
    """The model's load-balancing loss, for mixtures of experts asked for it."""
    observed_logps_M: Tensor | None = None
    """Of the given tokens that are to be predicted; None: there are none."""


def token_logps(
    model: nn.Module, pack: Pack, *, temperature: float, path: AttentionPath = "shared", router: bool = False
) -> TokenLogps:
    """Log-probabilities and entropies [N] of a pack's trained tokens, log-probabilities [M] of its observed ones;
    differentiable if gradients are enabled.

    `model` may be wrapped (DDP, PEFT). The caller enters `tree_attention` around forward *and* backward for the shared
    path. `router` asks a mixture of experts for its load-balancing loss.
    """
    inputs, predict, places = FORWARDS[path](pack)
    head_outputs: list[Tensor] = []
    unwrapped = unwrap(model)

    def head(module: nn.Module, hidden_1ND: Tensor) -> Tensor:
        hidden_PD = predict(hidden_1ND)
        targets = torch.cat([pack.target_N, pack.observed_M]) if pack.num_observed else pack.target_N
        head_outputs.extend(head_logps(module, hidden_PD, places, targets, unwrapped.config, temperature))
        # What the model does to these "logits" does not matter. That they lead to the head's weight does: data-parallel
        # wrappers look from a forward's outputs for the parameters that will get no gradient.
        return torch.stack(head_outputs, dim=-1)[None] if zero3 else head_outputs[0][None, :, None].clone()

    def hooked(_module: nn.Module, _inputs: Any, output_1N2: Tensor) -> None:
        """ZeRO-3's own hooks, which came first, gather the weight for the backward of what they returned."""
        head_outputs[:] = output_1N2[0].unbind(-1)

    embeddings: Any = unwrapped.get_output_embeddings()
    zero3 = hasattr(embeddings.weight, "ds_id")
    if router:
        inputs["output_router_logits"] = True
    with replaced_head(unwrapped, head):
        hook = embeddings.register_forward_hook(hooked) if zero3 else None
        outputs = model(use_cache=False, **inputs)
        if hook is not None:
            hook.remove()
    logps_N, entropy_N = head_outputs
    observed_logps_M = None
    if pack.num_observed:
        n = pack.num_tokens
        logps_N, observed_logps_M, entropy_N = logps_N[:n], logps_N[n:], entropy_N[:n]
    # A layer without experts may have none: transformers gives the number 0 then.
    router_loss = torch.as_tensor(outputs.aux_loss) if router else None
    return TokenLogps(logps_N=logps_N, entropy_N=entropy_N, router_loss=router_loss, observed_logps_M=observed_logps_M)


Precision = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes the context in which a model computes as it does in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Settings by which a run computes log-probabilities."""

    path: AttentionPath
    temperature: float
    precision: Precision

    @contextlib.contextmanager
    def context(self, model: nn.Module) -> Iterator[None]:
        """Around forward and backward of `model`: tree attention, where it can, in the run's precision."""
        with tree_attention(model) if self.path == "shared" else contextlib.nullcontext(), self.precision():
            yield

    def token_logps(self, model: nn.Module, packed: Pack, *, router: bool = False) -> TokenLogps:
        """See `token_logps`; inside `context`."""
        return token_logps(model, packed, temperature=self.temperature, path=self.path, router=router)


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
"""A forward's arguments, what picks the hidden states [P, D] that predict the trained tokens out of those that reach
the head, and which of them predicts which token."""


def _shared_inputs(pack: Pack) -> Inputs:
    inputs = {
        "input_ids": pack.input_ids_T[None],
        "position_ids": pack.position_ids_T[None],
        "attention_mask": None,
        "logits_to_keep": pack.predict_P,
        "podium": TreeAttention(pack.layout, [span.tokens for span in pack.spans_R], pack.input_ids_T.device),
    }
    return inputs, lambda hidden_1PD: hidden_1PD[0], pack.places


def _padded_inputs(pack: Pack) -> Inputs:
    """One row per rollout, padded on the right; `position_ids` count from its first token."""
    device = pack.input_ids_T.device
    lengths = [len(span.tokens) for span in pack.spans_R]
    index_RS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for r, span in enumerate(pack.spans_R):
        index_RS[r, : lengths[r]] = torch.from_numpy(span.tokens)
    real_RS = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    drawn, observed = [span.predicting for span in pack.spans_R], [span.observing for span in pack.spans_R]
    column_X = put(np.concatenate(drawn + observed), device)
    row_X = put(np.repeat([*range(len(drawn))] * 2, [*map(len, drawn + observed)]), device)
    inputs = {
        "input_ids": pack.input_ids_T[index_RS.to(device)],
        "position_ids": (real_RS.cumsum(1) - 1).to(device),
        "attention_mask": real_RS.long().to(device),
    }
    return inputs, lambda hidden_RSD: hidden_RSD[row_X, column_X], Places.of(np.arange(len(column_X)), device)


FORWARDS: dict[AttentionPath, Callable[[Pack], Inputs]] = {"shared": _shared_inputs, "padded": _padded_inputs}


# ---- the head ----


def replaced_head(
    model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Within this context the model's output embedding computes `forward(head, hidden)` in place of the logits."""
    head = model.get_output_embeddings()
    return replaced([(head, "forward", functools.partial(forward, head))])


def head_logps(
    head: nn.Module, hidden_PD: Tensor, places: Places, target_N: Tensor, config: Any, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] of the targets, never holding more than a chunk of logits."""
    adjust = LogitAdjustment.of(config, temperature)
    weight_VD = head.weight
    chunk = max(16, kind_of(hidden_PD.device).logits_bytes // (4 * weight_VD.shape[0]))
    factor_VD = product_weight(head, hidden_PD).detach()
    if hasattr(weight_VD, "ds_id"):  # of ZeRO-3, which gives a weight away after the forward
        factor_VD = factor_VD.clone()
    bias_V = getattr(head, "bias", None)
    logps_N, entropy_P = ChunkedLogps.apply(hidden_PD, weight_VD, factor_VD, bias_V, places, target_N, adjust, chunk)
    return logps_N, entropy_P[places.row_N]


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """Adjustment of logits between the head's product and the softmax: z = scale * cap * tanh(logits / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any, temperature: float) -> LogitAdjustment:
        """From a model config: Gemma's soft-capping, Cohere's and Granite's logit scales, and our temperature."""
        text = config.get_text_config()
        scale = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
        return cls(scale=scale / temperature, cap=getattr(text, "final_logit_softcapping", None))

    def forward(self, logits: Tensor) -> Tensor:
        """Adjusted logits, in the memory of these."""
        if self.cap is None:
            return logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap * self.scale)

    def backward(self, grad: Tensor, adjusted: Tensor) -> Tensor:
        """d loss / d logits from d loss / d adjusted: d tanh = 1 - tanh^2."""
        if self.cap is None:
            return grad if self.scale == 1.0 else grad.mul_(self.scale)
        return grad.mul_(1 - (adjusted / (self.cap * self.scale)) ** 2).mul_(self.scale)


class ChunkedLogps(torch.autograd.Function):
    """log softmax(z)[target] [N] and entropy of softmax(z) [P], z computed a chunk of rows at a time, twice if several.

    Token n is target n of row `places.row_N`. Backward of the entropy: dH/dz_j = -p_j (log p_j + H).
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
        adjust: LogitAdjustment,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        rows, needed = len(hidden_PD), any(ctx.needs_input_grad)
        top_P, log_total_P, entropy_P = (hidden_PD.new_empty(rows, dtype=torch.float32) for _ in range(3))
        logps_N = hidden_PD.new_empty(len(target_N), dtype=torch.float32)
        only = None
        with without_autocast(hidden_PD.device.type):
            for part, tokens, at in _row_chunks(rows, chunk, places):
                z = _logits(hidden_PD[part], factor_VD, bias_V, adjust)
                top_P[part], log_total_P[part], expected = _shifted(z)
                logps_N[tokens] = z[at, target_N[tokens]] - log_total_P[part][at]
                entropy_P[part] = log_total_P[part] - expected
                only = z if needed and rows <= chunk else None
        ctx.save_for_backward(hidden_PD, weight_VD, bias_V, target_N, top_P, log_total_P, entropy_P, only)
        ctx.places, ctx.adjust, ctx.chunk, ctx.factor_VD = places, adjust, chunk, factor_VD
        ctx.set_materialize_grads(False)
        return logps_N, entropy_P

    @staticmethod
    def backward(ctx: Any, grad_logps_N: Tensor | None, grad_entropy_P: Tensor | None) -> tuple[Any, ...]:
        hidden_PD, weight_VD, bias_V, target_N, top_P, log_total_P, entropy_P, only = ctx.saved_tensors
        factor_VD = ctx.factor_VD
        needs_hidden, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        grad_hidden = torch.empty_like(hidden_PD) if needs_hidden else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None

        def add_chunks(total_VD: Tensor | None) -> None:
            for part, tokens, at in _row_chunks(len(hidden_PD), ctx.chunk, ctx.places):
                top_1 = top_P[part, None]
                z = _logits(hidden_PD[part], factor_VD, bias_V, ctx.adjust).sub_(top_1) if only is None else only
                of_targets = None if grad_logps_N is None else (at, target_N[tokens], grad_logps_N[tokens])
                of_entropy = None if grad_entropy_P is None else (entropy_P[part, None], grad_entropy_P[part, None])
                grad = _grad_logits(z, (top_1, log_total_P[part, None]), ctx.adjust, of_targets, of_entropy)
                if grad_bias is not None:
                    grad_bias.add_(grad.sum(0))
                grad = grad.to(factor_VD.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (grad @ factor_VD).to(hidden_PD.dtype)
                if total_VD is not None:
                    _add_product(total_VD, grad, hidden_PD[part].to(factor_VD.dtype))

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


def _row_chunks(rows: int, chunk: int, places: Places) -> Iterator[tuple[slice, Tensor | slice, Tensor]]:
    """Rows at a time, with the tokens that belong to them, and these tokens' places among them."""
    for start in range(0, rows, chunk):
        part = slice(start, min(rows, start + chunk))
        first, end = places.first_P[start], places.first_P[part.stop]
        tokens = slice(None) if rows <= chunk else places.order_N[first:end]
        yield part, tokens, places.row_N[tokens] - start


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, adjust: LogitAdjustment) -> Tensor:
    hidden = hidden.to(weight.dtype)
    logits = wide_product(hidden, weight.T) if kind_of(hidden.device).autocast else (hidden @ weight.T).float()
    return adjust.forward(logits if bias is None else logits.add_(bias))


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
    adjust: LogitAdjustment,
    of_targets: tuple[Tensor, Tensor, Tensor] | None,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """d loss / d logits, in the memory of z where nothing else needs z.

    `lse`: largest logits, which were taken from z, and log-sum-exps of z. `of_targets`: rows, targets and upstream
    gradients of the log-probabilities; `of_entropy`: entropy and upstream gradient of every row.
    """
    top, log_total = lse
    adjusted = z + top if adjust.cap is not None else z
    logp = z.sub_(log_total)
    if of_entropy is not None:
        entropy, upstream = of_entropy
        p = logp.exp()
        entropy_grad = torch.where(p > 0, p * (logp + entropy), 0.0).mul_(upstream)
    grad = logp.exp_()
    if of_targets is not None:
        rows, targets, upstream = of_targets
        total = torch.zeros_like(top[:, 0]).index_add_(0, rows, upstream)
        grad.mul_(-total[:, None]).index_put_((rows, targets), upstream, accumulate=True)
    else:
        grad.zero_()
    if of_entropy is not None:
        grad.sub_(entropy_grad)
    return adjust.backward(grad, adjusted)


def _add_product(total_VD: Tensor, grad_NV: Tensor, hidden_ND: Tensor) -> None:
    """total += grad^T hidden; on a CPU some rows at a time, as a whole product would be as large as the weight."""
    if grad_NV.dtype == total_VD.dtype:
        total_VD.addmm_(grad_NV.T, hidden_ND)
    elif kind_of(total_VD.device).autocast:
        add_product(total_VD, grad_NV.T, hidden_ND)
    else:
        for start in range(0, len(total_VD), PRODUCT_ROWS):
            rows = slice(start, start + PRODUCT_ROWS)
            total_VD[rows].add_(grad_NV[:, rows].T @ hidden_ND)


# ---- which path a model can take ----


def choose_path(model: nn.Module) -> tuple[AttentionPath, str]:
    """The fastest path that gives this model's own numbers, and why the shared one was not taken (or "").

    Decided by trying: two completions of one prompt, packed, against the same two as separate plain forwards.
    """
    base = base_model(model)
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return "padded", "its forward does not take `logits_to_keep`"
    try:
        difference, tolerance = probe(unwrap(model))
    except Exception as error:  # noqa: BLE001  any failure means the same: this model needs the padded path
        return "padded", f"a trial of the shared-prefix forward failed ({type(error).__name__}: {error})"
    if not difference <= tolerance:
        return "padded", f"a trial of the shared-prefix forward differed by {difference:.2g} nats"
    return "shared", ""


def probe(model: nn.Module) -> tuple[float, float]:
    """Largest difference in log-probability between the shared and the padded path on made-up tokens, and its limit.

    The limit is a share of what a layer would do that looked at the other completion, too, or 1e-3 if that is less.
    """
    device = next(model.parameters()).device
    tokens = np.random.default_rng(0).integers(0, model.get_input_embeddings().weight.shape[0], 24).tolist()
    prompt, one, two = tokens[:12], tokens[12:20], tokens[20:]
    with evaluation_mode(model), in_float32(model):
        with tree_attention(model):
            shared = _probed(model, prompt, [one, two], "shared", device)
        with attention_implementation(model, "eager"):  # which leaves nothing out, soft-capping included
            padded = _probed(model, prompt, [one, two], "padded", device)
            leaking = _probed(model, prompt + one, [two], "padded", device)
    effect = float((padded[len(one) :] - leaking).abs().max())
    return float((shared - padded).abs().max()), min(1e-3, 0.1 * effect + 2e-6)


@torch.no_grad()
def _probed(
    model: nn.Module, prompt: list[int], completions: list[list[int]], path: AttentionPath, device: torch.device
) -> Tensor:
    group = TrainingGroup(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(map(tuple, completions)),
        advantages_G=np.zeros(len(completions), np.float32),
        sampled_logps=tuple(np.zeros(len(ids), np.float32) for ids in completions),
    )
    [packed] = pack([group], tokens_per_pack=len(prompt) + sum(map(len, completions)), device=device)
    return token_logps(model, packed, temperature=1.0, path=path).logps_N


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within this context layers with weights in half precision compute in float32, so that rounding hides nothing.

    Only the layer that is computing has a float32 copy of its weights.
    """
    handles: list[Any] = []
    in_4_bits = [m for m in model.modules() if getattr(m, "compute_dtype", None) in HALF]  # of bitsandbytes
    for module in model.modules():
        if halves := [p for p in module.parameters(recurse=False) if p.dtype in HALF]:
            wide = _Wide(halves)
            handles.append(module.register_forward_pre_hook(wide.enter))
            handles.append(module.register_forward_hook(wide.leave, always_call=True))
    try:
        with replaced((layer, "compute_dtype", torch.float32) for layer in in_4_bits):
            yield
    finally:
        for handle in handles:
            handle.remove()


HALF = (torch.bfloat16, torch.float16)


class _Wide:
    """A layer's parameters, in float32 from its forward's beginning to its end."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def enter(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._halves = [p.data for p in self.parameters]
        for p in self.parameters:
            p.data = p.data.float()
        return tuple(x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in args)

    def leave(self, *_: Any) -> None:
        for p, half in zip(self.parameters, self._halves, strict=True):
            p.data = half
