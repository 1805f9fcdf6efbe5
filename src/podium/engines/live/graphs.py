"""Decoding steps of a fixed shape, captured once as a CUDA graph and replayed for every token.

A step of a small model starts more than a thousand kernels, which a GPU computes several times faster than the host can
start them one by one; a replay starts all of them at once. What changes from token to token is data on the device, and
what changes from look to look (who is running, how long they are) is copied there before its first step.

On a device without CUDA graphs the same step of a fixed shape is computed as it is, which is how it is tested.

Shape letters: as in `cache`; C = S M cells, one for each row that a prompt's slot has room for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from podium.engines.live.cache import Cache, Decode, Grid, Lanes
from podium.models.devices import MIB, put
from podium.models.forward import logits_of, unwrap
from podium.models.head import WideHead, replaced_head

FEWEST_ROWS = 4
"""Rows of the smallest shape; shapes grow by factors of two, so that few of them are captured."""

KEPT_BYTES, CAST_BYTES = 256 * MIB, 2048 * MIB
"""Largest key/value cache and trained float32 weights for which a session's captured step is kept for the next session:
the cache stays in memory, and every replay converts the weights, which are trained in between."""

SHRINK, FEWEST_TOKENS = 4, 64
"""A shape is left for a smaller one when so many times its rows would fit in, and so many tokens may still come."""

FEWEST_STEPS = 4
"""Steps from which a capture pays at once: it takes as long as two or three of them."""


class GraphShape(NamedTuple):
    """The sizes of a step."""

    rows: int
    slots: int
    per_slot: int
    """Most rows of one prompt."""
    prompt: int
    """Most tokens of a prompt."""
    own: int
    """Most tokens of a row's own."""

    def holds(self, other: GraphShape) -> bool:
        """Whether all that fits into the other fits into this."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class FixedDecode(Decode):
    """A decoding step whose shapes do not depend on who is running: what is missing is masked.

    Unused rows write to the cache's last lane, which is never read, and their logits are ignored.
    """

    def __init__(self, cache: Cache, shape: GraphShape, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.shape = shape
        self.prompt_length = shape.prompt
        self.own_length = shape.own
        self.longest = shape.prompt + shape.own - 1
        self.lockstep = None
        self.ragged = True
        self.grid: FixedGrid = FixedGrid(shape.rows, shape.slots, shape.per_slot, device)
        self.ids_R, self.own_R, self.prompt_R, self.shift_R, self.places_R = (
            torch.zeros(shape.rows, dtype=torch.long, device=device) for _ in range(5)
        )

    def begin(self) -> None:
        """Make what a step computes once for all layers; part of what is captured."""
        self.positions_1R = (self.prompt_R + self.own_R)[None]
        self.rotary_1R = self.positions_1R + self.shift_R
        self.masks = {}
        self._layers = itertools.count()

    def load(
        self, ids_R: Tensor, slots_R: np.ndarray, own_R: np.ndarray, prompt_R: np.ndarray, shift_R: np.ndarray | None
    ) -> None:
        """Copy the running rows' tokens, lengths, shifts (see `Decode`) and places to the device."""
        rows = len(slots_R)
        unused = len(self.ids_R) - len(slots_R)
        places_R = np.append(np.arange(rows), np.full(unused, self.cache.max_rows - 1))
        self.ids_R[:rows].copy_(ids_R)
        shift_R = np.zeros(rows, np.int64) if shift_R is None else shift_R
        for fixed, values in ((self.own_R, own_R), (self.prompt_R, prompt_R), (self.shift_R, shift_R)):
            fixed.copy_(put(np.append(values, np.zeros(unused, np.int64)), self.device))
        self.places_R.copy_(put(places_R, self.device))
        self.grid.load(slots_R)


