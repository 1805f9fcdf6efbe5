"""`stages:` of a recipe: every stage becomes a recipe of its own, the keys beside `stages` with its own over them.

    stages:
      - name: format
        rewards: [answer_format]
        until: rewards/answer_format/mean >= 0.9 for 3 steps
        max_steps: 20
      - name: correctness
        max_steps: 40
        optimizer: keep

All of it is resolved before anything starts. A flag wins over both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import trl

from podium.errors import ConfigError, PodiumError, as_line, did_you_mean
from podium.recipe import Recipe
from podium.recipe.assume import OLD_NAMES
from podium.recipe.document import Document, Place, Problem, fail, in_order
from podium.recipe.gates import Gate, parse_gate, unknown_metric
from podium.recipe.reading import short_name, survey
from podium.recipe.schema import OWN_KEYS, Mistake, check_type, field_types, key_types, unknown_key
from podium.rewards.resolve import distinct_names

STAGES = "stages"

Kind = Literal["grpo", "sft"]

STAGE_KEYS: Mapping[str, Any] = {
    "name": str,
    "type": Kind,
    "until": str | None,
    "epochs": float | None,
    "optimizer": Literal["keep", "reset"],
    "reference": Literal["keep", "last_stage"],
    "schedule": Literal["continue", "restart"],
    "adaptive_weights": Literal["keep", "reset"],
    "completion": str | None,
}
"""Keys of a stage besides those of a recipe."""

CARRIED: Mapping[str, str] = {
    "optimizer": "keep",
    "reference": "keep",
    "schedule": "restart",
    "adaptive_weights": "keep",
}
"""What a stage takes over from the one before it, unless it says otherwise."""

CARRIED_FROM_SFT: Mapping[str, str] = {**CARRIED, "optimizer": "reset", "reference": "last_stage"}
"""The same behind a stage of another loss: its result is where the policy, and the reference, start."""

SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
"""What a schedule that goes on cannot change."""

_OF_COLUMNS = ("prompt", "answer", "answer_from", "examples")
_OF_ROWS = ("dataset_config", "filter", *_OF_COLUMNS, "pass_rates", "pass_rate", "order", "difficulty")
"""Keys that are about the rows of one dataset and say nothing of another's."""

_PER_STAGE = {"dataset", "eval_dataset", "rewards", "datasets", "held_out", "system", "chat", *_OF_ROWS}
_LOADING = ("model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32", "chat_template_path")
_WHOLE_RUN = frozenset({*OWN_KEYS, *_LOADING, "output_dir", "resume_from_checkpoint", "push_to_hub"})
"""Keys that make no sense for a part of a run; `trl.ModelConfig`'s are others."""

REFUSED: Mapping[str, str] = {
    "save_only_model": "leaves out what the next stage, or a run that is resumed, goes on from",
    "load_best_model_at_end": "would hand on other weights than those at a stage's end",
    "push_to_hub": "would publish every stage by itself; the run's folder can be when it is done",
}
"""Settings that do not go together with stages."""

_REPLACES: Mapping[str, tuple[str, ...]] = {
    "rewards": ("reward_weights", "adaptive_rewards", "reward_model_name_or_path"),
    "dataset": ("datasets", *_OF_ROWS),
    "datasets": ("dataset", *_OF_ROWS),
    "eval_dataset": ("held_out",),
    "held_out": ("eval_dataset",),
    "epochs": ("max_steps", "num_train_epochs"),
}
"""Keys of the base that say nothing any more once a stage has these."""

