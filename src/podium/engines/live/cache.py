"""Keys and values of the running rows, and attention over them.

Each prompt's keys are kept once and shared by its rows; a row's own keys stand in its own lane. `Prefill`, `Decode`
and `Extend` are what a model's attention layers call (`models.attention.Attends`).

Shape letters: S prompt slots, M rows of the fullest slot, R rows, H heads, J key/value heads, Q = H / J queries a
key/value head, X prompt tokens, Y own tokens, K = X + Y keys, D width of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.models.attention import LayerShape, TreeAttention, additive, attention_dtype, without_autocast
from podium.models.devices import kind_of, put
from podium.models.precision import wide_product
from podium.models.prefix_tree import Layout
from podium.models.recurrence import FollowingRows, PromptRows, States, TokenOrder

_LANE_STEP = 32
"""Lanes grow by so many tokens, up to `max_tokens`, so that short completions do not pay for all of those."""

_LANE_FACTOR = 2
"""On a GPU lanes grow by this factor: every growth copies all of them, and leaves a hole of a size that the allocator
is never asked for again."""


@dataclass(slots=True)
class Lanes:
    """One growing tensor pair of keys and values [rows, J, tokens, D] per layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def ensure(self, layer: int, like: Tensor, rows: int, tokens: int) -> None:
        """Room for `rows` rows of `tokens` tokens; `like` [T, J, D] gives heads, width, type and device."""
        for store in (self.keys, self.values):
            old = store.get(layer)
            if old is not None and old.shape[0] >= rows and old.shape[2] >= tokens:
                continue
            have_rows, have_tokens = (0, 0) if old is None else (old.shape[0], old.shape[2])
            shape = (max(rows, have_rows), like.shape[1], max(tokens, have_tokens), like.shape[2])
            new = like.new_zeros(shape)
            if old is not None:
                new[:have_rows, :, :have_tokens] = old
            store[layer] = new

    def first(self, layer: int, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows and tokens, rows and heads joined: views [rows * J, tokens, D]."""
        keys = self.keys[layer]
        values = self.values[layer]
        return keys[:rows, :, :tokens].flatten(0, 1), values[:rows, :, :tokens].flatten(0, 1)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole rows, source -> target."""
        if not self.keys:  # of a model whose layers have states
            return
        for layer, keys in list(self.keys.items()):
            self.ensure(layer, keys[0].transpose(0, 1), 1 + max(target for _, target in moves), keys.shape[2])
        device = next(iter(self.keys.values())).device
        source, target = (put(np.array(side), device) for side in zip(*moves, strict=True))
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target] = tensor[source]


class Cache:
    """Everything the running rows have computed so far."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        """`max_tokens`: the most that a completion is expected to have; that of a program may have more."""
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.prompts = Lanes()
        self.own = Lanes()
        self.states = States(max_rows)
        """Recurrent states of the rows after all of their tokens, of layers that have no keys and values."""

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        stores = (self.prompts.keys, self.prompts.values, self.own.keys, self.own.values)
        return sum(tensor.nbytes for store in stores for tensor in store.values())

    def prompt_room(self, tokens: int, device: torch.device) -> int:
        """Tokens to make room for in the lanes of prompts, of which the longest has `tokens`."""
        return tokens if kind_of(device).host_memory else -(-tokens // _LANE_STEP) * _LANE_STEP

    def room(self, tokens: int, device: torch.device) -> int:
        """Tokens to make room for in the own lanes, where `tokens` are needed."""
        size = -(-tokens // _LANE_STEP) * _LANE_STEP if kind_of(device).host_memory else _LANE_STEP
        while size < tokens:
            size *= _LANE_FACTOR
        return size if tokens > self.max_tokens else min(size, self.max_tokens)

    def move(self, rows: Sequence[tuple[int, int]], slots: Sequence[tuple[int, int]]) -> None:
        """Follow the schedule's moves."""
        if rows:
            self.own.move(rows)
            self.states.move(rows)
        if slots:
            self.prompts.move(slots)


