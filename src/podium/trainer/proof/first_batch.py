"""The proof, and the callback that runs it: before the first rollouts, before the first step, after weights first move.

Every process checks its own groups and model; results are gathered, so that all stop where one fails. After a resume,
and where weights are sharded (FSDP, DeepSpeed), only the checks that need no first batch run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from podium.errors import Finding, ProofError, way_on
from podium.records import Prompt, Sample, ScoredGroup
from podium.trainer.config import GRPOConfig
from podium.trainer.proof.checks import (
    AFTER_STEP,
    BEFORE_ROLLOUTS,
    BEFORE_STEP,
    KEPT_STEPS,
    OF_TURNS,
    Check,
    Row,
    reference_logps,
    shortened,
)
from podium.trainer.proof.evidence import (
    After,
    Before,
    Subject,
    first_not_finite,
    take_probe,
    telling_prompts,
    weight_traces,
    whole_tensors,
)
from podium.trainer.rounds import MicroBatch
from podium.trainer.rules import ignored_codes
from podium.trainer.samples import samples_of
from podium.trainer.snapshot import preserve_training_state

logger = logging.getLogger(__name__)

FILE = "proof.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All checks of a run so far."""

    checks: tuple[Check, ...]
    step: int
    """Optimizer steps the run had taken when it began: not 0 after a resume."""
    processes: int
    seconds: float

    @property
    def failures(self) -> tuple[Check, ...]:
        """Checks that stop the run."""
        return tuple(check for check in self.checks if check.word == "FAILED")

    def summary(self) -> str:
        """One line where all is well; every other check that was made has a line below it."""
        counts = Counter({"ok": "passed", "note": "passed"}.get(check.word, check.word) for check in self.checks)
        words = ("FAILED", "overruled", "WARNING", "not checked")
        others = "".join(f", {counts[word]} {word.lower()}" for word in words if counts[word])
        head = f"proof on the first batch: {counts['passed']} checks passed{others}, {self.seconds:.1f} s"
        lines = (f"  {check.word}  {check.name}  {check.detail}" for check in self.checks if not check.is_quiet)
        return "\n".join([head, *lines])

    def table(self) -> str:
        widest = max((len(check.name) for check in self.checks), default=0)
        lines = [f"  {check.word:11}  {check.name:{widest}}  {check.detail}" for check in self.checks]
        return "\n".join([f"proof on the first batch, {self.seconds:.1f} s", *lines])

    def write(self, file: Path) -> None:
        """Write `proof.json`; NaN and infinity are null."""
        checks = [{**dataclasses.asdict(check), "result": check.word} for check in self.checks]
        for check in checks:
            check.update({k: None for k, v in check.items() if isinstance(v, float) and not math.isfinite(v)})
        passed = all(check.passed is not False for check in self.checks)
        head = {"passed": passed, "step": self.step, "processes": self.processes}
        text = {**head, "seconds": round(self.seconds, 3), "checks": checks}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class FirstBatch(TrainerCallback):
    """Runs the checks of one run, once each, and keeps their results."""

    def __init__(self, args: GRPOConfig, say: Callable[[Finding], None], record: Callable[[Finding], None]) -> None:
        self.args = args
        self.say = say
        self.record = record
        self.checks: list[Check] = []
        self.seconds = 0.0
        self.step = 0
        self.begun = False
        self.waiting = False
        """Whether the first batch is still to be checked."""
        self.after: After | None = None
        self.gradients: list[Mapping[str, Tensor]] = []
        """Of the steps since training began, until the weights move."""
        self.may_stand_still = False
        self._since = self._unreported = 0.0

    @property
    def proof(self) -> Proof:
        return Proof(checks=tuple(self.checks), step=self.step, processes=self.args.world_size, seconds=self.seconds)

    def take_seconds(self) -> float:
        """Seconds of checks since the last call, which are not the optimizer step's."""
        seconds = self._unreported
        self._unreported = 0.0
        return seconds

    # ---- the three moments ----

    def before_rollouts(self, run: Subject) -> None:
        """Check weights and settings. Raises `ProofError`, as the other two do.

        What a `rollout_func` samples has nothing to be compared with: then there is no proof.
        """
        if self.begun or not self.args.prove_first_batch or run.training.agents.rollout_func is not None:
            return
        self.begun = True
        self.step = run.state.global_step
        self.waiting = not self.step and run.training.step.processes.division in ("one", "ddp")
        self._since = time.perf_counter()
        if self.waiting and not self.args.process_index:
            logger.info("Checking the first batch, sampling and training on it: takes about as long as a step.")
        self._show(BEFORE_ROLLOUTS, run, final=not self.waiting)

    def before_step(self, run: Subject, batches: Sequence[MicroBatch], scored: Sequence[ScoredGroup]) -> None:
        """Check the first batch; keep the state before every step that may be the first to move the weights."""
        if self.after is None and not self.waiting:
            return
        samples = [sample for batch in batches for sample in batch.samples]
        with self._undisturbed(run):
            if self.waiting:
                self.waiting = False
                made_up = Prompt(id=0, row=-1, token_ids=tuple(range(1, 9)), text="", content="")  # without any
                has_turns = any(gather_object([any(c.turns for s in scored for c in s.group.completions)]))
                probe = take_probe(run, telling_prompts(scored) or [made_up], has_turns=has_turns)
                trained = trained_of_own(samples, scored)
                before = Before(run=run, trained=trained, scored=tuple(scored), probe=probe)
                self._show([*BEFORE_STEP, *(OF_TURNS if has_turns else ())], before, final=True)
                samples = samples or [
                    sample
                    for place, group in enumerate(scored)
                    for sample in samples_of(group, np.zeros(group.num_completions), place)
                ]
            self.after = state_before(run, samples, self.gradients)
        # Weight decay alone moves an adapter's first matrix, which the second, still zero, hides.
        signal = any(gather_object([any(batch.samples for batch in batches)]))
        rates = [group["lr"] for group in run.optimizer.param_groups]
        self.may_stand_still = not signal or max(rates, default=0.0) == 0

    def after_backward(self) -> None:
        """Keep the gradients of the step as the backward left them, before callbacks and the optimizer."""
        if self.after is not None:
            tensors = {name: p.grad for name, p in whole_tensors(self.after.run.model).items()}
            self.gradients.append({name: g.detach().clone() for name, g in tensors.items() if g is not None})
            del self.gradients[:-KEPT_STEPS]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the first step that should have moved the weights: one with a learning rate and something to learn."""
        if self.after is None or self.may_stand_still:
            return
        now = weight_traces(self.after.run.model)
        before = self.after.weights
        if self.args.fp16 and all(np.array_equal(now[n].numbers, t.numbers) for n, t in before.items()):
            return  # a step that overflowed
        after = self.after
        self.after = None
        self.gradients = []
        with self._undisturbed(after.run):
            self._show(AFTER_STEP, after, final=True)

    # ---- running checks ----

    @contextlib.contextmanager
    def _undisturbed(self, run: Subject) -> Iterator[None]:
        """Leave no trace; no round is sampled meanwhile, as its reward functions may draw random numbers."""
        run.wait()
        self._since = time.perf_counter()
        with preserve_training_state(run.training.step.model):
            yield
        self._count()

    def _count(self) -> None:
        spent = time.perf_counter() - self._since
        self._since = time.perf_counter()
        self.seconds += spent
        self._unreported += spent

    def _show(self, table: Sequence[Row], evidence: Subject | Before | After, *, final: bool) -> None:
        """Run checks, gather them, print and write; raise where one failed."""
        mine = [with_layer(row.checked(evidence), evidence) for row in table]
        new = [worst(results) for results in zip(*gather_object([mine]), strict=True)]
        ignored = ignored_codes(self.args)
        new = [dataclasses.replace(c, overruled=c.passed is False and c.code in ignored) for c in new]
        self.checks += new
        self._count()
        proof = self.proof
        if not self.args.process_index and (final or proof.failures):
            proof.write(Path(self.args.output_dir) / FILE)
            shown = dataclasses.replace(proof, checks=tuple(new)) if table is AFTER_STEP else proof
            if shown is proof or not all(check.is_quiet for check in new):
                logger.info("%s", shown.summary())
            logger.debug("%s", shown.table())
        for check in [] if self.args.process_index else new:
            if check.word in ("WARNING", "overruled"):
                self.say(check.finding)
            elif check.word == "FAILED":
                self.record(check.finding)
        if proof.failures:
            raise failure(proof)


def trained_of_own(samples: Sequence[Sample], scored: Sequence[ScoredGroup]) -> tuple[Sample, ...]:
    """Return the samples that any process trains on and this one has sampled, and its own that none has sampled.

    Args:
        samples: those that this process trains on; processes exchange some of them.
        scored: the groups that this process has sampled.
    """
    mine = {
        ((sequence.prompt or group.group.prompt).token_ids, sequence.token_ids)
        for group in scored
        for completion in group.group.completions
        for sequence in completion.sequences
    }
    sampled = set(gather_object([*mine]))
    trained = gather_object([*samples])
    strange = [sample for sample in samples if (sample.prompt_ids, sample.token_ids) not in sampled]
    return (*(sample for sample in trained if (sample.prompt_ids, sample.token_ids) in mine), *strange)


def state_before(run: Subject, samples: Sequence[Sample], gradients: Sequence[Mapping[str, Tensor]]) -> After:
    """The state that a step which may move the weights is compared with."""
    short = shortened(samples)
    tensors = whole_tensors(run.model)
    rates = {
        id(p): group["lr"] * group.get("weight_decay", 0.0)
        for group in run.optimizer.param_groups
        for p in group["params"]
    }
    return After(
        run=run,
        weights=weight_traces(run.model),
        samples=short,
        logps=run.training.step.logps(short, run.model),
        reference=reference_logps(run, short),
        signal=any(sample.advantage for sample in samples),
        tensors={name: p.detach().clone() for name, p in tensors.items()},
        decays={name: rate for name, p in tensors.items() if (rate := rates.get(id(p), 0.0))},
        gradients=gradients,
    )


def with_layer(check: Check, evidence: Subject | Before | After) -> Check:
    """For log-probabilities that are not numbers: the layer from which they come."""
    if check.passed is not False or not isinstance(evidence, Before) or check.code not in ("P004", "P005"):
        return check
    run = evidence.run
    probe = evidence.probe
    if np.isfinite(probe.packed_N).all():
        return check
    layer = first_not_finite(run.model, lambda: run.training.step.logps(probe.samples, run.model))
    return dataclasses.replace(check, detail=f"{check.detail}; not finite from {layer or 'the head'} on")


def worst(checks: Sequence[Check]) -> Check:
    """The result of one check on all processes: the first failure or warning, with its process, else the first."""
    for word in ("FAILED", "WARNING"):
        for rank, check in enumerate(checks):
            if check.word == word:
                process = f"process {rank}: " if len(checks) > 1 else ""
                return dataclasses.replace(check, detail=f"{process}{check.detail}")
    return next((check for check in checks if check.passed is not None), checks[0])


def failure(proof: Proof) -> ProofError:
    """All failures in one message."""
    found = [check.finding for check in proof.failures]
    lines = [f"  {finding.code} {finding.what}\n  fix: {way_on(finding)}" for finding in found]
    return ProofError(
        f"The proof on the first batch failed in {len(lines)} of {len(proof.checks)} checks, so the run stops:\n"
        + "\n".join(lines)
        + f"\n`podium explain {found[0].code}` says more; `prove_first_batch: false` trains without a proof.",
        code=found[0].code,
        findings=found,
    )