_NOT_FOR_SFT = ("eval_", "load_best", "metric_for", "greater_is", "remove_unused", "batch_eval", "label_names", "hub_")
"""Beginnings of keys that the base has for evaluation by rewards, and for the whole run."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a run, resolved."""

    number: int
    """From 1."""
    name: str
    kind: Kind
    recipe: Recipe
    """Of this stage alone; its `output_dir` is the stage's folder. `config` of an SFT stage is for `SFTConfig`."""
    until: Gate | None
    optimizer: str
    reference: str
    schedule: str
    adaptive_weights: str
    completion: str | None
    """Of an SFT stage: the column with the right completion, or a text with columns in braces."""
    rows: tuple[Any, Any] | None = None
    """Training and held-out rows that are given as they are, in Python; None: those of the recipe."""

    @property
    def folder(self) -> str:
        """`02-correctness`, inside the run's folder."""
        return f"{self.number:02}-{self.name}"

    @property
    def max_steps(self) -> int | None:
        """The most optimizer steps it may take; None: as many as its epochs have."""
        steps = self.recipe.config.get("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def load_rows(self) -> tuple[Any, Any]:
        """Training rows and held-out rows (or None)."""
        from podium.data.loading import load_data

        return self.rows if self.rows is not None else load_data(self.recipe.data)

    def sft_arguments(self) -> trl.SFTConfig:
        """Of an SFT stage. On a CPU without mixed precision, unless `bf16` was asked for.

        Raises:
            ConfigError: values that `SFTConfig` refuses.
        """
        config = dict(self.recipe.config)
        if not torch.accelerator.is_available():
            config = {"use_cpu": True, "bf16": False, **config}
        try:
            return trl.SFTConfig(**config)
        except ValueError as error:
            raise ConfigError(f"{self.recipe.place_of(str(error))}: {error}", code="C030") from error


def is_staged(document: Document) -> bool:
    """Whether a recipe has stages."""
    return STAGES in document.values


def read_stages(document: Document, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe of a run with stages: the whole is judged as its last stage is; `stages` are its parts.

    Raises:
        ConfigError: with all the problems, each with its stage.
    """
    surveyed = survey_stages(document, overrides)
    fail(document.name, labelled(surveyed))
    return whole(document, overrides, [each.stage for each in surveyed])


def whole(document: Document, overrides: Mapping[str, Any], stages: Sequence[Stage]) -> Recipe:
    """The recipe of the run that these stages make."""
    last = stages[-1].recipe
    folder = str(Path(last.config["output_dir"]).parent)
    return replace(
        last,
        config={**last.config, "output_dir": folder},
        given={**document.values, **overrides},
        stages=tuple(stages),
    )


@dataclass(slots=True)
class Surveyed:
    """A stage as far as it can be understood, and what is wrong with it."""

    stage: Stage
    problems: list[Problem] = field(default_factory=list)


def labelled(surveyed: Sequence[Surveyed]) -> list[Problem]:
    """All problems with the stage they are in; what is wrong in every stage is said once."""
    alike = [{str(problem) for problem in each.problems} for each in surveyed]
    everywhere = set.intersection(*alike) if len(alike) > 1 else set()
    first = surveyed[0].problems if surveyed else []
    shared = [problem for problem in first if str(problem) in everywhere]
    own = [
        replace(problem, what=f"stage {each.stage.name}: {problem.what}")
        for each in surveyed
        for problem in each.problems
        if str(problem) not in everywhere
    ]
    return in_order([*shared, *own])


def survey_stages(document: Document, overrides: Mapping[str, Any]) -> list[Surveyed]:
    """Every stage with what is wrong with it.

    Raises:
        ConfigError: `stages` is no list of mappings.
    """
    written = document.values[STAGES]
    if not isinstance(written, list) or not written or not all(isinstance(each, Mapping) for each in written):
        where = document.where((STAGES,))
        raise ConfigError(
            f"{where}: `stages` must be a list of mappings, each with a `name`",
            code="C003",
            fix="stages: [{name: format, rewards: [answer_format], max_steps: 20}]",
        )
    found: list[Surveyed] = []
    for index, values in enumerate(written):
        reading = _StageReading(document=document, overrides=overrides, index=index, values=values, count=len(written))
        found.append(reading.survey(found[-1].stage if found else None))
    _check_names(document, found)
    _check_schedules(document, [each.stage for each in found], found)
    return found


@dataclass(slots=True)
class _StageReading:
    """One stage on its way."""

    document: Document
    overrides: Mapping[str, Any]
    index: int
    values: Mapping[str, Any]
    count: int
    problems: list[Problem] = field(default_factory=list)

    def say(self, what: str, *place: str | int, code: str = "C030", fix: str) -> None:
        where = self.document.where((STAGES, self.index, *place))
        self.problems.append(Problem(where=where, what=what, code=code, fix=fix))

    def say_of(self, wrong: Mistake | PodiumError, *place: str | int) -> None:
        self.say(wrong.what, *place, code=wrong.code, fix=wrong.fix)

    def survey(self, before: Stage | None) -> Surveyed:
        own = {key: self._own(key) for key in STAGE_KEYS if self.values.get(key) is not None}
        kind: Kind = own.get("type") or "grpo"
        settings = {key: value for key, value in self.values.items() if key not in STAGE_KEYS}
        self._check_keys(settings, kind)
        if own.get("epochs") is not None:
            settings["num_train_epochs"] = own["epochs"]
            if "max_steps" in settings:
                self.say("`epochs` and `max_steps` are two ends", "epochs", fix="keep one")
        recipe = self._recipe(settings, kind)
        name = str(own.get("name") or f"stage-{self.index + 1}")
        recipe = replace(recipe, config={**recipe.config, "output_dir": self._folder(recipe, name)})
        stage = Stage(
            number=self.index + 1,
            name=name,
            kind=kind,
            recipe=recipe,
            until=self._gate(own.get("until"), recipe, kind, bounded="epochs" in own),
            completion=own.get("completion"),
            **self._carried(own, before),
        )
        self._check_place(own, stage, before)
        return Surveyed(stage, in_order(self.problems))

    # ---- its own keys ----

    def _own(self, key: str) -> Any:
        checked, mistake = check_type(key, self.values[key], STAGE_KEYS[key])
        if mistake is None:
            return checked
        self.say_of(mistake, key)
        return None

    def _check_keys(self, settings: dict[str, Any], kind: Kind) -> None:
        """Names; what cannot be in a stage is taken out of `settings`."""
        for key in list(settings):
            short = OLD_NAMES.get(key, key)
            if key not in key_types() and not (kind == "sft" and key in sft_only()):
                known = {**key_types(), **STAGE_KEYS}
                self.say_of(unknown_key(key, None if not did_you_mean(key, STAGE_KEYS) else known), key)
            elif short in whole_run():
                self.say(f"`{key}` is the same for the whole run", key, fix="write it beside `stages`")
            elif kind == "sft" and key not in sft_keys():
                self.say(f"`{key}` says nothing to an sft stage, which samples no completions", key, fix="leave it out")
            else:
                continue
            del settings[key]

    def _carried(self, own: Mapping[str, Any], before: Stage | None) -> dict[str, Any]:
        defaults = CARRIED_FROM_SFT if before is not None and before.kind == "sft" else CARRIED
        return {key: own.get(key) or default for key, default in defaults.items()}

    # ---- its recipe ----

    def _recipe(self, settings: Mapping[str, Any], kind: Kind) -> Recipe:
        plain = {key: value for key, value in settings.items() if kind == "grpo" or key not in sft_only()}
        recipe, problems = survey(self._merged(plain), self.overrides, needs_rewards=kind == "grpo", assumes=False)
        self.problems += problems
        for key, why in REFUSED.items():
            if recipe.config.get(key):
                where = recipe.places.get(key, recipe.name)
                self.problems.append(Problem(where=where, what=f"`{key}` {why}", fix=as_line(key, None)))
        return recipe if kind == "grpo" else self._for_sft(recipe, settings)

    def _for_sft(self, recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
        inherited = field_types(transformers.TrainingArguments)
        config = {
            key: value
            for key, value in recipe.config.items()
            if key in inherited and not key.startswith(_NOT_FOR_SFT) and key != "gradient_checkpointing"
        }
        if recipe.data.order is not None:
            config["train_sampling_strategy"] = "sequential"
        for key in settings:
            if key in sft_only():
                config[key], mistake = check_type(key, settings[key], sft_only()[key])
                if mistake is not None:
                    self.say_of(mistake, key)
        return replace(recipe, config={"logging_steps": 1, **config}, rewards=())

    def _merged(self, settings: Mapping[str, Any]) -> Document:
        """The base with the stage's settings over it; every key knows the line it stands in."""
        gone = {STAGES, *(OLD_NAMES.get(key, key) for key in settings)}
        for key in (*settings, *(key for key in ("epochs",) if key in self.values)):
            gone |= set(_REPLACES.get(OLD_NAMES.get(key, key), ()))
        if self.index < self.count - 1:
            gone.add("accuracy")  # of the run as a whole: the rewards of its last stage
        base = {key: x for key, x in self.document.values.items() if OLD_NAMES.get(key, key) not in gone}
        lines = {place: line for place, line in self.document.lines.items() if place[0] in base}
        lines |= {
            place[2:]: line
            for place, line in self.document.lines.items()
            if place[:2] == (STAGES, self.index) and len(place) > 2 and place[2] in settings
        }
        if "num_train_epochs" in settings and "epochs" in self.values:
            lines[("num_train_epochs",)] = self.document.lines.get((STAGES, self.index, "epochs"), 0)
        return replace(self.document, values={**base, **settings}, lines=lines)

    def _folder(self, recipe: Recipe, name: str) -> str:
        return str(Path(recipe.config["output_dir"]) / f"{self.index + 1:02}-{name}")

    # ---- its end ----

    def _gate(self, text: str | None, recipe: Recipe, kind: Kind, *, bounded: bool) -> Gate | None:
        if text is None:
            return None
        try:
            gate = parse_gate(text)
        except ConfigError as error:
            self.say_of(error, "until")
            return None
        for problem, fix in self._gate_problems(gate, recipe, kind, bounded=bounded):
            self.say(problem, "until", code="C060", fix=fix)
        return gate

    def _gate_problems(self, gate: Gate, recipe: Recipe, kind: Kind, *, bounded: bool) -> Iterator[tuple[str, str]]:
        """What is wrong and what to type."""
        config = recipe.config
        if not bounded and not (isinstance(config.get("max_steps"), int) and config["max_steps"] > 0):
            yield "a gate may never be met: the stage needs `max_steps`, too", "max_steps: 50"
        if config.get("record") is False:
            yield "a gate reads what is recorded, and `record` is false", "record: true"
        if kind == "sft":
            return
        names = distinct_names([short_name(spec) for spec in recipe.rewards])
        if names and (unknown := unknown_metric(gate, names)):
            yield unknown
        if gate.held_out and str(config.get("eval_strategy", "no")) == "no":
            what = f"`{gate.metric}` is measured by evaluations during training, and there are none"
            yield what, "eval_strategy: steps, and eval_steps"

    # ---- its place among the others ----

    def _check_place(self, own: Mapping[str, Any], stage: Stage, before: Stage | None) -> None:
        if stage.kind == "sft" and before is not None:
            self.say("an sft stage must be the first", "type", fix="move it to the front")
        if stage.kind == "sft" and self.index == self.count - 1:
            fix = "add a stage with `rewards`"
            self.say("behind an sft stage comes at least one that is not", "type", fix=fix)
        if stage.completion is not None and stage.kind != "sft":
            self.say("`completion` is for a stage of `type: sft`", "completion", fix=as_line("completion", None))
        if before is None:
            for key in CARRIED:
                if key in own:
                    what = f"`{key}` says what comes from the stage before; this is the first"
                    self.say(what, key, fix=as_line(key, None))
            return
        if stage.optimizer == "keep" and before.recipe.config.get("optim") != stage.recipe.config.get("optim"):
            self.say("`optim` differs from the stage before", "optim", fix="optimizer: reset")
        if stage.schedule == "continue" and before.kind == "sft":
            what = "the schedule of an sft stage does not go on in the next"
            self.say(what, "schedule", fix="schedule: restart")


def _check_names(document: Document, found: Sequence[Surveyed]) -> None:
    seen: dict[str, int] = {}
    for index, each in enumerate(found):
        place: Place = (STAGES, index, "name")
        name = document.values[STAGES][index].get("name")
        if name is None:
            problem = "a stage needs a `name`, which is also that of its folder"
        elif not isinstance(name, str) or not _NAME.fullmatch(name):
            problem = f"`name` must be made of letters, digits, - and _; got `{name}`"
        elif name in seen:
            problem = f"the name `{name}` is that of stage {seen[name] + 1}, too"
        else:
            seen[name] = index
            continue
        code, where = "C031" if name is None else "C003", document.where(place)
        each.problems.append(Problem(where=where, what=problem, code=code, fix=f"name: stage-{index + 1}"))


def _check_schedules(document: Document, stages: Sequence[Stage], found: Sequence[Surveyed]) -> None:
    """Stages that share one schedule must agree on it, and have lengths that are known."""
    for index, stage in enumerate(stages):
        if stage.schedule != "continue" or index == 0:
            continue
        before, where = stages[index - 1], document.where((STAGES, index, "schedule"))
        differ = [key for key in SCHEDULE if before.recipe.config.get(key) != stage.recipe.config.get(key)]
        if differ:
            what = f"`schedule: continue` goes on with that of the stage before, but {', '.join(differ)} differ"
            found[index].problems.append(Problem(where=where, what=what, fix="take them out, or schedule: restart"))
        endless = [each.name for each in (before, stage) if each.max_steps is None]
        if endless:
            what = f"`schedule: continue` must know how long the stages are: {' and '.join(endless)} need `max_steps`"
            found[index].problems.append(Problem(where=where, what=what, fix="max_steps: 50"))


def schedule_steps(stages: Sequence[Stage], index: int) -> int | None:
    """Length of the schedule that stage `index` is part of, the bounds of all its stages; None: the stage alone."""
    first = index
    while first > 0 and stages[first].schedule == "continue":
        first -= 1
    last = index
    while last + 1 < len(stages) and stages[last + 1].schedule == "continue":
        last += 1
    return None if first == last else sum(stage.max_steps or 0 for stage in stages[first : last + 1])


def reference_start(stages: Sequence[Stage], index: int) -> int:
    """The stage whose beginning is the reference policy of stage `index`."""
    while index > 0 and stages[index].reference == "keep":
        index -= 1
    return index


# ---- which keys ----


@cache
def whole_run() -> frozenset[str]:
    """Keys that a stage cannot have, by their short names."""
    keys = {*_WHOLE_RUN, *field_types(trl.ModelConfig)} - _PER_STAGE
    return frozenset({OLD_NAMES.get(key, key) for key in keys} - _PER_STAGE)


@cache
def sft_only() -> Mapping[str, Any]:
    """Keys that only `SFTConfig` has, or that mean something else there."""
    own = field_types(trl.SFTConfig)
    common = field_types(transformers.TrainingArguments)
    return {key: value for key, value in own.items() if key not in common}


@cache
def sft_keys() -> frozenset[str]:
    """Keys of a recipe that an SFT stage may have."""
    data = {"dataset", "dataset_name", "dataset_train_split", "dataset_streaming", "datasets", "streaming", *_OF_ROWS}
    common = {key for key in field_types(transformers.TrainingArguments) if not key.startswith(_NOT_FOR_SFT)}
    return frozenset({*common, *sft_only(), *data, "held_out", "system", "chat"})