class Prefill:
    """Attention of new prompts over themselves, as a prefix tree; the keys and values of each go to its slot."""

    def __init__(self, cache: Cache, layout: Layout, first_slot: int, first_row: int, device: torch.device) -> None:
        """`first_slot`, `first_row`: places of the first of the new prompts, and of the first row behind them."""
        self.cache = cache
        self.first_slot = first_slot
        self.first_row = first_row
        self.room = cache.prompt_room(max(map(len, layout.paths)), device)
        self.paths = [put(path, device) for path in layout.paths]
        self.tree = TreeAttention(layout, device)
        self._layers = itertools.count()

    @cached_property
    def rows(self) -> TokenOrder:
        """See `models.attention.Attends`."""
        return PromptRows(self.tree.layout.paths, self.tree.device, self.cache.states, self.first_row)

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        """Attention output [T, H, D]; see `models.attention.Attends`."""
        dtype = attention_dtype(query_HTD)
        key_TJD = key_JTD.transpose(0, 1).to(dtype)
        value_TJD = value_JTD.transpose(0, 1).to(dtype)
        lanes = self.cache.prompts
        layer = next(self._layers)
        lanes.ensure(layer, key_TJD, self.first_slot + len(self.paths), self.room)
        for lane, new_TJD in ((lanes.keys[layer], key_TJD), (lanes.values[layer], value_TJD)):
            for slot, path_X in enumerate(self.paths, self.first_slot):
                lane[slot, :, : len(path_X)] = new_TJD[path_X].transpose(0, 1)
        return self.tree.attend(query_HTD, key_JTD, value_JTD, shape)


class Decode:
    """Attention of one new token a row over its prompt and its own earlier tokens."""

    def __init__(
        self,
        cache: Cache,
        slots_R: np.ndarray,
        own_R: np.ndarray,
        prompt_lengths_S: Sequence[int],
        device: torch.device,
        shift_R: np.ndarray | None = None,
    ) -> None:
        """`own_R`: tokens of its own that row r has in the cache already, before this one; `shift_R`: what is added to
        their number for the model's positions, None: nothing."""
        self.cache = cache
        self.device = device
        self.own_length = int(own_R.max()) + 1
        self.lockstep = int(own_R[0]) if (own_R == own_R[0]).all() else None
        prompt_R = np.array(prompt_lengths_S)[slots_R]
        self.own_R = put(own_R, device)
        self.prompt_R = put(prompt_R, device)
        self.positions_1R = (self.prompt_R + self.own_R)[None]
        self.rotary_1R = self.positions_1R if shift_R is None else self.positions_1R + put(shift_R, device)
        self.places_R = torch.arange(len(slots_R), device=device)
        self.prompt_length = max(prompt_lengths_S)
        self.longest = int((prompt_R + own_R).max())
        self.ragged = bool((prompt_R < self.prompt_length).any() or (own_R < self.own_length - 1).any())
        self.grid = Grid(slots_R, len(prompt_lengths_S), device)
        self.masks: dict[Any, Tensor | None] = {}
        self._layers = itertools.count()

    @cached_property
    def rows(self) -> TokenOrder:
        """See `models.attention.Attends`."""
        return FollowingRows(self.cache.states, 0, np.ones(len(self.own_R), np.int64), self.device)

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        """Attention output [R, H, D]: scores against the prompt, slot by slot, and the own lane; one softmax."""
        dtype = attention_dtype(query_HTD)
        with without_autocast(query_HTD.device.type):
            query_RHD, key_RJD, value_RJD = (x.transpose(0, 1).to(dtype) for x in (query_HTD, key_JTD, value_JTD))
            layer = next(self._layers)
            rows, heads, width = query_RHD.shape
            own = self.cache.own
            own.ensure(layer, key_RJD, self.cache.max_rows, self.cache.room(self.own_length, self.device))
            for store, new in ((own.keys[layer], key_RJD), (own.values[layer], value_RJD)):
                if self.lockstep is None:
                    store[self.places_R, :, self.own_R] = new
                else:
                    store[:rows, :, self.lockstep] = new
            own_keys, own_values = own.first(layer, rows, self.own_length)
            prompt_keys, prompt_values = self.cache.prompts.first(layer, self.grid.slots, self.prompt_length)
            query_RJQD = (query_RHD * shape.scaling).view(rows, key_RJD.shape[1], -1, width)
            keys = self.prompt_length + self.own_length
            scores_RJQK = query_RJQD.new_empty(*query_RJQD.shape[:3], keys, dtype=torch.float32)
            on_prompt, on_own = scores_RJQK.split([self.prompt_length, self.own_length], dim=-1)
            on_prompt.copy_(self.grid.rows(wide_product(self.grid.of(query_RJQD), prompt_keys.transpose(1, 2))))
            on_own.copy_(wide_product(query_RJQD.flatten(0, 1), own_keys.transpose(1, 2)).view(on_own.shape))
            if shape.limits not in self.masks:
                self.masks[shape.limits] = self._mask(shape)
            weights_RJQK = shape.softmax(scores_RJQK, self.masks[shape.limits]).to(dtype)
            on_prompt, on_own = weights_RJQK.split([self.prompt_length, self.own_length], dim=-1)
            of_prompt = self.grid.rows(torch.bmm(self.grid.of(on_prompt), prompt_values))
            of_own = torch.bmm(on_own.flatten(0, 1), own_values).view(query_RJQD.shape)
            return (of_prompt + of_own).reshape(rows, heads, width).to(query_HTD.dtype)

    def _mask(self, shape: LayerShape) -> Tensor | None:
        """0 or minus infinity [R, 1, 1, X + Y], or None where every row sees everything."""
        if not self.ragged and not shape.hides(self.longest + 1):
            return None
        own = torch.arange(self.own_length, device=self.device)[None]
        prompt = torch.arange(self.prompt_length, device=self.device)[None]
        seen = torch.cat([prompt < self.prompt_R[:, None], own <= self.own_R[:, None]], dim=1)
        if shape.hides(self.longest + 1):
            now = self.positions_1R.T
            seen &= shape.sees(now, torch.cat([prompt.expand(len(now), -1), self.prompt_R[:, None] + own], dim=1))
        return additive(seen)[:, None, None]


