"""Health of a run: every optimizer step is recorded in its folder, checked by the monitors, acted upon, and shown.

The trainer passes rounds and measurements; the rest comes in as a callback. Only the main process writes and checks;
the others send it their rows, and follow its decision. The line that training shows is a callback of its own: step,
reward, share of right completions, their length, time left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import torch
from accelerate.utils import broadcast_object_list, gather_object
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils.import_utils import is_in_notebook

from podium.agents.setup import user_code
from podium.algorithm.metrics import MetricsBuffer
from podium.data.sources import is_read_once
from podium.data.survey import EXAMPLES
from podium.errors import DataError, Finding, RewardError, overrule, way_on
from podium.errors.texts import with_fix
from podium.models.forward import base_model
from podium.models.loading import dropouts
from podium.records import ScoredGroup, StepMetrics
from podium.runs import checkpoint, environment
from podium.runs.html import render
from podium.runs.monitors import Monitor, agreed, run_settings
from podium.runs.monitors.detection import percent
from podium.runs.pace import clock, steps_per_round, typical_seconds
from podium.runs.recording import RunFolder, joined, rollout_rows
from podium.runs.redaction import without_secrets
from podium.runs.run import CONFIG, ENVIRONMENT, REWARD_TEST, Run
from podium.tester.pretest import as_plain, pretest
from podium.tester.reach import WHOLE, reach_of
from podium.trainer.assembly import has_prompts
from podium.trainer.parts import local
from podium.trainer.processes import differing_rows, zero_stage
from podium.trainer.rules import OF_THE_OPTIMIZER, fixed_settings, heeded, ignored_codes
from podium.trainer.run import TrainingRun

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

logger = logging.getLogger(__name__)

MOST_ROLLBACKS = 3

MOST_LEFT_OUT = 3
"""Optimizer steps left out in a row after which a run ends: it learns nothing."""

TENSORS = 24
VALUES = 2048
"""Most trained tensors, spread over the model, and most numbers of each, that `WeightProbe` samples."""


NUMBERS: Mapping[str, Callable[[float], str]] = {
    "reward": "reward {:.3f}".format,
    "accuracy": lambda share: f"right {percent(share)}",
    "completions/mean_length": "length {:.0f} tokens".format,
}
"""Metrics on the line. The loss is not among them: GRPO's is near 0 by construction, whatever is learnt."""

LINES = 10
"""About as many lines a whole run has in a file or pipe."""

FIRST = "sampling and checking the first batch, which takes longer than a step"


class AboveTheBar(logging.Handler):
    """Prints notes and warnings on lines of their own, above a progress bar of tqdm."""

    def emit(self, record: logging.LogRecord) -> None:
        word = {"INFO": "note", "DEBUG": "note"}.get(record.levelname, record.levelname.lower())
        tqdm.write(f"{word}: {record.getMessage()}", file=sys.stderr)


def show_notes() -> None:
    """Show Podium's notes, findings and the proof, unless the program has set up logging of its own."""
    podium = logging.getLogger("podium")
    if not podium.handlers and not logging.getLogger().handlers:
        podium.addHandler(AboveTheBar())
        podium.setLevel(logging.INFO)
        podium.propagate = False


LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Health(TrainerCallback):
    """Records and checks the run of one trainer.

    Attributes:
        config: the contents of `config.yaml`, set to the recipe by the command line; else the settings that differ
            from their defaults.
        found: all findings of this run, in order.
        decision: the consequence of a finding: `stop`, `rollback`, or None.
        latest: on the main process the numbers of the optimizer step that ended last, as recorded.
    """

    def __init__(self, run: TrainingRun, measured: MetricsBuffer) -> None:
        self.run = run
        self.args = run.args
        self.measured = measured
        self.config: Mapping[str, Any] | None = None
        self.found: list[Finding] = []
        self.decision: str | None = None
        self.latest: Mapping[str, float] = {}
        self.folder = RunFolder(Path(str(self.args.output_dir)), rollouts_megabytes=self.args.record_megabytes)
        self._wishes = cast("dict[str, str]", self.args.on_finding or {})
        self._monitor = Monitor()
        self._rounds: list[dict[str, list[Any]]] = []
        self._gaps: list[Tensor] = []
        self._probe: WeightProbe | None = None
        self._made_with = fixed_settings(self.args)
        self._learning_rate = 0.0
        self._num_tokens = 0.0
        self._seconds = 0.0
        self._steps_per_round = steps_per_round(vars(self.args))
        self._spent = 0.0
        self._rollbacks = 0
        self._left_out = 0
        """Optimizer steps in a row whose gradient was not finite."""
        self._said: list[Finding] = []
        """Findings of this step that are not the monitors'; the same on every process."""
        self._unrecorded: list[Finding] = []
        """Findings from before the record is begun, or cut after a rollback."""

    # ---- from the trainer ----

    def take(self, run: TrainingRun) -> None:
        """Describe a run with other rows from here on."""
        self.run = run
        self.__dict__.pop("described", None)

    def compare_settings(self) -> None:
        """Say once which settings were changed too late to have an effect, at a generation round."""
        now = fixed_settings(self.args, self._made_with)
        changed = [name for name, value in now.items() if value != self._made_with[name]]
        if changed and self._is_main:
            logger.warning(
                "Changed in args when training had read it, and without effect: %s. Training goes on with what it was. "
                "To change it in a run, end the run, and resume it with another GRPOConfig.",
                ", ".join(f"{name}={now[name]!r} (was {self._made_with[name]!r})" for name in changed),
            )
        for name in changed:
            del self._made_with[name]

    def saw_round(
        self,
        scored: Sequence[ScoredGroup],
        advantages_PG: Sequence[np.ndarray],
        kept_PG: Sequence[np.ndarray],
        step: int,
    ) -> None:
        """A generation round of this process; `step` is the optimizer step it is for."""
        if not self.args.record:
            return
        with self._timed():
            weights = self.run.scoring.advantage.weights_K
            images = self.args.log_multimodal
            mine = rollout_rows(scored, advantages_PG, kept_PG, weights_K=weights, step=step, images=images)
            rows = gather_object(mine)
            if self._is_main and rows:
                self.folder.add_rollouts(rows)
                self._rounds.append(joined(rows))

    def saw_gaps(self, gaps: Sequence[Tensor]) -> None:
        self._gaps.extend(gaps)

    def saw_gradient(self, origin: str | None, name: str, step: int) -> None:
        """A step before it is applied. `origin`: where its gradient or loss, as `name` says, stops being finite (M131);
        None: both are finite."""
        self._left_out = 0 if origin is None else self._left_out + 1
        if origin is None:
            return
        apart = zero_stage(self.args) is None
        done = "the step was left out, nothing has changed" if apart else "DeepSpeed decides whether it is applied"
        again = f" {self._left_out} steps in a row: nothing is learnt." if self._left_out > 1 else ""
        finding = Finding(
            code="M131",
            severity="error" if self._left_out > 1 else "warning",
            what=f"The {name} of step {step} is not finite: {done}. {origin}{again}",
            why="Applied, one NaN or infinity would spread to every weight.",
            fix="Mend what it began with; weights that are not finite come back with a checkpoint from before.",
            step=step,
            facts={"name": name, "at_step": step, "done": done, "origin": origin, "again": again},
        )
        self._said = [*heeded([finding], ignored_codes(self.args))]
        for finding in self._said if self._is_main else ():
            self.say(finding)

    # ---- as a callback ----

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The length of the run, which rewards that fade divide by, is known to evaluations before it."""
        order = self.run.rows.order
        state.max_steps = order.plan.num_steps(args, order.num_micro_steps)
        state.num_train_epochs = math.ceil(args.num_train_epochs)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._made_with.update(fixed_settings(self.args, OF_THE_OPTIMIZER))
        self._probe = WeightProbe(kwargs["model"]) if isinstance(kwargs.get("model"), nn.Module) else None
        self.decision = None
        self._num_tokens = float(state.num_input_tokens_seen)
        self._seconds = 0.0
        self._begin_record(state)
        if self._is_main and self.args.prove_first_batch and not state.global_step:
            self._report_reward_test()

    def _begin_record(self, state: TrainerState) -> None:
        if not (self.args.record and self._is_main):
            return
        with self._timed():
            described = self.described
            ignored = frozenset() if self.args.strict else ignored_codes(self.args)  # strict: what is overruled is said
            given = self.config if self.config is not None else self._given()
            self._monitor = Monitor(run_settings(described, given), ignored=ignored)
            self.folder.begin(resumed_step=state.global_step or None)
            self.folder.write_json(ENVIRONMENT, described)
            self.folder.write_yaml(CONFIG, given)
            if state.global_step:  # the monitors see all steps of a resumed run; its findings are in its folder
                run = Run.load(self.folder.folder)
                self._monitor.reread(run.history, run.rounds, run.rounds.visits, run.reported)
            for finding in self._unrecorded:
                self.folder.add_finding(finding)
            self._unrecorded = []

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before any backward: DeepSpeed steps in the last one."""
        if self.args.record and self._probe is not None:
            with self._timed():
                self._probe.before()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._learning_rate = kwargs["optimizer"].param_groups[0]["lr"] if kwargs.get("optimizer") else 0.0

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.args.record and self._probe is not None and not self._left_out:
            with self._timed():
                self.measured.add("train", self._probe.after())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        new = self._said
        self._said = []
        if self.args.record and self._is_main:
            with self._timed():
                metrics = StepMetrics(step=state.global_step, values=self._step_values(state))
                self.latest = metrics.values
                self.folder.add_metrics(metrics)
                rounds = self._rounds
                self._rounds = []
                seen = heeded(self._monitor.step(metrics, rounds), ignored_codes(self.args))
                for finding in agreed([*self.found, *seen])[len(self.found) :]:
                    if finding.code not in {said.code for said in new}:
                        self.say(finding)
                        new = [*new, finding]
        wishes = {self._wish(finding) for finding in new}
        decision = next((wish for wish in ("rollback", "stop") if wish in wishes), None)
        if self.args.world_size > 1:
            decision = broadcast_object_list([decision])[0]
        if decision is not None:
            self.decision = decision
            control.should_training_stop = True
            control.should_save = decision == "stop"

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = kwargs.get("metrics") or {}
        values = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if self.args.record and self._is_main and values and state.global_step:
            self.folder.add_metrics(StepMetrics(step=state.global_step, values=values))
            self._monitor.add_evaluation(values)

    # ---- numbers ----

    def _step_values(self, state: TrainerState) -> dict[str, float]:
        """All measurements of this step, with those of the process; speed where a generation round ends."""
        own = {"learning_rate": self._learning_rate, "health/resident_bytes": float(psutil.Process().memory_info().rss)}
        if torch.cuda.is_available():
            own["health/device_bytes"] = float(torch.cuda.memory_allocated())
        if self._gaps:
            gaps = torch.stack(self._gaps)
            self._gaps = []
            if self.run.agents.rollout_func is not None:  # which need return none
                gaps = gaps[~gaps.isnan().any(1)]
            if len(gaps):
                mean = float(gaps[:, 0].mean())
                most = float(gaps[:, 1].max())
                own["health/logp_gap_mean"] = mean
                own["health/logp_gap_max"] = most
        self.measured.add("train", {name: value for name, value in own.items() if name != "learning_rate"})
        values = {**self.measured.take_step(), **own}
        self._seconds += values.get("step_time", 0.0)
        tokens = float(state.num_input_tokens_seen)
        if state.global_step % self._steps_per_round == 0:
            speed = (tokens - self._num_tokens) / self._seconds if self._seconds > 0 else 0.0
            if speed > 0:
                values["health/tokens_per_second"] = speed
                self.measured.add("train", {"health/tokens_per_second": speed})
            self._num_tokens = tokens
            self._seconds = 0.0
        spent = self._spent
        self._spent = 0.0
        self.measured.add("train", {"time/monitor_seconds": spent})
        return {**values, "time/monitor_seconds": spent}

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Seconds spent here; a step's line carries those since the line before."""
        start = time.perf_counter()
        yield
        self._spent += time.perf_counter() - start

    # ---- findings ----

    def _report_reward_test(self) -> None:
        """The rewards tested without a model. Raises `RewardError` for an error, as `podium train` does.

        W111 is left to the first round, which has real completions. Log records have a code: the command line, which
        has made the test before, leaves those out.
        """
        run = self.run
        if run.agents.rollout_func is not None:
            logger.info("Rewards are not tested before training: rollout_func may add columns that they read.")
            return
        examples = [] if is_read_once(run.rows.train) else [*islice(run.rows.train, EXAMPLES)]
        examples = [row for row in examples if has_prompts([row])]  # of the others the environments make them
        examples = [run.rows.builder.with_images(row, index) for index, row in enumerate(examples)]
        weights = run.scoring.advantage.weights_K.tolist()
        reach = WHOLE if run.agents.takes_turns else reach_of(run.rows.builder, examples)
        played = run.agents.pools is not None
        test = pretest(run.scoring.rewards, weights, examples, environments=played, reach=reach)
        kept = heeded((finding for finding in test.findings if finding.code != "W111"), ignored_codes(self.args))
        found = [replace(finding, step=1) for finding in kept]
        if self.args.record:
            self.folder.write_json(REWARD_TEST, as_plain(test))
        wrong = [finding for finding in found if finding.severity == "error"]
        for finding in found:
            if finding not in wrong:
                self._log(finding, extra={"code": finding.code})
            if finding.severity != "note":
                self.add(finding)
        if test.table is not None:
            logger.info("%s", "\n".join(["Rewards before training", *test.table.as_text()]), extra={"code": "W121"})
        if wrong:
            lines = "\n".join(with_fix(f"{finding.what} [{finding.code}]", way_on(finding)) for finding in wrong)
            raise RewardError(lines, code=wrong[0].code)

    def overrules(self, finding: Finding) -> bool:
        """Whether the user goes on against a finding from before the run; then it is said, and recorded later."""
        [heard] = [*heeded([finding], ignored_codes(self.args))] or [finding]
        if heard.severity == finding.severity:
            return False
        if heard.code not in {finding.code for finding in self.found}:
            self.overruled_before([heard])
        if self._is_main:
            logger.warning("%s %s.", heard.code, heard.what)
        return True

    def compare_rows(self) -> None:
        """Raise `DataError` where the processes of the run have read other training rows."""
        digests = gather_object([self.described["data"].get("sha256")]) if self.args.world_size > 1 else [None]
        finding = differing_rows(digests)
        if finding is not None and not self.overrules(finding):
            raise DataError(
                f"{finding.what}: {finding.why}.",
                code=finding.code,
                fix=way_on(finding),
                what=finding.what,
                why=finding.why,
            )

    def overruled_before(self, found: Sequence[Finding], *, say: bool = False) -> None:
        """Keep findings that were overruled before training, for the record of this run; with `say`, log them too."""
        ignored = ignored_codes(self.args)
        kept = [finding for finding in found if finding.code in ignored and finding.severity == "warning"]
        self.found += kept
        self._unrecorded += kept
        if say:
            for finding in kept:
                self._log(finding)

    def say(self, finding: Finding) -> None:
        """Report a finding to the folder, the terminal and, as a number, the trackers."""
        self.add(finding)
        self._log(finding)

    def add(self, finding: Finding) -> None:
        """Report a finding to the folder and, as a number, the trackers."""
        self.found.append(finding)
        self.folder.add_finding(finding)
        self.measured.add("train", {f"finding/{finding.code}": 1.0})

    def _log(self, finding: Finding, extra: Mapping[str, str] | None = None) -> None:
        ends = self._wish(finding) == "stop"
        level = LEVELS[finding.severity] if ends else min(LEVELS[finding.severity], logging.WARNING)
        on = "" if ends or finding.severity != "error" else " (the run goes on; `strict: true` would end it)"
        if ends and finding.code not in self._wishes:
            on = f" To go on against it: {overrule(finding.code)}"
        logger.log(level, "%s %s Fix: %s%s", finding.code, finding.what, finding.fix, on, extra=extra)

    def _wish(self, finding: Finding) -> str | None:
        ruined = not math.isfinite(self.latest.get("health/update_ratio", 0.0))
        ends = self.args.strict or (finding.code == "M131" and (ruined or self._left_out >= MOST_LEFT_OUT))
        return self._wishes.get(finding.code) or ("stop" if ends and finding.severity == "error" else None)

    # ---- rolling back ----

    def back_to(self) -> Path | None:
        """After training has ended: the checkpoint to continue from; None: the run ends here.

        Later checkpoints are set aside. The same on every process.
        """
        if self.decision != "rollback":
            return None
        healthy = self._newest_healthy() if self._is_main and self._rollbacks < MOST_ROLLBACKS else None
        if self.args.world_size > 1:
            healthy = broadcast_object_list([healthy])[0]
        self.decision = "stop" if healthy is None else None
        self._rollbacks += 1
        if healthy is None and self._is_main:
            logger.error("There is no healthy checkpoint to go back to (save_steps), or it did not help: the run ends.")
        return healthy

    def _newest_healthy(self) -> Path | None:
        """The newest undamaged checkpoint from before the finding began; those after it are set aside."""
        bad = next(finding for finding in reversed(self.found) if self._wishes.get(finding.code) == "rollback")
        issue = self._monitor.issues.get(bad.code)  # none without a record
        began = (bad.step or 0) if issue is None else issue.first_step
        folders = checkpoint.checkpoints(self.folder.folder)
        earlier = (folder for folder in folders if checkpoint.step_of(folder) < began)
        healthy = next((folder for folder in earlier if checkpoint.damage(folder) is None), None)
        if healthy is None:
            return None
        kept = checkpoint.step_of(healthy)
        for folder in folders:
            if checkpoint.step_of(folder) > kept:
                folder.rename(folder.with_name(f"set-aside-{folder.name}"))
        what = f"{bad.code} in step {bad.step}: went back to step {kept}, with half the learning rate."
        went_back = replace(bad, code="M191", severity="warning", what=what, why=bad.what, step=kept)
        self.found.append(went_back)
        self._unrecorded.append(went_back)
        logger.warning("%s", what)
        return healthy

    def slow_down(self, optimizer: Any, scheduler: Any) -> None:
        """Half the learning rate for every rollback so far, also for the rest of the schedule."""
        factor = 0.5**self._rollbacks
        if factor == 1:
            return
        for group in optimizer.param_groups:
            group["lr"] *= factor
            group["initial_lr"] = group.get("initial_lr", group["lr"]) * factor
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]

    # ---- written once ----

    @property
    def _is_main(self) -> bool:
        return self.args.process_index == 0

    @cached_property
    def described(self) -> dict[str, Any]:
        """The contents of `environment.json`."""
        run = self.run
        trained = [p for p in run.policy.model.parameters() if p.requires_grad]
        names = [reward.name for reward in run.scoring.rewards]
        code = user_code(run.agents.tools, run.agents.pools, run.agents.program)
        return {
            **environment.describe_environment(run.scoring.rewards, run.rows.train),
            "agents": {name: environment.source_of(*code_of_role) for name, code_of_role in code.items()},
            "model": {
                "name": getattr(run.policy.model.config, "_name_or_path", ""),
                "parameters": run.policy.num_parameters,
                "trained_parameters": sum(p.numel() for p in trained),
                "adapter": hasattr(run.policy.model, "peft_config"),
                "quantized": getattr(run.policy.model.config, "quantization_config", None) is not None,
            },
            "trained_dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
            "dropout": max((getattr(*place) for place in dropouts(run.policy.model)), default=0.0),
            "reward_weights": dict(zip(names, run.scoring.advantage.weights_K.tolist(), strict=True)),
            "accuracy": run.scoring.accuracy,
            "rollout_func": run.agents.rollout_func is not None,
            "settings": without_secrets(self.args.to_dict()),
        }

    @property
    def made_of(self) -> dict[str, Any]:
        """The part of it that a run must share with the one that wrote its checkpoint."""
        adapters = getattr(self.run.policy.model, "peft_config", None)
        adapter = adapters[self.run.policy.model.active_adapter].to_dict() if adapters else None
        kept = {name: self.described[name] for name in ("settings", "model", "rewards", "agents", "data")}
        return without_secrets({**kept, "adapter": adapter})

    def _given(self) -> dict[str, Any]:
        """Settings that are not the defaults, for a run without a recipe."""
        defaults = {f.name: f.default for f in dataclasses.fields(self.args)}
        settings = {name: x for name, x in self.args.to_dict().items() if x is not None and x != defaults.get(name)}
        named = {"model": getattr(self.run.policy.model.config, "_name_or_path", "")}
        return without_secrets({**named, "rewards": [r.name for r in self.run.scoring.rewards], **settings})


