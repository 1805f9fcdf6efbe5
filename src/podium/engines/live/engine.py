"""The loop: admit prompts, prefill them, draw their first tokens, then decode everyone one token at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import make_groups
from podium.engines.live.cache import Cache, Decode, Prefill
from podium.engines.live.schedule import Member, Row, Schedule
from podium.engines.sampling import Drawn, draw, uniforms
from podium.models.attention import tree_attention
from podium.packing import common_beginning
from podium.records import Group, Prompt, SamplingSettings

PREFILL_TOKENS = 4096
"""Prompt tokens in one forward."""

DRAWN_BYTES = 4 << 20
"""Memory of the float32 logits that a CPU draws from at once: what stays in its cache over the passes of a draw."""

MAX_ROWS = {"cpu": 128, "cuda": 512}
"""Completions decoding at once; more wait. Beyond this a CPU's products get no faster and the cache only grows."""


class LiveEngine:
    """Samples from the modules of the model it is given, in evaluation mode, with the weights of that moment."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        max_rows: int | None = None,
    ) -> None:
        """`precision` is a context in which the model computes as it does in training."""
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision
        self.max_rows = max_rows

    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, policy_step: int = 0) -> list[Group]:
        """One group per prompt; see `engines.base.RolloutEngine`."""
        device = next(self.model.parameters()).device
        max_rows = min(self.max_rows or MAX_ROWS.get(device.type, 128), len(prompts) * settings.num_completions)
        schedule = Schedule(prompts, settings, max_rows)
        with evaluation(self.model), torch.no_grad(), self.precision(), tree_attention(self.model):
            Round(self.model, schedule, device).run()
        sampled = [[completion for completion in group if completion is not None] for group in schedule.done]
        return make_groups(prompts, sampled, self.tokenizer, settings, policy_step)


class Round:
    """One call of `generate`."""

    def __init__(self, model: nn.Module, schedule: Schedule, device: torch.device) -> None:
        self.model = model
        self.schedule = schedule
        self.device = device
        self.cache = Cache(schedule.max_rows)
        self.penalise = schedule.settings.repetition_penalty != 1

    def run(self) -> None:
        """Until every completion has ended."""
        while self.schedule.waiting or self.schedule.rows:
            self._prefill(self.schedule.admit())
            if self.schedule.rows:
                self._decode()

    def _prefill(self, admitted: list[int]) -> None:
        while admitted:
            count, tokens = 0, 0
            for prompt in admitted:
                tokens += len(self.schedule.prompts[prompt].token_ids)
                if count and tokens > PREFILL_TOKENS:
                    break
                count += 1
            self._prefill_together(admitted[:count])
            admitted = admitted[count:]

    def _prefill_together(self, chosen: list[int]) -> None:
        """The prompts' keys and values, and the first token of each of their completions, from one row of logits."""
        ids = [self.schedule.prompts[prompt].token_ids for prompt in chosen]
        trunk = common_beginning(ids)
        texts = [x[trunk:] for x in ids]
        lengths = [len(x) for x in texts]
        logits_PV = self._forward(
            torch.tensor([*ids[0][:trunk], *(token for x in texts for token in x)], device=self.device),
            torch.cat([torch.arange(trunk), *(trunk + torch.arange(n) for n in lengths)])[None].to(self.device),
            Prefill(self.cache, lengths, len(self.schedule.slots), self.device, trunk=trunk),
            torch.tensor(trunk + np.cumsum(lengths) - 1, device=self.device),
        )
        self._draw([self.schedule.start(prompt) for prompt in chosen], logits_PV)

    def _decode(self) -> None:
        """One token for every running row."""
        rows = self.schedule.rows
        step = Decode(
            self.cache,
            np.array([row.slot for row in rows]),
            np.array([len(row.token_ids) - 1 for row in rows]),
            [len(self.schedule.prompts[prompt].token_ids) for prompt in self.schedule.slots],
            self.device,
        )
        last = torch.tensor([row.token_ids[-1] for row in rows], device=self.device)
        self._draw(list(rows), self._forward(last, step.positions_1R, step, slice(None)))

    def _forward(self, ids_T: Tensor, positions_1T: Tensor, attends: Prefill | Decode, keep: Tensor | slice) -> Tensor:
        """Logits [len(keep), V], in the precision of their product."""
        outputs = self.model(
            input_ids=ids_T[None],
            position_ids=positions_1T,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=keep if isinstance(keep, Tensor) else 0,
            podium=attends,
        )
        return outputs.logits[0]

    def _draw(self, rows: list[Row], logits_RV: Tensor) -> None:
        """One token for every member of every row, some rows at a time."""
        tokens: list[int] = []
        logps: list[float] = []
        size = max(1, DRAWN_BYTES // (4 * logits_RV.shape[1])) if self.device.type == "cpu" else len(rows)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            drawn = self._drawn(rows[part], logits_RV[part].float())
            tokens += drawn.token_M.tolist()
            logps += drawn.logp_M.tolist()
        moves = self.schedule.append(rows, tokens, logps)
        self.cache.move(moves.rows, moves.slots)

    def _drawn(self, rows: list[Row], logits_RV: Tensor) -> Drawn:
        """`logits_RV` is overwritten."""
        members = [(row, member) for row in rows for member in row.members]
        keys = np.array([member.key for _, member in members], np.uint64)
        positions = np.array([len(row.token_ids) for row, _ in members])
        row_M = np.repeat(np.arange(len(rows)), [len(row.members) for row in rows])
        seen_RV = self._seen(rows, logits_RV) if self.penalise else None
        if self.schedule.settings.lengths is not None:  # then each completion has logits of its own
            if len(members) > len(rows):
                logits_RV = logits_RV[row_M]
                seen_RV = None if seen_RV is None else seen_RV[row_M]
                row_M = np.arange(len(members))
            logits_RV = self._with_lengths(members, logits_RV)
        return draw(
            logits_RV,
            torch.from_numpy(uniforms(keys, positions)).to(self.device),
            self.schedule.settings,
            seen_RV,
            torch.from_numpy(row_M).to(self.device),
        )

    def _with_lengths(self, members: list[tuple[Row, Member]], logits_MV: Tensor) -> Tensor:
        """Only an end token is left where a completion must end, and none before."""
        settings = self.schedule.settings
        ends = sorted(settings.end_ids)
        assert settings.lengths is not None
        assert ends, "exact lengths need an end token"
        kept = logits_MV[:, ends[0]].clone()
        logits_MV[:, ends] = float("-inf")
        for m, (row, member) in enumerate(members):
            if len(row.token_ids) + 1 >= settings.lengths(self.schedule.prompts[row.prompt].id, member.completion):
                logits_MV[m] = float("-inf")
                logits_MV[m, ends[0]] = kept[m]
        return logits_MV

    def _seen(self, rows: list[Row], logits_RV: Tensor) -> Tensor:
        """Which tokens each row's prompt and completion hold already, for the repetition penalty."""
        seen = torch.zeros_like(logits_RV, dtype=torch.bool)
        for r, row in enumerate(rows):
            seen[r, [*self.schedule.prompts[row.prompt].token_ids, *row.token_ids]] = True
        return seen


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Dropout off while sampling; afterwards every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