SCORES_AT_ONCE = 1 << 25
"""Attention scores of one product of `Extend`: 128 MiB in float32."""


class Extend:
    """Attention of several new tokens a row over its prompt, its own earlier tokens, and causally over themselves.

    Shape letters: A rows that go on, L new tokens of the longest of them, T new tokens of all.
    """

    def __init__(
        self,
        cache: Cache,
        first: int,
        slots_A: np.ndarray,
        own_A: np.ndarray,
        lengths_A: np.ndarray,
        prompt_lengths_S: Sequence[int],
        device: torch.device,
        shift_A: np.ndarray | None = None,
    ) -> None:
        """`first`: place of the first of them in the own lanes; `own_A`: tokens in the cache; `lengths_A`: new ones;
        `shift_A`: as in `Decode`."""
        self.cache = cache
        self.first = first
        self.device = device
        self.lengths_A = lengths_A
        prompt_A = np.array(prompt_lengths_S)[slots_A]
        self.own_length = int((own_A + lengths_A).max())
        self.prompt_length = int(prompt_A.max())
        self.stops = np.cumsum(lengths_A)
        starts_A = self.stops - lengths_A
        row_T = np.repeat(np.arange(len(slots_A)), lengths_A)
        column_T = np.arange(len(row_T)) - starts_A[row_T]
        token_AL = starts_A[:, None] + np.minimum(np.arange(lengths_A.max()), lengths_A[:, None] - 1)
        self.token_AL = put(token_AL, device)
        self.row_T = put(row_T, device)
        self.column_T = put(column_T, device)
        self.slots_A = put(slots_A, device)
        self.prompt_A = put(prompt_A, device)
        self.own_A = put(own_A, device)
        self.lane_T = put(first + row_T, device)
        self.own_T = put(own_A[row_T] + column_T, device)
        self.positions_1T = put(prompt_A[row_T] + own_A[row_T] + column_T, device)[None]
        self.rotary_1T = self.positions_1T if shift_A is None else self.positions_1T + put(shift_A[row_T], device)
        self.last_A = put(self.stops - 1, device)
        self.masks: dict[Any, Tensor] = {}
        self._layers = itertools.count()

    @cached_property
    def rows(self) -> TokenOrder:
        """See `models.attention.Attends`."""
        return FollowingRows(self.cache.states, self.first, self.lengths_A, self.device)

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        """Attention output [T, H, D]; see `models.attention.Attends`."""
        dtype = attention_dtype(query_HTD)
        with without_autocast(query_HTD.device.type):
            query_THD, key_TJD, value_TJD = (x.transpose(0, 1).to(dtype) for x in (query_HTD, key_JTD, value_JTD))
            lanes = self.cache.own
            layer = next(self._layers)
            lanes.ensure(layer, key_TJD, self.cache.max_rows, self.cache.room(self.own_length, self.device))
            for store, new_TJD in ((lanes.keys, key_TJD), (lanes.values, value_TJD)):
                store[layer][self.lane_T, :, self.own_T] = new_TJD
            query_THD = query_THD * shape.scaling
            rows, new = self.token_AL.shape
            at_once = max(1, SCORES_AT_ONCE // (query_THD.shape[1] * new * (self.prompt_length + self.own_length)))
            parts = [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
            return torch.cat([self._part(query_THD, part, layer, shape) for part in parts]).to(query_HTD.dtype)

    def _part(self, query_THD: Tensor, part: slice, layer: int, shape: LayerShape) -> Tensor:
        """Attention output of some of the rows, flat as their tokens are."""
        key_AJKD, value_AJKD = self._stored(part, layer)
        query_AHLD = query_THD[self.token_AL[part]].transpose(1, 2)
        query_GPD = query_AHLD.unflatten(1, (key_AJKD.shape[1], -1)).flatten(2, 3).flatten(0, 1)
        scores_GPK = wide_product(query_GPD, key_AJKD.flatten(0, 1).transpose(1, 2)).float()
        key = part.start, shape.limits
        if key not in self.masks:
            self.masks[key] = self._mask(part, shape)
        scores_AHLK = scores_GPK.view(*query_AHLD.shape[:3], -1)
        weights_AHLK = shape.softmax(scores_AHLK, self.masks[key]).to(value_AJKD.dtype)
        output_GPD = torch.bmm(weights_AHLK.view(scores_GPK.shape), value_AJKD.flatten(0, 1))
        tokens = slice(int(self.stops[part.start - 1]) if part.start else 0, int(self.stops[part.stop - 1]))
        return output_GPD.view(query_AHLD.shape)[self.row_T[tokens] - part.start, :, self.column_T[tokens]]

    def _stored(self, part: slice, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some of the rows: prompt, then own [A, J, X + Y, D]."""
        prompts = self.cache.prompts
        own = self.cache.own
        slots_A = self.slots_A[part]
        lanes = slice(self.first + part.start, self.first + part.stop)
        keys, values = (
            torch.cat([of_slots[slots_A, :, : self.prompt_length], of_rows[lanes, :, : self.own_length]], dim=2)
            for of_slots, of_rows in (
                (prompts.keys[layer], own.keys[layer]),
                (prompts.values[layer], own.values[layer]),
            )
        )
        return keys, values

    def _mask(self, part: slice, shape: LayerShape) -> Tensor:
        """0 or minus infinity [A, 1, L, X + Y]."""
        prompt_A1 = self.prompt_A[part, None]
        own_A1 = self.own_A[part, None]
        prompt_AX = torch.arange(self.prompt_length, device=self.device).expand(len(prompt_A1), -1)
        own_AY = prompt_A1 + torch.arange(self.own_length, device=self.device)
        now_AL = prompt_A1 + own_A1 + torch.arange(self.token_AL.shape[1], device=self.device)
        then_A1K = torch.cat([prompt_AX, own_AY], dim=1)[:, None]
        seen_ALK = then_A1K <= now_AL[:, :, None]
        seen_ALK[:, :, : self.prompt_length] &= (prompt_AX < prompt_A1)[:, None]
        if shape.limits != (None, None):
            seen_ALK &= shape.sees(now_AL[:, :, None], then_A1K)
        return additive(seen_ALK)[:, None]


class Grid:
    """The rows of a slot side by side, so that a prompt is read once for all of them."""

    def __init__(self, slots_R: np.ndarray, slots: int, device: torch.device) -> None:
        order = np.argsort(slots_R, kind="stable")
        counts = np.bincount(slots_R, minlength=slots)
        first = np.cumsum(counts) - counts
        place_R = np.empty(len(slots_R), np.int64)
        place_R[order] = np.arange(len(slots_R)) - first[slots_R[order]]
        self.slots = slots
        self.rows_per_slot = int(counts.max())
        self.dense = len(slots_R) == slots * self.rows_per_slot and bool((order == np.arange(len(order))).all())
        self.slot_R = put(slots_R, device)
        self.place_R = put(place_R, device)

    def of(self, x_RJQE: Tensor) -> Tensor:
        """[R, J, Q, E] -> [S * J, M * Q, E]."""
        _, j, q, e = x_RJQE.shape
        if self.dense:
            grid_SJMQE = x_RJQE.view(self.slots, self.rows_per_slot, j, q, e).transpose(1, 2)
        else:
            grid_SJMQE = x_RJQE.new_zeros(self.slots, j, self.rows_per_slot, q, e)
            grid_SJMQE[self.slot_R, :, self.place_R] = x_RJQE
        return grid_SJMQE.reshape(self.slots * j, -1, e)

    def rows(self, x_GPE: Tensor) -> Tensor:
        """The inverse: [S * J, M * Q, E] -> [R, J, Q, E]."""
        queries = x_GPE.shape[1] // self.rows_per_slot
        grid_SJMQE = x_GPE.view(self.slots, -1, self.rows_per_slot, queries, x_GPE.shape[2])
        return grid_SJMQE.transpose(1, 2).flatten(0, 1) if self.dense else grid_SJMQE[self.slot_R, :, self.place_R]
