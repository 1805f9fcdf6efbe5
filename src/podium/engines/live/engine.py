"""The loop: admit prompts, prefill them, draw their first tokens, then decode all running rows a token at a time."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import EndedCompletion, Interrupted, RolloutEngine
from podium.engines.live.cache import Cache, Decode, Extend, Prefill
from podium.engines.live.graphs import Graphs, is_divided
from podium.engines.live.schedule import CompletionKey, Row, Schedule, in_parts
from podium.engines.sampling import DrawnTokens, draw, joined, levels, uniforms
from podium.models.attention import tree_attention
from podium.models.candidates import of_bits
from podium.models.devices import free_bytes, kind_of, put
from podium.models.forward import Precision, logits_of, unwrap
from podium.models.head import WideHead, replaced_head
from podium.models.images import ImageOrder, encoded_once, rotary_positions, shift_behind
from podium.models.lean import lean_precision
from podium.models.memory import SAMPLED_LOGITS, cache_bytes_per_token
from podium.models.modes import evaluation_mode
from podium.models.precision import ProductPrecision
from podium.models.prefix_tree import lay_out_prompts
from podium.models.recurrence import recurrent
from podium.records import GivenImages, RolloutRequest, SamplingSettings

PREFILL_TOKENS = 4096
"""Prompt tokens in one forward."""

STEPS_PER_LOOK = 8
"""Tokens that every row draws between two looks at them, where a look waits for the device."""


class LiveEngine(RolloutEngine):
    """Samples from the modules of the model it is given, in evaluation mode, with the weights of that moment."""

    name = "live"
    interleaves = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: Precision = contextlib.nullcontext,
        max_rows: int | None = None,
        own_logits: bool = False,
    ) -> None:
        """`precision` is a context in which the model computes as it does in training.

        `own_logits`: training takes the model's own logits, so that they are not computed in float32 here either.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision
        self.max_rows = max_rows
        self.own_logits = own_logits
        self.graphs = Graphs(own_logits=own_logits)

    def go_on(self) -> None:
        """Called before every token; raises `Interrupted` where sampling is to be given up."""

    @contextlib.contextmanager
    def session(
        self,
        settings: SamplingSettings,
        expected: Sequence[RolloutRequest],
        *,
        max_rows: int | None = None,
        keeps: bool = False,
    ) -> Iterator[DecodingSession]:
        """A session for as long as the context is entered; the weights must not change inside.

        Args:
            settings: of requests that have none of their own.
            expected: the requests that will come, or some like them; the memory is shared out by these.
            max_rows: completions at a time; None: as many as `expected` has, and as fit.
            keeps: whether completions that have ended keep their keys and values, for requests that continue them.
        """
        device = next(self.model.parameters()).device
        with contextlib.ExitStack() as inside:
            for context in (evaluation_mode(self.model), torch.no_grad(), self.precision(), tree_attention(self.model)):
                inside.enter_context(context)
            if max_rows is None:
                numbers = [request.num_completions for request in expected]
                most = self.max_rows or rows_that_fit(self.model, expected, device)
                max_rows = max([min(most, sum(numbers)), *numbers])
            if kind_of(device).autocast and not self.own_logits:
                inside.enter_context(replaced_head(unwrap(self.model), WideHead()))
            rewinds = not recurrent(self.model)
            schedule = Schedule(settings, max_rows, shared=kind_of(device).immediate, keeps=keeps, rewinds=rewinds)
            most_tokens = max((request.max_tokens for request in expected), default=0)
            session = DecodingSession(self, schedule, device, most_tokens)
            yield session
            if session.fixed is not None:
                self.graphs.keep(session.fixed)


CACHE_SHARE = 0.6
"""Share of the memory free when sampling begins that keys, values and logits of the running rows may take."""


