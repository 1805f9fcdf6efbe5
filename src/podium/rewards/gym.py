"""reasoning-gym's own scorers as a reward, in a sandbox.

dataset = podium.data.load("reasoning-gym:countdown?size=200&seed=1").train
GRPOTrainer(..., reward_funcs=[library_reward("reasoning_gym", dataset="countdown")], train_dataset=dataset)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from podium.data.extract import tagged
from podium.data.gym import GymScorer, check_task
from podium.errors import RewardError
from podium.errors.texts import quoted
from podium.isolation.sandbox import check_settings, choose
from podium.rewards.text import text_of

Extract = Literal["answer", "raw"]
logger = logging.getLogger(__name__)

GENEROUS: Mapping[str, str] = {
    "arc_agi": "every board, 0.05",
    "rearc": "every board, 0.05",
    "coin_flip": "answers that begin as the right one does, as `0` does",
    "game_of_life_halting": "every text that is not empty, where the right answer is True",
    "knights_knaves": "answers that name everybody and are right about some",
}
"""Tasks whose scorers pay for texts without the right answer."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """reasoning-gym's `score_answer` of the named dataset, run in a sandbox: a score of the answer from 0 to 1.

    Read are the `metadata` column (JSON text or a mapping) and the `answer` column, as `gym_rows` makes them. The
    answer of a completion is inside its last `<answer>` tags (`extract: answer`), or the `raw` text. An answer that
    takes longer than `timeout` processor seconds, or breaks the scorer, gets 0. None where a row has no metadata or
    those of another dataset, where the sandbox itself fails, and where `call_seconds` are over. Raises `ConfigError`
    without reasoning-gym or for a dataset it lacks, `RewardError` where no sandbox works.
    """

    __name__: ClassVar[str] = "reasoning_gym"  # in metrics and messages

    dataset: str
    extract: Extract = "answer"
    timeout: int = 2
    memory_megabytes: int = 2048
    workers: int | None = None
    sandbox: str = "auto"
    call_seconds: float = 45.0
    _scorer: GymScorer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, get_args(Extract))
        check_task(self.dataset)
        if self.dataset in GENEROUS:
            logger.warning("reasoning-gym's scorer of `%s` gives credit to %s.", self.dataset, GENEROUS[self.dataset])
        scorer = GymScorer(
            dataset=self.dataset,
            backend=choose(self.sandbox),
            timeout=self.timeout,
            memory_megabytes=self.memory_megabytes,
            workers=self.workers,
            call_seconds=self.call_seconds,
        )
        object.__setattr__(self, "_scorer", scorer)

    def __call__(
        self, completions: Sequence[Any], metadata: Sequence[Any], answer: Sequence[Any] | None = None
    ) -> list[float | None]:
        golds = [None] * len(completions) if answer is None else answer
        entries = [self._entry(own, gold, index) for index, (own, gold) in enumerate(zip(metadata, golds, strict=True))]
        texts = [text_of(completion) for completion in completions]
        answers = [text.strip() if self.extract == "raw" else tagged(text, "answer") for text in texts]
        asked = [index for index, entry in enumerate(entries) if entry is not None and answers[index] is not None]
        scores: list[float | None] = [None if entry is None else 0.0 for entry in entries]
        tests = [{"answer": answers[index], "entry": entries[index]} for index in asked]
        for index, score in zip(asked, self._scorer(tests), strict=True):
            scores[index] = score
        return scores

    def _entry(self, metadata: Any, answer: Any, index: int) -> dict[str, Any] | None:
        """The entry for `score_answer`; None where there is nothing to score with."""
        if metadata is None:
            return None
        if isinstance(metadata, str):
            try:
                metadata = json.loads(metadata)
            except ValueError as error:
                raise RewardError(
                    f"the `metadata` of completion {index} are not JSON: {quoted(error)}", index=index, error=error
                ) from error
        if not isinstance(metadata, Mapping):
            start = str(metadata)[:80]
            raise RewardError(
                f"the `metadata` of completion {index} are {start!r}; expected a mapping.",
                index=index,
                metadata=start,
            )
        if metadata.get("source_dataset", self.dataset) != self.dataset:
            return None
        return {"question": "", "answer": answer, "metadata": dict(metadata)}
