"""Log-probabilities and gradients computed plainly: one sample, one forward, the model's own logits.

No shared prefix, no packing, no chunked head, no rounded products, no cache. Everything faster is compared with this.

Shape letters: T tokens of a sample, A those that were drawn, N those of all samples, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from podium.models.attention import attention_implementation
from podium.models.forward import TokenLogps, base_model
from podium.models.modes import evaluation_mode
from podium.records import Sample


def action_places(sample: Sample) -> np.ndarray:
    """Indices of the drawn tokens among those behind the prompt [A]."""
    return np.flatnonzero(sample.actions)


def turns_of(sample: Sample) -> np.ndarray:
    """The turn of each drawn token [A], from 0: turns are apart by given tokens."""
    places_A = action_places(sample)
    return np.cumsum(np.diff(places_A, prepend=places_A[:1]) > 1)


@contextlib.contextmanager
def reference_forward(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and eager attention, the one that applies everything, soft-capping included."""
    base = base_model(model)
    eager = getattr(base, "_supports_attention_backend", False)
    with evaluation_mode(model), attention_implementation(base, "eager") if eager else contextlib.nullcontext():
        yield


def sample_logps(model: nn.Module, sample: Sample, temperature: float) -> TokenLogps:
    """Log-probability and entropy [A] of a sample's drawn tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([sample.prompt_ids + sample.token_ids], device=device)
    logits_TV = model(input_ids=ids, use_cache=False).logits[0].float()
    places_A = torch.from_numpy(action_places(sample)).to(device) + len(sample.prompt_ids)
    logp_AV = (logits_TV[places_A - 1] / temperature).log_softmax(-1)
    targets = ids[0, places_A, None]
    p_AV = logp_AV.exp()
    return TokenLogps(
        logps_N=logp_AV.gather(1, targets)[:, 0], entropy_N=-torch.where(p_AV > 0, p_AV * logp_AV, 0.0).sum(-1)
    )


@torch.no_grad()
def plain_logps(model: nn.Module, samples: Sequence[Sample], temperature: float) -> TokenLogps:
    """Log-probabilities and entropies of all samples, without gradients."""
    with reference_forward(model):
        outputs = [sample_logps(model, sample, temperature) for sample in samples]
    return TokenLogps(**{name: torch.cat([getattr(out, name) for out in outputs]) for name in ("logps_N", "entropy_N")})


def plain_backward(
    model: nn.Module,
    samples: Sequence[Sample],
    temperature: float,
    values: TokenLogps,
    loss_of: Callable[[TokenLogps], Tensor],
) -> float:
    """Add the gradients of `loss_of`, a sample at a time; gives the loss. `values` are `plain_logps`."""
    leaves = [x.clone().requires_grad_() for x in (values.logps_N, values.entropy_N)]
    loss = loss_of(TokenLogps(logps_N=leaves[0], entropy_N=leaves[1]))
    loss.backward()
    lengths = [int(sample.actions.sum()) for sample in samples]
    upstream = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    with reference_forward(model):
        for sample, of_logps, of_entropy in zip(samples, *(x.split(lengths) for x in upstream), strict=True):
            out = sample_logps(model, sample, temperature)
            ((out.logps_N * of_logps).sum() + (out.entropy_N * of_entropy).sum()).backward()
    return float(loss.detach())


def first_not_finite(model: nn.Module, forward: Callable[[], object]) -> str:
    """The name of the first layer whose output has a NaN or an infinity while `forward` runs; empty: none."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules() if name}

    def look(module: nn.Module, _args: object, output: object) -> None:
        outputs = output if isinstance(output, (tuple, list)) else [output]
        tensors = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
        if not found and any(not bool(x.isfinite().all()) for x in tensors):
            found.append(names[module])

    handles = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""
