"""The reference engine and the fallback: transformers' own `generate`, one row per completion.

Slower than `live` by the prompt that every row computes again and the rows that wait for the longest; it takes any
model and any of `generation_kwargs`. Its random numbers come from torch's global generator, seeded for every round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from podium.engines.base import RolloutEngine, Sampled
from podium.engines.sampling import row_key
from podium.models.attention import tree_attention
from podium.models.forward import AttentionPath, Precision, base_model, token_logps
from podium.models.modes import evaluation_mode, replaced
from podium.models.packing import pack
from podium.records import Prompt, SamplingSettings, TrainingGroup


class TransformersEngine(RolloutEngine):
    """`model.generate`; log-probabilities of what it drew come from one more forward, as training computes them."""

    name = "transformers"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: AttentionPath,
        tokens_per_pack: int,
        precision: Precision = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.path = path
        self.tokens_per_pack = tokens_per_pack
        self.precision = precision

    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[list[Sampled]]:
        """One turn; see `engines.base.RolloutEngine`."""
        if not prompts:
            return []
        with evaluation_mode(self.model), torch.no_grad(), self.precision():
            ids = self._generate(prompts, settings)
            logps = self._score(prompts, ids, settings)
        return [list(zip(*pair, strict=True)) for pair in zip(ids, logps, strict=True)]

    def _generate(self, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[list[list[int]]]:
        device = next(self.model.parameters()).device
        most = settings.max_tokens - min(prompt.earlier for prompt in prompts)
        width = max(len(prompt.token_ids) for prompt in prompts)
        rows = [prompt.token_ids for prompt in prompts for _ in range(settings.num_completions)]
        ids = torch.tensor(
            [[self.tokenizer.pad_token_id] * (width - len(row)) + list(row) for row in rows], device=device
        )
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            key = row_key(settings.seed, settings.round, prompts[0].id, -1 - prompts[0].earlier)
            torch.manual_seed(int(key & np.uint64(2**63 - 1)))
            # Else the folder's generation_config.json fills in what the settings leave open: min_p, suppressed tokens.
            with replaced([(base_model(self.model), "generation_config", GenerationConfig())]):
                given = {"input_ids": ids, "attention_mask": mask, "generation_config": self._config(settings, most)}
                output = self.model.generate(**given, tokenizer=self.tokenizer)
        left = [settings.max_tokens - prompt.earlier for prompt in prompts for _ in range(settings.num_completions)]
        drawn = [row[:most] for row, most in zip(output[:, width:].tolist(), left, strict=True)]
        lengths = [next((i for i, x in enumerate(row, 1) if x in settings.end_ids), len(row)) for row in drawn]
        return _grouped([row[:length] for row, length in zip(drawn, lengths, strict=True)], settings)

    def _config(self, settings: SamplingSettings, max_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            **{
                "max_new_tokens": max_tokens,
                "do_sample": not settings.greedy,
                "temperature": settings.temperature if not settings.greedy else None,
                "top_p": settings.top_p if not settings.greedy else None,
                "top_k": settings.top_k if not settings.greedy else None,
                "min_p": settings.min_p or None,
                "repetition_penalty": settings.repetition_penalty,
                "eos_token_id": sorted(settings.end_ids) or None,
                "pad_token_id": self.tokenizer.pad_token_id,
                "disable_compile": True,
                **settings.extra,
            }
        )

    def _score(
        self, prompts: Sequence[Prompt], ids: list[list[list[int]]], settings: SamplingSettings
    ) -> list[list[list[float]]]:
        groups = [
            TrainingGroup(
                prompt_ids=prompt.token_ids,
                completion_ids=tuple(tuple(x) for x in completions),
                advantages_G=np.zeros(len(completions), np.float32),
                sampled_logps=tuple(np.zeros(len(x), np.float32) for x in completions),
            )
            for prompt, completions in zip(prompts, ids, strict=True)
        ]
        device = next(self.model.parameters()).device
        temperature = 1.0 if settings.greedy else settings.temperature
        flat: list[list[float]] = []
        for packed in pack(groups, tokens_per_pack=self.tokens_per_pack, device=device):
            with tree_attention(self.model) if self.path == "shared" else contextlib.nullcontext():
                logps_N = token_logps(self.model, packed, temperature=temperature, path=self.path).logps_N
            flat += [x.tolist() for x in packed.split(logps_N)]
        return _grouped(flat, settings)


def _grouped(rows: list[Any], settings: SamplingSettings) -> list[list[Any]]:
    g = settings.num_completions
    return [rows[i : i + g] for i in range(0, len(rows), g)]