class WeightProbe:
    """Measures how far an optimizer step moves the weights, on a fixed sample of them.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> probe = WeightProbe(layer)
    >>> probe.before()
    >>> layer.weight.data *= 1.01
    >>> {name: round(value, 4) for name, value in probe.after().items()}
    {'health/update_ratio': 0.01, 'health/moved_share': 1.0}
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and local(p).numel()]
        every = max(1, len(trained) // TENSORS)
        # An odd stride, or every sample of a LoRA model would be of its A matrices, and none of B.
        self._parameters = trained[:: every + (every % 2 == 0)]
        head = getattr(base_model(model), "get_output_embeddings", lambda: None)()
        self._head_bias = getattr(head, "bias", None)
        self._values: list[Tensor] = []

    def before(self) -> None:
        self._values = self._sample()

    def after(self) -> dict[str, float]:
        """RMS of the change over RMS of the weights, and the share of weights that changed at all.

        A number of the head's bias that does not change is left out of both RMS: one of -1e20 forbids its token, has no
        gradient, and says nothing of the size of the others.
        """
        if not self._values:
            return {}
        now = self._sample()
        then = self._values
        self._values = []
        moved = [x != y for x, y in zip(now, then, strict=True)]
        kept = torch.cat([m | (p is not self._head_bias) for m, p in zip(moved, self._parameters, strict=True)])
        sizes = torch.cat(then)[kept].double()
        change = torch.cat(now)[kept].double() - sizes
        return {
            "health/update_ratio": float(change.norm() / sizes.norm().clamp_min(1e-12)),
            "health/moved_share": float(torch.cat(moved).float().mean()),
        }

    def _sample(self) -> list[Tensor]:
        mine = [local(p).detach().flatten() for p in self._parameters]
        return [x[:: max(1, len(x) // VALUES)][:VALUES].to(torch.float32, copy=True) for x in mine]


# ---- the line that training shows ----


@dataclass(slots=True)
class Pace:
    """Seconds of the steps of a run, evaluations and checkpoints apart, and of what is to come.

    The first step is left out: it holds the proof, and completions that have not learnt to end.
    """

    per_round: int = 1
    """Optimizer steps of a generation round."""
    first: int = 1
    """Number of the first step."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each step after the first."""
    others: float = 0.0
    """Seconds of evaluations and checkpoints so far, which recur."""
    _mark: float | None = None

    def step_ended(self) -> None:
        """After every optimizer step, before its evaluation and checkpoint."""
        now = time.perf_counter()
        if self._mark is not None:
            self.seconds.append(now - self._mark)
        self._mark = now

    def interrupted(self) -> None:
        """After an evaluation or a checkpoint."""
        now = time.perf_counter()
        if self._mark is not None:
            self.others += now - self._mark
            self._mark = now

    def left(self, step: int, max_steps: int) -> float | None:
        """Seconds from the end of a step to that of the run; None: not known yet."""
        if (typical := typical_seconds(self.seconds, self.per_round)) is None:
            return None
        return (max_steps - step) * (typical + self.others / (step - self.first + 1))


