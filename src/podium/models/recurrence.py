"""Layers that carry a state in place of keys and values, over the rows of a tree or of a batch.

Gated delta rule, Kimi's delta rule, Mamba-2 and short convolutions: such a layer knows the tokens before one through a
recurrent state and the last inputs of a convolution. transformers computes both with functions of the layer's own
module, or with fused kernels in their place, which take initial states. Inside `recurrent_layers` these functions get
the tokens of `podium`, an `Attends`, as rows. A row of a tree begins with the state of the row that it follows, so a
shared beginning is computed once and gradients flow back through it; when sampling, states are kept for the next step.

Shape letters: T tokens of a forward, B rows, L tokens of the longest row, C channels of a convolution.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from podium.models.devices import kind_of, put
from podium.models.modes import replaced
from podium.models.prefix_tree import Segment, prefix_tree

Step = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""From inputs [B, L, ...] and the states before them (None: none) to outputs [B, L, ...] and the states behind them."""


class TokenOrder(Protocol):
    """How the tokens of a forward follow each other."""

    def convolve(self, layer: int, x_TC: Tensor, before: int, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Outputs [T, C] of a causal convolution over a token and `before` earlier ones.

        `run` convolves rows [B, before + L, C].
        """
        ...

    def scan(self, layer: int, inputs_T: Sequence[Tensor], step: Step) -> Tensor:
        """Outputs [T, ...] of a recurrence. Rows are padded with zeros, which must leave a state as it is."""
        ...


@dataclass(slots=True)
class States:
    """States of the running rows of an engine, by layer and kind."""

    max_rows: int
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def write(self, key: tuple[int, str], first: int, values: Tensor) -> None:
        """Keep the states [B, ...] of rows `first` and on."""
        if key not in self.tensors:
            self.tensors[key] = values.new_zeros(self.max_rows, *values.shape[1:])
        self.tensors[key][first : first + len(values)] = values

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole rows, source -> target."""
        for tensor in self.tensors.values():
            source, target = (put(np.array(side), tensor.device) for side in zip(*moves, strict=True))
            tensor[target] = tensor[source]


# ---- rows of a tree ----


SHORTEST_ROW = 32
"""Tokens that sharing must save to be worth a level of its own: fewer are computed again in each row below."""

_CHUNK = 64
"""Tokens of a chunk of the delta rule: rows are padded to a multiple of it."""


@dataclass(slots=True)
class _Row:
    """A piece of one or several paths."""

    path: np.ndarray
    """Positions in T from the root of the tree to the last token of this row."""
    start: int
    """Index in `path` of its first token."""
    parent: int
    """Number of the row that it follows, in the level before."""
    ended: Sequence[int]
    """The paths that end with it."""
    children: Sequence[Segment]

    def __len__(self) -> int:
        return len(self.path) - self.start

    @property
    def size(self) -> int:
        """Rows of a size are computed together: their numbers of chunks have the same power of two."""
        return ((len(self) - 1) // _CHUNK).bit_length()


def _levels(paths: Sequence[np.ndarray]) -> list[list[list[_Row]]]:
    """Rows of all paths, by level and size."""
    levels = []
    found = [(prefix_tree(paths), 0, 0)]
    while found:
        rows = []
        for segment, start, parent in found:  # which grows
            ended = segment.ended
            row = _Row(paths[segment.rows[0]][: segment.stop], start, parent, ended, segment.children)
            ways = len(segment.children) + bool(ended)
            if not segment.children or (ways - 1) * len(row) >= SHORTEST_ROW:
                rows.append(row)
                continue
            found += [(child, start, parent) for child in segment.children]
            if ended:
                row.children = ()
                rows.append(row)
        groups = [[row for row in rows if row.size == size] for size in sorted({row.size for row in rows})]
        levels.append(groups)
        numbered = enumerate(row for group in groups for row in group)
        found = [(child, len(row.path), number) for number, row in numbered for child in row.children]
    return levels


class TreeRows:
    """`TokenOrder` of a prefix tree, level by level: the rows of a level follow those of the level before."""

    def __init__(self, paths: Sequence[np.ndarray], device: torch.device | str) -> None:
        """`paths`: positions in T of each text."""
        self.device = device
        self.levels = _levels(paths)
        self.num_tokens = 1 + max(int(path.max()) for path in paths)
        groups = [group for level in self.levels for group in level]
        self._parents = [
            [put(np.array([row.parent for row in group]), device) for group in level] for level in self.levels
        ]
        self._places: dict[int, list[list[Tensor]]] = {}
        self._output_T = put(_output_places(groups, self.num_tokens), device)

    def convolve(self, layer: int, x_TC: Tensor, before: int, run: Callable[[Tensor], Tensor]) -> Tensor:
        """See `TokenOrder`."""
        padded = with_zeros(x_TC)
        places = [place for level in self._places_behind(before) for place in level]
        return self._in_order([run(taken(padded, place_BL))[:, before:] for place_BL in places])

    def scan(self, layer: int, inputs_T: Sequence[Tensor], step: Step) -> Tensor:
        """See `TokenOrder`."""
        padded = [with_zeros(x) for x in inputs_T]
        outputs: list[Tensor] = []
        before: Tensor | None = None
        for i, (places, parents) in enumerate(zip(self._places_behind(0), self._parents, strict=True)):
            states = []
            for place_BL, parent_B in zip(places, parents, strict=True):
                initial = None if before is None else taken(before, parent_B)
                output, state = step([taken(x, place_BL) for x in padded], initial)
                outputs.append(output)
                states.append(state)
            before = torch.cat(states)
            self.behind(layer, i, before)
        return self._in_order(outputs)

    def behind(self, layer: int, level: int, states: Tensor) -> None:
        """Take note of the states behind the rows of a level."""

    def _places_behind(self, before: int) -> list[list[Tensor]]:
        """By level and group, positions [B, before + L] of the rows behind `before` others; T where there is none."""
        if before not in self._places:
            self._places[before] = [
                [put(_stacked(group, before, self.num_tokens), self.device) for group in level] for level in self.levels
            ]
        return self._places[before]

    def _in_order(self, outputs: Sequence[Tensor]) -> Tensor:
        return taken(torch.cat([x.flatten(0, 1) for x in outputs]), self._output_T)


class PromptRows(TreeRows):
    """Rows of prompts, whose last states become those of the rows that follow them."""

    def __init__(self, paths: Sequence[np.ndarray], device: torch.device | str, states: States, first_row: int) -> None:
        """`first_row`: place among the states of the first prompt."""
        super().__init__(paths, device)
        self.states = states
        self.first_row = first_row
        self.paths = paths

    def convolve(self, layer: int, x_TC: Tensor, before: int, run: Callable[[Tensor], Tensor]) -> Tensor:
        """See `TokenOrder`; the last inputs of every prompt are kept."""
        last = [np.concatenate([np.full(before, self.num_tokens), path])[len(path) :] for path in self.paths]
        self.states.write((layer, "inputs"), self.first_row, with_zeros(x_TC)[put(np.stack(last), self.device)])
        return super().convolve(layer, x_TC, before, run)

    def behind(self, layer: int, level: int, states: Tensor) -> None:
        """Keep the states behind the prompts that end in this level."""
        for number, row in enumerate(row for group in self.levels[level] for row in group):
            for path in row.ended:
                self.states.write((layer, "state"), self.first_row + path, states[number : number + 1])


def _stacked(rows: Sequence[_Row], before: int, nothing: int) -> np.ndarray:
    places = np.full((len(rows), before + max(map(len, rows))), nothing)
    for place, row in zip(places, rows, strict=True):
        behind = row.path[max(0, row.start - before) :]
        first = before - min(row.start, before)
        place[first : first + len(behind)] = behind
    return places


def _output_places(groups: Sequence[Sequence[_Row]], num_tokens: int) -> np.ndarray:
    """Index of each position's output [T] in the flattened outputs of all groups."""
    found = np.zeros(num_tokens, np.int64)
    offset = 0
    for rows in groups:
        length = max(map(len, rows))
        for row in rows:
            found[row.path[row.start :]] = offset + np.arange(len(row))
            offset += length
    return found


def taken(x_T: Tensor, places: Tensor) -> Tensor:
    """x[places] with a deterministic backward: on a CPU that of indexing sums in any order on several threads."""
    if not kind_of(x_T.device).host_memory:
        return x_T[places]
    return x_T.index_select(0, places.flatten()).unflatten(0, places.shape)


def with_zeros(x_T: Tensor) -> Tensor:
    """x with a row of zeros appended, to which the indices of padding point."""
    return torch.cat([x_T, x_T.new_zeros(1, *x_T.shape[1:])])


# ---- rows that go on ----


class FollowingRows:
    """`TokenOrder` of new tokens behind rows with kept states: one each in a decode step, several after an answer."""

    def __init__(self, states: States, first: int, lengths_B: np.ndarray, device: torch.device) -> None:
        """`first`: place among the states of the first row; `lengths_B`: new tokens."""
        self.states = states
        self.rows = slice(first, first + len(lengths_B))
        self.lengths_B = put(lengths_B, device)
        self.places: tuple[Tensor, Tensor] | None = None
        """Tokens [B, L] of the rows, and where the tokens' outputs stand among all [T]; None: one token a row."""
        if (longest := int(lengths_B.max())) > 1:
            column_BL = np.arange(longest)[None]
            stop_B = np.cumsum(lengths_B)
            token_BL = np.where(column_BL < lengths_B[:, None], (stop_B - lengths_B)[:, None] + column_BL, stop_B[-1])
            self.places = put(token_BL, device), put(np.flatnonzero(token_BL < stop_B[-1]), device)

    def convolve(self, layer: int, x_TC: Tensor, before: int, run: Callable[[Tensor], Tensor]) -> Tensor:
        """See `TokenOrder`; the last inputs of every row are kept."""
        key = layer, "inputs"
        behind = torch.cat([self.states.tensors[key][self.rows], self._in_rows(x_TC)], dim=1)
        if self.places is None:
            last = behind[:, 1:]
        else:
            last_BK = self.lengths_B[:, None] + torch.arange(before, device=behind.device)
            last = torch.take_along_dim(behind, last_BK[..., None], dim=1)
        self.states.write(key, self.rows.start, last)
        return self._in_order(run(behind)[:, before:])

    def scan(self, layer: int, inputs_T: Sequence[Tensor], step: Step) -> Tensor:
        """See `TokenOrder`; the states behind every row are kept."""
        key = layer, "state"
        output, state = step([self._in_rows(x) for x in inputs_T], self.states.tensors[key][self.rows])
        self.states.write(key, self.rows.start, state)
        return self._in_order(output)

    def _in_rows(self, x_T: Tensor) -> Tensor:
        return x_T[:, None] if self.places is None else with_zeros(x_T)[self.places[0]]

    def _in_order(self, x_BL: Tensor) -> Tensor:
        return x_BL[:, 0] if self.places is None else x_BL.flatten(0, 1)[self.places[1]]


# ---- transformers' layers ----


class _Call(NamedTuple):
    """A layer's forward that is going on in this thread."""

    layer: int
    rows: TokenOrder


_going_on = threading.local()


def _convolution(
    own: Callable[..., Any], call: _Call, x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any
) -> Tensor:
    """A depthwise causal convolution: x [1, C, T], weight [C, K]."""

    def run(x_BLC: Tensor) -> Tensor:
        return own(x_BLC.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

    return call.rows.convolve(call.layer, x[0].T, weight.shape[-1] - 1, run).T[None]


def _delta_rule(
    own: Callable[..., Any],
    call: _Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    single: Callable[..., Any],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv:2412.06464): all inputs [1, T, H, ...].

    With a decay g of 0 and a weight beta of 0 a token changes no state. `single` is its form for one token.
    """
    others = {name: x for name, x in kwargs.items() if name not in _OF_THE_CACHE}

    def step(inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value, g, beta = inputs
        rule = single if query.shape[1] == 1 and state is not None else own
        return rule(query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True, **others)

    inputs = [x[0] for x in (query, key, value, g, beta)]
    return call.rows.scan(call.layer, inputs, step)[None], None


_OF_THE_CACHE = ("podium", "initial_state", "output_final_state", "cu_seqlens")


def _mamba2(
    own: Callable[..., Any], call: _Call, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **of_layer: Any
) -> Tensor:
    """Mamba-2's scan (Dao and Gu, arXiv:2405.21060): x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N].

    A token whose time step is 0 changes no state, so time steps are computed before there is padding.
    """
    D = of_layer["D"]
    chunk_size = of_layer["chunk_size"]
    dt = F.softplus(dt + of_layer["dt_bias"].to(dt.dtype)).clamp(*of_layer["dt_limit"])

    def step(inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, B, C = inputs
        length = x.shape[1]
        if length == 1 and state is not None:
            return _mamba2_step(x, dt, A, B, C, D, state)
        most = min(chunk_size, _CHUNK) if kind_of(x.device).host_memory else chunk_size
        chunk = min(most, max(16, 1 << (length - 1).bit_length()))
        return own(x, dt, A, B, C, chunk_size=chunk, D=D, initial_states=state, return_final_states=True)

    return call.rows.scan(call.layer, [y[0] for y in (x, dt, B, C)], step)[None]


def _mamba2_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: h = exp(dt A) h + dt x B^T and y = h C + D x (arXiv:2405.21060, equation 1); state [B, H, P, N]."""
    x, dt, B, C = (y[:, 0].float() for y in (x, dt, B, C))
    B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], dim=1) for y in (B, C))
    state = state * (A.float() * dt).exp()[..., None, None] + (dt[..., None] * x)[..., None] * B[:, :, None]
    output = (state @ C[..., None])[..., 0] + D[:, None] * x
    return output[:, None], state


