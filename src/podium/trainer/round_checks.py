"""What a round itself may tell of a mistake, before it is trained on: findings of a run, each told once.

W010 rewards that differ when they are given a second time    W019 rewards that one process alone does not get
M035 tokens without a text                                    M135 log-probabilities that are not the policy's
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from accelerate.utils import gather_object

from podium.agents.rollout_func import foreign_logps
from podium.algorithm.metrics import RolloutTable
from podium.errors import Finding
from podium.models.forward import base_model
from podium.records import Sample, ScoredGroup
from podium.rewards.score import repeat_findings
from podium.runs.monitors.policy import APART, OF_THESE_IDS
from podium.trainer.processes import ScoresByProcess, of_all_ranks
from podium.trainer.rounds import RoundKey, SampledRound
from podium.trainer.samples import ScoredRound
from podium.trainer.settings import call_settings
from podium.trainer.snapshot import same_random_numbers
from podium.trainer.step import Step

WRITTEN = Finding(
    code="M135",
    severity="warning",
    what="The weights changed while completions were sampled and scored, so the policy that is trained did not "
    "sample them.",
    why="A tool, an environment or a reward function wrote to the model.",
    fix="Leave trainer.model as it is there; give them a copy.",
)


class RoundChecks:
    """Looks at the rounds of a run."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        """Codes of findings that are told once a run."""
        self._has_repeated = False
        self._has_compared = False
        self._known: Sequence[int] = ()
        """Ids of the tokens that have a text."""
        self._scores: ScoresByProcess | None = None

    def say(self, findings: list[Finding], finding: Finding) -> None:
        """Add a finding, unless its code was told in this run."""
        if finding.code not in self._told:
            self._told.add(finding.code)
            findings.append(finding)

    def findings(
        self, sampled: SampledRound, scored: ScoredRound, table: RolloutTable, samples: Sequence[Sample]
    ) -> Iterator[Finding]:
        """Findings about a round of which this process has `sampled` its part; `table` is of all ranks."""
        if not self._has_repeated and sampled.key == RoundKey(epoch=0, number=0):
            yield from self._repeated(sampled, scored)
        if sampled.written:
            yield WRITTEN
        if scored.run.plan.ranks > 1:
            yield from self._unscored(sampled.places, scored, table)
        if "M035" not in self._told:
            yield from self._textless(sampled.scored, scored)
        if scored.run.agents.rollout_func is not None and not self._has_compared:
            yield from self._foreign(samples, scored.run.step)

    def _repeated(self, sampled: SampledRound, scored: ScoredRound) -> Iterator[Finding]:
        """Score the first round of a run a second time, by functions that are fast; findings where scores differ."""
        run = scored.run
        if scored.state.global_step or not (run.args.prove_first_batch and run.args.should_log):
            return
        self._has_repeated = True
        seconds = dict(sampled.measured.seconds)
        fast = [reward for reward in run.scoring.rewards if seconds.get(f"reward/{reward.name}_seconds", 9.0) < 1.0]
        with same_random_numbers():
            found = repeat_findings(
                sampled.scored,
                fast,
                trainer_state=scored.state,
                settings=call_settings(run.args),
                environments=run.agents.pools is not None,
            )
            yield from [dataclasses.replace(finding, step=1) for finding in found]

    def _unscored(self, places: Sequence[int], scored: ScoredRound, table: RolloutTable) -> Iterator[Finding]:
        """W019, once a run: reward functions give None on other processes than the first."""
        plan = scored.run.plan
        ranks_P = of_all_ranks(places, [plan.rank] * len(places))
        if plan.rank:
            return
        if self._scores is None:
            self._scores = ScoresByProcess(len(table.names_K), plan.ranks)
        rewards_PGK = table.rewards_RK.reshape(len(ranks_P), -1, len(table.names_K))
        found = self._scores.findings(rewards_PGK, table.names_K, ranks_P)
        yield from [dataclasses.replace(finding, step=scored.state.global_step + 1) for finding in found]

    def _textless(self, groups: Sequence[ScoredGroup], scored: ScoredRound) -> Iterator[Finding]:
        """M035, once a run: tokens were drawn for which the tokenizer has no text."""
        policy = scored.run.policy
        drawn_N = np.concatenate(
            [[*completion.token_ids] for x in groups for completion in x.group.completions] or [[]]
        )
        self._known = self._known or sorted(policy.tokenizer.get_vocab().values())
        counts = gather_object([(int(np.isin(drawn_N, self._known, invert=True).sum()), len(drawn_N))])
        count, total = map(sum, zip(*counts, strict=True))
        if not count:
            return
        share = f"{100 * count / total:.2g}"
        rows = base_model(policy.model).config.get_text_config().vocab_size
        tokens = self._known[-1] + 1
        self._told.add("M035")
        yield Finding(
            code="M035",
            severity="warning",
            what=f"{count:,} of {total:,} drawn tokens of this round ({share} %) have no text: the model has "
            f"{rows:,} tokens to draw, the tokenizer {tokens:,}.",
            why="Reward functions do not see them, and a completion's text, tokenized again, lacks them.",
            fix=f"the model's own tokenizer, or once: model.resize_token_embeddings({tokens}); "
            "model.save_pretrained(folder)",
            step=scored.state.global_step + 1,
            facts={"count": count, "total": total, "share": share, "rows": rows, "tokens": tokens},
        )

    def _foreign(self, samples: Sequence[Sample], step: Step) -> Iterator[Finding]:
        """M135 before the first step: a `rollout_func` returned log-probabilities that are not the policy's."""
        if not step.args.prove_first_batch or step.filters_logps:
            return
        self._has_compared = True
        returned = [sample.sampled_logps_A for sample in samples]
        own = step.logps(samples)
        doubts = [doubt for doubt in gather_object([foreign_logps(returned, own, APART)]) if doubt]
        if doubts:
            yield Finding(
                code="M135",
                severity="warning",
                what=f"The log-probabilities that rollout_func returned {doubts[0]}.",
                fix=OF_THESE_IDS,
                step=1,
            )