class FixedGrid(Grid):
    """A grid with a fixed number of cells, filled and read by indices on the device."""

    def __init__(self, rows: int, slots: int, per_slot: int, device: torch.device) -> None:
        self.slots = slots
        self.rows_per_slot = per_slot
        self.device = device
        self.row_C = torch.zeros(slots * per_slot, dtype=torch.long, device=device)
        self.cell_R = torch.zeros(rows, dtype=torch.long, device=device)

    def load(self, slots_R: np.ndarray) -> None:
        """Give every running row a cell of its slot."""
        order = np.argsort(slots_R, kind="stable")
        place_R = np.argsort(order) - np.searchsorted(slots_R[order], slots_R)
        cell_R = np.zeros(len(self.cell_R), np.int64)
        row_C = np.zeros(len(self.row_C), np.int64)
        cell_R[: len(slots_R)] = slots_R * self.rows_per_slot + place_R
        row_C[cell_R[: len(slots_R)]] = np.arange(len(slots_R))
        self.cell_R.copy_(put(cell_R, self.device))
        self.row_C.copy_(put(row_C, self.device))

    def of(self, x_RJQE: Tensor) -> Tensor:
        """[R, J, Q, E] -> [S * J, M * Q, E]."""
        grid_SMJQE = x_RJQE[self.row_C].unflatten(0, (self.slots, self.rows_per_slot))
        return grid_SMJQE.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def rows(self, x_GPE: Tensor) -> Tensor:
        """The inverse: [S * J, M * Q, E] -> [R, J, Q, E]."""
        grid_SJMQE = x_GPE.unflatten(1, (self.rows_per_slot, -1)).unflatten(0, (self.slots, -1))
        return grid_SJMQE.transpose(1, 2).flatten(0, 1)[self.cell_R]


def is_divided(model: nn.Module) -> bool:
    """Whether the model's parameters are spread over processes, which gather them for every forward."""
    by_deepspeed = any(hasattr(p, "ds_id") for p in model.parameters())
    return by_deepspeed or any(isinstance(module, FSDPModule) for module in model.modules())


class Graphs:
    """What an engine keeps of its captures from one session to the next.

    The last graph holds the memory that all of them share, as only one is replayed. A model whose step cannot be
    captured (one that looks at its own results on the host, say) is decoded without, from then on.
    """

    def __init__(self, *, own_logits: bool = False) -> None:
        self.own_logits = own_logits
        self.last: torch.cuda.CUDAGraph | None = None
        self.refused: str | None = None
        """Why the model's step could not be captured."""
        self._side: torch.cuda.Stream | None = None
        self._kept: FixedSteps | None = None

    def steps(self, model: nn.Module, max_rows: int, max_tokens: int, device: torch.device) -> FixedSteps | None:
        """The steps of a new session: those that were kept if they are of its size, and the weights where they were."""
        if self.refused is not None:
            return None
        kept = self._kept
        self._kept = None
        if kept is not None and kept.suits(model, max_rows, max_tokens):
            kept.begin()
            return kept
        # With a lane that rows of no one write to.
        return FixedSteps(self, model, Cache(max_rows + 1, max_tokens), device)

    def keep(self, steps: FixedSteps) -> None:
        """Keep a session's steps for the next one, where that takes little memory."""
        self._kept = steps if steps.lasts and steps.cache.nbytes <= KEPT_BYTES else None

    def capture(self, step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], object], Tensor]:
        """The replay of a step that has run once, and the tensor that it writes its result to."""
        if device.type != "cuda":
            result = step()
            return lambda: result.copy_(step()), result
        graph = torch.cuda.CUDAGraph()
        pool = None if self.last is None else self.last.pool()
        self._side = self._side or torch.cuda.Stream()  # the same one always: memory is reused within a stream
        before = torch.cuda.current_stream()
        self._side.wait_stream(before)
        with torch.cuda.stream(self._side):
            # Other threads may go on allocating meanwhile: one that trains, beside one that samples.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = step()
            finally:
                graph.capture_end()
        before.wait_stream(self._side)
        self.last = graph
        return graph.replay, result