def rows_that_fit(model: nn.Module, requests: Sequence[RolloutRequest], device: torch.device) -> int:
    """Completions that may be sampled at once: those whose keys, values and logits fit, and no more than pays.

    Those between two turns count: they keep their keys and values, each in a place of its own, while their tools run.
    Call it in the context in which the model computes: autocast halves what is kept.
    """
    most = kind_of(device).max_rows
    free = free_bytes(device)
    if free is None:
        return most
    config = unwrap(model).config
    wide = next(model.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    a_token = cache_bytes_per_token(config, size=4 if wide else 2)
    vocabulary = config.get_text_config().vocab_size
    longest = max(
        (request.max_tokens + len(request.token_ids) / request.num_completions for request in requests), default=0
    )
    a_row = a_token * longest + SAMPLED_LOGITS * 4 * vocabulary + state_bytes(model, device)
    return max(*(request.num_completions for request in requests), 1, min(most, int(CACHE_SHARE * free / a_row)))


def state_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of one row's states in layers that carry one, measured on one token; inside `tree_attention`."""
    if not recurrent(model):
        return 0
    cache = Cache(1, 1)
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    attends = Prefill(cache, lay_out_prompts([np.zeros(1, np.int64)]), 0, 0, device)
    model(input_ids=one, position_ids=one, attention_mask=None, podium=attends, use_cache=False, logits_to_keep=1)
    return sum(x.nbytes for x in cache.states.tensors.values())


class DecodingSession:
    """Requests that are decoded together, of which new ones may come at any time.

        with engine.session(settings, [request]) as session:
            number = session.submit(request)
            while session.is_busy:
                session.step()
                for ended in session.poll(): ...

    What a completion draws depends on its request's seed and numbers, not on when it came or on who else is there; see
    `engines.sampling`. Where sequences are kept, a request with a position or a turn goes on behind the longest
    beginning that it shares with one of them, of which nothing is computed again. A sequence is kept until its own
    completion goes on (the same `prompt_id` and `completion`) or is cancelled; until then it holds its place.
    """

    def __init__(self, engine: LiveEngine, schedule: Schedule, device: torch.device, max_tokens: int) -> None:
        """`max_tokens`: the most that a completion is expected to have."""
        self.model = engine.model
        self.go_on = engine.go_on
        self.schedule = schedule
        self.device = device
        captures = kind_of(device).graphs and schedule.rewinds and not is_divided(engine.model)
        self.fixed = engine.graphs.steps(engine.model, schedule.max_rows, max_tokens, device) if captures else None
        self.cache = Cache(schedule.max_rows, max_tokens) if self.fixed is None else self.fixed.cache
        # What a kept row draws in vain would be in its state, which no later step could undo.
        looks_often = kind_of(device).immediate or (schedule.keeps and not schedule.rewinds)
        self.steps_per_look = 1 if looks_often else STEPS_PER_LOOK
        self._shift_of: dict[tuple[GivenImages, ...], int] = {}

    def submit(self, request: RolloutRequest) -> int:
        """Let a request wait for its rows; the id of its completions. Raises `EngineError` if it can never fit."""
        return self.schedule.submit(request)

    def cancel(self, request: int, place: int | None = None) -> None:
        """Stop a request or one of its completions, waiting, running or kept; its places are free in the next step."""
        self.schedule.cancel(request, place)

    def poll(self) -> list[EndedCompletion]:
        """The completions that have ended since the last call, in the order in which they ended."""
        ended = self.schedule.ended
        self.schedule.ended = []
        return ended

    @property
    def max_rows(self) -> int:
        """Completions that may be running or kept."""
        return self.schedule.max_rows

    @property
    def is_decoding(self) -> bool:
        """Whether there are running rows."""
        return bool(self.schedule.rows)

    @property
    def is_busy(self) -> bool:
        """Whether there are running rows or waiting requests."""
        return bool(self.schedule.rows or self.schedule.waiting)

    def step(self) -> None:
        """Let waiting requests in where there is room, then draw a token for every running row.

        Where a look at them waits for the device they are several; a row that ends in between draws a few in vain.
        """
        self.go_on()
        self._resume()
        for numbers in self.schedule.admit(PREFILL_TOKENS):
            self._prefill(numbers)
        if not self.schedule.rows:
            return
        rows = list(self.schedule.rows)
        own_R = np.array([len(row.token_ids) - 1 for row in rows])
        slots_R = np.array([row.slot for row in rows])
        prompts_S = [len(token_ids) for token_ids in self.schedule.slots]
        last_R = put(np.array([row.token_ids[-1] for row in rows]), self.device)
        seen_RV = self._seen(rows)
        shift_R = self._shifts(rows)
        drawn: list[DrawnTokens] = []
        left = [row.request.max_tokens - row.num_drawn for row in rows]
        steps = min(self.steps_per_look, *left)
        fixed = self.fixed
        if fixed is not None and not fixed.load(last_R, slots_R, own_R, prompts_S, shift_R, steps, max(left)):
            fixed = None
        for step in range(steps):
            self.go_on()
            if fixed is not None:
                logits_RV = fixed.run(last_R if step else None)[: len(rows)]
            else:
                attends = Decode(self.cache, slots_R, own_R + step, prompts_S, self.device, shift_R)
                logits_RV = logits_of(self.model, last_R, attends.rotary_1R, attends)
            drawn.append(self._draw(rows, logits_RV, step, seen_RV))
            last_R = drawn[-1].token_M  # of rows with one completion each, where there is another step
            if seen_RV is not None and len(last_R) == len(rows):
                seen_RV.scatter_(1, last_R[:, None], True)
        self._record(rows, drawn)

    def _prefill(self, numbers: list[int]) -> None:
        """Compute waiting prompts, whose keys and values go to the cache, and draw their rows' first tokens."""
        requests = [self.schedule.waiting[number] for number in numbers]
        order = ImageOrder()
        layout = lay_out_prompts([order.told_apart(request.token_ids, request.images) for request in requests])
        ids_T = layout.token_ids_T
        feature_T = np.full(len(ids_T), -1)
        positions = layout.position_T[None]
        if order.images:
            ids_T, feature_T = order.laid_out(layout, [(request.token_ids, request.images) for request in requests])
            rotary_CT = rotary_positions(self.model, ids_T, layout.paths, [request.images for request in requests])
            positions = positions if rotary_CT is None else rotary_CT[:, None].numpy()
        with encoded_once(self.model, order.images, feature_T[feature_T >= 0], order.images) as fields:
            logits_PV = logits_of(
                self.model,
                put(ids_T, self.device),
                put(positions, self.device),
                Prefill(self.cache, layout, len(self.schedule.slots), len(self.schedule.rows), self.device),
                put(np.array([path[-1] for path in layout.paths]), self.device),
                fields,
            )
        rows = [self.schedule.start(number) for number in numbers]
        self._record(rows, [self._draw(rows, logits_PV, 0, self._seen(rows))])

    def _resume(self) -> None:
        """Go on with kept rows: the tokens that follow them in requests, and the first token of each completion."""
        self.cache.move(*self.schedule.resume())
        rows = [row for row in self.schedule.rows if not row.num_drawn]
        if not rows:
            return
        first = len(self.schedule.rows) - len(rows)
        drawn = []
        for part in in_parts(rows, [len(row.token_ids) - row.cached for row in rows], PREFILL_TOKENS):
            texts = [row.token_ids[row.cached :] for row in part]
            order, features_X, rotary_CT = self._given_images(part)
            attends = Extend(
                self.cache,
                first,
                np.array([row.slot for row in part]),
                np.array([row.cached for row in part]),
                np.array([len(text) for text in texts]),
                [len(token_ids) for token_ids in self.schedule.slots],
                self.device,
                self._shifts(part),
            )
            ids_T = put(np.array([token for text in texts for token in text]), self.device)
            positions = attends.rotary_1T if rotary_CT is None else put(rotary_CT, self.device)[:, None]
            with encoded_once(self.model, order.images, features_X, order.images) as fields:
                logits_AV = logits_of(self.model, ids_T, positions, attends, attends.last_A, fields)
            drawn.append(self._draw(part, logits_AV, 0, self._seen(part)))
            first += len(part)
        self._record(rows, [joined(drawn)])

    def _record(self, rows: list[Row], drawn: Sequence[DrawnTokens]) -> None:
        """The one place where the device is waited for: what was drawn goes to the host and into the schedule."""
        both_2SM = torch.stack(
            [torch.stack([getattr(x, name).double() for x in drawn]) for name in ("token_M", "logp_M")]
        )
        bits = [x.bits_MB for x in drawn if x.bits_MB is not None]
        bits_SMB = torch.stack(bits).cpu().numpy() if bits else None
        tokens_SM, logps_SM = both_2SM.tolist()
        tokens = [int(token) for token in tokens_SM[0]]
        logps = logps_SM[0]
        mine = list(range(len(tokens)))
        places = {id(row): i for i, row in enumerate(rows)}
        running = rows
        for step in range(len(drawn)):
            if step:
                running = [row for row in self.schedule.rows if id(row) in places]
                mine = [places[id(row)] for row in running]
                tokens = [int(tokens_SM[step][i]) for i in mine]
                logps = [logps_SM[step][i] for i in mine]
            if running:
                candidates = None if bits_SMB is None else [of_bits(bits_SMB[step, i]) for i in mine]
                self.cache.move(*self.schedule.append(running, tokens, logps, candidates))

    def _draw(self, rows: list[Row], logits_RV: Tensor, step: int, seen_RV: Tensor | None) -> DrawnTokens:
        """The token of every completion that is `step` after its last known one.

        Some rows at a time: what is drawn from at once stays in a processor's cache.
        """
        at_once = kind_of(self.device).drawn_bytes
        size = len(rows) if at_once is None else max(1, at_once // (4 * logits_RV.shape[1]))
        drawn = []
        for _, alike in itertools.groupby(range(len(rows)), key=lambda i: (i // size, id(rows[i].settings))):
            places = [*alike]
            part = slice(places[0], places[-1] + 1)
            settings = rows[places[0]].settings
            logits = logits_RV[part].float()
            seen = None if seen_RV is None else seen_RV[part]
            drawing = [(row, completion) for row in rows[part] for completion in row.completions]
            keys = np.array([completion.key for _, completion in drawing], np.uint64)
            positions = np.array([row.request.position + row.num_drawn + step for row, _ in drawing])
            row_M = np.repeat(np.arange(len(logits)), [len(row.completions) for row in rows[part]])
            if settings.lengths is not None:  # then each completion has logits of its own
                if len(drawing) > len(logits):
                    logits, seen = logits[row_M], None if seen is None else seen[row_M]
                    row_M = np.arange(len(drawing))
                logits = self._with_lengths(drawing, logits, step, settings)
            uniform_ML = put(uniforms(keys, positions, levels(logits.shape[1])), self.device)
            drawn.append(draw(logits, uniform_ML, settings, seen, put(row_M, self.device)))
        return joined(drawn)

    def _with_lengths(
        self, drawing: list[tuple[Row, CompletionKey]], logits_MV: Tensor, step: int, settings: SamplingSettings
    ) -> Tensor:
        """Only an end token is left where a completion must end, and none before."""
        ends = sorted(settings.end_ids)
        assert settings.lengths is not None
        assert ends, "exact lengths need an end token"
        lengths = [settings.lengths(completion.prompt_id, completion.completion) for _, completion in drawing]
        over_M = np.array([row.num_drawn + step for row, _ in drawing]) + 1 >= np.array(lengths)
        kept_M = logits_MV[:, ends[0]].clone()
        for end in ends:
            logits_MV[:, end] = float("-inf")
        logits_MV.masked_fill_(put(over_M, self.device)[:, None], float("-inf"))
        logits_MV[:, ends[0]] = torch.where(put(over_M, self.device), kept_M, float("-inf"))
        return logits_MV

    def _shifts(self, rows: Sequence[Row]) -> np.ndarray | None:
        """Offsets from each row's token counts to its rotary positions, which images change; None: no images."""
        requests = [row.request for row in rows]
        if not any(request.images for request in requests):
            return None
        for request in requests:
            if request.images not in self._shift_of:
                self._shift_of[request.images] = shift_behind(self.model, request.token_ids, request.images)
        return np.array([self._shift_of[request.images] for request in requests])

    def _given_images(self, rows: Sequence[Row]) -> tuple[ImageOrder, np.ndarray, np.ndarray | None]:
        """The images among the new tokens of rows that go on, the feature of each placeholder among these, and the
        rotary positions [axes, new tokens] where images change them; None: tokens are counted."""
        order = ImageOrder()
        wholes = [np.array([*self.schedule.slots[row.slot], *row.token_ids]) for row in rows]
        begins = [len(self.schedule.slots[row.slot]) + row.cached for row in rows]
        told = [
            order.told_apart(ids_L, row.request.images, begin)[begin:]
            for row, ids_L, begin in zip(rows, wholes, begins, strict=True)
        ]
        told_T = np.concatenate(told)
        features_X = -1 - told_T[told_T < 0]
        if not order.images:
            return order, features_X, None
        stops = np.cumsum([len(ids_L) for ids_L in wholes])
        paths = [np.arange(stop - len(ids_L), stop) for ids_L, stop in zip(wholes, stops, strict=True)]
        rotary_CT = rotary_positions(self.model, np.concatenate(wholes), paths, [row.request.images for row in rows])
        if rotary_CT is None:
            return order, features_X, None
        new_T = np.concatenate([path[begin:] for path, begin in zip(paths, begins, strict=True)])
        return order, features_X, rotary_CT[:, new_T].numpy()

    def _seen(self, rows: list[Row]) -> Tensor | None:
        """Which tokens each row's prompt and completion hold already [R, V]; None without a repetition penalty."""
        if all(row.settings.repetition_penalty == 1 for row in rows):
            return None
        texts = [[*self.schedule.slots[row.slot], *row.token_ids] for row in rows]
        row_X = np.repeat(np.arange(len(rows)), [len(text) for text in texts])
        token_X = np.array([token for text in texts for token in text])
        vocabulary = unwrap(self.model).get_output_embeddings().weight.shape[0]
        seen_RV = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=self.device)
        seen_RV[put(row_X, self.device), put(token_X, self.device)] = True
        return seen_RV


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor of the policy that its copy does not have yet."""

    name: str
    value: torch.Tensor
    state: tuple[int, int]
    """Its count of writes, and its address."""


class CopyEngine(LiveEngine):
    """The live engine on a second copy of the policy, for rollouts that overlap training.

    The copy has modules of its own, so that sampling may run in a thread while the policy's are trained; what is frozen
    and lies on the same device is shared. It is as new as its last `sync`, and it can be interrupted.
    """

    own_weights = True

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        precision: Precision,
        max_rows: int | None = None,
        own_logits: bool = False,
    ) -> None:
        """`precision` is the policy's context; the copy computes as it does."""
        model = copy_of(policy, device)
        self._theirs = precision
        self._own = None
        if isinstance(precision, ProductPrecision):
            self._own = lean_precision(model, enabled=precision.enabled)
        sampling = precision if self._own is None else self._own.sampling
        super().__init__(model, tokenizer, precision=sampling, max_rows=max_rows, own_logits=own_logits)
        self._unwanted = threading.Event()
        self._taken: dict[str, tuple[int, int]] = {}

    @torch.no_grad()
    def sync(self, policy: nn.Module, version: int) -> None:
        """Everything that is trained, LoRA included; what is frozen once. Also whether products are rounded."""
        self._unwanted.clear()
        self._copy(self._changed(policy), rounds_products=self._rounds_products)

    @torch.no_grad()
    def snapshot(self, policy: nn.Module, version: int) -> Callable[[], None]:
        """See `engines.base.RolloutEngine`: a further copy of what is trained, until it is sampled from."""
        device = next(self.model.parameters()).device
        changed = [replace(tensor, value=tensor.value.to(device, copy=True)) for tensor in self._changed(policy)]
        return partial(self._copy, changed, rounds_products=self._rounds_products)

    @property
    def _rounds_products(self) -> bool:
        """Whether the policy's products are rounded now."""
        return isinstance(self._theirs, ProductPrecision) and self._theirs.enabled

    def _changed(self, policy: nn.Module) -> list[ChangedTensor]:
        """The tensors of the policy that the copy has to take over."""
        own = dict(tensors_of(self.model))
        changed = []
        for name, theirs in tensors_of(unwrap(policy)):
            state = theirs._version, theirs.data_ptr()
            if own[name] is not theirs and (theirs.requires_grad or self._taken.get(name) != state):
                changed.append(ChangedTensor(name, theirs, state))
        return changed

    @torch.no_grad()
    def _copy(self, changed: Sequence[ChangedTensor], *, rounds_products: bool) -> None:
        if self._own is not None:
            self._own.enabled = rounds_products
        own = dict(tensors_of(self.model))
        for tensor in changed:
            own[tensor.name].copy_(tensor.value)
            self._taken[tensor.name] = tensor.state
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def interrupt(self) -> None:
        """Before its next forward."""
        self._unwanted.set()

    def go_on(self) -> None:
        """Raises `Interrupted` after `interrupt`."""
        if self._unwanted.is_set():
            raise Interrupted


def copy_of(policy: nn.Module, device: torch.device) -> nn.Module:
    """A frozen copy; on the policy's own device it shares the parameters that are not trained."""
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad and p.device == device}
    copied = copy.deepcopy(policy, dict(shared)).eval().requires_grad_(False)
    return copied if all(p.device == device for p in copied.parameters()) else copied.to(device)


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by their names."""
    return [*model.named_parameters(), *model.named_buffers()]
