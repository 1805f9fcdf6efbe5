"""The loop: admit prompts, prefill them, draw their first tokens, then decode all running rows a token at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import Episodes, RolloutEngine, Sampled
from podium.engines.live.cache import Cache, Decode, Extend, Prefill
from podium.engines.live.schedule import CompletionKey, Moves, Row, Schedule, in_parts
from podium.engines.sampling import Drawn, draw, joined, levels, uniforms
from podium.models.attention import Attends, tree_attention, without_autocast
from podium.models.devices import free_bytes, kind_of, put
from podium.models.forward import Precision, replaced_head, unwrap
from podium.models.memory import SAMPLED_LOGITS, cache_bytes_per_token
from podium.models.modes import evaluation_mode
from podium.models.precision import product_weight, wide_product
from podium.models.prefixes import PrefixTree, common_beginning
from podium.records import RolloutRequest, SamplingSettings

PREFILL_TOKENS = 4096
"""Prompt tokens in one forward."""

STEPS_PER_LOOK = 8
"""Tokens that every row draws between two looks at them, where a look waits for the device."""


class LiveEngine(RolloutEngine):
    """Samples from the modules of the model it is given, in evaluation mode, with the weights of that moment."""

    name = "live"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: Precision = contextlib.nullcontext,
        max_rows: int | None = None,
    ) -> None:
        """`precision` is a context in which the model computes as it does in training."""
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision
        self.max_rows = max_rows

    def converse(
        self, requests: Sequence[RolloutRequest], settings: SamplingSettings, episodes: Episodes
    ) -> list[list[Sampled]]:
        """Completions of several turns; no token is computed twice, and tools run while other rows decode."""
        return self.sample(requests, settings, episodes)

    def sample(
        self, requests: Sequence[RolloutRequest], settings: SamplingSettings, episodes: Episodes | None = None
    ) -> list[list[Sampled]]:
        """One turn of every completion, or all turns where there are `episodes`."""
        device = next(self.model.parameters()).device
        with contextlib.ExitStack() as inside:
            for context in (evaluation_mode(self.model), torch.no_grad(), self.precision(), tree_attention(self.model)):
                inside.enter_context(context)
            most = self.max_rows or rows_that_fit(self.model, requests, device)
            max_rows = min(most, sum(request.num_completions for request in requests))
            shared, several_turns = kind_of(device).immediate, episodes is not None
            schedule = Schedule(requests, settings, max_rows, shared=shared, several_turns=several_turns)
            if kind_of(device).autocast:
                inside.enter_context(replaced_head(unwrap(self.model), WideHead()))
            batch = DecodingBatch(self.model, schedule, device, episodes)
            while schedule.waiting or schedule.rows or schedule.between_turns:
                for prompts_together in schedule.admit(PREFILL_TOKENS):
                    batch.prefill(prompts_together)
                if schedule.rows:
                    batch.decode()
                if schedule.between_turns and (settings.in_order_of_answers or not schedule.rows):
                    batch.resume()
        return [[completion for completion in group if completion is not None] for group in schedule.done]


CACHE_SHARE = 0.6
"""Share of the memory free when sampling begins that keys, values and logits of the running rows may take."""


def rows_that_fit(model: nn.Module, requests: Sequence[RolloutRequest], device: torch.device) -> int:
    """Completions that may be sampled at once: those whose keys, values and logits fit, and no more than pays.

    Those between two turns count: they keep their keys and values, each in a place of its own, while their tools run.
    Call it in the context in which the model computes: autocast halves what is kept.
    """
    most, free = kind_of(device).max_rows, free_bytes(device)
    if free is None:
        return most
    config = unwrap(model).config
    wide = next(model.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    a_token = cache_bytes_per_token(config, size=4 if wide else 2)
    vocabulary = config.get_text_config().vocab_size
    longest = max((each.max_tokens + len(each.token_ids) / each.num_completions for each in requests), default=0)
    a_row = a_token * longest + SAMPLED_LOGITS * 4 * vocabulary
    return max(*(each.num_completions for each in requests), 1, min(most, int(CACHE_SHARE * free / a_row)))


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


class DecodingBatch:
    """The rows that one call of `generate` decodes at a time."""

    def __init__(
        self, model: nn.Module, schedule: Schedule, device: torch.device, episodes: Episodes | None = None
    ) -> None:
        self.model = model
        self.schedule = schedule
        self.episodes = episodes
        self.device = device
        self.cache = Cache(schedule.max_rows, max((each.max_tokens for each in schedule.requests), default=0))
        self.steps_per_look = 1 if kind_of(device).immediate else STEPS_PER_LOOK

    def prefill(self, chosen: list[int]) -> None:
        """The prompts' keys and values, and the first token of each of their completions, from one row of logits."""
        prompts = [self.schedule.requests[each].token_ids for each in chosen]
        tree = PrefixTree([np.array(prompt) for prompt in prompts], trunk=common_beginning(prompts))
        logits_PV = self._forward(
            put(np.array(tree.token_ids), self.device),
            put(np.array(tree.depths)[None], self.device),
            Prefill(self.cache, tree, len(self.schedule.slots), self.device),
            put(np.array([path[-1] for path in tree.paths]), self.device),
        )
        rows = [self.schedule.start(prompt) for prompt in chosen]
        self._record(rows, [joined(list(self._draw(rows, logits_PV, 0, self._seen(rows))))])

    def resume(self) -> None:
        """Go on with rows whose turn has been answered: what they are given, and the first token of their next turn."""
        assert self.episodes is not None
        schedule = self.schedule
        at_least = sum(len(row.completions) for row in schedule.between_turns)
        if schedule.settings.in_order_of_answers:
            at_least = 0 if schedule.rows else 1
        first = len(schedule.rows)
        self._move(schedule.resume(self.episodes.answers(at_least=at_least)))
        rows = schedule.rows[first:]
        drawn: list[Drawn] = []
        for part in in_parts(rows, [len(row.token_ids) - row.cached for row in rows], PREFILL_TOKENS):
            drawn += self._draw(part, self._extended(part, first), 0, self._seen(part))
            first += len(part)
        if rows:
            self._record(rows, [joined(drawn)])

    def _extended(self, rows: list[Row], first: int) -> Tensor:
        """Logits behind the tokens that the rows at places `first` and on were given, and the last one they drew."""
        texts = [row.token_ids[row.cached :] for row in rows]
        attends = Extend(
            self.cache,
            first,
            np.array([row.slot for row in rows]),
            np.array([row.cached for row in rows]),
            np.array([len(text) for text in texts]),
            self._prompt_lengths(),
            self.device,
        )
        ids_T = put(np.array([token for text in texts for token in text]), self.device)
        return self._forward(ids_T, attends.positions_1T, attends, attends.last_A)

    def decode(self) -> None:
        """Some tokens for every running row, and one look at them; a row that ends in between draws a few in vain."""
        rows = list(self.schedule.rows)
        own_R = np.array([len(row.token_ids) - 1 for row in rows])
        slots_R = np.array([row.slot for row in rows])
        prompts_S = self._prompt_lengths()
        last_R = put(np.array([row.token_ids[-1] for row in rows]), self.device)
        seen_RV = self._seen(rows)
        drawn: list[Drawn] = []
        left = min(self.schedule.requests[row.prompt].max_tokens - len(row.token_ids) for row in rows)
        for step in range(min(self.steps_per_look, left)):
            attends = Decode(self.cache, slots_R, own_R + step, prompts_S, self.device)
            logits_RV = self._forward(last_R, attends.positions_1R, attends)
            drawn.append(joined(list(self._draw(rows, logits_RV, step, seen_RV))))
            last_R = drawn[-1].token_M  # of rows with one completion each, where there is another step
            if seen_RV is not None and len(last_R) == len(rows):
                seen_RV.scatter_(1, last_R[:, None], True)
        self._record(rows, drawn)

    def _prompt_lengths(self) -> list[int]:
        return [len(self.schedule.requests[prompt].token_ids) for prompt in self.schedule.slots]

    def _forward(self, ids_T: Tensor, positions_1T: Tensor, attends: Attends, keep: Tensor | Literal[0] = 0) -> Tensor:
        """Logits [len(keep), V], in the precision of their product; 0: of all tokens."""
        given = {"input_ids": ids_T[None], "position_ids": positions_1T, "attention_mask": None, "podium": attends}
        return self.model(**given, use_cache=False, logits_to_keep=keep).logits[0]

    def _record(self, rows: list[Row], drawn: Sequence[Drawn]) -> None:
        """The one place where the device is waited for: what was drawn goes to the host and into the schedule."""
        both_2SM = torch.stack([torch.stack([getattr(x, name) for x in drawn]).double() for name in Drawn._fields])
        tokens_SM, logps_SM = both_2SM.tolist()
        tokens, logps = [int(token) for token in tokens_SM[0]], logps_SM[0]
        places = {id(row): i for i, row in enumerate(rows)}
        running = rows
        for step in range(len(drawn)):
            if step:
                running = [row for row in self.schedule.rows if id(row) in places]
                mine = [places[id(row)] for row in running]
                tokens, logps = [int(tokens_SM[step][i]) for i in mine], [logps_SM[step][i] for i in mine]
            if running:
                waited = len(self.schedule.between_turns)
                self._move(self.schedule.append(running, tokens, logps))
                self._answer(self.schedule.between_turns[waited:])

    def _move(self, moves: Moves) -> None:
        self.cache.move(moves.rows, moves.slots)

    def _answer(self, rows: list[Row]) -> None:
        """Begin with what follows the turns of these rows' completions."""
        for row in rows:
            for each in row.completions:
                assert self.episodes is not None
                self.episodes.ended(*self.schedule.place(row, each), row.token_ids)

    def _draw(self, rows: list[Row], logits_RV: Tensor, step: int, seen_RV: Tensor | None) -> Iterator[Drawn]:
        """The token of every completion that is `step` after its last known one.

        Some rows at a time: what is drawn from at once stays in a processor's cache.
        """
        at_once = kind_of(self.device).drawn_bytes
        size = len(rows) if at_once is None else max(1, at_once // (4 * logits_RV.shape[1]))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits, seen = logits_RV[part].float(), None if seen_RV is None else seen_RV[part]
            drawing = [(row, each) for row in rows[part] for each in row.completions]
            keys = np.array([each.key for _, each in drawing], np.uint64)
            positions = np.array([row.earlier + len(row.token_ids) + step for row, _ in drawing])
            row_M = np.repeat(np.arange(len(logits)), [len(row.completions) for row in rows[part]])
            if self.schedule.settings.lengths is not None:  # then each completion has logits of its own
                if len(drawing) > len(logits):
                    logits, seen = logits[row_M], None if seen is None else seen[row_M]
                    row_M = np.arange(len(drawing))
                logits = self._with_lengths(drawing, logits, step)
            uniform_ML = put(uniforms(keys, positions, levels(logits.shape[1])), self.device)
            yield draw(logits, uniform_ML, self.schedule.settings, seen, put(row_M, self.device))

    def _with_lengths(self, drawing: list[tuple[Row, CompletionKey]], logits_MV: Tensor, step: int) -> Tensor:
        """Only an end token is left where a completion must end, and none before."""
        settings = self.schedule.settings
        ends = sorted(settings.end_ids)
        assert settings.lengths is not None
        assert ends, "exact lengths need an end token"
        prompts = [self.schedule.requests[row.prompt] for row, _ in drawing]
        numbers = [given.completion + x.completion for given, (_, x) in zip(prompts, drawing, strict=True)]
        lengths = [settings.lengths(given.prompt_id, number) for given, number in zip(prompts, numbers, strict=True)]
        over_M = np.array([len(row.token_ids) - row.turn_start + step for row, _ in drawing]) + 1 >= np.array(lengths)
        kept_M = logits_MV[:, ends[0]].clone()
        for end in ends:
            logits_MV[:, end] = float("-inf")
        logits_MV.masked_fill_(put(over_M, self.device)[:, None], float("-inf"))
        logits_MV[:, ends[0]] = torch.where(put(over_M, self.device), kept_M, float("-inf"))
        return logits_MV

    def _seen(self, rows: list[Row]) -> Tensor | None:
        """Which tokens each row's prompt and completion hold already [R, V]; None without a repetition penalty."""
        if self.schedule.settings.repetition_penalty == 1:
            return None
        texts = [[*self.schedule.requests[row.prompt].token_ids, *row.token_ids] for row in rows]
        row_X = np.repeat(np.arange(len(rows)), [len(text) for text in texts])
        token_X = np.array([token for text in texts for token in text])
        vocabulary = unwrap(self.model).get_output_embeddings().weight.shape[0]
        seen_RV = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=self.device)
        seen_RV[put(row_X, self.device), put(token_X, self.device)] = True
        return seen_RV
