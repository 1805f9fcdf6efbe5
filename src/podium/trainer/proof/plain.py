"""Log-probabilities and gradients computed plainly: one row, one forward, the model's own logits.

No shared prefix, no packing, no chunked head, no rounded products, no cache. Everything faster is compared with this.

Shape letters: T tokens of a row, C drawn tokens of a completion, N those of all completions, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor, nn

from podium.models.attention import attention_implementation
from podium.models.forward import TokenLogps, base_model
from podium.models.modes import evaluation_mode
from podium.records import TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt with one completion."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    drawn: np.ndarray | None = None
    """Whether the policy drew each token of the completion; None: it drew all."""

    @property
    def places(self) -> np.ndarray:
        """Indices of the drawn tokens in the completion [C]."""
        return np.arange(len(self.completion_ids)) if self.drawn is None else np.flatnonzero(self.drawn)

    @property
    def turns(self) -> np.ndarray:
        """The turn of each drawn token [C], from 0: turns are apart by given tokens."""
        return np.cumsum(np.diff(self.places, prepend=self.places[:1]) > 1)


def rows_of(groups: Sequence[TrainingGroup]) -> list[Row]:
    """Rows in the order in which `packing` lays out trained tokens."""
    return [
        Row(prompt_ids=prompt_ids, completion_ids=ids, drawn=drawn)
        for group in groups
        for prompt_ids, ids, drawn in zip(
            group.prompts or repeat(group.prompt_ids), group.completion_ids, group.drawn or repeat(None), strict=False
        )
    ]


@contextlib.contextmanager
def reference_forward(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and eager attention, the one that applies everything, soft-capping included."""
    base = base_model(model)
    eager = getattr(base, "_supports_attention_backend", False)
    with evaluation_mode(model), attention_implementation(base, "eager") if eager else contextlib.nullcontext():
        yield


def row_logps(model: nn.Module, row: Row, temperature: float) -> TokenLogps:
    """Log-probability and entropy [C] of a completion's drawn tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([row.prompt_ids + row.completion_ids], device=device)
    logits_TV = model(input_ids=ids, use_cache=False).logits[0].float()
    places_C = torch.from_numpy(row.places).to(device) + len(row.prompt_ids)
    logp_CV = (logits_TV[places_C - 1] / temperature).log_softmax(-1)
    targets = ids[0, places_C, None]
    p_CV = logp_CV.exp()
    return TokenLogps(
        logps_N=logp_CV.gather(1, targets)[:, 0], entropy_N=-torch.where(p_CV > 0, p_CV * logp_CV, 0.0).sum(-1)
    )


@torch.no_grad()
def plain_logps(model: nn.Module, rows: Sequence[Row], temperature: float) -> TokenLogps:
    """Log-probabilities and entropies of all rows, without gradients."""
    with reference_forward(model):
        outputs = [row_logps(model, row, temperature) for row in rows]
    return TokenLogps(**{name: torch.cat([getattr(out, name) for out in outputs]) for name in ("logps_N", "entropy_N")})


def plain_backward(
    model: nn.Module,
    rows: Sequence[Row],
    temperature: float,
    values: TokenLogps,
    loss_of: Callable[[TokenLogps], Tensor],
) -> float:
    """Add the gradients of `loss_of`, a row at a time; gives the loss. `values` are `plain_logps`."""
    leaves = [x.clone().requires_grad_() for x in (values.logps_N, values.entropy_N)]
    loss = loss_of(TokenLogps(logps_N=leaves[0], entropy_N=leaves[1]))
    loss.backward()
    lengths = [len(row.places) for row in rows]
    upstream = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    with reference_forward(model):
        for row, of_logps, of_entropy in zip(rows, *(x.split(lengths) for x in upstream), strict=True):
            out = row_logps(model, row, temperature)
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