class _Progress(TrainerCallback):
    """Collects the numbers of the line; subclasses show it."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}
        self.rewards: dict[int, float] = {}
        self.pace = Pace()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace = Pace(per_round=steps_per_round(vars(args)), first=state.global_step + 1)
        if state.is_world_process_zero:
            self.open(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace.step_ended()
        self.show(state)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace.interrupted()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace.interrupted()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs |= dict(logs or {})
        if state.is_world_process_zero and "reward" in (logs or {}):
            self.rewards[state.global_step] = self.logs["reward"]
            self.log(state)
        self.show(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()

    def line(self, state: TrainerState) -> str:
        left = self.pace.left(state.global_step, state.max_steps)
        return progress_line(state.global_step, state.max_steps, self.logs, left)

    def open(self, state: TrainerState) -> None:
        """Show that the first batch is checked, on the main process."""

    def show(self, state: TrainerState) -> None:
        """Update what is shown, after a step and after its numbers are logged."""

    def log(self, state: TrainerState) -> None:
        """Print a line where there is no live one, after numbers with a reward are logged on the main process."""

    def close(self) -> None:
        """Leave the terminal as it was; also called when training raises."""


class ProgressLine(_Progress):
    """One line on a terminal, updated at every step; about ten lines in all in a file or pipe."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.live: Live | None = None
        self.printed = 0

    def open(self, state: TrainerState) -> None:
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
            self._update(f"step {state.global_step}/{state.max_steps}  {FIRST} ...")

    def show(self, state: TrainerState) -> None:
        self._update(self.line(state))

    def log(self, state: TrainerState) -> None:
        every = math.ceil(state.max_steps / LINES) or 1
        due = state.global_step // every > self.printed // every or state.global_step in (1, state.max_steps)
        if self.live is None and due:
            self.printed = state.global_step
            self.console.print(Text(fitting(self.line(state), self.console.width)), soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _update(self, line: str) -> None:
        if self.live is not None:
            self.live.update(Text(fitting(line, self.console.width), overflow="ellipsis", no_wrap=True), refresh=True)


class NotebookProgress(_Progress):
    """The line and the reward curve below a notebook's cell."""

    def __init__(self) -> None:
        super().__init__()
        self.display: DisplayHandle | None = None

    def open(self, state: TrainerState) -> None:
        from IPython.display import HTML, display

        self.display = display(HTML(self._html(f"{FIRST} ...")), display_id=True)

    def show(self, state: TrainerState) -> None:
        from IPython.display import HTML

        if self.display is not None:
            self.display.update(HTML(self._html(self.line(state))))

    def _html(self, line: str) -> str:
        return render("progress.html", line=line, rewards=list(self.rewards.values()))


def show_line(trainer: Trainer, line: ProgressLine) -> ProgressLine:
    """Put our line in place of the Trainer's bar and its printed dicts."""
    for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK, NotebookProgress):
        trainer.remove_callback(callback)
    trainer.add_callback(line)
    return line


