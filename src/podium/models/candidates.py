"""The tokens that filters had left where a token was drawn, over which its log-probability is normalized in training.

With `top_p`, `top_k` or `min_p` a token is drawn from a part of the vocabulary. Normalized over all of it, the same
weights give another log-probability than the sampler's, so the first step of a round would have a ratio other than 1.
Training therefore takes the sampler's own set, as DeepSeek-V3.2 does (arXiv:2512.02556, section 3.1, "Keep Sampling
Mask").

The candidates of one token are a numpy array: int32 ids in increasing order; where they are more than a 32nd of the
vocabulary, one bit a token (uint8, of `numpy.packbits`); an empty array stands for all tokens.

Shape letters: R rows of logits, V vocabulary, B bytes of V bits, N trained tokens, X candidates of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.models.devices import put

ALL = np.empty(0, np.int32)
"""The candidates of a token that was drawn from the whole vocabulary."""
_BIT_OF_BYTE = (128, 64, 32, 16, 8, 4, 2, 1)


def packed_bits(kept_RV: Tensor) -> Tensor:
    """Whether each token was kept, as bits [R, B] in the order of `numpy.packbits`."""
    padded = torch.nn.functional.pad(kept_RV, (0, -kept_RV.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = torch.tensor(_BIT_OF_BYTE, dtype=torch.uint8, device=kept_RV.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def of_bits(bits_B: np.ndarray) -> np.ndarray:
    """The candidates of one token from its bits, of which none is set where all could be drawn.

    >>> of_bits(np.packbits(np.arange(640) == 7)), of_bits(np.zeros(80, np.uint8)).size
    (array([7], dtype=int32), 0)
    """
    ids = np.flatnonzero(np.unpackbits(bits_B)).astype(np.int32)
    return ids if ids.nbytes <= bits_B.nbytes else bits_B.copy()


def ids_of(candidates: np.ndarray) -> np.ndarray:
    """The ids of one token's candidates, in increasing order."""
    return np.flatnonzero(np.unpackbits(candidates)) if candidates.dtype == np.uint8 else candidates


def num_candidates(candidates: np.ndarray, vocabulary: int) -> int:
    """How many they are; `vocabulary` where all tokens could be drawn."""
    if candidates.dtype == np.uint8:
        return int(np.unpackbits(candidates).sum())
    return len(candidates) or vocabulary


def of_completion(candidates: Sequence[np.ndarray], num_drawn: int) -> tuple[np.ndarray, ...] | None:
    """The candidates of a whole completion; None where those of a token are not known, or no filter was set."""
    known = len(candidates) == num_drawn and any(len(of_token) for of_token in candidates)
    return tuple(candidates) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates of a pack's trained tokens, one after the other in the order of the rows that predict them."""

    ids_X: Tensor
    row_X: Tensor
    """The row of logits that each belongs to."""
    token_X: Tensor
    """The trained token whose candidate each is."""
    first: np.ndarray
    """First candidate of each token in the order of the rows, and X; known on the host."""

    @classmethod
    def of(
        cls, candidates_N: Sequence[np.ndarray], row_N: np.ndarray, order_N: np.ndarray, device: torch.device
    ) -> Candidates:
        """Candidates of tokens that are predicted by rows `row_N`; `order_N` are the tokens by their rows."""
        in_order = [ids_of(candidates_N[n]) if n < len(candidates_N) else ALL for n in order_N]
        counts = np.array([len(ids) for ids in in_order])
        return cls(
            ids_X=put(np.concatenate(in_order).astype(np.int64), device),
            row_X=put(np.repeat(row_N[order_N], counts), device),
            token_X=put(np.repeat(order_N, counts), device),
            first=np.concatenate([[0], np.cumsum(counts)]),
        )

    def between(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, rows and tokens of the candidates of tokens `first` to `end - 1` in the order of the rows."""
        part = slice(self.first[first], self.first[end])
        return self.ids_X[part], self.row_X[part], self.token_X[part]


def log_totals(logits_X: Tensor, token_X: Tensor, num_tokens: int) -> Tensor:
    """log sum exp of each token's candidates [N]; -inf for a token that has none. Differentiable."""
    shape = logits_X.new_full((num_tokens,), -torch.inf)
    top_N = shape.scatter_reduce(0, token_X, logits_X.detach(), "amax")
    mass_X = (logits_X - top_N[token_X]).exp()
    return top_N + torch.zeros_like(top_N).index_add(0, token_X, mass_X).log()
