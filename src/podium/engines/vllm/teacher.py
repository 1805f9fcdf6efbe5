"""A teacher behind `vllm serve`: log-probabilities of tokens that another model drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podium.engines.vllm.server import ServerRefused, VllmServer, first_up
from podium.errors import ConfigError, EngineError
from podium.records import Sample

SILENT_SECONDS = 240.0
"""A server may be silent for so long while it judges a round."""


class VllmTeacher(NamedTuple):
    """See `engines.table.ServedTeacher`."""

    server: VllmServer
    model: str
    """The name to ask for."""
    root: str
    """The folder or hub id that the server was started with."""

    @classmethod
    def at(cls, url: str) -> VllmTeacher:
        """The model that a server offers first. Raises `ConfigError` where none answers."""
        server = VllmServer(url, seconds=SILENT_SECONDS)
        try:
            first_up([server], 0)
            first = server.call("/v1/models")["data"][0]
        except EngineError as error:
            raise ConfigError(
                f"The teacher cannot be asked: {error.what}",
                code="C063",
                fix="start it: vllm serve MODEL --port PORT",
                settings=("teacher_model",),
                what=error.what,
            ) from None
        return cls(server, str(first["id"]), str(first["root"]))

    def logps(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of every sample's drawn tokens, in order, at temperature 1.

        Raises:
            EngineError: the server is gone, or gives no log-probabilities of prompts.
        """
        same = {"model": self.model, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        asked = [[*sample.prompt_ids, *sample.token_ids] for sample in samples]
        answers = self.server.complete([{**same, "prompt": ids} for ids in asked])
        found = []
        for sample, ids, answer in zip(samples, asked, answers, strict=True):
            if (of_prompt := answer["choices"][0].get("prompt_logprobs")) is None:
                raise ServerRefused(f"The vLLM server at {self.server.url} gives no `prompt_logprobs`.")
            whole = [of_prompt[i][str(ids[i])]["logprob"] for i in range(len(sample.prompt_ids), len(ids))]
            found.append(np.array(whole, np.float32)[sample.actions])
        return found