def show_in_notebook(trainer: Trainer) -> None:
    """In a notebook, put our line and curve in place of the Trainer's table of losses."""
    if is_in_notebook() and not trainer.args.disable_tqdm:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(NotebookProgress())


def fitting(line: str, width: int) -> str:
    """As many of its parts as fit.

    >>> fitting("step 3/5  reward 1.250  0:04 left", 25)
    'step 3/5  reward 1.250'
    """
    parts = line.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def progress_line(step: int, max_steps: int, logs: Mapping[str, float], left: float | None) -> str:
    """The line; `left` are the seconds to come, None where they are not known.

    >>> logs = {"reward": 1.25, "accuracy": 0.25, "completions/mean_length": 31.4}
    >>> progress_line(3, 5, logs, 4.0)
    'step 3/5  reward 1.250  right 25 %  length 31 tokens  0:04 left'
    >>> progress_line(3, 5, {"programs/seconds_max": 8.04, "programs/slowest_row": 12.0}, None)
    'step 3/5  slowest program 8.0 s (row 12)  ... left'
    >>> progress_line(5, 5, {"programs/rejected": 0.5, "programs/rejected_row": 12.0}, None)
    'step 5/5  rejected requests a program 0.5 (row 12)'
    """
    parts = [f"step {step}/{max_steps}"]
    parts += [form(logs[name]) for name, form in NUMBERS.items() if logs.get(name) is not None]
    if (row := logs.get("programs/slowest_row")) is not None and (seconds := logs.get("programs/seconds_max")):
        parts.append(f"slowest program {seconds:.1f} s (row {row:.0f})")
    if (row := logs.get("programs/rejected_row")) is not None and (rejected := logs.get("programs/rejected")):
        parts.append(f"rejected requests a program {rejected:.1f} (row {row:.0f})")
    if step < max_steps:
        parts.append("... left" if left is None else f"{clock(left)} left")
    return "  ".join(parts)