def _no_fusion(_own: Callable[..., Any], _call: _Call, *_: Any, **__: Any) -> None:
    """No result of a function for a whole layer, which takes no states: the layer then computes its parts."""


def _without_states(_own: Callable[..., Any], _call: _Call, *_: Any, **__: Any) -> None:
    """Refuse an operator that takes no initial state. Raises `NotImplementedError`, and the model's trial says so."""
    raise NotImplementedError("selective scans of Mamba's first version take no initial state")


FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Mapping[str, str]]] = {
    "causal_conv1d_fn": (_convolution, {}),
    "torch_chunk_gated_delta_rule": (_delta_rule, {"single": "torch_recurrent_gated_delta_rule"}),
    "chunk_kimi_delta_attention": (_delta_rule, {"single": "recurrent_kimi_delta_attention"}),
    "mamba2_chunk_scan": (_mamba2, {}),
    "mamba2_split_conv1d_scan_combined": (_no_fusion, {}),
    "mamba_selective_scan": (_without_states, {}),
    "mamba_inner_fn": (_without_states, {}),
}
"""transformers' functions by name: what computes them over rows, and the other functions of their module it needs."""


def recurrent(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that carry a state, by their convolutions and the functions of their Python modules."""
    found = []
    for module in model.modules():
        names = vars(sys.modules.get(type(module).__module__, object))
        convolutions = (x for x in module.children() if isinstance(x, nn.Conv1d) and x.groups == x.in_channels)
        if not FUNCTIONS.keys().isdisjoint(names) and any(convolutions):
            found.append(module)
    return found


def recurrent_layers(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within this context the model's layers with a state compute over the rows of the keyword `podium`."""
    layers = recurrent(model)
    if not layers:
        return contextlib.nullcontext()
    for module in {sys.modules[type(layer).__module__] for layer in layers}:
        _install(module)
    return _within(model, layers)


@contextlib.contextmanager
def _within(model: nn.Module, layers: Sequence[nn.Module]) -> Any:
    latest: dict[str, Any] = {}  # of this model; a layer that is computed again in the backward asks for it, too

    def note(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        latest["attends"] = kwargs.get("podium")

    def forward(layer: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        attends = latest.get("attends")
        before = getattr(_going_on, "call", None)
        _going_on.call = None if attends is None else _Call(layer, attends.rows)
        try:
            return own(*args, **kwargs)
        finally:
            _going_on.call = before

    whole = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    hook = whole.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with replaced((x, "forward", functools.partial(forward, i, x.forward)) for i, x in enumerate(layers)):
            yield
    finally:
        hook.remove()


_installing = threading.Lock()


def _install(module: ModuleType) -> None:
    """Let a module's functions look for a call that is going on; without one they are what they were."""
    with _installing:
        for name, (over_rows, needed) in FUNCTIONS.items():
            own = getattr(module, name, None)
            if own is not None and not hasattr(own, "of_podium"):
                others = {argument: getattr(module, other) for argument, other in needed.items()}
                setattr(module, name, _over_rows(own, functools.partial(over_rows, own, **others)))


def _over_rows(own: Callable[..., Any], over_rows: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        call = getattr(_going_on, "call", None)
        return own(*args, **kwargs) if call is None else over_rows(call, *args, **kwargs)

    function.of_podium = True  # type: ignore[attr-defined]
    return function