class FixedSteps:
    """The decoding steps of a session: shapes are chosen, captured and left as rows come and go."""

    def __init__(self, graphs: Graphs, model: nn.Module, cache: Cache, device: torch.device) -> None:
        self.graphs = graphs
        self.model = model
        self.cache = cache
        self.device = device
        self.decode: FixedDecode | None = None
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.dtype == torch.float32)
        self.lasts = trained <= CAST_BYTES
        """Whether what is captured holds no copy of a weight, so that it may be replayed after the weights changed."""
        self._addresses = addresses(model)
        self._first = True
        self._lanes: list[tuple[Lanes, Tensor]] = []
        """Those that were captured, with the tensors that were in them."""

    def suits(self, model: nn.Module, max_rows: int, max_tokens: int) -> bool:
        """Whether a session of this size may go on with these steps."""
        same = model is self.model and addresses(model) == self._addresses
        return same and (max_rows + 1, max_tokens) == (self.cache.max_rows, self.cache.max_tokens)

    def begin(self) -> None:
        """Begin another session."""
        self._first = True

    def load(
        self,
        ids_R: Tensor,
        slots_R: np.ndarray,
        own_R: np.ndarray,
        prompts_S: Sequence[int],
        shift_R: np.ndarray | None,
        steps: int,
        to_come: int,
    ) -> bool:
        """Prepare so many steps of these rows, of which one may have `to_come`; False: decode them otherwise."""
        if self.graphs.refused is not None:
            return False
        given = ids_R, slots_R, own_R, np.array(prompts_S)[slots_R], shift_R
        needed = self._shape(slots_R, prompts_S, int(own_R.max()) + steps)
        if not self._serves(needed, to_come):
            if to_come < FEWEST_STEPS:
                return False
            self.decode = FixedDecode(self.cache, needed, self.device)
            self.decode.load(*given)
            self._step()  # makes room in the cache, chooses kernels; what it stores is stored again
            self.decode.load(*given)
            self._lanes = [(lanes, lanes.keys[0]) for lanes in (self.cache.prompts, self.cache.own)]
            try:
                self._replay, self._logits_RV = self.graphs.capture(self._step, self.device)
            except RuntimeError as error:
                self.graphs.refused = str(error).splitlines()[0]
                self.decode = None
                return False
        self._first = False
        self.decode.load(*given)
        return True

    def run(self, ids_R: Tensor | None) -> Tensor:
        """Logits [R, V] of all rows after one more token; `ids_R`: the tokens just drawn, None for the first step."""
        assert self.decode is not None
        if ids_R is not None:
            self.decode.ids_R[: len(ids_R)].copy_(ids_R)
        self._replay()
        return self._logits_RV

    def _shape(self, slots_R: np.ndarray, prompts_S: Sequence[int], own_tokens: int) -> GraphShape:
        rows = max(FEWEST_ROWS, 1 << (len(slots_R) - 1).bit_length())
        return GraphShape(
            rows=min(rows, self.cache.max_rows),
            slots=len(prompts_S),
            per_slot=int(np.bincount(slots_R).max()),
            prompt=self.cache.prompt_room(max(prompts_S), self.device),
            own=self.cache.room(own_tokens, self.device),
        )

    def _serves(self, needed: GraphShape, to_come: int) -> bool:
        """Whether what has been captured computes the shape that is needed, and is not much too large for it.

        At first it must be that very shape: so what is sampled does not depend on earlier sessions.
        """
        moved = any(lanes.keys.get(0) is not kept for lanes, kept in self._lanes)
        if self.decode is None or moved:
            return False
        if self._first:
            return self.decode.shape == needed
        small = to_come >= FEWEST_TOKENS and self.decode.shape.rows >= SHRINK * needed.rows
        return self.decode.shape.holds(needed) and not small

    def _step(self) -> Tensor:
        assert self.decode is not None
        self.decode.begin()
        with self._renewed():
            logits_RV = logits_of(self.model, self.decode.ids_R, self.decode.rotary_1R, self.decode)
        self.decode.own_R.add_(1)
        return logits_RV

    @contextlib.contextmanager
    def _renewed(self) -> Iterator[None]:
        """Within this context weights are rounded where they are used, if what is captured is to last."""
        kind = self.device.type
        if not self.lasts or not torch.is_autocast_enabled(kind):
            yield
            return
        rounded = torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)
        own = contextlib.nullcontext() if self.graphs.own_logits else replaced_head(unwrap(self.model), WideHead())
        with rounded, own:
            yield


def addresses(model: nn.Module) -> list[int]:
    """Addresses of the model's parameters and buffers, from which a graph reads them."""
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
